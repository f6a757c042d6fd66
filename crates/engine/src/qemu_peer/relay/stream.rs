//! One of QEMU's connections: what it says goes to the other relay, and what comes from there it is told, in order.
use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    os::fd::AsFd,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    net::{RecvFlags, recv},
};
use transship_wire::relay::{MAX_BYTES, Message, Packet};

use super::{
    outlet::{Chunk, Outlet},
    session::{Session, lock},
};
use crate::{Error, Phase, control::TICK, transport::Connection};

/// What may be on its way on a connection in one direction, as [`cost`] counts it. All of it may have to be kept by the other relay.
pub(super) const WINDOW: u32 = 16 << 20;
/// What a packet takes beside its bytes, so that many small ones are bounded too.
const PACKET_COST: u32 = 256;
/// More is allowed when so much has been taken, or all there was.
const RETURN_AT: u32 = WINDOW / 4;

/// What of a window a packet of so many bytes takes.
pub(super) fn cost(bytes: usize) -> u32 {
    bytes as u32 + PACKET_COST // at most MAX_BYTES
}

/// One of QEMU's connections.
pub(super) struct Stream {
    pub(super) number: u16,
    /// The QEMU's address.
    pub(super) qemu: String,
    socket: Connection,
    allowance: Mutex<Allowance>,
    allowed: Condvar,
    inbox: Mutex<Inbox>,
    arrived: Condvar,
    /// Taken while its QEMU is told something and that is noted.
    telling: Mutex<()>,
    /// Its QEMU says no more, and the other relay has been told; its QEMU has been told all.
    read_ended: AtomicBool,
    write_ended: AtomicBool,
}

/// What may be sent to the other relay.
#[derive(Debug, Default)]
struct Allowance {
    /// 0: it has not said.
    window: u32,
    left: u32,
}

/// What has come from the other relay and was not written yet.
#[derive(Debug, Default)]
struct Inbox {
    next: u64,
    waiting: BTreeMap<u64, Item>,
    /// What it has sent and was not allowed anew.
    used: u32,
}

/// Something to write.
#[derive(Debug)]
pub(super) enum Item {
    Bytes { bytes: Vec<u8>, gives_end: bool },
    End,
}

impl Stream {
    pub(super) fn new(number: u16, socket: Connection, qemu: String) -> Result<Arc<Self>, Error> {
        let prepared = socket.set_read_timeout(None).and_then(|()| socket.be_patient(TICK));
        prepared.map_err(|source| Error::Io { what: format!("set up the connection with {qemu}"), source })?;
        Ok(Arc::new(Self {
            number,
            qemu,
            socket,
            allowance: Mutex::default(),
            allowed: Condvar::new(),
            inbox: Mutex::default(),
            arrived: Condvar::new(),
            telling: Mutex::default(),
            read_ended: AtomicBool::new(false),
            write_ended: AtomicBool::new(false),
        }))
    }

    /// Another handle, for a thread of its own.
    pub(super) fn handle(&self) -> Result<Connection, Error> {
        self.socket
            .try_clone()
            .map_err(|source| Error::Io { what: format!("set up the connection with {}", self.qemu), source })
    }

    /// Wakes whoever waits here, to see that the session is broken.
    pub(super) fn wake(&self) {
        // With the locks: nobody is between looking and falling asleep.
        drop((lock(&self.allowance), lock(&self.inbox)));
        self.allowed.notify_all();
        self.arrived.notify_all();
    }

    pub(super) fn has_ended(&self) -> bool {
        self.read_ended.load(SeqCst) && self.write_ended.load(SeqCst)
    }

    /// Whether its QEMU is gone, or has said its last.
    pub(super) fn is_silent(&self) -> bool {
        self.read_ended.load(SeqCst)
    }

    /// When the session is broken: what its QEMU was told is noted after this, and it is told no more.
    pub(super) fn settle(&self) {
        drop(lock(&self.telling));
    }

    /// Ends the threads that read and write here. The connection breaks when the last handle is gone.
    pub(super) fn break_off(&self) {
        self.socket.break_off();
        self.wake();
    }

    /// Ends these threads. What was written still arrives.
    pub(super) fn close(&self) {
        self.socket.end_reading();
        self.wake();
    }

    /// Says that nothing follows. What is on its way still arrives.
    pub(super) fn end_writing(&self) {
        self.socket.end_writing();
    }

    /// Whether its QEMU closes the connection within the time. What it says until then is dropped.
    pub(super) fn is_closed_within(&self, time: Duration) -> bool {
        self.listen(time, |_| ())
    }

    /// Hears what its QEMU says within the time. Whether it has closed the connection.
    pub(super) fn listen(&self, time: Duration, mut look: impl FnMut(&[u8])) -> bool {
        let deadline = Instant::now() + time;
        let Ok(mut socket) = self.socket.try_clone() else { return false };
        let mut room = vec![0; 64 << 10];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || socket.set_read_timeout(Some(left)).is_err() {
                return false;
            }
            match read_what_is_there(&mut socket, &mut room) {
                Ok(Heard::Bytes(count)) => look(&room[..count]),
                Ok(Heard::Nothing) => {}
                Ok(Heard::End) | Err(_) => return true,
            }
        }
    }

    /// The other relay allows more.
    pub(super) fn allow(&self, amount: u32, session: &Session) -> Result<(), Error> {
        let mut allowance = lock(&self.allowance);
        if allowance.window == 0 {
            allowance.window = amount;
        }
        allowance.left = match allowance.left.checked_add(amount) {
            Some(left) if left <= allowance.window => left,
            _ => return Err(session.broke(format!("allows more on connection {} than was sent", self.number))),
        };
        self.allowed.notify_all();
        Ok(())
    }

    /// Waits until a packet of so many bytes may be sent. False: the session is broken.
    fn take_allowance(&self, bytes: usize, session: &Session) -> bool {
        self.wait_for(session, |allowance| {
            let left = allowance.left.checked_sub(cost(bytes));
            left.is_some_and(|left| {
                allowance.left = left;
                true
            })
        })
    }

    /// Waits until the other relay's QEMU has taken all that was sent. False: the session is broken.
    fn wait_until_taken(&self, session: &Session) -> bool {
        self.wait_for(session, |allowance| allowance.left == allowance.window)
    }

    fn wait_for(&self, session: &Session, mut ready: impl FnMut(&mut Allowance) -> bool) -> bool {
        let mut allowance = lock(&self.allowance);
        loop {
            if session.is_broken() {
                return false;
            }
            if ready(&mut allowance) {
                return true;
            }
            allowance = self.allowed.wait(allowance).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes what has come from the other relay, whatever came before it.
    pub(super) fn arrive(&self, packet: &Packet, item: Item, session: &Session) -> Result<(), Error> {
        let broke = |what: &str| {
            Err(session.broke(format!("sent packet {} of connection {} {what}", packet.sequence, self.number)))
        };
        let mut inbox = lock(&self.inbox);
        if packet.sequence < inbox.next || inbox.waiting.contains_key(&packet.sequence) {
            return broke("twice");
        }
        if let Item::Bytes { bytes, .. } = &item {
            inbox.used = match inbox.used.checked_add(cost(bytes.len())) {
                Some(used) if used <= WINDOW => used,
                _ => return broke("although it was not allowed so much"),
            };
        } else if inbox.waiting.values().any(|item| matches!(item, Item::End)) {
            return broke("behind its end");
        }
        inbox.waiting.insert(packet.sequence, item);
        if packet.sequence == inbox.next {
            self.arrived.notify_all();
        }
        Ok(())
    }

    /// The next thing to write. None: the session is broken.
    fn next_item(&self, session: &Session) -> Option<Item> {
        let mut inbox = lock(&self.inbox);
        loop {
            if session.is_broken() {
                return None;
            }
            let next = inbox.next;
            if let Some(item) = inbox.waiting.remove(&next) {
                inbox.next += 1;
                return Some(item);
            }
            inbox = self.arrived.wait(inbox).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// So many bytes were written. Says what may be allowed anew, if it is worth saying.
    fn wrote(&self, bytes: usize, owed: &mut u32) -> Option<u32> {
        *owed += cost(bytes);
        let mut inbox = lock(&self.inbox);
        if *owed < RETURN_AT && inbox.waiting.contains_key(&inbox.next) {
            return None;
        }
        inbox.used -= *owed; // it is part of it
        Some(std::mem::take(owed))
    }
}

/// What is read from a QEMU goes out by this.
pub(super) struct Sender {
    pub(super) stream: Arc<Stream>,
    outlet: Arc<Outlet>,
    session: Arc<Session>,
    sequence: u64,
}

impl Sender {
    pub(super) fn new(stream: &Arc<Stream>, outlet: &Arc<Outlet>, session: &Arc<Session>) -> Self {
        Self { stream: Arc::clone(stream), outlet: Arc::clone(outlet), session: Arc::clone(session), sequence: 0 }
    }

    /// Sends bytes when there is room for them over there. A session that is broken takes no more, and says so elsewhere.
    pub(super) fn send(&mut self, bytes: &[u8], gives_end: bool) -> Result<(), Error> {
        for bytes in bytes.chunks(MAX_BYTES) {
            if self.session.is_broken() {
                return Ok(());
            }
            if gives_end {
                self.session.end_given.store(true, SeqCst);
            }
            if !self.stream.take_allowance(bytes.len(), &self.session) {
                return Ok(());
            }
            let chunk = Chunk::new(self.stream.number, self.sequence, bytes.to_vec(), gives_end);
            self.sequence += 1;
            self.session.counts.from_qemu.fetch_add(bytes.len() as u64, Relaxed);
            self.session.progress.relayed_bytes.fetch_add(bytes.len() as u64, Relaxed);
            self.outlet.send(chunk)?;
        }
        Ok(())
    }

    /// Waits until all that was sent on any connection has been taken over there. False: the session is broken.
    pub(super) fn wait_until_all_is_taken(&self) -> bool {
        self.session.streams().iter().all(|stream| stream.wait_until_taken(&self.session))
    }

    pub(super) fn is_broken(&self) -> bool {
        self.session.is_broken()
    }

    /// The end is about to be sent. Not if that might have been so from the beginning.
    pub(super) fn hands_over(&self) {
        if !self.session.end_given.load(SeqCst) {
            self.session.progress.set_phase(Phase::HandedOver);
        }
    }

    pub(super) fn end(self) -> Result<(), Error> {
        self.outlet.end(self.stream.number, self.sequence)?;
        self.stream.read_ended.store(true, SeqCst);
        self.session.tell();
        Ok(())
    }
}

/// What a look at a QEMU's connection brings.
pub(super) enum Heard {
    Bytes(usize),
    /// Nothing within the time.
    Nothing,
    End,
}

/// Reads what there is, up to the end of `into`; waits for the first byte only, for as long as the connection says.
pub(super) fn read_what_is_there(socket: &mut Connection, into: &mut [u8]) -> io::Result<Heard> {
    let mut have = loop {
        match socket.read(into) {
            Ok(0) => return Ok(Heard::End),
            Ok(have) => break have,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                return Ok(Heard::Nothing);
            }
            Err(error) => return Err(error),
        }
    };
    while have < into.len() {
        match recv(socket.as_fd(), &mut into[have..], RecvFlags::DONTWAIT) {
            // An end or an error comes again.
            Ok((0, _)) | Err(_) => break,
            Ok((more, _)) => have += more,
        }
    }
    Ok(Heard::Bytes(have))
}

/// Carries what a QEMU says to the other relay, to its end. `look` sees all of it.
pub(super) fn read_on(mut sender: Sender, mut look: impl FnMut(&[u8])) -> Result<(), Error> {
    let mut socket = sender.stream.handle()?;
    let mut room = vec![0; MAX_BYTES];
    loop {
        match read_what_is_there(&mut socket, &mut room) {
            Ok(Heard::Bytes(count)) => {
                look(&room[..count]);
                sender.send(&room[..count], false)?;
            }
            Ok(Heard::Nothing) => {}
            Ok(Heard::End) => return sender.end(),
            Err(error) => return broken(sender, error),
        }
        if sender.session.is_broken() {
            return Ok(());
        }
    }
}

/// A QEMU's connection has broken. While the end of the stream is withheld, this ends all: the other QEMU is to hear of it as it would have without
/// relays. Afterwards the guest may be over there, and a source that is gone is an end like any other.
pub(super) fn broken(sender: Sender, error: io::Error) -> Result<(), Error> {
    if sender.session.end_given.load(SeqCst) {
        return sender.end();
    }
    Err(lost(&sender.stream, error))
}

fn lost(stream: &Stream, source: io::Error) -> Error {
    match Errno::from_io_error(&source) {
        Some(Errno::CONNRESET | Errno::PIPE) => Error::Protocol {
            peer: stream.qemu.clone(),
            what: "has broken the connection; it is a QEMU, ask it why".into(),
        },
        _ => Error::Io { what: format!("relay what {} says and hears", stream.qemu), source },
    }
}

/// Tells a QEMU what comes from the other relay, to its end. `look` sees everything that was written.
pub(super) fn write_on(stream: &Arc<Stream>, session: &Arc<Session>, mut look: impl FnMut(&[u8])) -> Result<(), Error> {
    let mut socket = stream.handle()?;
    let mut owed = 0;
    while let Some(item) = stream.next_item(session) {
        let Item::Bytes { bytes, gives_end } = item else {
            if owed > 0 {
                session.say(&Message::Credit { connection: stream.number, amount: owed })?;
            }
            socket.end_writing();
            stream.write_ended.store(true, SeqCst);
            session.tell();
            return Ok(());
        };
        if gives_end {
            session.end_given.store(true, SeqCst);
        }
        if let Err(error) = write_patiently(stream, &mut socket, &bytes, session, &mut look) {
            return if session.is_broken() { Ok(()) } else { Err(lost(stream, error)) };
        }
        session.counts.to_qemu.fetch_add(bytes.len() as u64, Relaxed);
        session.progress.relayed_bytes.fetch_add(bytes.len() as u64, Relaxed);
        if let Some(amount) = stream.wrote(bytes.len(), &mut owed) {
            session.say(&Message::Credit { connection: stream.number, amount })?;
        }
    }
    Ok(())
}

/// A QEMU may take nothing for as long as it likes.
fn write_patiently(
    stream: &Stream,
    socket: &mut Connection,
    mut bytes: &[u8],
    session: &Session,
    look: &mut impl FnMut(&[u8]),
) -> io::Result<()> {
    while !bytes.is_empty() {
        let _telling = lock(&stream.telling);
        if session.is_broken() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        match socket.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                look(&bytes[..count]);
                bytes = &bytes[count..];
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
                ) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// How long a QEMU may take to close a connection when all is over.
pub(super) const CLOSING: Duration = Duration::from_secs(60);
