//! New connections to a VMM: made here, or by whoever still has the right to make them.
use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::OnceLock,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect as connect_socket, socket_with, sockopt},
};

/// How long a socket may have no room for one more.
const CONNECT_WAIT: Duration = Duration::from_secs(5);

type Connector = Box<dyn Fn(&Path) -> io::Result<OwnedFd> + Send + Sync>;

/// Set once, before the first connection that it makes.
static CONNECTOR: OnceLock<Connector> = OnceLock::new();

/// From now on `connector` makes the connections of this process, which may not make them by itself any more. If there
/// was one before, that one stays.
pub fn connect_by(connector: impl Fn(&Path) -> io::Result<OwnedFd> + Send + Sync + 'static) {
    let _ = CONNECTOR.set(Box::new(connector));
}

/// A connection with whoever listens there. When the socket's queue is full, a plain connect would wait for ever.
pub(crate) fn connect(to: &Path) -> io::Result<UnixStream> {
    if let Some(connector) = CONNECTOR.get() {
        return connector(to).map(UnixStream::from);
    }
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(CONNECT_WAIT))?;
    connect_socket(&socket, &SocketAddrUnix::new(to)?)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, None)?;
    Ok(UnixStream::from(socket))
}

/// Whether the other end has closed it: a process that ends does.
pub(crate) fn has_hung_up(connection: &impl AsFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut ready = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::RDHUP)];
    poll(&mut ready, Some(&now)).is_ok_and(|count| count > 0)
}
