//! The socket. QEMU and a client come to the same one, and are told apart by the first byte that they send: the lines
//! of a client begin with `{`, which begins no message of a QEMU.
use std::{
    io,
    os::{fd::AsFd, unix::net::UnixStream},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use rustix::{
    event::{PollFd, PollFlags},
    net::{RecvFlags, recv},
};
use transship_lines::{GuestSocket, wait_for_any};

use crate::{device::Device, end::End, relay, session};

/// Connections at one time, most of them of visitors who have not said yet what they want.
const MAX_VISITORS: usize = 16;

/// Is the device, until `end` asks it to end. A QEMU may come, go and come again. `room`: a folder of this process
/// alone, which must stay empty but for what is made here.
///
/// # Errors
/// The system's own.
pub fn serve(socket: &GuestSocket, room: &Path, end: &End<'_>) -> io::Result<()> {
    let shutdown = end.when_unused;
    let device = Arc::new(Device::new()?);
    let door = Door { device, room, end, visitors: AtomicUsize::new(0), has_qemu: AtomicBool::new(false) };
    thread::scope(|scope| {
        loop {
            let mut ready = [
                PollFd::from_borrowed_fd(shutdown.event(), PollFlags::IN),
                PollFd::from_borrowed_fd(socket.fd(), PollFlags::IN),
            ];
            wait_for_any(&mut ready, None)?;
            if !ready[0].revents().is_empty() {
                return Ok(());
            }
            let Some(visitor) = socket.accept() else { continue };
            // The numbers are only counted here; no memory depends on them.
            if door.visitors.fetch_add(1, Ordering::Relaxed) >= MAX_VISITORS {
                door.visitors.fetch_sub(1, Ordering::Relaxed);
                tracing::warn!("too many connections at once: one was closed");
                continue;
            }
            let door = &door;
            thread::Builder::new().name("visitor".into()).spawn_scoped(scope, move || {
                if let Err(error) = door.visit(visitor) {
                    tracing::warn!("a connection was closed: {error}");
                }
                door.visitors.fetch_sub(1, Ordering::Relaxed);
            })?;
        }
    })
}

struct Door<'a> {
    device: Arc<Device>,
    room: &'a Path,
    end: &'a End<'a>,
    visitors: AtomicUsize,
    has_qemu: AtomicBool,
}

impl Door<'_> {
    fn visit(&self, visitor: UnixStream) -> io::Result<()> {
        visitor.set_nonblocking(false)?;
        match self.first_byte(&visitor)? {
            None => Ok(()),
            Some(b'{') => session::run(visitor, &self.device, self.end.when_unused),
            Some(_) => self.serve_qemu(&visitor),
        }
    }

    /// Without taking it.
    fn first_byte(&self, visitor: &UnixStream) -> io::Result<Option<u8>> {
        let mut ready = [
            PollFd::from_borrowed_fd(self.end.when_unused.event(), PollFlags::IN),
            PollFd::from_borrowed_fd(visitor.as_fd(), PollFlags::IN),
        ];
        wait_for_any(&mut ready, None)?;
        if !ready[0].revents().is_empty() {
            return Ok(None);
        }
        let mut byte = [0];
        let (bytes, _) = recv(visitor, &mut byte, RecvFlags::PEEK)?;
        Ok((bytes > 0).then_some(byte[0]))
    }

    fn serve_qemu(&self, qemu: &UnixStream) -> io::Result<()> {
        // Taking it comes after the device was left by the QEMU before, giving it back before the device is taken by
        // the next.
        if self.has_qemu.swap(true, Ordering::Acquire) {
            return Err(io::Error::other("another QEMU is connected already; give each guest a balloon of its own"));
        }
        tracing::info!("QEMU is connected");
        let result = relay::run(qemu, &self.device, self.room, self.end);
        self.device.left();
        tracing::info!("QEMU has disconnected");
        self.has_qemu.store(false, Ordering::Release);
        result
    }
}
