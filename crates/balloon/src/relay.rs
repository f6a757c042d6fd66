//! A QEMU behind the door: between it and rust-vmm's back end, which speaks the protocol, stands this.
//!
//! The back end lacks one thing: it can't tell QEMU that the device's configuration has changed. So what goes through
//! here is passed on as it is, and of one message a copy is taken: of the descriptor by which a back end may speak to
//! QEMU.
use std::{
    io::{self, Read},
    net::Shutdown as Close,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::Arc,
    thread,
};

use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
    net::{RecvFlags, SendFlags},
};
use transship_lines::{Shutdown, receive_with_fds, send_with_fds, wait_for_any};
use vhost::vhost_user::Listener;
use vhost_user_backend::VhostUserDaemon;
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

use crate::{device::Device, end::End};

/// Request, flags and size of the payload: three little-endian numbers of 32 bits.
const HEADER_BYTES: usize = 12;
/// The longest payload that the back end takes.
const MAX_PAYLOAD_BYTES: usize = 4096;
/// The most descriptors that the back end takes with a message.
const MAX_FDS: usize = 32;
/// Messages of the protocol.
const SET_OWNER: u32 = 3;
const RESET_OWNER: u32 = 4;
const SET_VRING_ENABLE: u32 = 18;
const SET_BACKEND_REQ_FD: u32 = 21;

/// Serves a QEMU until it or `end` ends it; one at a time. `room`: a folder that nobody else can come to.
pub(crate) fn run(qemu: &UnixStream, device: &Arc<Device>, room: &Path, end: &End<'_>) -> io::Result<()> {
    let (mut back_end, inner) = start(device, room)?;
    let gone = Shutdown::new()?;
    thread::scope(|scope| {
        scope.spawn(|| {
            answers(&inner, qemu);
            close(qemu, &inner);
        });
        scope.spawn(|| {
            if is_asked_to_end(end.when_unused, &gone) {
                // While messages still go to and fro: the guest is to hear that it has its memory again.
                device.done();
                wait_let_go(end, &gone);
                close(qemu, &inner);
            }
        });
        let result = messages(scope, qemu, &inner, device);
        gone.request();
        device.leave();
        close(qemu, &inner);
        result
    })?;
    // Whatever ended it, it has ended.
    if let Err(error) = back_end.wait() {
        tracing::debug!(%error, "the connection with QEMU ended");
    }
    Ok(())
}

/// The back end, and our end of the connection with it.
fn start(device: &Arc<Device>, room: &Path) -> io::Result<(VhostUserDaemon<Arc<Device>>, UnixStream)> {
    let memory = GuestMemoryAtomic::new(GuestMemoryMmap::new());
    let other = |error: vhost_user_backend::Error| io::Error::other(error.to_string());
    let mut back_end = VhostUserDaemon::new("balloon".into(), Arc::clone(device), memory).map_err(other)?;
    // It only takes connections.
    let path = room.join("s");
    let mut listener = Listener::new(&path, false).map_err(io::Error::other)?;
    let inner = UnixStream::connect(&path)?;
    back_end.start(&mut listener).map_err(other)?;
    Ok((back_end, inner))
}

/// Waits for either.
fn is_asked_to_end(shutdown: &Shutdown, gone: &Shutdown) -> bool {
    let mut ready = [shutdown, gone].map(|one| PollFd::from_borrowed_fd(one.event(), PollFlags::IN));
    // If waiting fails, nobody can be waited for.
    wait_for_any(&mut ready, None).is_err() || !ready[0].revents().is_empty()
}

/// QEMU 11.1 ends by an assertion when its guest looks at the configuration of a device whose other end is gone, and
/// may end when the other end goes while the device is being unplugged; nobody tells us when that is over. So it is
/// QEMU that has to hang up first, unless nobody wants to wait.
fn wait_let_go(end: &End<'_>, gone: &Shutdown) {
    (end.waiting)();
    let mut ready = [end.now, gone].map(|one| PollFd::from_borrowed_fd(one.event(), PollFlags::IN));
    // If waiting fails, nobody can be waited for.
    let _ = wait_for_any(&mut ready, None);
}

fn close(qemu: &UnixStream, inner: &UnixStream) {
    // They may be closed already.
    let _ = qemu.shutdown(Close::Both);
    let _ = inner.shutdown(Close::Both);
}

/// Answers carry no descriptors with what we offer.
fn answers(mut inner: &UnixStream, mut qemu: &UnixStream) {
    if let Err(error) = io::copy(&mut inner, &mut qemu) {
        tracing::debug!(%error, "QEMU does not accept answers any more");
    }
}

/// Passes on what QEMU sends, until it hangs up.
fn messages<'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    qemu: &UnixStream,
    inner: &UnixStream,
    device: &'scope Device,
) -> io::Result<()> {
    let (mut owned, mut notifies) = (false, false);
    while let Some(message) = Message::receive(qemu)? {
        // A device that was unplugged and plugged in again comes by the same connection, and QEMU does not say that the
        // old one is gone.
        if message.request() == SET_OWNER && std::mem::replace(&mut owned, true) {
            Message::plain(RESET_OWNER).send(inner)?;
        }
        if message.request() == SET_BACKEND_REQ_FD
            && let Some(channel) = message.fds.first()
        {
            device.qemu.open(UnixStream::from(channel.try_clone()?))?;
            if !std::mem::replace(&mut notifies, true) {
                scope.spawn(|| device.qemu.run());
            }
        }
        message.send(inner)?;
        if message.request() == SET_VRING_ENABLE && message.number(HEADER_BYTES + 4) == 1 {
            device.queue_starts(message.number(HEADER_BYTES));
        }
    }
    Ok(())
}

/// One message, as it came.
struct Message {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Message {
    /// One without payload, which is not answered.
    fn plain(request: u32) -> Self {
        let header = [request, 1, 0].map(u32::to_le_bytes);
        Self { bytes: header.as_flattened().to_vec(), fds: Vec::new() }
    }

    /// The next one; nothing if the other side has hung up.
    fn receive(mut from: &UnixStream) -> io::Result<Option<Self>> {
        let mut bytes = vec![0; HEADER_BYTES];
        let received = match receive_with_fds(from, &mut bytes, RecvFlags::WAITALL) {
            Ok(received) => received,
            Err(Errno::CONNRESET) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if received.bytes == 0 {
            return Ok(None);
        }
        if received.is_cut || received.fds.len() > MAX_FDS {
            return Err(bad(format!("it sent more than {MAX_FDS} descriptors with a message")));
        }
        // The kernel ends a read where descriptors come.
        from.read_exact(&mut bytes[received.bytes..])?;
        let mut message = Self { bytes, fds: received.fds };
        let payload = message.number(8) as usize;
        if payload > MAX_PAYLOAD_BYTES {
            return Err(bad(format!(
                "request {} has {payload} bytes; {MAX_PAYLOAD_BYTES} are possible",
                message.request()
            )));
        }
        message.bytes.resize(HEADER_BYTES + payload, 0);
        from.read_exact(&mut message.bytes[HEADER_BYTES..])?;
        Ok(Some(message))
    }

    fn send(&self, to: &UnixStream) -> io::Result<()> {
        let fds: Vec<_> = self.fds.iter().map(AsFd::as_fd).collect();
        let sent = send_with_fds(to, &self.bytes, &fds, SendFlags::empty())?;
        io::Write::write_all(&mut &*to, &self.bytes[sent..])
    }

    fn request(&self) -> u32 {
        self.number(0)
    }

    /// The 32 bits at `offset`; 0 if it is not so long.
    fn number(&self, offset: usize) -> u32 {
        self.bytes.get(offset..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u32::from_le_bytes(*bytes))
    }
}

fn bad(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
