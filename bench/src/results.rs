//! Single runs, and what follows from them.
use serde::{Serialize, Serializer, ser::SerializeStruct};
use serde_json::{Value, json};

use crate::{content::Content, machine::Machine};
/// Where zero pages are detected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Check {
    /// The main thread, before it hands pages to the channels.
    Main,
    /// The channels.
    Channels,
}

/// How memory is moved; the same for both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Mode {
    pub(crate) check: Check,
    pub(crate) channels: u8,
}

impl Mode {
    /// As it is called in tables: `main, 4 channels`.
    pub(crate) fn title(self) -> String {
        let plural = if self.channels == 1 { "" } else { "s" };
        match self.check {
            Check::Main => format!("main, {} channel{plural}", self.channels),
            Check::Channels => format!("{} channel{plural}", self.channels),
        }
    }

    /// For `transship move`.
    pub(crate) fn our_arguments(self) -> Vec<String> {
        let check = match self.check {
            Check::Main => "main",
            Check::Channels => "channels",
        };
        ["--channels", &self.channels.to_string(), "--zero-pages", check].map(str::to_owned).to_vec()
    }

    /// For QEMU's own migration.
    pub(crate) fn qemu_parameters(self) -> Value {
        let detection = match self.check {
            Check::Main => "legacy",
            Check::Channels => "multifd",
        };
        json!({ "multifd-channels": self.channels, "zero-page-detection": detection })
    }

    /// Threads that look for zero pages.
    pub(crate) fn scanners(self) -> u8 {
        match self.check {
            Check::Main => 1,
            Check::Channels => self.channels,
        }
    }
}

/// One move by transship.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct OurRun {
    /// `total_ms` of the report: from the first connection to the word that the guest is at the destination.
    pub(crate) ms: f64,
    /// From the start of the process to its end: with its own start, and attaching to QEMU.
    pub(crate) process_ms: f64,
    /// Of `ms`: until the first page could go.
    pub(crate) setup_ms: f64,
    /// As it is reported; 0 of a guest that stood still before.
    pub(crate) downtime_ms: f64,
    /// Of `ms`: all rounds.
    pub(crate) rounds_ms: f64,
    /// Pages that were looked at for content.
    pub(crate) pages_read: u64,
    pub(crate) wire_bytes: u64,
    /// transship and QEMU, both sides.
    pub(crate) cpu: Cpu,
    pub(crate) anonymous_bytes_max: Sides<u64>,
    /// The memory of both sides was compared byte for byte afterwards, and is equal. None: not compared.
    pub(crate) equal: Option<bool>,
}

/// One move by QEMU's own migration.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct QemuRun {
    /// From the command `migrate` until both sides say that it is completed.
    pub(crate) ms: f64,
    /// What QEMU itself gives as the total time.
    pub(crate) own_total_ms: f64,
    /// The same of the downtime.
    pub(crate) downtime_ms: f64,
    pub(crate) wire_bytes: u64,
    /// The two QEMUs.
    pub(crate) cpu: Cpu,
    pub(crate) equal: Option<bool>,
}

/// One move by either: what both know of it.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Run {
    pub(crate) ms: f64,
    pub(crate) wire_bytes: u64,
    pub(crate) cpu: Cpu,
    /// The memory of both sides was compared byte for byte afterwards, and is equal. None: not compared.
    pub(crate) equal: Option<bool>,
}

impl From<OurRun> for Run {
    fn from(OurRun { ms, wire_bytes, cpu, equal, .. }: OurRun) -> Self {
        Self { ms, wire_bytes, cpu, equal }
    }
}

impl From<QemuRun> for Run {
    fn from(QemuRun { ms, wire_bytes, cpu, equal, .. }: QemuRun) -> Self {
        Self { ms, wire_bytes, cpu, equal }
    }
}

/// CPU seconds.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct Cpu {
    pub(crate) qemu: Sides<f64>,
    /// Zero in QEMU's own migration.
    pub(crate) transship: Sides<f64>,
}

impl Cpu {
    pub(crate) fn total(&self) -> f64 {
        let Self { qemu, transship } = self;
        qemu.source + qemu.destination + transship.source + transship.destination
    }
}

/// A number for each side.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct Sides<T> {
    pub(crate) source: T,
    pub(crate) destination: T,
}

impl Sides<f64> {
    /// What came since `before`.
    pub(crate) fn less(self, before: Self) -> Self {
        Self { source: self.source - before.source, destination: self.destination - before.destination }
    }
}

/// All runs with one kind of memory, in one mode.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) content: Content,
    pub(crate) mode: Mode,
    pub(crate) guest_bytes: u64,
    pub(crate) ours: Vec<OurRun>,
    pub(crate) qemu: Vec<QemuRun>,
}

impl Row {
    pub(crate) fn our_ms(&self) -> Spread {
        Spread::of(self.ours.iter().map(|run| run.ms))
    }

    pub(crate) fn qemu_ms(&self) -> Spread {
        Spread::of(self.qemu.iter().map(|run| run.ms))
    }

    pub(crate) fn our_wire_bytes(&self) -> u64 {
        Spread::of(self.ours.iter().map(|run| run.wire_bytes as f64)).median as u64
    }

    pub(crate) fn qemu_wire_bytes(&self) -> u64 {
        Spread::of(self.qemu.iter().map(|run| run.wire_bytes as f64)).median as u64
    }

    pub(crate) fn our_cpu_seconds(&self) -> f64 {
        Spread::of(self.ours.iter().map(|run| run.cpu.total())).median
    }

    pub(crate) fn qemu_cpu_seconds(&self) -> f64 {
        Spread::of(self.qemu.iter().map(|run| run.cpu.total())).median
    }

    /// How many times as long as ours QEMU's own migration takes: median by median.
    pub(crate) fn ratio(&self) -> f64 {
        self.qemu_ms().median / self.our_ms().median
    }

    /// Guest memory moved a second, in GB (10^9 bytes).
    pub(crate) fn gb_per_s(&self, ms: f64) -> f64 {
        self.guest_bytes as f64 / 1e6 / ms
    }

    /// Bytes a second that all our scanning threads together read, while they did.
    pub(crate) fn scanned_per_s(&self) -> f64 {
        let rate = |run: &OurRun| (run.pages_read * transship_memory::PAGE) as f64 / (run.rounds_ms / 1e3);
        Spread::of(self.ours.iter().map(rate)).median
    }

    /// The most memory of its own that any of our processes had.
    pub(crate) fn anonymous_bytes_max(&self) -> u64 {
        let most = |run: &OurRun| run.anonymous_bytes_max.source.max(run.anonymous_bytes_max.destination);
        self.ours.iter().map(most).max().unwrap_or(0)
    }
}

impl Serialize for Row {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_struct("Row", 13)?;
        object.serialize_field("content", &self.content)?;
        object.serialize_field("mode", &self.mode)?;
        object.serialize_field("our_ms", &self.our_ms())?;
        object.serialize_field("qemu_ms", &self.qemu_ms())?;
        object.serialize_field("ratio", &self.ratio())?;
        object.serialize_field("our_gb_per_s", &self.gb_per_s(self.our_ms().median))?;
        object.serialize_field("qemu_gb_per_s", &self.gb_per_s(self.qemu_ms().median))?;
        object.serialize_field("our_wire_bytes", &self.our_wire_bytes())?;
        object.serialize_field("qemu_wire_bytes", &self.qemu_wire_bytes())?;
        object.serialize_field("our_cpu_seconds", &self.our_cpu_seconds())?;
        object.serialize_field("qemu_cpu_seconds", &self.qemu_cpu_seconds())?;
        object.serialize_field("ours", &self.ours)?;
        object.serialize_field("qemu", &self.qemu)?;
        object.end()
    }
}

/// Some runs' times, or other numbers, in two.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) least: f64,
}

impl Spread {
    /// Of at least one number; NaN without.
    pub(crate) fn of(numbers: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = numbers.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (half, odd) = (sorted.len() / 2, sorted.len() % 2 == 1);
        let median = match sorted.get(half) {
            None => f64::NAN,
            Some(&middle) if odd => middle,
            Some(&upper) => f64::midpoint(sorted[half - 1], upper),
        };
        Self { median, least: sorted.first().copied().unwrap_or(f64::NAN) }
    }
}

/// What this machine reads with so many threads.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct ScanBandwidth {
    pub(crate) threads: u8,
    pub(crate) bytes_per_s: f64,
}

/// Everything.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Results {
    pub(crate) machine: Machine,
    /// As it calls itself.
    pub(crate) qemu: String,
    pub(crate) guest_bytes: u64,
    pub(crate) huge_pages: bool,
    /// Its kind, and its state at the destination.
    pub(crate) memory: String,
    pub(crate) guest_running: bool,
    /// The source QEMU had not looked at its memory before.
    pub(crate) cold: bool,
    pub(crate) runs: u32,
    pub(crate) scan: Vec<ScanBandwidth>,
    pub(crate) rows: Vec<Row>,
}

impl Results {
    /// What this machine reads with so many threads, in bytes a second.
    pub(crate) fn scan_bandwidth(&self, threads: u8) -> Option<f64> {
        self.scan.iter().find(|scan| scan.threads == threads).map(|scan| scan.bytes_per_s)
    }

    /// The runs with this memory and mode.
    pub(crate) fn row(&self, content: Content, mode: Mode) -> Option<&Row> {
        self.rows.iter().find(|row| row.content == content && row.mode == mode)
    }

    /// In one line: on what all this was measured.
    pub(crate) fn setting(&self) -> String {
        let pages = if self.huge_pages { "huge pages" } else { "4 KiB pages" };
        let guest = if self.guest_running { "running" } else { "stopped" };
        let cold = if self.cold { ", cold page tables" } else { "" };
        let memory = crate::units::bytes(self.guest_bytes);
        let plural = if self.runs == 1 { "run" } else { "runs" };
        format!(
            "{memory} of {pages} ({}), guest {guest}{cold}, {} {plural} · {}",
            self.memory,
            self.runs,
            self.machine.title(&self.qemu)
        )
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[test]
    fn medians_and_least() {
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), Spread { median: 2.0, least: 1.0 });
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 10.0]), Spread { median: 3.0, least: 1.0 });
        assert_eq!(Spread::of([5.0]), Spread { median: 5.0, least: 5.0 });
        assert!(Spread::of([]).median.is_nan());
    }

    #[test]
    fn a_row_says_how_the_two_compare() {
        let row = row(Content::Zero, CHANNELS_2, 100.0, 250.0);
        assert_eq!(row.ratio(), 2.5);
        assert_eq!(row.gb_per_s(100.0), 10.0);
        // 200,000 pages in 80 ms.
        assert_eq!(row.scanned_per_s(), 200_000.0 * 4096.0 / 0.08);
        assert_eq!(row.anonymous_bytes_max(), 9 << 20);
        assert_eq!(row.our_cpu_seconds(), 1.0);
        assert_eq!(row.qemu_cpu_seconds(), 3.0);
    }

    #[test]
    fn modes_have_names() {
        assert_eq!(CHANNELS_2.title(), "2 channels");
        assert_eq!(Mode { channels: 1, ..CHANNELS_2 }.title(), "1 channel");
        let main = Mode { check: Check::Main, channels: 4 };
        assert_eq!((main.title().as_str(), main.scanners()), ("main, 4 channels", 1));
    }

    #[test]
    fn all_single_runs_are_in_the_json() {
        let json = serde_json::to_value(results()).expect("plain data");
        assert_eq!(json["rows"][0]["content"], "untouched");
        assert_eq!(json["rows"][0]["ours"].as_array().map(Vec::len), Some(3));
        assert_eq!(json["rows"][0]["qemu"][0]["ms"], 2800.0);
        assert_eq!(json["rows"][0]["ratio"], 70.0);
        assert_eq!(json["rows"][1]["mode"]["check"], "channels");
        assert_eq!(json["scan"][0]["threads"], 2);
    }

    pub(crate) const CHANNELS_2: Mode = Mode { check: Check::Channels, channels: 2 };

    pub(crate) fn row(content: Content, mode: Mode, our_ms: f64, qemu_ms: f64) -> Row {
        let cpu = |qemu, transship| Cpu {
            qemu: Sides { source: qemu, destination: qemu },
            transship: Sides { source: transship, destination: transship },
        };
        let ours = OurRun {
            ms: our_ms,
            process_ms: our_ms + 20.0,
            rounds_ms: our_ms * 0.8,
            pages_read: 200_000,
            wire_bytes: 1000,
            cpu: cpu(0.25, 0.25),
            anonymous_bytes_max: Sides { source: 5 << 20, destination: 9 << 20 },
            ..OurRun::default()
        };
        let qemu = QemuRun { ms: qemu_ms, wire_bytes: 9_000_000, cpu: cpu(1.5, 0.0), ..QemuRun::default() };
        Row { content, mode, guest_bytes: 1_000_000_000, ours: vec![ours; 3], qemu: vec![qemu; 3] }
    }

    pub(crate) fn results() -> Results {
        Results {
            machine: Machine::here(),
            qemu: "10.0.2 <&\">".into(),
            guest_bytes: 1_000_000_000,
            huge_pages: false,
            memory: "fresh".into(),
            guest_running: false,
            cold: false,
            runs: 3,
            scan: vec![ScanBandwidth { threads: 2, bytes_per_s: 12e9 }],
            rows: vec![
                row(Content::Untouched, CHANNELS_2, 40.0, 2800.0),
                row(Content::Zero, CHANNELS_2, 100.0, 150.0),
                row(Content::Random, CHANNELS_2, 800.0, 800.0),
            ],
        }
    }
}
