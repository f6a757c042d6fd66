//! The tables for people.
use super::{
    cases::{By, Guest},
    disk::{REQUEST_BYTES, REQUESTS},
    results::{RestoreRun, Results, SaveRun, Series, median},
};
use crate::{results::Spread, table::aligned, units};

const SAVES_HEAD: [&str; 13] = [
    "save",
    "file",
    "by",
    "ended",
    "ms",
    "(least)",
    "MB/s",
    "pages/s",
    "CPU s",
    "pause ms",
    "size",
    "on disk",
    "QEMU/ours",
];
const RESTORES_HEAD: [&str; 11] = [
    "restore",
    "file",
    "by",
    "ms",
    "(least)",
    "MB/s",
    "pages/s",
    "CPU s",
    "runs after ms",
    "speaks after ms",
    "QEMU/ours",
];
/// Those with words.
const SAVES_LEFT: usize = 4;
const RESTORES_LEFT: usize = 3;

const NOTES: &str = "
Medians (and least) times, until the file is durable: QEMU's saves are followed by a sync, included in their time. MB/s: guest
memory (10^6 bytes) by time; pages/s: pages of 4 KiB, also those that are written again. CPU: QEMU without its guest, and
transship. Pause: from QEMU's event STOP to RESUME; QEMU's own live saves: to their end, with the guest to be resumed then.
Runs after: from the call to QEMU's event RESUME; speaks after: to the guest's first line. Files are dropped from the page
cache before they are read.
";

impl Results {
    pub(super) fn setting(&self) -> String {
        let memory = units::bytes(self.guest_bytes);
        let plural = if self.runs == 1 { "run" } else { "runs" };
        format!("{memory} of random data, {} {plural} · {}", self.runs, self.machine.title(&self.qemu))
    }

    fn load(&self) -> String {
        let Some(rate) = self.hot_mib_per_s else { return "There was no guest that runs.".into() };
        let (hot, rate) = (units::bytes(self.hot_bytes), units::short(rate));
        format!(
            "Guests that run write {hot} again and again, as fast as they can ({rate} MiB/s when nothing is saved)."
        )
    }

    pub(super) fn table(&self) -> String {
        let saves = self.series.iter().map(|series| self.save_cells(series)).chain(self.disk_save_cells());
        let saves: Vec<_> = std::iter::once(SAVES_HEAD.map(str::to_owned)).chain(saves).collect();
        let restores = self.series.iter().flat_map(|series| {
            let eager = (!series.restores.is_empty()).then(|| self.restore_cells(series, &series.restores, ""));
            let lazy = (!series.lazy.is_empty()).then(|| self.restore_cells(series, &series.lazy, ", lazy"));
            eager.into_iter().chain(lazy)
        });
        let restores: Vec<_> = std::iter::once(RESTORES_HEAD.map(str::to_owned))
            .chain(restores)
            .chain(self.disk_restore_cells())
            .collect();
        let (setting, load, warning) = (self.setting(), self.load(), self.machine.warning());
        let (saves, restores) = (aligned(SAVES_LEFT, &saves), aligned(RESTORES_LEFT, &restores));
        format!("{setting}\n{load}\n{warning}\n{saves}\n{restores}{NOTES}")
    }

    fn save_cells(&self, series: &Series) -> [String; 13] {
        let ms = series.save(|run| run.ms);
        let written = written(series);
        let last = series.saves.last();
        let size = |of: fn(&SaveRun) -> u64| last.map_or_else(String::new, |run| units::bytes(of(run)));
        [
            series.case.guest.title().to_owned(),
            series.case.layout.title(self.channels),
            series.by.title().to_owned(),
            series.status().to_owned(),
            units::short(ms.median),
            format!("({})", units::short(ms.least)),
            units::short(self.mb_per_s(written(series.save_ms()))),
            units::short(written(series.pages_per_s())),
            units::short(series.cpu_seconds()),
            units::short(series.pause_ms()),
            size(|run| run.file_bytes),
            size(|run| run.allocated_bytes),
            self.ratio(series, Series::save_ms),
        ]
    }

    fn restore_cells(&self, series: &Series, runs: &[RestoreRun], way: &str) -> [String; 11] {
        let ms = Spread::of(runs.iter().map(|run| run.ms));
        let read = written(series);
        let ratio = if way.is_empty() { self.ratio(series, Series::restore_ms) } else { String::new() };
        [
            format!("{}{way}", series.case.guest.title()),
            series.case.layout.title(self.channels),
            series.by.title().to_owned(),
            units::short(ms.median),
            format!("({})", units::short(ms.least)),
            units::short(self.mb_per_s(read(ms.median))),
            units::short(self.pages_per_s(read(ms.median))),
            units::short(median(runs, |run| Some(run.cpu_seconds))),
            units::short(median(runs, |run| run.runs_after_ms)),
            units::short(median(runs, |run| run.speaks_after_ms)),
            ratio,
        ]
    }

    /// How many times as long as ours QEMU takes. Once, in our own line.
    fn ratio(&self, series: &Series, ms: impl Fn(&Series) -> f64) -> String {
        let qemu = if series.by == By::Transship { self.beside(series) } else { None };
        qemu.map_or_else(String::new, |qemu| {
            let ratio = ms(qemu) / ms(series);
            if ratio.is_finite() { format!("{ratio:.2}") } else { "-".into() }
        })
    }

    fn disk_save_cells(&self) -> Option<[String; 13]> {
        let Spread { median, least } = self.disk_write();
        let none = || "-".to_owned();
        (!self.disk.is_empty()).then(|| {
            [
                none(),
                disk_title(),
                "the disk".into(),
                "written".into(),
                units::short(median),
                format!("({})", units::short(least)),
                units::short(self.mb_per_s(median)),
                units::short(self.pages_per_s(median)),
                units::short(self.disk_cpu_seconds()),
                none(),
                units::bytes(self.guest_bytes),
                units::bytes(self.guest_bytes),
                String::new(),
            ]
        })
    }

    /// Read, and read into memory.
    fn disk_restore_cells(&self) -> impl Iterator<Item = [String; 11]> {
        let none = || "-".to_owned();
        let each = [("the disk", self.disk_read()), ("disk and memory", self.disk_fill())];
        let known = each.into_iter().filter(|_| !self.disk.is_empty());
        known.map(move |(by, Spread { median, least })| {
            [
                none(),
                disk_title(),
                by.into(),
                units::short(median),
                format!("({})", units::short(least)),
                units::short(self.mb_per_s(median)),
                units::short(self.pages_per_s(median)),
                none(),
                none(),
                none(),
                String::new(),
            ]
        })
    }

    /// Of all memory in this time.
    fn pages_per_s(&self, ms: f64) -> f64 {
        (self.guest_bytes / transship_memory::PAGE) as f64 / (ms / 1e3)
    }
}

/// Holes are neither written nor read, so they have no speed.
fn written(series: &Series) -> impl Fn(f64) -> f64 {
    let sparse = series.case.guest == Guest::Sparse;
    move |number| if sparse { f64::NAN } else { number }
}

fn disk_title() -> String {
    format!("direct I/O, {REQUESTS} x {}", units::bytes(REQUEST_BYTES as u64))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::files::results::tests::results;

    fn line(text: &str, begin: &str) -> String {
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        text.lines()
            .map(words)
            .find(|line| line.starts_with(begin))
            .unwrap_or_else(|| panic!("no {begin:?} in\n{text}"))
    }

    #[test]
    fn each_series_has_a_line_in_both_tables() {
        let text = results().table();
        let (saves, restores) = text.split_once("restore ").unwrap();
        assert_eq!(
            line(saves, "live mapped, 4 channels, direct I/O transship"),
            "live mapped, 4 channels, direct I/O transship saved 1200 (1200) 833 83333 0.6 40 3.81 MiB 1 MiB 1.67"
        );
        assert_eq!(
            line(saves, "live file"),
            "live file QEMU no end: 4 GiB after 9 s 9000 (9000) - 11111 9 - 3.81 MiB 1 MiB"
        );
        assert_eq!(
            line(saves, "- direct I/O"),
            "- direct I/O, 8 x 2 MiB the disk written 960 (960) 1042 254312 0.2 - 954 MiB 954 MiB"
        );
        assert!(line(saves, "background mapped, 4 channels, direct I/O transship").ends_with("3.57"), "by QEMU's file");
        assert_eq!(
            line(restores, "live, lazy"),
            "live, lazy mapped, 4 channels, direct I/O transship 3000 (3000) 333 81380 0.5 100 110"
        );
        assert!(line(restores, "paused mapped, 4 channels, direct I/O transship").ends_with("- - 1.36"));
        assert_eq!(
            line(restores, "never touched mapped, 4 channels, direct I/O transship"),
            "never touched mapped, 4 channels, direct I/O transship 50 (50) - - 0.5 - - 10.00"
        );
        let words = restores.split_whitespace().collect::<Vec<_>>().join(" ");
        for wanted in ["MiB the disk 1000 (1000) 1000", "MiB disk and memory 1050 (1050) 952"] {
            assert!(words.contains(wanted), "{words}");
        }
        assert!(!restores.contains("no end"), "there was nothing to restore");
    }
}
