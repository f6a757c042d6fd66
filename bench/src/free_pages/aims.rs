//! What the design aims at for free pages.
use super::{
    cases::{Case, Load, Way},
    results::{Results, Series},
};
use crate::{
    aims::{Aim, Aims, Bound},
    units,
};

const IDLE_GAIN: f64 = 77.0;
const BUSY_GAIN: f64 = 44.0;
const IDLE_TIMES: f64 = 3.0;
const BUSY_TIMES: f64 = 2.0;

impl Results {
    pub(super) fn aims(&self) -> Aims {
        let gains = self.ours().filter_map(|ours| self.gain_aim(ours));
        let growth = self.ours().filter_map(|ours| self.growth_aim(ours));
        let beside =
            self.ours().filter_map(|ours| Some((ours, self.beside(ours)?))).flat_map(|(ours, qemu)| beside(ours, qemu));
        gains.chain(growth).chain(beside).collect()
    }

    fn gain_aim(&self, ours: &Series) -> Option<Aim> {
        let wanted = if ours.case.load == Load::Idle { IDLE_GAIN } else { BUSY_GAIN };
        let gain = self.gain(ours).filter(|_| ours.case.way == Way::Hints)?;
        Some(Aim::new(format!("{}: time saved", title(ours)), Bound::AtLeast, wanted, gain * 100.0, "%"))
    }

    /// By that of the next smaller guest.
    fn growth_aim(&self, ours: &Series) -> Option<Aim> {
        let case = ours.case;
        let gain = self.gain(ours).filter(|_| case.way == Way::Hints)?;
        let smaller = self.ours().map(|series| series.case.guest_bytes).filter(|bytes| *bytes < case.guest_bytes);
        let smaller = self.of(Case { guest_bytes: smaller.max()?, ..case })?;
        let what = format!("{}: time saved, as with {}", title(ours), units::bytes(smaller.case.guest_bytes));
        Some(Aim::new(what, Bound::AtLeast, self.gain(smaller)? * 100.0, gain * 100.0, "%"))
    }
}

fn beside(ours: &Series, qemu: &Series) -> Vec<Aim> {
    let Case { load, way, .. } = ours.case;
    let mut aims = Vec::new();
    if matches!(way, Way::Hints | Way::Reporting) {
        let wanted = if load == Load::Idle { IDLE_TIMES } else { BUSY_TIMES };
        let (times, wire) = (qemu.ms().mean / ours.ms().mean, ours.wire_bytes() / qemu.wire_bytes());
        let title = title(ours);
        aims.push(Aim::new(format!("{title}: as fast as QEMU with the same"), Bound::AtLeast, wanted, times, "times"));
        aims.push(Aim::new(format!("{title}: bytes on the wire, of QEMU's"), Bound::AtMost, 1.0, wire, "times"));
    }
    if load == Load::Busy {
        let share = ours.work_share() / qemu.work_share();
        let what = format!("{}: the guest's work, of that with QEMU", title(ours));
        aims.push(Aim::new(what, Bound::AtLeast, 1.0, share, "times"));
    }
    aims
}

fn title(series: &Series) -> String {
    let Case { guest_bytes, load, way, .. } = series.case;
    format!("{}, {}, {}", units::bytes(guest_bytes), load.title(), way.title())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::free_pages::results::tests::results;

    fn verdict(results: &Results, what: &str) -> String {
        let text = results.aims().to_string();
        let line = text.lines().find(|line| line.contains(what)).unwrap_or_else(|| panic!("no {what:?} in\n{text}"));
        line.split_whitespace().next().unwrap_or_default().to_owned()
    }

    #[test]
    fn aims_are_met_or_missed_by_their_own_bound() {
        let results = results();
        for (what, wanted) in [
            ("2 GiB, idle, hints: time saved ", "MISSED"),
            ("4 GiB, idle, hints: time saved ", "met"),
            ("4 GiB, idle, hints: time saved, as with 2 GiB", "met"),
            ("2 GiB, busy, hints: time saved ", "met"),
            ("2 GiB, idle, hints: as fast", "MISSED"),
            ("2 GiB, idle, reporting: as fast", "met"),
            ("2 GiB, busy, hints: as fast", "met"),
            ("2 GiB, idle, hints: bytes", "met"),
            ("2 GiB, busy, hints: the guest's work", "MISSED"),
        ] {
            assert_eq!(verdict(&results, what), wanted, "{what}");
        }
        let text = results.aims().to_string();
        assert!(!text.contains("2 GiB, idle, hints: time saved, as"), "there is no smaller one\n{text}");
        assert!(!text.contains("idle, without"), "{text}");
    }

    #[test]
    fn each_can_be_missed() {
        let mut results = results();
        for series in &mut results.series {
            for run in &mut series.runs {
                run.ms = if series.case.way == Way::Without { 1000.0 } else { 900.0 };
                run.wire_bytes = if series.case.by == crate::files::By::Qemu { 10 } else { 11 };
            }
        }
        let text = results.aims().to_string();
        assert!(!text.lines().any(|line| line.trim_start().starts_with("met") && !line.contains("as with")), "{text}");
    }
}
