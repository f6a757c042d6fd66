//! Single runs, and what follows from them.
use std::{fs, os::unix::fs::MetadataExt, path::Path, time::Duration};

use serde::{Serialize, Serializer, ser::SerializeStruct};

use super::{
    cases::{By, Case, Guest, Layout},
    disk::DiskRun,
};
use crate::{
    limits::StateAlone,
    machine::Machine,
    results::Spread,
    rows::{Limit, Row},
    units,
};

pub(crate) const COMPLETED: &str = "completed";

/// One save, or an attempt. What a side does not tell is none.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct SaveRun {
    /// `completed`, or why not.
    pub(crate) status: String,
    /// Until the file is durable. Ours: `total_ms` of the report. QEMU's: from the command until it is completed and
    /// synced.
    pub(crate) ms: f64,
    /// Ours: from the start of the process to its end.
    pub(crate) process_ms: Option<f64>,
    /// What QEMU itself gives as the total time.
    pub(crate) own_total_ms: Option<f64>,
    /// Of `ms`: QEMU's file was written, but not durable.
    pub(crate) sync_ms: Option<f64>,
    /// How long the guest stood still, by the events of its QEMU. None: it stood still before.
    pub(crate) pause_ms: Option<f64>,
    /// Also those that were written again.
    pub(crate) pages_written: Option<u64>,
    pub(crate) file_bytes: u64,
    pub(crate) allocated_bytes: u64,
    /// QEMU without its guest; transship.
    pub(crate) cpu_seconds: f64,
    /// Ours: the most memory of its own.
    pub(crate) anonymous_bytes_max: Option<u64>,
}

impl SaveRun {
    /// Its sizes.
    pub(super) fn of_file(path: &Path) -> Result<Self, String> {
        let file = fs::metadata(path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Self { file_bytes: file.len(), allocated_bytes: file.blocks() * 512, ..Self::default() })
    }

    pub(super) fn ended(&self) -> bool {
        self.status == COMPLETED
    }

    fn pages_per_s(&self) -> f64 {
        self.pages_written.map_or(f64::NAN, |pages| pages as f64 / (self.ms / 1e3))
    }
}

/// One restore.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct RestoreRun {
    /// Until all memory is there. Ours: `total_ms` of the report. QEMU's: from the command until it is completed.
    pub(crate) ms: f64,
    /// Ours: from the start of the process to its end.
    pub(crate) process_ms: Option<f64>,
    /// From the call (ours: the start of the process) until QEMU starts the guest's CPU. None: it stands still.
    pub(crate) runs_after_ms: Option<f64>,
    /// From the call until the guest has said its first line.
    pub(crate) speaks_after_ms: Option<f64>,
    /// QEMU without its guest; transship.
    pub(crate) cpu_seconds: f64,
    /// Memory is as it was when the guest was saved. None: nobody looked.
    pub(crate) right: Option<bool>,
}

/// What a restore took by itself.
#[derive(Debug, Clone, Copy)]
pub(super) struct Restored {
    pub(super) time: Duration,
    pub(super) process_time: Option<Duration>,
    /// Beside the QEMU that it filled.
    pub(super) cpu_seconds: f64,
}

/// All runs of a case by one side.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    pub(crate) case: Case,
    pub(crate) by: By,
    pub(crate) saves: Vec<SaveRun>,
    pub(crate) restores: Vec<RestoreRun>,
    /// Of the same file, with the guest first and its pages later.
    pub(crate) lazy: Vec<RestoreRun>,
}

impl Series {
    pub(crate) fn new(case: Case, by: By) -> Self {
        Self { case, by, saves: Vec::new(), restores: Vec::new(), lazy: Vec::new() }
    }

    /// Of the first that did not end, if one did not.
    pub(super) fn status(&self) -> &str {
        self.saves.iter().find(|run| !run.ended()).map_or("saved", |run| &run.status)
    }

    pub(super) fn ended(&self) -> bool {
        self.saves.iter().all(SaveRun::ended)
    }

    pub(super) fn save(&self, of: impl Fn(&SaveRun) -> f64) -> Spread {
        Spread::of(self.saves.iter().map(of))
    }

    /// Not a number, if one did not end: that says nothing about speed.
    pub(super) fn save_ms(&self) -> f64 {
        if self.ended() { self.save(|run| run.ms).median } else { f64::NAN }
    }

    pub(super) fn restore_ms(&self) -> f64 {
        Spread::of(self.restores.iter().map(|run| run.ms)).median
    }

    pub(super) fn pause_ms(&self) -> f64 {
        self.save(|run| run.pause_ms.unwrap_or(f64::NAN)).median
    }

    pub(super) fn pages_per_s(&self) -> f64 {
        self.save(SaveRun::pages_per_s).median
    }

    pub(super) fn cpu_seconds(&self) -> f64 {
        self.save(|run| run.cpu_seconds).median
    }

    fn restore_cpu_seconds(&self) -> f64 {
        Spread::of(self.restores.iter().map(|run| run.cpu_seconds)).median
    }
}

/// Run by run; not a number where a save did not end.
fn save_ms(series: &Series) -> Vec<f64> {
    series.saves.iter().map(|run| if run.ended() { run.ms } else { f64::NAN }).collect()
}

/// Run by run. Where the saves of some runs did not end, there is no telling which restores are neighbours.
fn restore_ms(series: &Series) -> Vec<f64> {
    let all = series.restores.iter().map(|run| run.ms).collect();
    if series.ended() { all } else { Vec::new() }
}

/// A number that there may be, of some restores.
pub(super) fn median(runs: &[RestoreRun], of: impl Fn(&RestoreRun) -> Option<f64>) -> f64 {
    Spread::of(runs.iter().map(|run| of(run).unwrap_or(f64::NAN))).median
}

impl Serialize for Series {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_struct("Series", 11)?;
        object.serialize_field("guest", &self.case.guest)?;
        object.serialize_field("layout", &self.case.layout)?;
        object.serialize_field("by", &self.by)?;
        object.serialize_field("status", self.status())?;
        object.serialize_field("save_ms", &self.save(|run| run.ms))?;
        object.serialize_field("save_cpu_seconds", &self.cpu_seconds())?;
        object.serialize_field("restore_ms", &self.restore_ms())?;
        object.serialize_field("restore_lazy_ms", &median(&self.lazy, |run| Some(run.ms)))?;
        object.serialize_field("saves", &self.saves)?;
        object.serialize_field("restores", &self.restores)?;
        object.serialize_field("restores_lazy", &self.lazy)?;
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
    /// What a guest that runs writes again and again.
    pub(crate) hot_bytes: u64,
    /// How fast it did so before its first save.
    pub(crate) hot_mib_per_s: Option<f64>,
    pub(crate) channels: u8,
    pub(crate) runs: u32,
    /// None: the file system does no direct I/O.
    pub(crate) disk: Vec<DiskRun>,
    /// Of a guest that was never touched.
    pub(crate) state: Option<StateAlone>,
    pub(crate) series: Vec<Series>,
}

impl Results {
    pub(super) fn of(&self, guest: Guest, layout: Layout, by: By) -> Option<&Series> {
        self.series.iter().find(|series| series.case == Case { guest, layout } && series.by == by)
    }

    /// What QEMU does when asked for the same as we are, or the nearest to it: one stream.
    pub(super) fn beside(&self, ours: &Series) -> Option<&Series> {
        let Case { guest, layout } = ours.case;
        self.of(guest, layout, By::Qemu).or_else(|| self.of(guest, Layout::Plain, By::Qemu))
    }

    pub(super) fn disk_write(&self) -> Spread {
        Spread::of(self.disk.iter().map(|run| run.write_ms))
    }

    pub(super) fn disk_read(&self) -> Spread {
        Spread::of(self.disk.iter().map(|run| run.read_ms))
    }

    pub(super) fn disk_fill(&self) -> Spread {
        Spread::of(self.disk.iter().map(|run| run.fill_ms))
    }

    pub(super) fn disk_cached(&self) -> Spread {
        Spread::of(self.disk.iter().map(|run| run.cached_ms))
    }

    pub(super) fn disk_cpu_seconds(&self) -> f64 {
        Spread::of(self.disk.iter().map(|run| run.write_cpu_seconds)).median
    }

    /// What all tables say alike: each save, and each restore.
    pub(super) fn rows(&self) -> Vec<Row> {
        let ours = || self.series.iter().filter(|series| series.by == By::Transship);
        let beside = |series: &Series, of: fn(&Series) -> Vec<f64>| self.beside(series).map(of).unwrap_or_default();
        let limit = |series: &Series, what: &str, ms: Spread| {
            let is_read = series.case.guest != Guest::Sparse && !self.disk.is_empty();
            is_read.then(|| Limit { what: format!("the disk {what}"), value: ms.median })
        };
        let state = |series: &Series| self.state.filter(|_| series.case.guest == Guest::Sparse);
        let title = |what: &str, series: &Series| {
            format!("{what}, {}, {}", series.case.guest.title(), series.case.layout.title(self.channels))
        };
        let way = |series: &Series| if series.case.layout == Layout::Direct { "direct I/O" } else { "page cache" };
        let cpu = |row: Row, series: &Series, of: fn(&Series) -> f64| {
            let per_gb = |series: &Series| units::short(of(series) / (self.guest_bytes as f64 / 1e9));
            row.fact("CPU s/GB", per_gb(series), self.beside(series).map_or_else(String::new, per_gb))
        };
        let saves = ours().map(|series| {
            let row = Row::of(title("save", series), way(series), save_ms(series), beside(series, save_ms));
            let qemu =
                |of: fn(&Series) -> f64| self.beside(series).map_or_else(String::new, |qemu| units::short(of(qemu)));
            let row = row.limit(limit(series, "written", self.disk_write()));
            let row = row.limit(state(series).map(StateAlone::saved));
            let row = cpu(row, series, Series::cpu_seconds);
            match series.case.guest.runs() {
                true => row.fact("guest stands still ms", units::short(series.pause_ms()), qemu(Series::pause_ms)),
                false => row,
            }
        });
        let restores = ours().filter(|series| !series.restores.is_empty()).map(|series| {
            let row = Row::of(title("restore", series), way(series), restore_ms(series), beside(series, restore_ms));
            let row = row.limit(state(series).map(|state| state.restored(1)));
            let row = row.limit(limit(series, "read", self.disk_read()));
            let row = row.limit(limit(series, "read into memory", self.disk_fill()));
            // A plain stream is read ahead past it.
            let is_cached = matches!(series.case.layout, Layout::Mapped | Layout::Channels);
            let cached = is_cached.then(|| limit(series, "read through the page cache", self.disk_cached()));
            cpu(row.limit(cached.flatten()), series, Series::restore_cpu_seconds)
        });
        saves.chain(restores).collect()
    }

    /// Guest memory by time, in MB/s (10^6 bytes).
    pub(super) fn mb_per_s(&self, ms: f64) -> f64 {
        self.guest_bytes as f64 / 1e3 / ms
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn save(ms: f64, cpu_seconds: f64, pause_ms: Option<f64>) -> SaveRun {
        SaveRun {
            status: COMPLETED.into(),
            ms,
            pause_ms,
            pages_written: Some(100_000),
            file_bytes: 4_000_000,
            allocated_bytes: 1 << 20,
            cpu_seconds,
            ..SaveRun::default()
        }
    }

    pub(crate) fn restore(ms: f64, runs_after_ms: Option<f64>) -> RestoreRun {
        let speaks_after_ms = runs_after_ms.map(|ms| ms + 10.0);
        RestoreRun { ms, runs_after_ms, speaks_after_ms, cpu_seconds: 0.5, ..RestoreRun::default() }
    }

    fn series(guest: Guest, layout: Layout, by: By, save: SaveRun, restore: RestoreRun) -> Series {
        Series { saves: vec![save; 3], restores: vec![restore; 3], ..Series::new(Case { guest, layout }, by) }
    }

    /// 1 GB: a MB in a second is a page of 1000 bytes in a millisecond.
    pub(crate) fn results() -> Results {
        let (ours, qemu) = (By::Transship, By::Qemu);
        let pause = Some(40.0);
        let mut all = vec![
            series(Guest::Sparse, Layout::Direct, ours, save(100.0, 0.1, None), restore(50.0, None)),
            series(Guest::Sparse, Layout::Direct, qemu, save(900.0, 0.9, None), restore(500.0, None)),
            series(Guest::Paused, Layout::Direct, ours, save(1000.0, 0.5, None), restore(1100.0, None)),
            series(Guest::Paused, Layout::Direct, qemu, save(1100.0, 1.0, None), restore(1500.0, None)),
            series(Guest::Live, Layout::Plain, qemu, save(9000.0, 9.0, None), restore(0.0, None)),
            series(Guest::Live, Layout::Direct, ours, save(1200.0, 0.6, pause), restore(1100.0, Some(1120.0))),
            series(Guest::Live, Layout::Direct, qemu, save(2000.0, 2.0, Some(300.0)), restore(1500.0, Some(1490.0))),
            series(Guest::Background, Layout::Direct, ours, save(1400.0, 0.7, pause), restore(1100.0, Some(1120.0))),
            series(Guest::Background, Layout::Plain, qemu, save(5000.0, 5.0, pause), restore(1500.0, Some(1490.0))),
        ];
        for run in &mut all[4].saves {
            run.status = "no end: 4 GiB after 9 s".into();
        }
        all[4].restores.clear();
        all[5].lazy = vec![restore(3000.0, Some(100.0)); 3];
        Results {
            machine: Machine::here(),
            qemu: "10.0.2".into(),
            guest_bytes: 1_000_000_000,
            hot_bytes: 125_000_000,
            hot_mib_per_s: Some(900.0),
            channels: 4,
            runs: 3,
            disk: vec![
                DiskRun {
                    write_ms: 960.0,
                    write_cpu_seconds: 0.2,
                    read_ms: 1000.0,
                    fill_ms: 1050.0,
                    cached_ms: 1100.0
                };
                3
            ],
            state: None,
            series: all,
        }
    }

    #[test]
    fn what_never_ends_has_no_speed() {
        let results = results();
        let never = results.of(Guest::Live, Layout::Plain, By::Qemu).unwrap();
        assert!(never.save_ms().is_nan() && never.restore_ms().is_nan());
        assert_eq!(never.status(), "no end: 4 GiB after 9 s");
        let ours = results.of(Guest::Live, Layout::Direct, By::Transship).unwrap();
        assert_eq!((ours.save_ms(), ours.pause_ms(), ours.status()), (1200.0, 40.0, "saved"));
        assert_eq!(results.beside(ours).unwrap().save_ms(), 2000.0);
        let background = results.of(Guest::Background, Layout::Direct, By::Transship).unwrap();
        assert_eq!(results.beside(background).unwrap().case.layout, Layout::Plain);
        assert_eq!(results.mb_per_s(1000.0), 1000.0);
        assert_eq!(ours.pages_per_s(), 100_000.0 / 1.2);
    }

    #[test]
    fn all_single_runs_are_in_the_json() {
        let json = serde_json::to_value(results()).unwrap();
        let live = &json["series"][5];
        assert_eq!(
            (&live["guest"], &live["layout"], &live["by"]),
            (&"live".into(), &"direct".into(), &"transship".into())
        );
        assert_eq!(live["saves"].as_array().map(Vec::len), Some(3));
        assert_eq!(live["saves"][1]["pause_ms"], 40.0);
        assert_eq!(live["restores_lazy"][0]["runs_after_ms"], 100.0);
        assert_eq!(json["series"][8]["layout"], "plain");
        assert_eq!(json["disk"][2]["read_ms"], 1000.0);
    }
}
