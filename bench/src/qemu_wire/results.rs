//! Single runs, and what follows from them: the table, its aims, and the picture.
use std::{fmt::Write, path::Path};

use serde::{Serialize, Serializer, ser::SerializeStruct};

use super::{
    Kind,
    routes::{Route, Wire},
};
use crate::{
    aims::{Aim, Aims, Bound},
    codecs::Method,
    corpus::Corpus,
    limits::{self, StateAlone},
    machine::Machine,
    plot::{Bar, Chart, Group, Line, Side},
    results::{Sides, Spread},
    rows::{FRESH, Limit, Row},
    runs::Runs,
    table::aligned,
    units,
};

const UNTOUCHED_TIMES: f64 = 5.0;
/// Where the sender is the limit.
const COMPRESSED_TIMES: f64 = 2.0;
/// Two medians of the same speed are hardly ever equal.
const FILE_SHARE: f64 = 0.95;

const HEAD: [&str; 10] =
    ["memory", "wire", "route", "ms", "(least)", "MB/s", "ratio", "send CPU s/GB", "recv CPU s/GB", "× QEMU"];
const LEFT_COLUMNS: usize = 3;

/// Everything.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Results {
    pub(crate) machine: Machine,
    /// As it calls itself.
    pub(crate) qemu: String,
    pub(crate) guest_bytes: u64,
    pub(crate) corpus: String,
    pub(crate) runs: u32,
    /// The file system of received files does it, so they are written past the page cache.
    pub(crate) direct_io: bool,
    /// Milliseconds that the disk takes on its own to write as much as the guest's memory; none where it does no direct
    /// I/O.
    pub(crate) disk: Vec<f64>,
    pub(crate) series: Vec<Series>,
}

/// All runs on one route.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    pub(crate) kind: Kind,
    pub(crate) wire: Wire,
    pub(crate) route: Route,
    pub(crate) runs: Runs,
}

impl Series {
    pub(crate) fn title(&self) -> String {
        format!("{}, {}, {}", self.kind.title(), self.wire.title(), self.route.title())
    }

    /// Does the sender work more than who receives? Then it is what the move waits for.
    fn is_limited_by_the_sender(&self) -> bool {
        let cpu = self.runs.cpu_seconds_per_gb_by_side();
        cpu.source > cpu.destination
    }
}

impl Serialize for Series {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_struct("Series", 8)?;
        object.serialize_field("kind", &self.kind)?;
        object.serialize_field("wire", &self.wire)?;
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
        let Self { corpus, runs, .. } = self;
        format!("{memory}, corpus: {corpus}, unix socket, {runs} {plural} · {}", self.machine.title(&self.qemu))
    }

    /// QEMU's own migration of the same.
    fn beside(&self, series: &Series) -> Option<&Series> {
        self.series
            .iter()
            .find(|other| (other.kind, other.wire, other.route) == (series.kind, series.wire, Route::QemuToQemu))
    }

    fn disk_ms(&self) -> Option<f64> {
        (!self.disk.is_empty()).then(|| Spread::of(self.disk.iter().copied()).median)
    }

    /// What all tables say alike: each route with one of ours, beside QEMU to QEMU.
    pub(crate) fn rows(&self, peer: &str, base: &Path, corpus: &Corpus) -> Result<Vec<Row>, String> {
        let has_untouched = self.series.iter().any(|series| series.kind == Kind::Untouched);
        let state = has_untouched.then(|| StateAlone::of_firmware(peer, base, self.guest_bytes)).transpose()?;
        let ours = self.series.iter().filter(|series| series.route != Route::QemuToQemu);
        ours.map(|series| {
            let ms = |series: &Series| series.runs.all_ms();
            let threads = series.wire.channels.into();
            let all: Vec<Limit> = match (series.kind, series.route, series.wire.method) {
                (Kind::Corpus, Route::QemuToFile, Method::None) => {
                    self.disk_ms().map(|value| Limit { what: "the disk written".into(), value }).into_iter().collect()
                }
                (Kind::Corpus, _, Method::None) => vec![limits::copy(base, self.guest_bytes, FRESH)?],
                (Kind::Corpus, route, method) => {
                    let memory = (route != Route::QemuToFile).then_some((base, FRESH));
                    limits::codec(method.name(), corpus, self.guest_bytes, memory)?.into_iter().collect()
                }
                // A stock QEMU that sends has its own page tables.
                (Kind::Zero, Route::QemuToOurs | Route::QemuToFile, _) => {
                    vec![limits::scan(threads, self.guest_bytes)?]
                }
                (Kind::Zero, ..) => {
                    vec![limits::scan(threads, self.guest_bytes)?, limits::look(base, threads, self.guest_bytes)?]
                }
                (Kind::Untouched, Route::QemuToFile, _) => state.map(StateAlone::saved).into_iter().collect(),
                (Kind::Untouched, ..) => state.map(StateAlone::moved).into_iter().collect(),
            };
            let qemu = self.beside(series).map(ms).unwrap_or_default();
            let memory = match series.route {
                Route::QemuToFile if self.direct_io => "direct I/O",
                Route::QemuToFile => "page cache",
                _ => FRESH,
            };
            let cpu = |series: &Series| {
                let Sides { source, destination } = series.runs.cpu_seconds_per_gb_by_side();
                units::short(source + destination)
            };
            let beside = self.beside(series).map_or_else(String::new, cpu);
            Ok(Row::of(series.title(), memory, ms(series), qemu).limit(all).fact("CPU s/GB", cpu(series), beside))
        })
        .collect()
    }

    pub(crate) fn table(&self) -> String {
        let mut text = format!("{}\n{}", self.setting(), self.machine.warning());
        if let Some(ms) = self.disk_ms() {
            // Writing to a string does not fail.
            let memory = units::bytes(self.guest_bytes);
            let _ = writeln!(text, "the disk writes {memory} on its own in {} ms", units::short(ms));
        }
        text.push('\n');
        let head = HEAD.map(str::to_owned);
        let lines: Vec<_> = std::iter::once(head).chain(self.series.iter().map(|series| self.cells(series))).collect();
        text.push_str(&aligned(LEFT_COLUMNS, &lines));
        text.push_str(
            "\nMedian (and least) times; to file: until it is on the disk. MB/s: guest memory, 10^6 bytes. Ratio: guest by wire bytes.\n\
             × QEMU: throughput by that of QEMU to QEMU.\n",
        );
        text
    }

    fn cells(&self, series: &Series) -> [String; 10] {
        let (ms, cpu) = (series.runs.ms(), series.runs.cpu_seconds_per_gb_by_side());
        let times =
            self.beside(series).filter(|_| series.route != Route::QemuToQemu).map(|qemu| series.runs.times(&qemu.runs));
        [
            series.kind.title().to_owned(),
            series.wire.title(),
            series.route.title().to_owned(),
            units::short(ms.median),
            format!("({})", units::short(ms.least)),
            units::short(series.runs.mb_per_s()),
            units::short(series.runs.ratio()),
            units::short(cpu.source),
            units::short(cpu.destination),
            times.map_or(String::new(), |times| format!("{times:.2}")),
        ]
    }

    pub(crate) fn aims(&self) -> Aims {
        let aims = self.series.iter().filter_map(|series| self.aim(series, self.beside(series)?));
        aims.collect()
    }

    fn aim(&self, series: &Series, qemu: &Series) -> Option<Aim> {
        match series.route {
            Route::OursToQemu => {
                let (wanted, why) = match series.kind {
                    Kind::Untouched => (UNTOUCHED_TIMES, ""),
                    Kind::Corpus if series.wire.method != Method::None && qemu.is_limited_by_the_sender() => {
                        (COMPRESSED_TIMES, ", where the sender is the limit")
                    }
                    Kind::Corpus | Kind::Zero => (1.0, ""),
                };
                let what = format!("{}: as fast as QEMU to QEMU{why}", series.title());
                Some(Aim::new(what, Bound::AtLeast, wanted, series.runs.times(&qemu.runs), "times"))
            }
            Route::QemuToFile => {
                let disk = self.disk_ms().filter(|&ms| series.kind == Kind::Corpus && ms > qemu.runs.ms().median);
                let (ms, whom) = match disk {
                    Some(ms) => (ms, "the disk, which is slower than QEMU"),
                    None => (qemu.runs.ms().median, "QEMU to QEMU"),
                };
                let what = format!("{}: as fast as {whom}", series.title());
                Some(Aim::new(what, Bound::AtLeast, FILE_SHARE, ms / series.runs.ms().median, "of it"))
            }
            Route::QemuToQemu | Route::QemuToOurs | Route::OursToOurs => None,
        }
    }

    pub(crate) fn svg(&self) -> String {
        let title = |series: &Series| format!("{}, {}", series.kind.title(), series.wire.title());
        let groups = Group::of(self.series.iter().map(|series| (title(series), self.line(series))));
        let chart = Chart {
            title: "Moving a guest by QEMU's own protocol: transship and stock QEMU",
            setting: &self.setting(),
            legend: &[
                (Side::Qemu, "QEMU alone"),
                (Side::Ours, "with transship at one end or both"),
                (Side::Disk, "into a file"),
            ],
            notes: "× QEMU to QEMU",
            axis: "time to move all memory",
            groups,
        };
        chart.svg()
    }

    fn line(&self, series: &Series) -> Line {
        let side = match series.route {
            Route::QemuToQemu => Side::Qemu,
            Route::QemuToFile => Side::Disk,
            Route::OursToQemu | Route::QemuToOurs | Route::OursToOurs => Side::Ours,
        };
        let beside = self.beside(series).filter(|_| series.route != Route::QemuToQemu);
        Line {
            title: series.route.title().to_owned(),
            bars: vec![Bar { side, ms: series.runs.ms().median, remark: String::new() }],
            note: beside.map_or(String::new(), |qemu| format!("{:.2} ×", series.runs.times(&qemu.runs))),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::results::Cpu;
    use crate::results::Run;

    fn series(kind: Kind, method: Method, route: Route, ms: f64) -> Series {
        let cpu = Cpu { qemu: Sides { source: 2.0, destination: 0.5 }, transship: Sides::default() };
        let run = Run { ms, wire_bytes: 250_000_000, cpu, equal: Some(true) };
        Series {
            kind,
            wire: Wire { channels: 2, method },
            route,
            runs: Runs { guest_bytes: 1_000_000_000, list: vec![run; 3] },
        }
    }

    fn results() -> Results {
        use {Kind::*, Route::*};
        Results {
            machine: Machine::here(),
            qemu: "10.0.2".into(),
            guest_bytes: 1_000_000_000,
            corpus: "3 files, 8 MiB".into(),
            runs: 3,
            direct_io: true,
            disk: vec![1000.0],
            series: vec![
                series(Corpus, Method::Zstd, QemuToQemu, 2000.0),
                series(Corpus, Method::Zstd, OursToQemu, 1250.0),
                series(Corpus, Method::Zstd, QemuToFile, 2100.0),
                series(Corpus, Method::None, QemuToQemu, 500.0),
                series(Corpus, Method::None, OursToQemu, 500.0),
                series(Corpus, Method::None, QemuToFile, 2000.0),
                series(Untouched, Method::None, QemuToQemu, 400.0),
                series(Untouched, Method::None, OursToQemu, 50.0),
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
        let ours = "corpus 2 channels, zstd ours to QEMU 1250 (1250) 800 4 2 0.5 1.60";
        assert_eq!(line(&text, "2 channels, zstd  ours to QEMU"), ours);
        assert!(line(&text, "2 channels, zstd  QEMU to QEMU").ends_with("2000 (2000) 500 4 2 0.5"), "{text}");
        assert!(text.contains("the disk writes 954 MiB on its own in 1000 ms"), "{text}");
    }

    #[test]
    fn aims_are_met_or_missed_by_their_own_bound() {
        let mut results = results();
        let text = results.aims().to_string();
        let verdict = |text: &str, part: &str| line(text, part).split(' ').next().unwrap().to_owned();
        assert_eq!(verdict(&text, "zstd, ours to QEMU: as fast as QEMU to QEMU, where the sender"), "MISSED", "{text}");
        assert_eq!(verdict(&text, "none, ours to QEMU"), "met", "{text}");
        assert_eq!(verdict(&text, "never touched, 2 channels, none, ours to QEMU"), "met", "{text}");
        assert_eq!(verdict(&text, "zstd, QEMU to file: as fast as QEMU to QEMU"), "met", "{text}");
        assert_eq!(verdict(&text, "none, QEMU to file: as fast as the disk"), "MISSED", "{text}");

        // The destination works more than the source: to be as fast is enough.
        for series in &mut results.series[..3] {
            series.runs.list.iter_mut().for_each(|run| run.cpu.qemu.destination = 3.0);
        }
        let text = results.aims().to_string();
        assert_eq!(verdict(&text, "zstd, ours to QEMU: as fast as QEMU to QEMU"), "met", "{text}");
    }

    #[test]
    fn the_picture_has_a_bar_for_each() {
        let svg = results().svg();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let texts: Vec<_> = document.descendants().filter_map(|node| node.text()).collect();
        for wanted in ["corpus, 2 channels, zstd", "1.60 ×", "QEMU to file", "1250 ms"] {
            assert!(texts.contains(&wanted), "{wanted:?} is not in {texts:?}");
        }
    }

    #[test]
    fn all_single_runs_are_in_the_json() {
        let json = serde_json::to_value(results()).unwrap();
        assert_eq!(json["series"][1]["route"], "ours-to-qemu");
        assert_eq!(json["series"][1]["wire"]["method"], "zstd");
        assert_eq!(json["series"][1]["runs"].as_array().map(Vec::len), Some(3));
    }
}
