//! Waiting for a file descriptor, never for ever.
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Instant,
};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// Asks a server to end. Clones speak of the same server; any thread may ask, at any time and more than once.
#[derive(Debug, Clone)]
pub struct Shutdown {
    event: Arc<OwnedFd>,
}

impl Shutdown {
    /// A server that is not yet asked to end.
    ///
    /// # Errors
    /// The system has no file descriptor left.
    pub fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event: Arc::new(event) })
    }

    /// Asks. The server ends after the call that it is answering.
    pub fn request(&self) {
        // It can fail only when the counter is full: then it was asked often enough.
        let _ = rustix::io::write(&*self.event, &1u64.to_ne_bytes());
    }

    /// Whether it was asked for.
    pub fn is_requested(&self) -> bool {
        wait_for(self.event.as_fd(), PollFlags::IN, Instant::now()).unwrap_or(true)
    }

    /// Is readable from then on that it was asked for.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Waits until `fd` is ready or has failed: true; or until `deadline`: false.
pub fn wait_for(fd: BorrowedFd<'_>, events: PollFlags, deadline: Instant) -> io::Result<bool> {
    Ok(wait_for_any(&mut [PollFd::from_borrowed_fd(fd, events)], Some(deadline))? > 0)
}

/// Waits until one of `fds` is ready or has failed, or until `deadline`; returns how many are.
///
/// # Errors
/// The system's own.
pub fn wait_for_any(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<usize> {
    loop {
        let timeout = match deadline.map(|d| d.saturating_duration_since(Instant::now())) {
            Some(left) => Some(Timespec::try_from(left).map_err(io::Error::other)?),
            None => None,
        };
        match poll(fds, timeout.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
}
