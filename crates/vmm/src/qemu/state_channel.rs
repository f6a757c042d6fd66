//! The channel that QEMU saves the device state to.
use std::{
    io,
    os::unix::net::UnixStream,
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use crate::GuestError;

/// How long QEMU may be silent while it saves, and take to finish.
pub(super) const SAVE_WAIT: Duration = Duration::from_secs(30);
/// How long it may take to clean up behind a save that is over. Without load that is a millisecond.
const CLEANUP_WAIT: Duration = Duration::from_secs(10);

/// Both ends.
pub(super) struct StateChannel {
    pub(super) ours: UnixStream,
    pub(super) qemus: UnixStream,
    pub(super) name: QemusEnd,
}

impl StateChannel {
    pub(super) fn open() -> Result<Self, GuestError> {
        let opened = UnixStream::pair().and_then(|(ours, qemus)| {
            let name = QemusEnd(rustix::fs::fstat(&qemus)?.st_ino);
            Ok(Self { ours, qemus, name })
        });
        opened.map_err(failed)
    }
}

/// Why there is no channel.
pub(super) fn failed(error: io::Error) -> GuestError {
    GuestError::system("make a channel for the device state")(error)
}

/// QEMU's end, whoever has it, by its inode.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct QemusEnd(u64);

impl QemusEnd {
    /// Waits until QEMU, this process, has closed it.
    ///
    /// QEMU calls a migration over before it has cleaned up behind it, and what there is to clean up it sees by its
    /// capabilities: if multifd is switched on again too early, it looks for channels that never were, and dies. The
    /// end of its channel is closed after that.
    pub(super) fn wait_closed(self, pid: i32) {
        let deadline = Instant::now() + CLEANUP_WAIT;
        while self.is_open(pid) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn is_open(self, pid: i32) -> bool {
        let name = format!("socket:[{}]", self.0);
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        open.map(|entry| std::fs::read_link(entry.path()))
            .any(|target| target.is_ok_and(|target| target.as_os_str() == name.as_str()))
    }
}
