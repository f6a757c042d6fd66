//! Single runs, and what follows from them: the table, its aims, and the picture.
use std::path::Path;

use serde::{Serialize, Serializer, ser::SerializeStruct};

use super::{Kind, wires::Wire};
use crate::{
    aims::{Aim, Aims, Bound},
    codecs::Method,
    corpus::Corpus,
    guest_memory::GuestMemory,
    limits::{self, StateAlone},
    machine::Machine,
    plot::{Bar, Chart, Group, Line, Side},
    results::{Cpu, OurRun, QemuRun, Run, Spread},
    rows::Row,
    runs::Runs,
    table::aligned,
    units,
    verdict::compare,
};

/// Of the throughput of QEMU's TLS.
const QEMU_TIMES: f64 = 1.2;
/// Of the CPU time of our own moves in clear.
const CLEAR_CPU: f64 = 1.35;
/// More than in clear, for which the guest may stand still.
const ROUND_TRIPS: f64 = 2.0;

const HEAD: [&str; 11] = [
    "guest",
    "channels",
    "method",
    "wire",
    "ms",
    "(least)",
    "MB/s",
    "CPU s/GB",
    "of clear's CPU",
    "downtime ms",
    "× QEMU's TLS",
];
const LEFT_COLUMNS: usize = 4;

/// What is moved, and how it is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Way {
    pub(crate) kind: Kind,
    pub(crate) channels: u8,
    pub(crate) method: Method,
}

impl Way {
    fn title(self) -> String {
        let plural = if self.channels == 1 { "" } else { "s" };
        format!("{}, {} channel{plural}, {}", self.kind.title(), self.channels, self.method.name())
    }
}

/// One move.
pub(crate) struct Once {
    pub(crate) run: Run,
    /// As the side itself reports it.
    pub(crate) downtime_ms: f64,
}

impl From<OurRun> for Once {
    fn from(run: OurRun) -> Self {
        Self { downtime_ms: run.downtime_ms, run: run.into() }
    }
}

impl From<QemuRun> for Once {
    fn from(run: QemuRun) -> Self {
        Self { downtime_ms: run.downtime_ms, run: run.into() }
    }
}

/// All moves in one way over one wire.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    pub(crate) way: Way,
    pub(crate) wire: Wire,
    pub(crate) runs: Runs,
    downtime_ms: Vec<f64>,
}

impl Series {
    pub(crate) fn new(way: Way, wire: Wire) -> Self {
        Self { way, wire, runs: Runs::default(), downtime_ms: Vec::new() }
    }

    pub(crate) fn add(&mut self, guest_bytes: u64, Once { run, downtime_ms }: Once) {
        self.runs.guest_bytes = guest_bytes;
        self.runs.list.push(run);
        self.downtime_ms.push(downtime_ms);
    }

    pub(crate) fn title(&self) -> String {
        format!("{}, {}", self.way.title(), self.wire.title())
    }

    fn is_ours(&self) -> bool {
        self.wire != Wire::Qemu
    }

    fn downtime(&self) -> f64 {
        Spread::of(self.downtime_ms.iter().copied()).median
    }

    /// Both sides' together.
    fn cpu_seconds_per_gb(&self) -> f64 {
        self.runs.cpu_seconds_per_gb(Cpu::total)
    }

    /// What is compared in rows: for a guest that runs how long it stands still, else the time for all of it.
    fn times(&self) -> Vec<f64> {
        match self.way.kind {
            Kind::Running => self.downtime_ms.clone(),
            Kind::Random | Kind::Corpus => self.runs.all_ms(),
        }
    }

    /// CPU time, run by run, by that of the other.
    fn cpu_of(&self, other: &Self) -> f64 {
        let pairs = self.runs.list.iter().zip(&other.runs.list);
        Spread::of(pairs.map(|(run, other)| run.cpu.total() / other.cpu.total())).median
    }

    /// How many times as fast as the other, pair by pair.
    fn times_of(&self, other: &Self) -> f64 {
        compare(&self.times(), &other.times()).map_or(f64::NAN, |compared| compared.times)
    }
}

impl Serialize for Series {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_struct("Series", 10)?;
        object.serialize_field("kind", &self.way.kind)?;
        object.serialize_field("channels", &self.way.channels)?;
        object.serialize_field("method", &self.way.method)?;
        object.serialize_field("wire", &self.wire)?;
        self.runs.serialize_fields::<S>(&mut object)?;
        object.serialize_field("cpu_seconds_per_gb", &self.cpu_seconds_per_gb())?;
        object.serialize_field("downtime_ms", &self.downtime_ms)?;
        object.end()
    }
}

/// Everything.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Results {
    pub(crate) machine: Machine,
    /// As it calls itself.
    pub(crate) qemu: String,
    pub(crate) guest_bytes: u64,
    pub(crate) corpus: String,
    pub(crate) delay_ms: u32,
    #[serde(skip)]
    pub(crate) memory: GuestMemory,
    pub(crate) runs: u32,
    pub(crate) series: Vec<Series>,
}

impl Results {
    fn setting(&self) -> String {
        let plural = if self.runs == 1 { "run" } else { "runs" };
        let (memory, Self { corpus, runs, .. }) = (units::bytes(self.guest_bytes), self);
        format!("{memory}, corpus: {corpus}, TCP on this host, {runs} {plural} · {}", self.machine.title(&self.qemu))
    }

    /// The same way over this wire.
    fn over(&self, wire: Wire, way: Way) -> Option<&Series> {
        self.series.iter().find(|series| series.wire == wire && series.way == way)
    }

    fn encrypted(&self) -> impl Iterator<Item = &Series> {
        self.series.iter().filter(|series| matches!(series.wire, Wire::Token | Wire::Certificates))
    }

    /// What all tables say alike.
    pub(crate) fn rows(&self, peer: &str, base: &Path, corpus: &Corpus) -> Result<Vec<Row>, String> {
        let runs = self.series.iter().any(|series| series.way.kind == Kind::Running);
        let state = runs.then(|| StateAlone::of_firmware(peer, base, self.guest_bytes)).transpose()?;
        let ours = self.series.iter().filter(|series| series.is_ours());
        ours.map(|series| {
            let limit = match (series.way.kind, series.way.method) {
                (Kind::Running, _) => state.map(StateAlone::moved),
                (Kind::Random, _) | (_, Method::None) => {
                    Some(limits::copy(base, self.guest_bytes, self.memory.state())?)
                }
                (Kind::Corpus, method) => {
                    limits::codec(method.name(), corpus, self.guest_bytes, Some((base, self.memory.state())))?
                }
            };
            Ok(self.row(series).limit(limit))
        })
        .collect()
    }

    /// One of ours beside QEMU's TLS; a guest that runs has nothing beside it.
    fn row(&self, series: &Series) -> Row {
        let qemu = self.over(Wire::Qemu, series.way);
        let what = if series.way.kind == Kind::Running { "stands still" } else { "beside QEMU's TLS" };
        let title = format!("{}, {what}", series.title());
        let row = Row::of(title, self.memory.title(), series.times(), qemu.map(Series::times).unwrap_or_default());
        let cpu = |series: &Series| units::short(series.cpu_seconds_per_gb());
        row.fact("CPU s/GB", cpu(series), qemu.map(cpu).unwrap_or_default())
    }

    pub(crate) fn table(&self) -> String {
        let head = HEAD.map(str::to_owned);
        let lines: Vec<_> = std::iter::once(head).chain(self.series.iter().map(|series| self.cells(series))).collect();
        format!(
            "{}\n{}\n{}\nMedian (and least) times. MB/s: guest memory, 10^6 bytes. CPU s/GB: all processes of both sides. Of clear's CPU: by\n\
             that of the same run in clear. × QEMU's TLS: the time of QEMU's by ours, median of the pairs. The guest that runs is\n\
             moved over connections with {} ms each way.\n",
            self.setting(),
            self.machine.warning(),
            aligned(LEFT_COLUMNS, &lines),
            self.delay_ms
        )
    }

    fn cells(&self, series: &Series) -> [String; 11] {
        let (way, ms) = (series.way, series.runs.ms());
        let beside = |other: Option<&Series>, number: fn(&Series, &Series) -> f64| {
            other
                .filter(|other| other.wire != series.wire)
                .map_or_else(String::new, |other| format!("{:.2}", number(series, other)))
        };
        let is_still = way.kind == Kind::Running;
        let moved = |text: String| if is_still { String::new() } else { text };
        let clear = self.over(Wire::Clear, way).filter(|_| series.is_ours() && !is_still);
        [
            way.kind.title().to_owned(),
            way.channels.to_string(),
            way.method.name().to_owned(),
            series.wire.title().to_owned(),
            units::short(ms.median),
            format!("({})", units::short(ms.least)),
            moved(units::short(series.runs.mb_per_s())),
            moved(units::short(series.cpu_seconds_per_gb())),
            beside(clear, Series::cpu_of),
            if is_still { units::short(series.downtime()) } else { String::new() },
            beside(self.over(Wire::Qemu, way), Series::times_of),
        ]
    }

    pub(crate) fn aims(&self) -> Aims {
        self.encrypted().flat_map(|series| self.aims_of(series)).collect()
    }

    fn aims_of(&self, series: &Series) -> Vec<Aim> {
        let what = |what: &str| format!("{}: {what}", series.title());
        let clear = self.over(Wire::Clear, series.way);
        if series.way.kind == Kind::Running {
            let more = |clear: &Series| (series.downtime() - clear.downtime()) / f64::from(2 * self.delay_ms);
            let aim = |clear| {
                Aim::new(
                    what("stands still longer than in clear"),
                    Bound::AtMost,
                    ROUND_TRIPS,
                    more(clear),
                    "round trips",
                )
            };
            return clear.map(aim).into_iter().collect();
        }
        let fast = self.over(Wire::Qemu, series.way).map(|qemu| {
            Aim::new(what("as fast as QEMU's TLS"), Bound::AtLeast, QEMU_TIMES, series.times_of(qemu), "times")
        });
        let cheap = clear.map(|clear| {
            Aim::new(what("CPU per GB, of that in clear"), Bound::AtMost, CLEAR_CPU, series.cpu_of(clear), "of it")
        });
        fast.into_iter().chain(cheap).collect()
    }

    pub(crate) fn svg(&self) -> String {
        let mut ways: Vec<Way> = self.series.iter().map(|series| series.way).collect();
        ways.dedup();
        let groups = ways.into_iter().map(|way| {
            let lines = self.series.iter().filter(|series| series.way == way).map(|series| self.line(series));
            let still = if way.kind == Kind::Running { ": it stands still" } else { "" };
            Group { title: format!("{}{still}", way.title()), lines: lines.collect() }
        });
        let chart = Chart {
            title: "Moving a guest over encrypted connections",
            setting: &self.setting(),
            legend: &[(Side::Ours, "transship"), (Side::Qemu, "QEMU (multifd, tls-creds-x509, the same channels)")],
            notes: "× QEMU's TLS",
            axis: "time to move all memory, or of standing still",
            groups: groups.collect(),
        };
        chart.svg()
    }

    fn line(&self, series: &Series) -> Line {
        let side = if series.is_ours() { Side::Ours } else { Side::Qemu };
        let remark = match series.way.kind {
            Kind::Running => String::new(),
            Kind::Random | Kind::Corpus => format!(", {} CPU s/GB", units::short(series.cpu_seconds_per_gb())),
        };
        let qemu = self.over(Wire::Qemu, series.way).filter(|_| series.is_ours());
        Line {
            title: series.wire.title().to_owned(),
            bars: vec![Bar { side, ms: Spread::of(series.times()).median, remark }],
            note: qemu.map_or(String::new(), |qemu| format!("{:.2} ×", series.times_of(qemu))),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::results::Sides;

    fn series(kind: Kind, wire: Wire, ms: f64, cpu_seconds: f64, downtime_ms: f64) -> Series {
        let cpu = Cpu { qemu: Sides { source: cpu_seconds, destination: 0.0 }, ..Cpu::default() };
        let mut series = Series::new(Way { kind, channels: 4, method: Method::None }, wire);
        for _ in 0..3 {
            let run = Run { ms, wire_bytes: 1_000_000_000, cpu, equal: Some(true) };
            series.add(1_000_000_000, Once { run, downtime_ms });
        }
        series
    }

    fn results() -> Results {
        Results {
            machine: Machine::here(),
            qemu: "10.0.2".into(),
            guest_bytes: 1_000_000_000,
            corpus: "3 files, 8 MiB".into(),
            delay_ms: 10,
            memory: GuestMemory::default(),
            runs: 3,
            series: vec![
                series(Kind::Random, Wire::Clear, 400.0, 1.0, 0.0),
                series(Kind::Random, Wire::Token, 500.0, 1.3, 0.0),
                series(Kind::Random, Wire::Certificates, 800.0, 1.4, 0.0),
                series(Kind::Random, Wire::Qemu, 900.0, 2.0, 0.0),
                series(Kind::Running, Wire::Clear, 100.0, 0.1, 60.0),
                series(Kind::Running, Wire::Token, 140.0, 0.1, 81.0),
                series(Kind::Running, Wire::Certificates, 140.0, 0.1, 101.0),
            ],
        }
    }

    fn line(text: &str, part: &str) -> String {
        let line = text.lines().find(|line| line.contains(part)).unwrap_or_else(|| panic!("no {part:?} in\n{text}"));
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_line_has_all_numbers_and_what_it_is_compared_with() {
        let text = results().table();
        assert_eq!(line(&text, "token"), "random 4 none token 500 (500) 2000 1.3 1.30 1.80");
        assert_eq!(line(&text, "none    QEMU's TLS"), "random 4 none QEMU's TLS 900 (900) 1111 2");
        let still = text.lines().filter(|line| line.starts_with("running")).nth(1).unwrap();
        assert_eq!(line(still, "token"), "running 4 none token 140 (140) 81");
    }

    #[test]
    fn aims_are_met_or_missed_by_their_own_bound() {
        let text = results().aims().to_string();
        let verdict = |part: &str| line(&text, part).split(' ').next().unwrap().to_owned();
        assert_eq!(verdict("random, 4 channels, none, token: as fast"), "met");
        assert_eq!(verdict("random, 4 channels, none, certificates: as fast"), "MISSED", "1.125 times");
        assert_eq!(verdict("token: CPU per GB"), "met");
        assert_eq!(verdict("certificates: CPU per GB"), "MISSED");
        assert_eq!(verdict("token: stands still longer"), "met", "one round trip of 20 ms");
        assert_eq!(verdict("certificates: stands still longer"), "MISSED", "two, and a bit");
        assert_eq!(text.lines().count(), 7, "{text}");
    }

    #[test]
    fn rows_compare_the_time_or_the_downtime() {
        let results = results();
        let row = |place: usize| results.row(&results.series[place]);
        assert_eq!((row(1).ours, row(1).qemu), (vec![Some(500.0); 3], vec![Some(900.0); 3]));
        assert_eq!((row(5).ours, row(5).qemu), (vec![Some(81.0); 3], vec![]));
        assert!(row(5).title.ends_with("token, stands still"), "{}", row(5).title);
    }

    #[test]
    fn the_picture_has_a_bar_for_each() {
        let svg = results().svg();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let texts: Vec<_> = document.descendants().filter_map(|node| node.text()).collect();
        for wanted in ["500 ms, 1.3 CPU s/GB", "1.80 ×", "81 ms"] {
            assert!(texts.contains(&wanted), "{wanted} is not in {texts:?}");
        }
    }

    #[test]
    fn all_single_runs_are_in_the_json() {
        let json = serde_json::to_value(results()).unwrap();
        assert_eq!(json["series"][0]["runs"].as_array().map(Vec::len), Some(3));
        assert_eq!((&json["series"][3]["wire"], &json["series"][5]["downtime_ms"][2]), (&"qemu".into(), &81.0.into()));
    }
}
