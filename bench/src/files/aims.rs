//! What the design aims at for snapshots.
use super::{
    cases::{By, Guest, Layout},
    results::{Results, Series, median},
};
use crate::{
    aims::{Aim, Aims, Bound},
    units,
};

const WRITE_SHARE: f64 = 0.95;
const READ_SHARE: f64 = 0.9;
const SAVE_TIMES: f64 = 1.0;
const SAVE_CPU_SHARE: f64 = 0.5;
const RESTORE_TIMES: f64 = 1.5;
const LIVE_TIMES: f64 = 1.3;
const BACKGROUND_PAUSE_MS: f64 = 50.0;
const LAZY_START_MS: f64 = 150.0;
/// Well under a second.
const SPARSE_MS: f64 = 500.0;

impl Results {
    pub(super) fn aims(&self) -> Aims {
        let ours = |guest, layout| self.of(guest, layout, By::Transship);
        let background =
            [Layout::Mapped, Layout::Direct].into_iter().filter_map(|layout| ours(Guest::Background, layout));
        let all = ours(Guest::Paused, Layout::Direct).into_iter().flat_map(|series| self.of_paused(series));
        all.chain(ours(Guest::Live, Layout::Direct).into_iter().flat_map(|series| self.of_live(series)))
            .chain(background.map(|series| self.of_background(series)))
            .chain(ours(Guest::Sparse, Layout::Direct).map(|series| {
                Aim::new("never touched: time of a save".into(), Bound::AtMost, SPARSE_MS, series.save_ms(), "ms")
            }))
            .collect()
    }

    fn of_paused(&self, ours: &Series) -> Vec<Aim> {
        let disk = |what: &str, wanted, ms: f64, disk_ms: f64| {
            let [ours, disk] = [ms, disk_ms].map(|ms| units::short(self.mb_per_s(ms)));
            let what = format!("paused, direct I/O: {what} {ours} MB/s, of the disk's {disk} MB/s");
            Aim::new(what, Bound::AtLeast, wanted, disk_ms / ms, "of it")
        };
        let mut aims = vec![
            disk("saves", WRITE_SHARE, ours.save_ms(), self.disk_write().median),
            disk("restores", READ_SHARE, ours.restore_ms(), self.disk_read().median),
        ];
        if let Some(qemu) = self.beside(ours) {
            let times = |what: &str, wanted, got| {
                Aim::new(format!("paused, direct I/O: {what} as fast as QEMU"), Bound::AtLeast, wanted, got, "times")
            };
            let cpu = ours.cpu_seconds() / qemu.cpu_seconds();
            aims.extend([
                times("saves", SAVE_TIMES, qemu.save_ms() / ours.save_ms()),
                Aim::new(
                    "paused, direct I/O: CPU of a save, of QEMU's".into(),
                    Bound::AtMost,
                    SAVE_CPU_SHARE,
                    cpu,
                    "of it",
                ),
                times("restores", RESTORE_TIMES, qemu.restore_ms() / ours.restore_ms()),
            ]);
        }
        aims
    }

    fn of_live(&self, ours: &Series) -> Vec<Aim> {
        let paused = self.of(Guest::Paused, Layout::Direct, By::Transship).map(Series::save_ms);
        let live = paused.map(|paused| {
            let what = "live, direct I/O: saves as long as paused".into();
            Aim::new(what, Bound::AtMost, LIVE_TIMES, ours.save_ms() / paused, "times")
        });
        let lazy = (!ours.lazy.is_empty()).then(|| {
            let what = "lazy restore: the guest runs after".into();
            Aim::new(what, Bound::AtMost, LAZY_START_MS, median(&ours.lazy, |run| run.runs_after_ms), "ms")
        });
        live.into_iter().chain(lazy).collect()
    }

    fn of_background(&self, ours: &Series) -> Aim {
        let layout = ours.case.layout.title(self.channels);
        let what = format!("background, {layout}: the guest stands still for");
        Aim::new(what, Bound::AtMost, BACKGROUND_PAUSE_MS, ours.pause_ms(), "ms")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::files::results::tests::results;

    fn verdict(results: &Results, what: &str) -> String {
        let text = results.aims().to_string();
        let line = text.lines().find(|line| line.contains(what)).unwrap_or_else(|| panic!("no {what:?} in\n{text}"));
        line.split_whitespace().next().unwrap().to_owned()
    }

    #[test]
    fn aims_are_met_or_missed_by_their_own_bound() {
        let results = results();
        for (what, wanted) in [
            ("saves 1000 MB/s, of the disk's 1042 MB/s", "met"),
            ("restores 909 MB/s, of the disk's 1000 MB/s", "met"),
            ("saves as fast as QEMU", "met"),
            ("CPU of a save", "met"),
            // 1500 ms by 1100 ms.
            ("restores as fast as QEMU", "MISSED"),
            ("saves as long as paused", "met"),
            ("the guest stands still for", "met"),
            ("lazy restore", "met"),
            ("never touched", "met"),
        ] {
            assert_eq!(verdict(&results, what), wanted, "{what}");
        }
    }

    #[test]
    fn each_can_be_missed() {
        let mut results = results();
        results.disk.iter_mut().for_each(|run| (run.write_ms, run.read_ms) = (940.0, 980.0));
        for series in &mut results.series {
            series.lazy.iter_mut().for_each(|run| run.runs_after_ms = Some(151.0));
            let by_qemu = series.by == By::Qemu;
            for run in &mut series.saves {
                (run.ms, run.cpu_seconds) = match (by_qemu, series.case.guest) {
                    (true, _) => (999.0, 0.9),
                    (false, Guest::Paused) => (1000.0, 0.5),
                    (false, _) => (1301.0, 0.5),
                };
                run.pause_ms = Some(51.0);
            }
        }
        let text = results.aims().to_string();
        assert!(!text.contains("met "), "{text}");
        results.series.iter_mut().flat_map(|series| &mut series.saves).for_each(|run| run.status = "no end".into());
        assert_eq!(verdict(&results, "saves as long as paused"), "MISSED");
    }
}
