//! Connections that are encrypted, and whose other end is known.
use std::{
    borrow::Cow,
    io::{self, Read, Write},
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags, recv, send},
};
use transship_memory::{PageCount, WindowPages, WindowRead};
use transship_secure::{Caller, Halves, Handshake, Host, Opener, Progress, RECORD_BYTES, Sealer, SecureError};

use super::{Connection, Uri, dial::CONNECT_TIMEOUT};
use crate::Error;

/// Pages of a record.
const PAGES_AT_A_TIME: PageCount = PageCount::within(RECORD_BYTES as u64);

/// An encrypted connection. Each direction has a lock of its own, so one thread may read while another writes; two that
/// read take turns, as on any socket.
#[derive(Debug)]
pub(crate) struct Secured {
    pub(super) socket: Box<Connection>,
    sealer: Arc<Mutex<Sealer>>,
    opener: Arc<Mutex<Opener>>,
}

impl Secured {
    fn new(socket: Connection, halves: Halves) -> Self {
        let Halves { sealer, opener } = halves;
        Self { socket: Box::new(socket), sealer: Arc::new(Mutex::new(sealer)), opener: Arc::new(Mutex::new(opener)) }
    }

    pub(super) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            socket: Box::new(self.socket.try_clone()?),
            sealer: Arc::clone(&self.sealer),
            opener: Arc::clone(&self.opener),
        })
    }

    pub(super) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        lock(&self.opener).read(&mut *self.socket, into)
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        lock(&self.sealer).write(&mut *self.socket, bytes).map(|()| bytes.len())
    }

    pub(super) fn write_whole(&mut self, bytes: &[u8]) -> io::Result<()> {
        lock(&self.sealer).write_whole(&mut *self.socket, bytes)
    }

    pub(super) fn peek(&self, room: &mut [u8]) -> io::Result<usize> {
        let mut opener = lock(&self.opener);
        let seen = opener.peek(&mut AtOnce(self.socket.as_fd()), room.len())?;
        room[..seen.len()].copy_from_slice(seen);
        Ok(seen.len())
    }

    fn read_now(&mut self, into: &mut [u8]) -> io::Result<usize> {
        lock(&self.opener).read(&mut AtOnce(self.socket.as_fd()), into)
    }

    fn holds_something(&self) -> bool {
        !lock(&self.opener).is_empty()
    }

    fn is_closed(&self) -> bool {
        let mut opener = lock(&self.opener);
        match opener.peek(&mut AtOnce(self.socket.as_fd()), 1) {
            Ok(_) => opener.has_ended(),
            Err(_) => true,
        }
    }

    fn seal(&mut self, bytes: &[u8]) -> io::Result<Vec<u8>> {
        lock(&self.sealer).seal_all(bytes)
    }

    fn end_sealing(&mut self) {
        lock(&self.sealer).end();
    }

    fn say_goodbye(&mut self) {
        let _ = lock(&self.sealer).close(&mut AtOnce(self.socket.as_fd()));
    }

    /// As [`WindowRead::send`]. Each page is copied once more, to where it is encrypted.
    pub(super) fn send_window(&mut self, read: &WindowRead<'_>, head: &[u8], pages: WindowPages) -> io::Result<()> {
        let (mut sealer, socket) = (lock(&self.sealer), &mut *self.socket);
        sealer.append(socket, |room| room.write_all(head))?;
        let mut rest = pages;
        while !rest.is_empty() {
            let piece = rest.lowest(PAGES_AT_A_TIME);
            sealer.append(socket, |room| {
                read.copy_out(piece, room);
                Ok(())
            })?;
            rest = rest.without(piece.mask);
        }
        sealer.flush(socket)
    }
}

/// A panic with a half held has printed itself; what it left is either whole or refuses to go on.
fn lock<T>(half: &Mutex<T>) -> MutexGuard<'_, T> {
    half.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Connection {
    /// Connects to a listening peer that this caller knows; without a caller, in clear. When this returns, the peer is
    /// who it has to be, but has not said whether it takes us for that: see [`Connection::await_word`].
    pub(crate) fn call(to: &Uri, caller: Option<&Caller>) -> Result<Self, Error> {
        let mut socket = Self::open(to)?;
        let Some(caller) = caller else { return Ok(socket) };
        let untrusted = |failure: SecureError| Error::untrusted(&to.to_string(), &failure);
        let limit = |socket: &Self, time| socket.set_read_timeout(time).map_err(SecureError::from).map_err(untrusted);
        limit(&socket, Some(CONNECT_TIMEOUT))?;
        let done = Handshake::calling(caller).and_then(|mut handshake| handshake.advance(&mut socket));
        match done.map_err(untrusted)? {
            Progress::Done(halves) => {
                limit(&socket, None)?;
                Ok(Self::Secured(Secured::new(socket, *halves)))
            }
            Progress::Waiting => Err(untrusted(silent())),
        }
    }

    /// Writes the first bytes to a peer that was called. One that does not accept us may have hung up before they are
    /// out: then its word is the error.
    pub(crate) fn greet(&mut self, to: &Uri, greeting: &[u8]) -> Result<(), Error> {
        let Err(source) = self.write_all(greeting) else { return Ok(()) };
        self.await_word(to)?;
        Err(Error::Io { what: format!("greet {to}"), source })
    }

    /// Waits until the peer that was called has said that it accepts us. In clear there is nothing to wait for.
    pub(crate) fn await_word(&mut self, to: &Uri) -> Result<(), Error> {
        let Self::Secured(Secured { socket, opener, .. }) = self else { return Ok(()) };
        let untrusted = |failure: SecureError| match failure {
            SecureError::Broken(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Error::untrusted(&to.to_string(), &silent())
            }
            failure => Error::untrusted(&to.to_string(), &failure),
        };
        let limit = |socket: &Self, time| socket.set_read_timeout(time).map_err(SecureError::from).map_err(untrusted);
        limit(socket, Some(CONNECT_TIMEOUT))?;
        lock(opener).await_word(&mut **socket).map_err(untrusted)?;
        limit(socket, None)
    }

    /// As [`Read::read`], and WouldBlock where that would wait, whatever the timeout is.
    pub(crate) fn read_now(&mut self, room: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Secured(secured) => secured.read_now(room),
            clear => Ok(recv(clear, room, RecvFlags::DONTWAIT)?.0),
        }
    }

    /// Whether something can be read that is no longer in the socket: who waits at the socket would wait in vain.
    pub(crate) fn holds_something(&self) -> bool {
        matches!(self, Self::Secured(secured) if secured.holds_something())
    }

    /// Whether the other side has closed it, and all was read that came before. One that has more to say counts as
    /// open.
    pub(crate) fn is_closed(&self) -> bool {
        if let Self::Secured(secured) = self {
            return secured.is_closed();
        }
        match recv(self, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((there, _)) => there == 0,
            Err(Errno::AGAIN | Errno::INTR) => false,
            Err(_) => true,
        }
    }

    /// Makes bytes ready for a thread that writes to the socket by itself, because it has to look around meanwhile. If
    /// it can't write all of them, it calls [`Connection::end_sealing`].
    pub(crate) fn seal<'b>(&mut self, bytes: &'b [u8]) -> io::Result<Cow<'b, [u8]>> {
        match self {
            Self::Secured(secured) => secured.seal(bytes).map(Cow::Owned),
            _ => Ok(Cow::Borrowed(bytes)),
        }
    }

    /// Nothing more is written, because something could not be.
    pub(crate) fn end_sealing(&mut self) {
        if let Self::Secured(secured) = self {
            secured.end_sealing();
        }
    }

    /// Tells a peer that speaks TLS that nothing more comes. It may be gone.
    pub(crate) fn say_goodbye(&mut self) {
        if let Self::Secured(secured) = self {
            secured.say_goodbye();
        }
    }

    /// Goes on with a handshake, as far as it goes without waiting.
    pub(crate) fn shake_hands(self, handshake: &mut Handshake) -> (Self, Result<bool, SecureError>) {
        match handshake.advance(&mut AtOnce(self.as_fd())) {
            Ok(Progress::Done(halves)) => (Self::Secured(Secured::new(self, *halves)), Ok(true)),
            Ok(Progress::Waiting) => (self, Ok(false)),
            Err(failure) => (self, Err(failure)),
        }
    }
}

fn silent() -> SecureError {
    let what = format!("it has not answered for {} s", CONNECT_TIMEOUT.as_secs());
    io::Error::new(io::ErrorKind::TimedOut, what).into()
}

/// A socket that nobody waits for, whatever its own timeouts are.
struct AtOnce<'a>(BorrowedFd<'a>);

impl Read for AtOnce<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        Ok(recv(self.0.as_fd(), into, RecvFlags::DONTWAIT)?.0)
    }
}

impl Write for AtOnce<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(self.0.as_fd(), bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// By which callers a listener may be called, and until when.
#[derive(Debug)]
pub(crate) struct Lock {
    pub(crate) host: Host,
    since: Instant,
    lifetime: Option<Duration>,
}

impl Lock {
    pub(super) fn new(host: Host, lifetime: Option<Duration>) -> Self {
        Self { host, since: Instant::now(), lifetime }
    }

    /// An error when it is too late for a session to begin.
    pub(super) fn check(&self) -> Result<(), Error> {
        let Some(lifetime) = self.lifetime.filter(|lifetime| self.since.elapsed() >= *lifetime) else { return Ok(()) };
        Err(Error::Untrusted(format!(
            "the token has expired: nobody has come with it for {lifetime:?}; start this again for a new one \
             (--token-lifetime says how long it is good)"
        )))
    }
}
