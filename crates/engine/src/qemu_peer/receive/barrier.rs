//! Barriers between the main stream and the channels: what came before one on any channel is in place before anything
//! behind it is.
use std::sync::{Condvar, Mutex, MutexGuard};

use crate::{Error, Progress, Rule, control::TICK};

/// What the channels and the main stream know of each other.
pub(super) struct Barrier {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    channels: Vec<Channel>,
    /// Barriers that were passed.
    passed: u64,
    /// Nobody need wait any more.
    closed: bool,
    failed: Option<Error>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Channel {
    at: At,
    /// It has brought pages since the last barrier.
    pages: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum At {
    #[default]
    Reading,
    Waiting,
    Ended,
}

impl Barrier {
    pub(super) fn new(channels: usize) -> Self {
        let channels = vec![Channel::default(); channels];
        Self { state: Mutex::new(State { channels, passed: 0, closed: false, failed: None }), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// A channel has come to its half. Returns when the main stream has, too; false: it never will.
    pub(super) fn wait(&self, channel: usize) -> bool {
        let mut state = self.state();
        state.channels[channel] = Channel { at: At::Waiting, pages: false };
        self.changed.notify_all();
        let passed = state.passed;
        while state.passed == passed && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        !state.closed
    }

    /// A channel brings pages.
    pub(super) fn note_pages(&self, channel: usize) {
        self.state().channels[channel].pages = true;
    }

    /// A channel was closed by the source.
    pub(super) fn end(&self, channel: usize) {
        self.state().channels[channel].at = At::Ended;
        self.changed.notify_all();
    }

    /// A channel has failed. What fails because all is over tells nothing.
    pub(super) fn fail(&self, error: Error) {
        let mut state = self.state();
        if !state.closed {
            state.failed.get_or_insert(error);
            self.changed.notify_all();
        }
    }

    /// Whether a channel has failed. What it says is for [`Barrier::check`].
    pub(super) fn has_failed(&self) -> bool {
        self.state().failed.is_some()
    }

    /// The error of a channel that has failed.
    pub(super) fn check(&self) -> Result<(), Error> {
        self.state().failed.take().map_or(Ok(()), Err)
    }

    /// The main stream has come to its half: waits for all channels, and lets them go on.
    pub(super) fn pass(&self, peer: &str, progress: &Progress) -> Result<(), Error> {
        let mut state = self.state();
        loop {
            if let Some(error) = state.failed.take() {
                return Err(error);
            }
            if progress.is_cancelled() {
                return Err(Error::CANCELLED);
            }
            if let Some(ended) = state.channels.iter().position(|channel| channel.at == At::Ended) {
                let what = format!("has closed channel {ended} before the end of its memory");
                return Err(Error::breach(peer, Rule::Stays, what));
            }
            if state.channels.iter().all(|channel| channel.at == At::Waiting) {
                break;
            }
            state = self.changed.wait_timeout(state, TICK).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        state.channels.iter_mut().for_each(|channel| channel.at = At::Reading);
        state.passed += 1;
        self.changed.notify_all();
        Ok(())
    }

    /// The memory is said to be complete: no channel may have brought pages that no barrier has closed.
    pub(super) fn check_complete(&self, peer: &str) -> Result<(), Error> {
        self.check()?;
        match self.state().channels.iter().position(|channel| channel.pages) {
            None => Ok(()),
            Some(channel) => {
                let what = format!("sent pages on channel {channel} after the last barrier of its main stream");
                Err(Error::breach(peer, Rule::Order, what))
            }
        }
    }

    /// Ends all waits.
    pub(super) fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }
}
