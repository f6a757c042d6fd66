//! The channel that QEMU saves the device state to.
use std::{
    io,
    net::Shutdown,
    os::{fd::OwnedFd, unix::net::UnixStream},
    time::Duration,
};

use crate::GuestError;

/// How long QEMU may be silent while it saves, and take to finish.
pub(super) const SAVE_WAIT: Duration = Duration::from_secs(30);

/// Both ends.
pub(super) struct StateChannel {
    pub(super) ours: UnixStream,
    pub(super) qemus: UnixStream,
}

impl StateChannel {
    pub(super) fn open() -> Result<Self, GuestError> {
        UnixStream::pair().map(|(ours, qemus)| Self { ours, qemus }).map_err(failed)
    }

    /// One more of our end, by which it can be hung up, whoever reads the other.
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

    /// Nobody reads any more: a QEMU that writes fails.
    pub(super) fn hang_up(&self) {
        // It fails only when QEMU has closed already.
        let _ = self.0.shutdown(Shutdown::Read);
    }
}
