//! File systems for a test alone.

use std::{path::Path, thread};

use rustix::{mount::MountPropagationFlags, thread::UnshareFlags};
use transship_lab::lacks;

/// A directory, for a thread that sees mounts of its own, which end with it.
pub(crate) fn with_mounts_of_its_own(test: impl FnOnce(&Path) + Send) {
    let dir = tempfile::tempdir().unwrap();
    let run = || {
        // SAFETY: only this thread's view of the file systems is split off; no memory and no descriptor is shared less
        // than before.
        let split = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) };
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        match split.and_then(|()| rustix::mount::mount_change("/", private)) {
            Ok(()) => test(dir.path()),
            Err(why) => lacks(format_args!("root, who may mount ({why})")),
        }
    };
    thread::scope(|scope| scope.spawn(run).join().unwrap());
}
