//! Single runs, and what follows from them: the table, its aims, and the picture.
use serde::{Serialize, Serializer, ser::SerializeStruct};

use super::routes::Route;
use crate::{
    aims::{Aim, Aims, Bound},
    limits,
    machine::Machine,
    plot::{Bar, Chart, Group, Line, Side},
    results::Cpu,
    rows::{FRESH, Row},
    runs::Runs,
    table::aligned,
    units,
};

const HEAD: [&str; 9] =
    ["link", "route", "ms", "(least)", "MB/s", "ratio", "send CPU s/GB", "recv CPU s/GB", "× QEMU's zstd"];
const LEFT_COLUMNS: usize = 2;

/// Everything.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Results {
    pub(crate) machine: Machine,
    /// As it calls itself.
    pub(crate) qemu: String,
    pub(crate) guest_bytes: u64,
    pub(crate) corpus: String,
    pub(crate) channels: u8,
    pub(crate) runs: u32,
    pub(crate) series: Vec<Series>,
}

/// All runs by one route.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    pub(crate) mbit: u32,
    pub(crate) route: Route,
    pub(crate) runs: Runs,
}

impl Series {
    fn link(&self) -> String {
        format!("{} Mbit/s", self.mbit)
    }

    pub(crate) fn title(&self) -> String {
        format!("{}, {}", self.link(), self.route.title())
    }
}

impl Serialize for Series {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_struct("Series", 7)?;
        object.serialize_field("link_mbit", &self.mbit)?;
        object.serialize_field("route", &self.route)?;
        self.runs.serialize_fields::<S>(&mut object)?;
        object.serialize_field("cpu_seconds_per_gb", &self.runs.cpu_seconds_per_gb_by_side())?;
        object.end()
    }
}

impl Results {
    fn setting(&self) -> String {
        let memory = units::bytes(self.guest_bytes);
        let plural = if self.runs == 1 { "run" } else { "runs" };
        let Self { corpus, channels, runs, .. } = self;
        format!("{memory}, corpus: {corpus}, {channels} channels, {runs} {plural} · {}", self.machine.title(&self.qemu))
    }

    /// QEMU's own, compressed by itself, over the same link.
    fn beside(&self, series: &Series) -> Option<&Series> {
        self.series.iter().find(|other| other.mbit == series.mbit && other.route == Route::Zstd)
    }

    /// Those with relays, with what they are compared with.
    fn compared(&self) -> impl Iterator<Item = (&Series, &Series)> {
        let relays = self.series.iter().filter(|series| series.route.has_relays());
        relays.filter_map(|series| Some((series, self.beside(series)?)))
    }

    /// What all tables say alike.
    pub(crate) fn rows(&self) -> Vec<Row> {
        let row = |(series, qemu): (&Series, &Series)| {
            let ratio = |series: &Series| units::short(series.runs.ratio());
            let cpu = |series: &Series| units::short(series.runs.cpu_seconds_per_gb(Cpu::total));
            let row = Row::of(
                format!("{}, beside QEMU's zstd", series.title()),
                FRESH,
                series.runs.all_ms(),
                qemu.runs.all_ms(),
            );
            let row = row.limit(Some(limits::link(series.mbit, series.runs.wire_bytes())));
            row.fact("CPU s/GB", cpu(series), cpu(qemu)).fact("ratio", ratio(series), ratio(qemu))
        };
        self.compared().map(row).collect()
    }

    pub(crate) fn table(&self) -> String {
        let head = HEAD.map(str::to_owned);
        let lines: Vec<_> = std::iter::once(head).chain(self.series.iter().map(|series| self.cells(series))).collect();
        format!(
            "{}\n{}\n{}\nMedian (and least) times. MB/s: guest memory, 10^6 bytes. Ratio: guest by bytes on the link. × QEMU's zstd: its\n\
             time by this.\n",
            self.setting(),
            self.machine.warning(),
            aligned(LEFT_COLUMNS, &lines)
        )
    }

    fn cells(&self, series: &Series) -> [String; 9] {
        let (ms, cpu) = (series.runs.ms(), series.runs.cpu_seconds_per_gb_by_side());
        let times = self.beside(series).filter(|_| series.route != Route::Zstd);
        [
            series.link(),
            series.route.title().to_owned(),
            units::short(ms.median),
            format!("({})", units::short(ms.least)),
            units::short(series.runs.mb_per_s()),
            units::short(series.runs.ratio()),
            units::short(cpu.source),
            units::short(cpu.destination),
            times.map_or(String::new(), |zstd| format!("{:.2}", series.runs.times(&zstd.runs))),
        ]
    }

    pub(crate) fn aims(&self) -> Aims {
        let aim = |(series, qemu): (&Series, &Series)| {
            let what = format!("{}: as fast as QEMU's own zstd", series.title());
            (series.route == Route::Relays)
                .then(|| Aim::new(what, Bound::AtLeast, 1.0, series.runs.times(&qemu.runs), "times"))
        };
        self.compared().filter_map(aim).collect()
    }

    pub(crate) fn svg(&self) -> String {
        let groups = Group::of(self.series.iter().map(|series| (series.link(), self.line(series))));
        let chart = Chart {
            title: "Migrations of stock QEMU over a link",
            setting: &self.setting(),
            legend: &[(Side::Qemu, "QEMU alone"), (Side::Ours, "through relays")],
            notes: "× QEMU's zstd",
            axis: "time until the destination has all memory",
            groups,
        };
        chart.svg()
    }

    fn line(&self, series: &Series) -> Line {
        let side = if series.route.has_relays() { Side::Ours } else { Side::Qemu };
        let beside = self.beside(series).filter(|_| series.route != Route::Zstd);
        Line {
            title: series.route.title().to_owned(),
            bars: vec![Bar { side, ms: series.runs.ms().median, remark: String::new() }],
            note: beside.map_or(String::new(), |zstd| format!("{:.2} ×", series.runs.times(&zstd.runs))),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::results::{Run, Sides};

    fn series(mbit: u32, route: Route, ms: f64) -> Series {
        let cpu = Cpu { qemu: Sides { source: 2.0, destination: 0.5 }, transship: Sides::default() };
        let run = Run { ms, wire_bytes: 250_000_000, cpu, equal: Some(true) };
        Series { mbit, route, runs: Runs { guest_bytes: 1_000_000_000, list: vec![run; 3] } }
    }

    fn results() -> Results {
        Results {
            machine: Machine::here(),
            qemu: "10.0.2".into(),
            guest_bytes: 1_000_000_000,
            corpus: "3 files, 8 MiB".into(),
            channels: 4,
            runs: 3,
            series: vec![
                series(1000, Route::Zstd, 3000.0),
                series(1000, Route::Plain, 9000.0),
                series(1000, Route::Relays, 2500.0),
                series(10_000, Route::Zstd, 1800.0),
                series(10_000, Route::Relays, 2000.0),
            ],
        }
    }

    fn line(text: &str, part: &str) -> String {
        let line = text.lines().find(|line| line.contains(part)).unwrap_or_else(|| panic!("no {part:?} in\n{text}"));
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn each_link_is_compared_with_qemu_s_zstd_over_it() {
        let text = results().table();
        assert_eq!(line(&text, "(2500)"), "1000 Mbit/s relays 2500 (2500) 400 4 2 0.5 1.20", "{text}");
        assert!(line(&text, "(2000)").ends_with("0.90"), "{text}");
        assert!(line(&text, "(9000)").ends_with("0.33"), "{text}");
        assert!(line(&text, "(3000)").ends_with("2 0.5"), "{text}");
    }

    #[test]
    fn the_link_bounds_what_goes_over_it() {
        let rows = results().rows();
        assert_eq!(rows.iter().map(|row| row.median(crate::rows::Side::Ours)).collect::<Vec<_>>(), [2500.0, 2000.0]);
        // 2 Gbit over 1 and over 10 Gbit/s.
        assert_eq!(rows.iter().flat_map(|row| row.of_limits().map(|(share, _)| share)).collect::<Vec<_>>(), [0.8, 0.1]);
    }

    #[test]
    fn aims_are_met_or_missed() {
        let text = results().aims().to_string();
        assert!(line(&text, "1000 Mbit/s, relays").starts_with("met"), "{text}");
        assert!(line(&text, "10000 Mbit/s, relays").starts_with("MISSED"), "{text}");
    }

    #[test]
    fn the_picture_has_a_bar_for_each() {
        let svg = results().svg();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let texts: Vec<_> = document.descendants().filter_map(|node| node.text()).collect();
        for wanted in ["1000 Mbit/s", "1.20 ×", "relays", "2500 ms"] {
            assert!(texts.contains(&wanted), "{wanted:?} is not in {texts:?}");
        }
    }

    #[test]
    fn all_single_runs_are_in_the_json() {
        let json = serde_json::to_value(results()).unwrap();
        assert_eq!(json["series"][2]["route"], "relays");
        assert_eq!(json["series"][2]["link_mbit"], 1000);
        assert_eq!(json["series"][2]["runs"].as_array().map(Vec::len), Some(3));
    }
}
