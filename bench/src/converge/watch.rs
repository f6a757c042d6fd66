//! A guest that is watched from before its move until after it, by its own serial port.
use std::{
    thread,
    time::{Duration, Instant},
};

use transship_lab::{
    Qemu,
    beats::{Heard, heard, wait_for_beats},
};
use transship_memory::PAGE_BYTES;

use super::{BEATS_BESIDE, Way, results::Run};
use crate::{
    pair::{Pair, text},
    threads::mib_per_s,
    units::millis,
};

/// From the guest's start until its rate is taken: its first round through memory may be slower.
const SETTLE: Duration = Duration::from_millis(500);
const PAGES_PER_MIB: f64 = ((1 << 20) / PAGE_BYTES) as f64;

/// What the guest did before the move.
pub(super) struct Watch {
    since: Instant,
    /// Pages a second.
    rate: f64,
    /// What it had written, and when it said so.
    count: u64,
    at: Instant,
}

/// How many pages a second a guest writes that writes as fast as it can.
pub(super) fn fastest(guest: &Qemu) -> Result<f64, String> {
    thread::sleep(SETTLE);
    Ok(mib_per_s(guest)? * PAGES_PER_MIB)
}

impl Watch {
    pub(super) fn begin(pair: &Pair<'_>) -> Result<Self, String> {
        let rate = fastest(&pair.source)?;
        wait_for_beats(&pair.source, BEATS_BESIDE).map_err(text)?;
        let since = Instant::now();
        let count = pair.source.next_count().map_err(text)?.count;
        Ok(Self { since, rate, count, at: Instant::now() })
    }

    /// The guest is where the run says. Adds what it noticed, and has it check its memory.
    ///
    /// # Errors
    /// A guest that can't be asked, or that transship has damaged. That QEMU has is what its run came to.
    pub(super) fn end(self, pair: &Pair<'_>, way: Way, run: Run) -> Result<Run, String> {
        let home = if run.arrived() { &pair.destination } else { &pair.source };
        let count = home.next_count().map_err(text)?.count;
        let seconds = self.at.elapsed().as_secs_f64();
        wait_for_beats(home, BEATS_BESIDE).map_err(text)?;
        let Heard { silence, usual, .. } = heard(&pair.source, &pair.destination, self.since).map_err(text)?;
        let swept = home.sweep().map_err(text)?;
        let status = match swept.errors {
            0 => run.status.clone(),
            errors => damaged(way, errors, swept.pages)?,
        };
        Ok(Run {
            status,
            blackout_ms: millis(silence),
            beat_ms: millis(usual),
            writes_mib_per_s: self.rate / PAGES_PER_MIB,
            work: count.saturating_sub(self.count) as f64 / seconds / self.rate,
            ..run
        })
    }
}

/// How a run ended after which so many pages are not what the guest has written.
fn damaged(way: Way, wrong: u64, pages: u64) -> Result<String, String> {
    let text = format!("{wrong} of {pages} pages wrong");
    if way.is_ours() { Err(format!("{text}: this is a bug of transship")) } else { Ok(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_was_damaged_is_an_error_of_ours_and_a_result_of_qemus() {
        let text = "3 of 16384 pages wrong";
        assert_eq!(damaged(Way::QemuPostcopy, 3, 16384), Ok(text.to_owned()));
        assert!(damaged(Way::Postcopy, 3, 16384).is_err_and(|error| error.starts_with(text)));
        let run = Run { status: text.to_owned(), ..Run::default() };
        assert!(!run.arrived());
    }
}
