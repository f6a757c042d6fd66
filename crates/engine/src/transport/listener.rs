//! Where connections are waited for.
use std::{
    fs, io,
    net::TcpListener,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{
            fs::FileTypeExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    time::Duration,
};

use crossbeam_channel::{Receiver, Sender, unbounded};
use transship_secure::Host;
use zeroize::Zeroizing;

use super::{Connection, Lock, Uri, users::Users};
use crate::Error;

/// How soon those are looked at again that were handed over without a word.
const SOON: Duration = Duration::from_millis(5);

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

    /// What another process needs to go on in its place, where callers are to know it. See [`Host::reveal`].
    pub fn key(&self) -> Option<Zeroizing<String>> {
        self.lock.as_ref().map(|lock| lock.host.reveal())
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

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
