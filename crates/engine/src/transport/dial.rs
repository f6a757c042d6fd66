//! New connections: made here, or by whoever still has the right to make them.
use std::{
    io,
    net::{TcpStream, ToSocketAddrs},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::Path,
    sync::OnceLock,
    time::Duration,
};

use super::Uri;

/// How long a connection may take to come about.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

type Connector = Box<dyn Fn(&Uri) -> io::Result<OwnedFd> + Send + Sync>;

/// Set once, before the first connection.
static CONNECTOR: OnceLock<Connector> = OnceLock::new();

/// From now on `connector` makes the connections of this process, which may not make them by itself any more. What is
/// sent and received goes over the sockets that it returns. If there was one before, that one stays.
pub fn connect_by(connector: impl Fn(&Uri) -> io::Result<OwnedFd> + Send + Sync + 'static) {
    let _ = CONNECTOR.set(Box::new(connector));
}

/// A connection with the listener at `to`. It takes at most 10 s for each address of a name.
///
/// # Errors
/// Nobody listens there, the name has no address, or the system refuses.
pub fn connect(to: &Uri) -> io::Result<OwnedFd> {
    match to {
        Uri::Tcp { host, port } => connect_tcp(host, *port).map(OwnedFd::from),
        Uri::Unix(path) => connect_unix(path).map(OwnedFd::from),
    }
}

pub(super) fn by_somebody(to: &Uri) -> io::Result<OwnedFd> {
    match CONNECTOR.get() {
        Some(connector) => connector(to),
        None => connect(to),
    }
}

fn connect_tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Connects without waiting for ever when the listener's queue is full: the send timeout bounds a connect too.
fn connect_unix(path: &Path) -> io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let stream = UnixStream::from(fd);
    stream.set_write_timeout(Some(CONNECT_TIMEOUT))?;
    connect(&stream, &SocketAddrUnix::new(path)?)?;
    Ok(stream)
}
