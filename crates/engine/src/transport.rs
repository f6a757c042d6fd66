//! Where the bytes go: `tcp:host:port` and `unix:path`, encrypted or in clear.
mod dial;
mod secured;
mod users;

use std::{
    fmt, fs,
    io::{self, Read, Write},
    net::{IpAddr, Shutdown, TcpListener, TcpStream},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{
            fs::FileTypeExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use crossbeam_channel::{Receiver, Sender, unbounded};
use rustix::net::{RecvFlags, recv, sockopt};
use transship_memory::Region;
use transship_secure::Host;

use crate::Error;
pub use dial::{connect, connect_by};
pub(crate) use secured::{Lock, Secured};
use users::Users;

/// How soon those are looked at again that were handed over without a word.
const SOON: Duration = Duration::from_millis(5);
/// Bytes that a TCP socket holds beyond what the link has room for. More would be on its way before anybody could think
/// better of it, and would take memory; less might leave a link without work while a channel wakes up.
const UNSENT_BYTES: u32 = 256 * 1024;
/// A peer that accepts no byte for this long is considered dead.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Why something could not be sent to a peer on one of its connections: `data channel 3`.
pub(crate) fn sending_failed(peer: &str, on: &str, source: io::Error) -> Error {
    match source.kind() {
        io::ErrorKind::WouldBlock => {
            let what = format!("has accepted nothing from {on} for {} s", STALL_TIMEOUT.as_secs());
            Error::Protocol { peer: peer.to_owned(), what }
        }
        _ => Error::Io { what: format!("send to {peer} on {on}"), source },
    }
}

/// An address, as QEMU writes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Uri {
    /// `tcp:host:port`; an IPv6 address in brackets.
    Tcp {
        /// A name or an address, without brackets.
        host: String,
        /// 0 lets a listener's system choose.
        port: u16,
    },
    /// `unix:path`
    Unix(PathBuf),
}

impl Uri {
    /// Whether what goes there, or comes from there, may go over a network: all but this host's own addresses and
    /// sockets. A name other than `localhost` may be anybody's.
    pub fn is_remote(&self) -> bool {
        match self {
            Self::Unix(_) => false,
            Self::Tcp { host, .. } => match host.parse::<IpAddr>() {
                Ok(address) => !address.to_canonical().is_loopback(),
                Err(_) => host != "localhost",
            },
        }
    }
}

impl FromStr for Uri {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| Err(format!("{text:?} is not an address: {why}; write tcp:HOST:PORT or unix:PATH"));
        match text.split_once(':') {
            Some(("unix", "")) => wrong("the path is missing"),
            Some(("unix", path)) => Ok(Self::Unix(path.into())),
            Some(("tcp", rest)) => {
                let Some((host, port)) = rest.rsplit_once(':') else { return wrong("the port is missing") };
                let Ok(port) = port.parse() else { return wrong("the port is not a number from 0 to 65535") };
                let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
                if bare.is_none() && host.contains(':') {
                    return wrong("an IPv6 address goes in brackets");
                }
                Ok(Self::Tcp { host: bare.unwrap_or(host).to_owned(), port })
            }
            _ => wrong("unknown kind"),
        }
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
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

    /// Writes `head` and then the present pages of a window: [`Region::send_window`].
    pub(crate) fn send_window(&mut self, region: &Region, head: &[u8], first: u64, present: u128) -> io::Result<()> {
        match self {
            Self::Secured(secured) => secured.send_window(region, head, first, present),
            clear => region.send_window(clear.as_fd(), head, first, present),
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

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    /// With the path that is its own.
    Unix(UnixListener, PathBuf),
    /// Somebody else listens.
    Handed(Receiver<(Connection, String)>),
}

/// A socket that waits for a source.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    uri: Uri,
    /// None: anybody may come, and everything is in clear.
    lock: Option<Lock>,
    /// Of a unix socket without a lock: who may come; none: everybody who can.
    users: Option<Users>,
}

impl Listener {
    /// Listens at `uri`. A unix socket without a listener is replaced.
    ///
    /// # Errors
    /// The address is in use, or the system refuses it.
    pub fn bind(uri: &Uri) -> Result<Self, Error> {
        let failed = |source| Error::Io { what: format!("listen at {uri}"), source };
        match uri {
            Uri::Tcp { host, port } => {
                let socket = TcpListener::bind((host.as_str(), *port)).map_err(failed)?;
                let port = socket.local_addr().map_err(failed)?.port();
                socket.set_nonblocking(true).map_err(failed)?;
                Ok(Self {
                    socket: Socket::Tcp(socket),
                    uri: Uri::Tcp { host: host.clone(), port },
                    lock: None,
                    users: None,
                })
            }
            Uri::Unix(path) => {
                remove_stale(path).map_err(failed)?;
                let socket = UnixListener::bind(path).map_err(failed)?;
                socket.set_nonblocking(true).map_err(failed)?;
                Ok(Self { socket: Socket::Unix(socket, path.clone()), uri: uri.clone(), lock: None, users: None })
            }
        }
    }

    /// One at whose address somebody else listens, who sends the connections that belong here.
    pub(crate) fn handed(uri: &Uri) -> (Sender<(Connection, String)>, Self) {
        let (sender, receiver) = unbounded();
        (sender, Self { socket: Socket::Handed(receiver), uri: uri.clone(), lock: None, users: None })
    }

    /// Goes on with the socket of a process that has died. `host`: by whom connections are encrypted; none: by nobody.
    /// `users`: see [`Listener::for_users`]; none: anybody.
    pub(crate) fn taken_over(
        socket: OwnedFd,
        uri: Uri,
        host: Option<Host>,
        users: Option<Vec<u32>>,
    ) -> Result<Self, Error> {
        let failed = |source| Error::Io { what: format!("listen at {uri}"), source };
        let socket = match &uri {
            Uri::Tcp { .. } => Socket::Tcp(TcpListener::from(socket)),
            Uri::Unix(path) => Socket::Unix(UnixListener::from(socket), path.clone()),
        };
        match &socket {
            Socket::Tcp(socket) => socket.set_nonblocking(true).map_err(failed)?,
            Socket::Unix(socket, _) => socket.set_nonblocking(true).map_err(failed)?,
            Socket::Handed(_) => {}
        }
        let listener = Self { socket, uri, lock: None, users: users.map(Users) };
        Ok(match host {
            // The session has begun: there is no time limit for that.
            Some(host) => listener.locked(host, None),
            None => listener,
        })
    }

    /// The socket; none: somebody else listens.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.socket.descriptor()
    }

    /// The address, with the port that the system chose if 0 was asked for.
    pub fn uri(&self) -> &Uri {
        &self.uri
    }

    /// From now on only callers that this host knows are heard. A session must begin within `lifetime`; none: whenever
    /// it likes.
    #[must_use]
    pub fn locked(self, host: Host, lifetime: Option<Duration>) -> Self {
        Self { lock: Some(Lock::new(host, lifetime)), ..self }
    }

    /// From now on only these users are heard, by their numbers, if this is a unix socket. Whoever shows a token or a
    /// certificate is known by that.
    #[must_use]
    pub fn for_users(self, users: Vec<u32>) -> Self {
        Self { users: Some(Users(users)), ..self }
    }

    /// See [`Listener::for_users`]; none: anybody.
    pub(crate) fn users(&self) -> Option<&[u32]> {
        self.users.as_ref().map(|users| &*users.0)
    }

    /// Why somebody who has come is not heard; none: he is.
    pub(crate) fn refusal(&self, connection: &Connection) -> Option<String> {
        match (&self.users, connection) {
            (Some(users), Connection::Unix(socket)) if self.lock.is_none() => users.refusal(socket),
            _ => None,
        }
    }

    /// Takes no more connections; those that wait are refused.
    pub(crate) fn close(&self) {
        // It fails on none that listens.
        let _ = self.socket.descriptor().map(|fd| rustix::net::shutdown(fd, rustix::net::Shutdown::Both));
    }

    pub(crate) fn lock(&self) -> Option<&Lock> {
        self.lock.as_ref()
    }

    /// # Errors
    /// It is too late for a session to begin.
    pub(crate) fn check_lifetime(&self) -> Result<(), Error> {
        self.lock.as_ref().map_or(Ok(()), Lock::check)
    }

    /// Waits at most `timeout` for a connection, or for something from those that `also` are waited for; none if there
    /// was none.
    pub(crate) fn accept(
        &self,
        timeout: Duration,
        also: &[BorrowedFd<'_>],
    ) -> Result<Option<(Connection, String)>, Error> {
        if let Socket::Handed(lines) = &self.socket {
            // Those that come this way have spoken already; those that have not are looked at again soon.
            let timeout = if also.is_empty() { timeout } else { timeout.min(SOON) };
            return Ok(lines.recv_timeout(timeout).ok());
        }
        let failed = |source| Error::Io { what: format!("accept a connection at {}", self.uri), source };
        if !self.wait(timeout, also).map_err(failed)? {
            return Ok(None);
        }
        let accepted = match &self.socket {
            Socket::Tcp(socket) => socket.accept().map(|(s, from)| (Connection::Tcp(s), format!("tcp:{from}"))),
            Socket::Unix(socket, _) => socket.accept().map(|(s, _)| (Connection::Unix(s), self.uri.to_string())),
            Socket::Handed(_) => return Ok(None), // was asked above
        };
        match accepted {
            Ok((connection, peer)) => match connection.prepare() {
                Ok(()) => Ok(Some((connection, peer))),
                // It hung up between its connect and our accept.
                Err(_) => Ok(None),
            },
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => {
                Ok(None)
            }
            Err(error) => Err(failed(error)),
        }
    }

    fn wait(&self, timeout: Duration, also: &[BorrowedFd<'_>]) -> io::Result<bool> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let Some(fd) = self.socket.descriptor() else { return Ok(false) };
        let limit = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        let all = std::iter::once(&fd).chain(also);
        let mut all: Vec<_> = all.map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        match poll(&mut all, Some(&limit)) {
            Ok(_) => Ok(!all[0].revents().is_empty()),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

impl Socket {
    /// None: it has none, because somebody else listens.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Tcp(socket) => Some(socket.as_fd()),
            Self::Unix(socket, _) => Some(socket.as_fd()),
            Self::Handed(_) => None,
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            // Another process may have removed it already.
            let _ = fs::remove_file(path);
        }
    }
}

fn remove_stale(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => match UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
            _ => Ok(()), // in use: bind says so
        },
        _ => Ok(()),
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in ["tcp:host:1234", "tcp:127.0.0.1:0", "tcp:[::1]:7", "unix:/run/a:b.sock"] {
            assert_eq!(text.parse::<Uri>().unwrap().to_string(), text);
        }
        for text in ["", "tcp:", "tcp:host", "tcp:host:70000", "tcp:::1:7", "unix:", "udp:host:1", "host:1"] {
            assert!(text.parse::<Uri>().unwrap_err().contains("tcp:HOST:PORT"), "{text}");
        }
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let uri = Uri::Unix(dir.path().join("s"));
        drop(UnixListener::bind(dir.path().join("s")).unwrap());
        let live = Listener::bind(&uri).unwrap();
        assert!(Listener::bind(&uri).is_err());
        drop(live);
        assert!(!dir.path().join("s").exists());
    }

    #[test]
    fn accepting_gives_up_when_nobody_comes() {
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
        assert!(listener.accept(Duration::from_millis(1), &[]).unwrap().is_none());
        let client = Connection::open(listener.uri()).unwrap();
        let (_, peer) = listener.accept(Duration::from_secs(5), &[]).unwrap().unwrap();
        assert!(peer.starts_with("tcp:127.0.0.1:"));
        client.shutdown();
    }
}
