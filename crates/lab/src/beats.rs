//! What a guest's user notices of a move: the longest silence between two of its beats, wherever it is.
//!
//! A guest can't measure its own blackout, since its clock stands still when it does. So it beats (`workload.beat_ms`)
//! on its serial port, and whoever listens to the ports of both sides sees when nothing came.
use crate::lines::{Lines, Mark};
use crate::{LabError, Qemu, Result};
use std::time::{Duration, Instant};

/// For [`crate::QemuBuilder::append`]: a beat every millisecond.
pub const BEATS: &str = "workload.beat_ms=1";

/// How a guest was heard from one moment to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heard {
    /// The longest time without a beat.
    pub silence: Duration,
    /// The usual time between two beats: the median.
    pub usual: Duration,
    /// How many there were.
    pub beats: usize,
}

/// How the guest was heard since a moment, at one side or the other.
///
/// # Errors
/// There are too few beats to say: it does not beat, or its image is an old one.
pub fn heard(source: &Qemu, destination: &Qemu, since: Instant) -> Result<Heard> {
    let beats = |guest: &Qemu| guest.serial().lines().times(is_beat);
    between(beats(source).into_iter().chain(beats(destination)).filter(|time| *time >= since).collect())
}

/// Waits until so many beats have come from a guest since now.
///
/// # Errors
/// They do not in time: it stands still, does not beat, or is gone.
pub fn wait_for_beats(guest: &Qemu, count: usize) -> Result<()> {
    let lines: &Lines = guest.serial().lines();
    let mut mark: Mark = lines.mark();
    for _ in 0..count {
        mark = lines.wait(mark, "a beat", |line| is_beat(line).then_some(()))?.1;
    }
    Ok(())
}

/// A move may come between the two characters of a beat.
fn is_beat(line: &str) -> bool {
    line.chars().all(|c| c == '~')
}

fn between(mut times: Vec<Instant>) -> Result<Heard> {
    times.sort_unstable();
    let mut gaps: Vec<Duration> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    gaps.sort_unstable();
    match gaps.last() {
        Some(&silence) if gaps.len() > 2 => Ok(Heard { silence, usual: gaps[gaps.len() / 2], beats: times.len() }),
        _ => {
            let cure = "start it with workload.beat_ms, and build its image anew (make setup)";
            Err(LabError(format!("{} beats of the guest are too few: {cure}", times.len())))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_silence_is_found_wherever_the_beats_come_from() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        // Those of the destination may be read before the last ones of the source.
        let heard = between(vec![at(0), at(1), at(40), at(41), at(2), at(42)]).unwrap();
        let ms = Duration::from_millis;
        assert_eq!(heard, Heard { silence: ms(38), usual: ms(1), beats: 6 });
        assert!(between(vec![at(0), at(1)]).unwrap_err().to_string().contains("2 beats"));
        assert!(is_beat("~") && is_beat("~~") && is_beat("") && !is_beat("workload: count=1"));
    }
}
