//! What the design aims at, and whether it was met here.
use std::fmt;

use serde::Serialize;

use crate::{
    content::Content,
    results::{Check, Mode, Results, Row},
    units,
};

const UNTOUCHED_TIMES: f64 = 30.0;
const ZERO_TIMES: f64 = 2.0;
const RANDOM_TIMES: f64 = 1.0;
const RANDOM_TIMES_HUGE: f64 = 1.3;
/// Of what as many threads of this machine read at best.
const SCAN_SHARE: f64 = 0.8;
const MIB_A_PROCESS: f64 = 64.0;
const MIB_A_CHANNEL: f64 = 4.0;

/// All of them that something was measured for.
#[derive(Debug, Clone, Serialize)]
#[serde(transparent)]
pub(crate) struct Aims(Vec<Aim>);

/// One number that there is an aim for.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Aim {
    what: String,
    bound: Bound,
    wanted: f64,
    got: f64,
    unit: &'static str,
    met: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Bound {
    AtLeast,
    AtMost,
}

impl Aims {
    /// Of a table that aims at nothing.
    pub(crate) fn none() -> Self {
        Self(Vec::new())
    }

    pub(crate) fn of(results: &Results) -> Self {
        let speed = results.rows.iter().filter(|row| row.mode.check == Check::Channels);
        let times = speed.filter_map(|row| times_as_fast(row, results.huge_pages));
        let shares = results.rows.iter().filter_map(|row| scan_share(row, results));
        let gaps = results.rows.iter().filter_map(|row| gap(row, results));
        Self(times.chain(shares).chain(gaps).chain(memory(results)).collect())
    }
}

impl FromIterator<Aim> for Aims {
    fn from_iter<I: IntoIterator<Item = Aim>>(aims: I) -> Self {
        Self(aims.into_iter().collect())
    }
}

impl Aim {
    pub(crate) fn new(what: String, bound: Bound, wanted: f64, got: f64, unit: &'static str) -> Self {
        // A number that could not be measured meets nothing.
        let met = match bound {
            Bound::AtLeast => got >= wanted,
            Bound::AtMost => got <= wanted,
        };
        Self { what, bound, wanted, got, unit, met }
    }
}

fn times_as_fast(row: &Row, huge_pages: bool) -> Option<Aim> {
    let wanted = match row.content {
        Content::Untouched => UNTOUCHED_TIMES,
        Content::Zero => ZERO_TIMES,
        Content::Random if huge_pages => RANDOM_TIMES_HUGE,
        Content::Random => RANDOM_TIMES,
        Content::Mixed => return None,
    };
    let what = format!("{}, {}: as fast as QEMU", row.content.title(), row.mode.title());
    Some(Aim::new(what, Bound::AtLeast, wanted, row.ratio(), "times"))
}

fn scan_share(row: &Row, results: &Results) -> Option<Aim> {
    if row.content != Content::Zero || row.mode.check != Check::Channels {
        return None;
    }
    let machine = results.scan_bandwidth(row.mode.scanners())?;
    let (ours, best) = (units::short(row.scanned_per_s() / 1e9), units::short(machine / 1e9));
    let what = format!("touched zero, {}: {ours} GB/s scanned, of the machine's {best} GB/s", row.mode.title());
    Some(Aim::new(what, Bound::AtLeast, SCAN_SHARE, row.scanned_per_s() / machine, "of it"))
}

/// Main-thread mode is there to show the gap that checking in the channels closes.
fn gap(row: &Row, results: &Results) -> Option<Aim> {
    if row.content != Content::Zero || row.mode.check != Check::Main || row.mode.channels == 1 {
        return None;
    }
    let by_channels = results.row(row.content, Mode { check: Check::Channels, ..row.mode })?;
    let what = format!("touched zero, {}: as long as by channels", row.mode.title());
    Some(Aim::new(what, Bound::AtLeast, 1.0, row.our_ms().median / by_channels.our_ms().median, "times"))
}

/// The row that leaves the least room.
fn memory(results: &Results) -> Option<Aim> {
    let limit = |row: &Row| MIB_A_PROCESS + MIB_A_CHANNEL * f64::from(row.mode.channels);
    let used = |row: &Row| row.anonymous_bytes_max() as f64 / f64::from(1 << 20);
    let worst = results.rows.iter().max_by(|a, b| (used(a) / limit(a)).total_cmp(&(used(b) / limit(b))))?;
    let what = format!("{}, {}: memory of our own in a process", worst.content.title(), worst.mode.title());
    Some(Aim::new(what, Bound::AtMost, limit(worst), used(worst), "MiB"))
}

impl fmt::Display for Aims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return Ok(());
        }
        writeln!(f, "Aims")?;
        let width = self.0.iter().map(|aim| aim.what.chars().count()).max().unwrap_or(0);
        for Aim { what, bound, wanted, got, unit, met } in &self.0 {
            let verdict = if *met { "met   " } else { "MISSED" };
            let bound = match bound {
                Bound::AtLeast => "at least",
                Bound::AtMost => "at most",
            };
            writeln!(
                f,
                "  {verdict}  {what:width$}  {:>6} {unit} ({bound} {})",
                units::short(*got),
                units::short(*wanted)
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::{CHANNELS_2, results, row};

    fn verdicts(results: &Results) -> Vec<(String, bool)> {
        Aims::of(results).0.into_iter().map(|aim| (aim.what, aim.met)).collect()
    }

    fn verdict(results: &Results, what: &str) -> bool {
        let all = verdicts(results);
        all.iter().find(|(name, _)| name.contains(what)).unwrap_or_else(|| panic!("no {what:?} in {all:?}")).1
    }

    #[test]
    fn aims_are_met_or_missed_by_their_own_bound() {
        let mut results = results();
        assert!(verdict(&results, "never touched, 2 channels: as fast"), "70 times");
        assert!(!verdict(&results, "touched zero, 2 channels: as fast"), "1.5 times");
        assert!(verdict(&results, "random, 2 channels: as fast"), "1.0 times");
        // 10.24 GB/s of 12.
        assert!(verdict(&results, "GB/s scanned"));
        results.scan[0].bytes_per_s = 13e9;
        assert!(!verdict(&results, "GB/s scanned"));
        results.huge_pages = true;
        assert!(!verdict(&results, "random, 2 channels: as fast"), "1.3 times is the aim on huge pages");
    }

    #[test]
    fn main_thread_mode_has_to_show_the_gap() {
        let mut results = results();
        let main = Mode { check: Check::Main, ..CHANNELS_2 };
        results.rows.push(row(Content::Zero, main, 180.0, 300.0));
        assert!(verdict(&results, "as long as by channels"));
        results.rows.pop();
        results.rows.push(row(Content::Zero, main, 90.0, 300.0));
        assert!(!verdict(&results, "as long as by channels"));
        assert!(!verdicts(&results).iter().any(|(what, _)| what.contains("main, 2 channels: as fast")));
    }

    #[test]
    fn one_process_over_its_memory_is_enough_to_miss() {
        let mut results = results();
        assert!(verdict(&results, "memory of our own"));
        results.rows[1].ours[2].anonymous_bytes_max.source = 73 << 20;
        assert!(!verdict(&results, "touched zero, 2 channels: memory of our own"));
        results.rows[1].ours[2].anonymous_bytes_max.source = 72 << 20;
        assert!(verdict(&results, "touched zero, 2 channels: memory of our own"));
    }

    #[test]
    fn a_missed_aim_is_printed_as_such() {
        let text = Aims::of(&results()).to_string();
        assert!(text.contains("met     never touched, 2 channels: as fast as QEMU"), "{text}");
        assert!(text.contains("MISSED  touched zero, 2 channels: as fast as QEMU"), "{text}");
        assert!(text.contains("1.5 times (at least 2)"), "{text}");
    }
}
