//! The channel that QEMU saves the device state to.
use std::{
    io,
    net::Shutdown,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::GuestError;

/// How long QEMU may be silent while it saves, and take to finish.
pub(super) const SAVE_WAIT: Duration = Duration::from_secs(30);
/// How long it may take to clean up behind a save that is over. Without load that is a millisecond.
const CLEANUP_WAIT: Duration = Duration::from_secs(10);

/// Both ends.
pub(super) struct StateChannel {
    pub(super) ours: UnixStream,
    pub(super) qemus: UnixStream,
}

impl StateChannel {
    pub(super) fn open() -> Result<Self, GuestError> {
        UnixStream::pair().map(|(ours, qemus)| Self { ours, qemus }).map_err(failed)
    }

    /// One more of our end, by which it is seen what becomes of the other.
    pub(super) fn our_end(&self) -> Result<OurEnd, GuestError> {
        self.ours.try_clone().map(OurEnd).map_err(failed)
    }
}

/// Why there is no channel.
pub(super) fn failed(error: io::Error) -> GuestError {
    GuestError::system("make a channel for the device state")(error)
}

/// Our end, whoever reads it.
pub(super) struct OurEnd(UnixStream);

impl OurEnd {
    /// What another process has passed.
    pub(super) fn passed(end: OwnedFd) -> Self {
        Self(end.into())
    }

    /// For another process.
    pub(super) fn into_file(self) -> OwnedFd {
        self.0.into()
    }

    /// Nobody reads any more: a QEMU that writes fails. What it reads is left to itself, or its own end of the channel
    /// could not be told from this one's.
    pub(super) fn hang_up(&self) {
        // It fails only when QEMU has closed already.
        let _ = self.0.shutdown(Shutdown::Read);
    }

    /// Waits until QEMU has closed its own end.
    ///
    /// QEMU calls a migration over before it has cleaned up behind it, and what there is to clean up it sees by its
    /// capabilities: if multifd is switched on again too early, it looks for channels that never were, and dies. The
    /// end of its channel is closed after that.
    pub(super) fn wait_closed(&self) {
        let deadline = Instant::now() + CLEANUP_WAIT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let time = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            // That it has hung up is always told.
            match poll(&mut [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::empty())], Some(&time)) {
                Err(rustix::io::Errno::INTR) if !left.is_zero() => {}
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{
        io::{Read, Write},
        thread,
    };

    use super::*;

    /// Also when nobody reads it any more, and when it is not empty.
    #[test]
    fn it_is_seen_when_the_other_end_is_closed_and_not_before() {
        let StateChannel { mut ours, mut qemus } = StateChannel::open().unwrap();
        qemus.write_all(b"state").unwrap();
        let end = OurEnd(ours.try_clone().unwrap());
        ours.read_exact(&mut [0; 2]).unwrap();
        let waiter = thread::spawn(move || {
            end.hang_up();
            end.wait_closed();
            Instant::now()
        });
        while qemus.write(b"more").is_ok() {
            thread::yield_now();
        }
        thread::sleep(Duration::from_millis(50)); // for it to see too much
        let begin = Instant::now();
        drop(qemus);
        assert!(waiter.join().unwrap() >= begin);
    }
}
