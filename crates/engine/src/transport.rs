//! Where the bytes go: `tcp:host:port` and `unix:path`, encrypted or in clear.
mod descriptors;
mod dial;
mod listener;
mod secured;
mod uri;
mod users;

use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

use rustix::net::{RecvFlags, recv, sockopt};
use transship_memory::{WindowPages, WindowRead};

use crate::{Error, Rule};
pub use dial::{connect, connect_by};
pub use listener::Listener;
pub(crate) use secured::{Lock, Secured};
pub use uri::Uri;

/// Bytes that a TCP socket holds beyond what the link has room for. More would be on its way before anybody could think
/// better of it, and would take memory; less might leave a link without work while a channel wakes up.
const UNSENT_BYTES: u32 = 256 * 1024;
/// The same for a connection that carries what somebody waits for.
const UNSENT_URGENT_BYTES: u32 = 16 * 1024;
/// A peer that accepts no byte for this long is considered dead.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Why something could not be sent to a peer on one of its connections: `data channel 3`.
pub(crate) fn sending_failed(peer: &str, on: &str, source: io::Error) -> Error {
    match source.kind() {
        io::ErrorKind::WouldBlock => {
            let what = format!("has accepted nothing from {on} for {} s", STALL_TIMEOUT.as_secs());
            Error::breach(peer, Rule::Answers, what)
        }
        _ => Error::Io { what: format!("send to {peer} on {on}"), source },
    }
}

/// What to do about a connection that can't be made.
fn cure(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => {
            "nothing listens there: start the receiving side first, such as `transship receive`, and use the address \
             that it prints; it waits for one move, and no longer than its token is good"
        }
        io::ErrorKind::TimedOut | io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
            "check the address, the route to it and firewalls on the way"
        }
        io::ErrorKind::PermissionDenied => "this user may not use that socket: run as its owner or as root",
        _ => "check the address, and whether the receiving side runs",
    }
}

/// One connected socket.
#[derive(Debug)]
pub(crate) enum Connection {
    Tcp(TcpStream),
    Unix(UnixStream),
    Secured(Secured),
}

impl Connection {
    /// Connects to a listening peer.
    pub(crate) fn open(uri: &Uri) -> Result<Self, Error> {
        let failed = |source| Error::Connect { to: uri.to_string(), cure: cure(&source), source };
        let socket = dial::by_somebody(uri).map_err(failed)?;
        let connection = match uri {
            Uri::Tcp { .. } => Self::Tcp(TcpStream::from(socket)),
            Uri::Unix(_) => Self::Unix(UnixStream::from(socket)),
        };
        connection.prepare().map_err(failed)?;
        Ok(connection)
    }

    /// Writes a few bytes that the system takes whole, or not at all: an error means that the peer can't have got one
    /// of them, and never will. What was taken may still be lost on its way, and later writes then fail.
    pub(crate) fn write_whole(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Self::Secured(secured) = self {
            return secured.write_whole(bytes);
        }
        let taken = loop {
            match self.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        // The rest of a few bytes; whether it goes out or not, from here on the peer may have it.
        let _ = self.write_all(&bytes[taken..]);
        Ok(())
    }

    /// Writes `head` and then some of the pages: [`WindowRead::send`], or [`WindowRead::send_apart`].
    pub(crate) fn send_window(
        &mut self,
        read: &WindowRead<'_>,
        head: &[u8],
        pages: WindowPages,
        apart: bool,
    ) -> io::Result<()> {
        match self {
            // Records of what is encrypted are short as it is.
            Self::Secured(secured) => secured.send_window(read, head, pages),
            clear if apart => read.send_apart(clear.as_fd(), head, pages),
            clear => read.send(clear.as_fd(), head, pages),
        }
    }

    /// The socket, where what comes from it is what was sent. None: it is encrypted.
    pub(crate) fn in_clear(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Secured(_) => None,
            clear => Some(clear.as_fd()),
        }
    }

    /// How many of the bytes that come next are there now, which are put into `room` and not taken. UnexpectedEof:
    /// there are none, and never will be.
    pub(crate) fn peek(&self, room: &mut [u8]) -> io::Result<usize> {
        use rustix::io::Errno;
        if let Self::Secured(secured) = self {
            return secured.peek(room);
        }
        match recv(self, room, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((there, _)) => Ok(there),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Sets the options of all our connections: a limit on stalls, and no delay for small messages.
    fn prepare(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => {
                stream.set_nodelay(true)?;
                stream.set_write_timeout(Some(STALL_TIMEOUT))?;
                // A host that vanishes sends no FIN: ask it for a sign of life.
                sockopt::set_socket_keepalive(stream, true)?;
                sockopt::set_tcp_keepidle(stream, Duration::from_secs(10))?;
                sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5))?;
                sockopt::set_tcp_keepcnt(stream, 4)?;
                sockopt::set_tcp_user_timeout(stream, STALL_TIMEOUT.as_millis() as u32)?;
                socket2::SockRef::from(stream).set_tcp_notsent_lowat(UNSENT_BYTES)?;
            }
            Self::Unix(stream) => stream.set_write_timeout(Some(STALL_TIMEOUT))?,
            Self::Secured(secured) => secured.socket.prepare()?,
        }
        Ok(())
    }

    pub(crate) fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_read_timeout(timeout),
            Self::Unix(stream) => stream.set_read_timeout(timeout),
            Self::Secured(secured) => secured.socket.set_read_timeout(timeout),
        }
    }

    /// For what is waited for: of what was written before, little is still to be sent when something else is written.
    pub(crate) fn hold_little(&self) -> io::Result<()> {
        self.hold_at_most(UNSENT_URGENT_BYTES)
    }

    /// Has the socket hold so many bytes beyond what the link has room for: at most as many as usual, and at least as
    /// many as for what is waited for.
    pub(crate) fn hold(&self, bytes: u64) -> io::Result<()> {
        let bytes = bytes.clamp(UNSENT_URGENT_BYTES.into(), UNSENT_BYTES.into());
        self.hold_at_most(bytes as u32) // within these
    }

    fn hold_at_most(&self, bytes: u32) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => socket2::SockRef::from(stream).set_tcp_notsent_lowat(bytes),
            Self::Unix(_) => Ok(()),
            Self::Secured(secured) => secured.socket.hold_at_most(bytes),
        }
    }

    /// For a peer that may take nothing for as long as it likes. A write then returns after `look` at the latest, so
    /// that its caller can look around.
    pub(crate) fn be_patient(&self, look: Duration) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => {
                sockopt::set_tcp_user_timeout(stream, 0)?;
                stream.set_write_timeout(Some(look))
            }
            Self::Unix(stream) => stream.set_write_timeout(Some(look)),
            Self::Secured(secured) => secured.socket.be_patient(look),
        }
    }

    /// Ends what is written; what was written before still arrives.
    pub(crate) fn end_writing(&self) {
        // A peer that is gone makes this fail.
        let _ = self.shut(Shutdown::Write);
    }

    /// Wakes the thread that reads from it; nothing more is read.
    pub(crate) fn end_reading(&self) {
        // A peer that is gone makes this fail.
        let _ = self.shut(Shutdown::Read);
    }

    /// Makes it break when its last handle is dropped, even with data in transit, and wakes the thread that reads from
    /// it.
    pub(crate) fn break_off(&self) {
        // A peer that is gone makes these fail.
        let _ = match self {
            Self::Tcp(stream) => {
                let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
                stream.shutdown(Shutdown::Read)
            }
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Secured(secured) => return secured.socket.break_off(),
        };
    }

    fn shut(&self, how: Shutdown) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.shutdown(how),
            Self::Unix(stream) => stream.shutdown(how),
            Self::Secured(secured) => secured.socket.shut(how),
        }
    }

    /// A second handle to the same socket.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
            Self::Secured(secured) => Self::Secured(secured.try_clone()?),
        })
    }

    /// Ends both directions; a thread that is blocked on the socket wakes with an error.
    pub(crate) fn shutdown(&self) {
        // A peer that closed first makes this fail; it is shut then.
        let _ = self.shut(Shutdown::Both);
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
            Self::Secured(secured) => secured.socket.as_fd(),
        }
    }
}

impl Read for Connection {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(buf),
            Self::Unix(stream) => stream.read(buf),
            Self::Secured(secured) => secured.read(buf),
        }
    }
}

impl Write for Connection {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(buf),
            Self::Unix(stream) => stream.write(buf),
            Self::Secured(secured) => secured.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A number that can't be guessed.
pub(crate) fn random() -> Result<[u8; 16], Error> {
    let mut bytes = [0; 16];
    let mut have = 0;
    while have < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[have..], rustix::rand::GetRandomFlags::empty()) {
            Ok(more) => have += more,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::Io { what: "get random numbers".into(), source: error.into() }),
        }
    }
    Ok(bytes)
}
