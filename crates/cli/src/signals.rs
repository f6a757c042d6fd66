//! Ctrl-C and its kin: they cancel, they never kill in the middle.
use std::{io, sync::Arc, thread};

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ},
    flag,
    iterator::{Handle, Signals},
};
use transship_engine::{Phase, Progress};

use crate::{failure::Failure, output};

/// Handles the signals while it lives.
pub(crate) struct Watcher {
    handle: Handle,
    thread: Option<thread::JoinHandle<()>>,
}

impl Watcher {
    /// Calls `act` for each signal, with the number of signals that came before it, on a thread of its own.
    pub(crate) fn start(act: impl FnMut(usize) + Send + 'static) -> Result<Self, Failure> {
        Held::hold()?.start(act)
    }

    /// Cancels the move that `progress` shows, and says what that means.
    pub(crate) fn cancelling(progress: &Arc<Progress>, side: Side) -> Result<Self, Failure> {
        Held::hold()?.cancelling(progress, side)
    }
}

/// The signals from now on, which wait for somebody to handle them.
pub(crate) struct Held(Signals);

impl Held {
    /// No thread is started for this.
    pub(crate) fn hold() -> Result<Self, Failure> {
        let mut wanted = vec![SIGINT, SIGTERM];
        // `nohup` ignores it on our behalf; that stays so.
        if ignored_signals() & (1 << (SIGHUP - 1)) == 0 {
            wanted.push(SIGHUP);
        }
        Signals::new(wanted).map(Self).map_err(failed)
    }

    /// As [`Watcher::start`].
    pub(crate) fn start(self, mut act: impl FnMut(usize) + Send + 'static) -> Result<Watcher, Failure> {
        let Self(mut signals) = self;
        let handle = signals.handle();
        let thread = thread::Builder::new()
            .name("signals".into())
            .spawn(move || signals.forever().enumerate().for_each(|(before, _)| act(before)))
            .map_err(failed)?;
        Ok(Watcher { handle, thread: Some(thread) })
    }

    /// As [`Watcher::cancelling`].
    pub(crate) fn cancelling(self, progress: &Arc<Progress>, side: Side) -> Result<Watcher, Failure> {
        let progress = Arc::clone(progress);
        self.start(move |before| {
            let line = answer(progress.phase(), before, side);
            progress.cancel();
            output::say(line);
        })
    }
}

fn failed(error: io::Error) -> Failure {
    Failure::Failed(format!("can't handle Ctrl-C: {error}"))
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed; there's nothing to add.
            let _ = thread.join();
        }
    }
}

/// Which end of a move this process is, or what else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Destination,
    Save,
    /// An image, and then clones.
    Fork,
    /// A guest from a file.
    Restore,
    /// A file from a file.
    Conversion,
    /// Between two QEMUs.
    Relay,
    /// A service of such.
    Relays,
}

/// Makes a file that is longer than this process may make one (`ulimit -f`) an error instead of our end.
pub(crate) fn outlive_file_limits() -> Result<(), Failure> {
    let handled = flag::register(SIGXFSZ, Arc::default());
    handled.map(drop).map_err(|error| Failure::Failed(format!("can't handle a signal: {error}")))
}

/// For a process that ends with another one, and not before.
pub(crate) fn outlive_requests_to_end() -> Result<(), Failure> {
    let ignore = |signal| flag::register(signal, Arc::default()).map(drop).map_err(failed);
    [SIGHUP, SIGINT, SIGTERM].into_iter().try_for_each(ignore)
}

/// What is said to somebody who cancels in this phase, when so many have done so before.
pub(crate) fn answer(phase: Phase, before: usize, side: Side) -> &'static str {
    match (phase, side) {
        (Phase::Filling, Side::Source) => {
            "too late to cancel: the guest runs at the destination, and needs this process until it has all its pages"
        }
        (Phase::Filling, Side::Destination) => {
            "too late to cancel: the guest runs here, and needs this process until all its pages are here"
        }
        (Phase::Done, Side::Save) => "too late to cancel: the guest has been saved",
        (Phase::HandedOver | Phase::Done, Side::Source | Side::Save) => {
            "too late to cancel: the guest has been handed over and belongs to the destination now"
        }
        (Phase::HandedOver | Phase::Done, Side::Destination) => {
            "too late to cancel: the guest has been handed over to this side"
        }
        (Phase::Filling, Side::Restore) => {
            "too late to cancel: the guest runs and needs this process until all its pages are there; end the VMM instead"
        }
        (Phase::Done, Side::Conversion) => "too late to cancel: the file is complete",
        (Phase::HandedOver | Phase::Done, Side::Restore) => "too late to cancel: the guest is being started",
        (Phase::HandedOver | Phase::Done, Side::Relay) => {
            "too late to cancel: the guest is being handed over to the destination"
        }
        (_, Side::Fork) => "cancelling; the guest runs on, and so do the clones that run already",
        (_, Side::Relays) => "ending; what has not been handed over runs on at its source",
        (_, Side::Relay) => "cancelling; the guest runs on at the source",
        (_, Side::Conversion) => "cancelling; nothing changes",
        _ if before > 0 => "already cancelling; wait, so that nothing is left behind in the VMM",
        (Phase::Switchover, Side::Destination) => {
            "cancelling; the guest runs on at the source, unless that hands it over to this side at this moment"
        }
        (_, Side::Source) => "cancelling; the guest runs on here",
        (_, Side::Save) => "cancelling; the guest runs on, and the file stays as it was",
        (_, Side::Restore) => "cancelling; nothing will run",
        (_, Side::Destination) => "cancelling; the guest runs on at the source",
    }
}

/// The signals that this process was started with ignored, as the kernel shows them: bit n-1 for signal n.
fn ignored_signals() -> u64 {
    std::fs::read_to_string("/proc/self/status").ok().as_deref().and_then(ignored_in).unwrap_or(0)
}

fn ignored_in(status: &str) -> Option<u64> {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_depends_on_the_point_of_no_return() {
        assert!(answer(Phase::Rounds, 0, Side::Source).starts_with("cancelling"));
        assert!(answer(Phase::Switchover, 1, Side::Source).starts_with("already cancelling"));
        assert!(answer(Phase::HandedOver, 0, Side::Source).starts_with("too late"));
        // The source decides, and this side may already have told it to.
        assert!(answer(Phase::Switchover, 0, Side::Destination).contains("unless"));
        assert!(!answer(Phase::Rounds, 0, Side::Destination).contains("unless"));
        assert!(answer(Phase::HandedOver, 1, Side::Destination).starts_with("too late"));
    }

    #[test]
    fn ignored_signals_are_read_from_the_status() {
        let status = "Name:\tx\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\n";
        assert_eq!(ignored_in(status), Some(0x1001));
        assert_eq!(ignored_in("Name:\tx\n"), None);
        // The Rust runtime ignores SIGPIPE (13): a mask that is really ours has it.
        assert_ne!(ignored_signals() & (1 << 12), 0);
    }
}
