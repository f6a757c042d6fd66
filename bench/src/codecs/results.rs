//! Single runs, and what follows from them: the table, its aims, and the picture.
use std::{fmt::Write, path::Path};

use serde::{Serialize, Serializer, ser::SerializeStruct};

use super::Method;
use crate::{
    aims::{Aim, Aims, Bound},
    corpus::Corpus,
    guest_memory::GuestMemory,
    limits,
    machine::Machine,
    plot::{Bar, Chart, Group, Line, Side},
    results::{Cpu, Sides},
    rows::Row,
    runs::Runs,
    table::aligned,
    units,
};

const ZLIB_TIMES: f64 = 4.0;
const ZSTD_TIMES: f64 = 2.0;
const RATIO_SHARE: f64 = 0.97;
const AUTO_SHARE: f64 = 0.95;

const HEAD: [&str; 11] = [
    "channels",
    "method",
    "ms",
    "(least)",
    "MB/s",
    "ratio",
    "send CPU %",
    "recv CPU %",
    "CPU s/GB",
    "QEMU's",
    "× QEMU",
];
const LEFT_COLUMNS: usize = 2;

/// Everything.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Results {
    pub(crate) machine: Machine,
    /// As it calls itself.
    pub(crate) qemu: String,
    pub(crate) guest_bytes: u64,
    pub(crate) corpus: String,
    /// Ours; none: as the command has it.
    pub(crate) encoders: Option<u8>,
    pub(crate) link_mbit: Option<u32>,
    #[serde(skip)]
    pub(crate) memory: GuestMemory,
    pub(crate) runs: u32,
    pub(crate) series: Vec<Series>,
}

/// All runs by one side with one method.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    pub(crate) channels: u8,
    pub(crate) side: Side,
    pub(crate) method: Method,
    pub(crate) runs: Runs,
}

impl Series {
    pub(crate) fn is(&self, channels: u8, side: Side, method: Method) -> bool {
        (self.channels, self.side, self.method) == (channels, side, method)
    }

    pub(crate) fn title(&self) -> String {
        format!("{} channels, {}", self.channels, self.name())
    }

    fn name(&self) -> String {
        let whose = if self.side == Side::Qemu { "QEMU's " } else { "" };
        format!("{whose}{}", self.method.name())
    }

    /// Of one core, at each side.
    pub(crate) fn cpu_percent(&self) -> Sides<f64> {
        let percent = |seconds: fn(&Cpu) -> f64| self.runs.spread(|run| seconds(&run.cpu) / run.ms * 1e5).median;
        Sides {
            source: percent(|cpu| cpu.qemu.source + cpu.transship.source),
            destination: percent(|cpu| cpu.qemu.destination + cpu.transship.destination),
        }
    }

    /// Both sides' together.
    pub(crate) fn cpu_seconds_per_gb(&self) -> f64 {
        self.runs.cpu_seconds_per_gb(Cpu::total)
    }
}

impl Serialize for Series {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_struct("Series", 9)?;
        object.serialize_field("channels", &self.channels)?;
        object.serialize_field("side", if self.side == Side::Qemu { "qemu" } else { "transship" })?;
        object.serialize_field("method", &self.method)?;
        self.runs.serialize_fields::<S>(&mut object)?;
        object.serialize_field("cpu_percent", &self.cpu_percent())?;
        object.serialize_field("cpu_seconds_per_gb", &self.cpu_seconds_per_gb())?;
        object.end()
    }
}

impl Results {
    fn setting(&self) -> String {
        let memory = units::bytes(self.guest_bytes);
        let link = self.link_mbit.map_or_else(|| "unix socket".to_owned(), |mbit| format!("TCP, {mbit} Mbit/s"));
        let encoders = self.encoders.map_or_else(String::new, |count| format!(", {count} encoders"));
        let plural = if self.runs == 1 { "run" } else { "runs" };
        let Self { corpus, runs, .. } = self;
        format!("{memory} of {corpus}, {link}{encoders}, {runs} {plural} · {}", self.machine.title(&self.qemu))
    }

    /// What QEMU's own migration has to set against it.
    fn beside(&self, series: &Series) -> Option<&Series> {
        if series.side == Side::Qemu {
            return None;
        }
        self.series.iter().find(|other| other.is(series.channels, Side::Qemu, series.method.of_qemu()))
    }

    /// What all tables say alike.
    pub(crate) fn rows(&self, base: &Path, corpus: &Corpus) -> Result<Vec<Row>, String> {
        let ours = self.series.iter().filter(|series| series.side != Side::Qemu);
        ours.map(|series| {
            let limit = match (self.link_mbit, series.method) {
                (Some(mbit), _) => Some(limits::link(mbit, series.runs.wire_bytes())),
                (None, Method::None | Method::Auto) => Some(limits::copy(base, self.guest_bytes, self.memory.state())?),
                (None, method) => {
                    limits::codec(method.name(), corpus, self.guest_bytes, Some((base, self.memory.state())))?
                }
            };
            let qemu = self.beside(series);
            let ms = |series: &Series| series.runs.all_ms();
            let both = |name: fn(&Series) -> f64| {
                (units::short(name(series)), qemu.map_or_else(String::new, |qemu| units::short(name(qemu))))
            };
            let (ratio, cpu) = (both(|series| series.runs.ratio()), both(Series::cpu_seconds_per_gb));
            let beside =
                qemu.filter(|qemu| qemu.method != series.method).map(|qemu| format!(", beside {}", qemu.name()));
            let title = format!("{}{}", series.title(), beside.unwrap_or_default());
            let row = Row::of(title, self.memory.title(), ms(series), qemu.map(ms).unwrap_or_default()).limit(limit);
            Ok(row.fact("CPU s/GB", cpu.0, cpu.1).fact("ratio", ratio.0, ratio.1))
        })
        .collect()
    }

    pub(crate) fn table(&self) -> String {
        let mut text = format!("{}\n{}\n", self.setting(), self.machine.warning());
        let head = HEAD.map(str::to_owned);
        let lines: Vec<_> = std::iter::once(head).chain(self.series.iter().map(|series| self.cells(series))).collect();
        text.push_str(&aligned(LEFT_COLUMNS, &lines));
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "\nMedian (and least) times. MB/s: guest memory, 10^6 bytes. Ratio: guest by wire bytes. CPU: of one core, all processes\n\
             of a side; CPU s/GB: both sides. × QEMU: throughput by that of QEMU's own migration with the method beside it."
        );
        text
    }

    fn cells(&self, series: &Series) -> [String; 11] {
        let (ms, cpu, beside) = (series.runs.ms(), series.cpu_percent(), self.beside(series));
        [
            series.channels.to_string(),
            series.name(),
            units::short(ms.median),
            format!("({})", units::short(ms.least)),
            units::short(series.runs.mb_per_s()),
            format!("{:.2}", series.runs.ratio()),
            format!("{:.0}", cpu.source),
            format!("{:.0}", cpu.destination),
            units::short(series.cpu_seconds_per_gb()),
            beside.map_or("", |beside| beside.method.name()).to_owned(),
            beside.map_or(String::new(), |beside| format!("{:.2}", series.runs.times(&beside.runs))),
        ]
    }

    pub(crate) fn aims(&self) -> Aims {
        let ours = || self.series.iter().filter(|series| series.side == Side::Ours);
        let same = ours().filter_map(|series| Some((series, self.beside(series)?, wanted_times(series.method)?)));
        let same = same.flat_map(|(series, beside, wanted)| self.against(series, beside, wanted));
        let auto = ours().filter(|series| series.method == Method::Auto).filter_map(|auto| self.against_fixed(auto));
        same.chain(auto).collect()
    }

    /// A slow link makes all equally fast that fill it: there the times of the unix socket are no aim.
    fn against(&self, series: &Series, beside: &Series, wanted: f64) -> Vec<Aim> {
        let what = |what: &str| format!("{}: {what}", series.title());
        let speed =
            Aim::new(what("as fast as QEMU's"), Bound::AtLeast, wanted, series.runs.times(&beside.runs), "times");
        let ratio = series.runs.ratio() / beside.runs.ratio();
        let cpu = series.cpu_seconds_per_gb() / beside.cpu_seconds_per_gb();
        let mut aims = vec![
            Aim::new(what("ratio, of QEMU's"), Bound::AtLeast, RATIO_SHARE, ratio, "of it"),
            Aim::new(what("CPU per GB, of QEMU's"), Bound::AtMost, 1.0, cpu, "of it"),
        ];
        if self.link_mbit.is_none() {
            aims.insert(0, speed);
        }
        aims
    }

    fn against_fixed(&self, auto: &Series) -> Option<Aim> {
        let fixed = self.series.iter().filter(|other| {
            other.side == Side::Ours && other.channels == auto.channels && other.method != Method::Auto
        });
        let best = fixed.max_by(|a, b| a.runs.mb_per_s().total_cmp(&b.runs.mb_per_s()))?;
        let what = format!("{}: as fast as the best fixed method, {}", auto.title(), best.method.name());
        Some(Aim::new(what, Bound::AtLeast, AUTO_SHARE, auto.runs.mb_per_s() / best.runs.mb_per_s(), "of it"))
    }

    pub(crate) fn svg(&self) -> String {
        let mut channels: Vec<u8> = self.series.iter().map(|series| series.channels).collect();
        channels.dedup();
        let groups = channels
            .into_iter()
            .map(|channels| Group { title: format!("{channels} channels"), lines: self.lines(channels) });
        let chart = Chart {
            title: "Moving a guest's memory, compressed: transship and QEMU's own migration",
            setting: &self.setting(),
            legend: &[
                (Side::Ours, "transship"),
                (Side::Qemu, "QEMU (multifd, the same channels; none where it lacks the method)"),
            ],
            notes: "× QEMU",
            axis: "time to move all memory",
            groups: groups.collect(),
        };
        chart.svg()
    }

    fn lines(&self, channels: u8) -> Vec<Line> {
        let ours = self.series.iter().filter(|series| series.channels == channels && series.side == Side::Ours);
        let bar = |series: &Series| Bar {
            side: series.side,
            ms: series.runs.ms().median,
            remark: format!(", ratio {:.2}", series.runs.ratio()),
        };
        let line = |series: &Series| {
            let beside = self.beside(series);
            Line {
                title: series.method.name().to_owned(),
                bars: std::iter::once(series).chain(beside).map(bar).collect(),
                note: beside.map_or(String::new(), |beside| format!("{:.2} ×", series.runs.times(&beside.runs))),
            }
        };
        ours.map(line).collect()
    }
}

fn wanted_times(method: Method) -> Option<f64> {
    match method {
        Method::Zlib => Some(ZLIB_TIMES),
        Method::Zstd => Some(ZSTD_TIMES),
        Method::None | Method::Qatzip | Method::Lz4 | Method::Auto => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::results::Run;

    fn series(side: Side, method: Method, ms: f64, wire_bytes: u64) -> Series {
        let cpu = Cpu {
            qemu: Sides { source: 0.1, destination: 0.1 },
            transship: if side == Side::Qemu { Sides::default() } else { Sides { source: 0.2, destination: 0.1 } },
        };
        let run = Run { ms, wire_bytes, cpu, equal: Some(true) };
        Series { channels: 4, side, method, runs: Runs { guest_bytes: 1_000_000_000, list: vec![run; 3] } }
    }

    fn results() -> Results {
        Results {
            machine: Machine::here(),
            qemu: "10.0.2".into(),
            guest_bytes: 1_000_000_000,
            corpus: "3 files, 8 MiB".into(),
            encoders: None,
            link_mbit: None,
            memory: GuestMemory::default(),
            runs: 3,
            series: vec![
                series(Side::Ours, Method::Zlib, 1000.0, 300_000_000),
                series(Side::Qemu, Method::Zlib, 4400.0, 295_000_000),
                series(Side::Ours, Method::Lz4, 500.0, 400_000_000),
                series(Side::Qemu, Method::None, 600.0, 1_000_000_000),
                series(Side::Ours, Method::Auto, 540.0, 400_000_000),
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
        assert_eq!(line(&text, "4         zlib"), "4 zlib 1000 (1000) 1000 3.33 30 20 0.5 zlib 4.40");
        assert_eq!(line(&text, "QEMU's zlib"), "4 QEMU's zlib 4400 (4400) 227 3.39 2 2 0.2");
        assert_eq!(line(&text, "lz4"), "4 lz4 500 (500) 2000 2.50 60 40 0.5 none 1.20");
    }

    #[test]
    fn aims_are_met_or_missed_by_their_own_bound() {
        let text = results().aims().to_string();
        assert!(line(&text, "4 channels, zlib: as fast as QEMU's").starts_with("met"), "{text}");
        assert!(line(&text, "4 channels, zlib: ratio").starts_with("met"), "{text}");
        assert!(line(&text, "4 channels, zlib: CPU per GB").starts_with("MISSED"), "{text}");
        assert!(
            line(&text, "auto: as fast as the best fixed method, lz4").starts_with("MISSED"),
            "500 of 540 ms: {text}"
        );
        assert_eq!(text.lines().count(), 5, "{text}");

        let mut slow = results();
        slow.link_mbit = Some(1000);
        slow.series[0].runs.list.iter_mut().for_each(|run| run.wire_bytes = 310_000_000);
        let text = slow.aims().to_string();
        assert!(!text.contains("as fast as QEMU's"), "{text}");
        assert!(line(&text, "zlib: ratio").starts_with("MISSED"), "{text}");
    }

    #[test]
    fn the_picture_has_a_bar_for_each() {
        let svg = results().svg();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let texts: Vec<_> = document.descendants().filter_map(|node| node.text()).collect();
        assert!(texts.contains(&"4400 ms, ratio 3.39") && texts.contains(&"1.20 ×"), "{texts:?}");
    }

    #[test]
    fn all_single_runs_are_in_the_json() {
        let json = serde_json::to_value(results()).unwrap();
        assert_eq!(json["series"][0]["runs"].as_array().map(Vec::len), Some(3));
        assert_eq!(json["series"][1]["side"], "qemu");
        assert_eq!(json["series"][4]["method"], "auto");
    }
}
