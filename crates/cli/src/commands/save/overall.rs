//! One bar for all domains that are saved: on a terminal a bar, elsewhere a line from time to time. What each process
//! does it says itself, as to `transship status`.
use std::{
    io::{self, IsTerminal},
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{
    control::{self, State},
    output,
    units::Bytes,
};

/// How often they are asked.
const TICK: Duration = Duration::from_millis(500);
const LINE_EVERY: Duration = Duration::from_secs(5);

/// How far all of them are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) domains: usize,
    /// Whether they were saved or not.
    pub(super) ended: usize,
    /// Memory of all, and of those that have ended.
    pub(super) bytes: u64,
    pub(super) ended_bytes: u64,
}

impl Counts {
    /// `done`: bytes; `running`: domains.
    fn in_words(&self, done: u64, running: usize) -> String {
        let Self { domains, ended, bytes, .. } = *self;
        let (done, bytes) = (Bytes(done), Bytes(bytes));
        format!("{ended} of {domains} domains done, {running} under way: {done} of {bytes}")
    }
}

/// Shows it until the other end of `over` is gone. `now`: the counts, and the process and the memory of each domain
/// that is being saved.
pub(super) fn show(over: &Receiver<()>, now: &dyn Fn() -> (Counts, Vec<(i32, u64)>)) {
    let bar = io::stderr().is_terminal().then(|| {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(10));
        let style = ProgressStyle::with_template("[{bar:12}] {wide_msg}");
        bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "))
    });
    let mut shown = Instant::now();
    while over.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
        let (counts, running) = now();
        // One that does not answer has just begun, or just ended.
        let states = control::all(&mut Vec::new()).unwrap_or_default();
        let done = running.iter().map(|&(pid, memory)| {
            let state = states.iter().map(|found| &found.state).find(|state| i64::from(state.pid) == i64::from(pid));
            state.map_or(0, |state| done_of(memory, state))
        });
        let done = counts.ended_bytes + done.sum::<u64>();
        let words = counts.in_words(done, running.len());
        match &bar {
            Some(bar) => {
                bar.set_length(counts.bytes);
                bar.set_position(done);
                bar.set_message(words);
                bar.tick();
            }
            None if shown.elapsed() >= LINE_EVERY => {
                shown = Instant::now();
                output::say(&words);
            }
            None => {}
        }
    }
    // What remains to be said is in the result.
    bar.iter().for_each(ProgressBar::finish_and_clear);
}

/// Of a domain with so much memory. What is saved again in later rounds is not counted twice.
fn done_of(memory: u64, state: &State) -> u64 {
    match state.phase.as_str() {
        "connecting" => 0,
        "rounds" | "held" => memory.saturating_sub(state.left_bytes),
        _ => memory,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(phase: &str, left_bytes: u64) -> State {
        State { phase: phase.into(), left_bytes, ..State::default() }
    }

    #[test]
    fn what_is_left_of_a_domain_is_not_done() {
        for (phase, left, done) in [
            ("connecting", 0, 0),
            ("rounds", 30, 70),
            ("rounds", 130, 0),
            ("switchover", 5, 100),
            ("completing", 0, 100),
        ] {
            assert_eq!(done_of(100, &state(phase, left)), done, "{phase} {left}");
        }
    }

    #[test]
    fn the_line_counts_domains_and_memory() {
        let counts = Counts { domains: 5, ended: 2, bytes: 5 << 30, ended_bytes: 2 << 30 };
        let line = counts.in_words(3 << 30, 2);
        assert_eq!(line, "2 of 5 domains done, 2 under way: 3.0 GiB of 5.0 GiB");
    }
}
