//! One of QEMU's connections: how much may be on its way, what has come out of order, and what it was told.
use std::{
    collections::BTreeMap,
    io::{self, ErrorKind, Read, Write},
    os::fd::AsFd,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use rustix::net::{RecvFlags, recv};
use transship_wire::relay::Packet;

use super::{
    buffers::Buffer,
    fate::{Fate, lock},
};
use crate::{Error, Rule, control::TICK, transport::Connection};

/// What may be on its way on a connection in one direction, as [`cost`] counts it. All of it may have to be kept by the
/// other relay.
pub(super) const WINDOW: u32 = 16 << 20;
/// What a packet takes beside its bytes, so that many small ones are bounded too.
const PACKET_COST: u32 = 256;
/// More is allowed when so much has been taken, or all there was.
const RETURN_AT: u32 = WINDOW / 4;

/// How long a QEMU may take to close a connection when all is over.
pub(super) const CLOSING: Duration = Duration::from_secs(60);

/// What of a window a packet of so many bytes takes.
pub(super) fn cost(bytes: usize) -> u32 {
    bytes as u32 + PACKET_COST // at most MAX_BYTES
}

/// One of QEMU's connections.
pub(super) struct Stream {
    pub(super) number: u16,
    /// The QEMU's address.
    pub(super) qemu: String,
    fate: Arc<Fate>,
    socket: Connection,
    allowance: Mutex<Allowance>,
    allowed: Condvar,
    inbox: Mutex<Inbox>,
    arrived: Condvar,
    /// Taken while its QEMU is told something and that is noted.
    telling: Mutex<()>,
    /// See `has_said_all` and `was_told_all`.
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
    Bytes { bytes: Buffer, gives_end: bool },
    End,
}

impl Stream {
    pub(super) fn new(number: u16, socket: Connection, qemu: String, fate: &Arc<Fate>) -> Result<Arc<Self>, Error> {
        let prepared = socket.set_read_timeout(None).and_then(|()| socket.be_patient(TICK));
        prepared.map_err(|source| Error::Io { what: format!("set up the connection with {qemu}"), source })?;
        Ok(Arc::new(Self {
            number,
            qemu,
            fate: Arc::clone(fate),
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

    /// Its QEMU says no more, and the other relay has been told.
    pub(super) fn has_said_all(&self) {
        self.read_ended.store(true, SeqCst);
        self.wake(); // see `wait_until_silent`
    }

    /// Its QEMU has been told all.
    pub(super) fn was_told_all(&self) {
        self.write_ended.store(true, SeqCst);
    }

    /// Tells its QEMU something, which may take nothing for as long as it likes. `look` sees what was written.
    pub(super) fn tell(
        &self,
        socket: &mut Connection,
        mut bytes: &[u8],
        look: &mut impl FnMut(&[u8]),
    ) -> io::Result<()> {
        while !bytes.is_empty() {
            let _telling = lock(&self.telling);
            if self.fate.is_broken() {
                return Err(ErrorKind::ConnectionAborted.into());
            }
            match socket.write(bytes) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => {
                    look(&bytes[..count]);
                    bytes = &bytes[count..];
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
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

    /// Waits until its QEMU is gone or has said its last, at most for the time.
    pub(super) fn wait_until_silent(&self, time: Duration) {
        let deadline = Instant::now() + time;
        let mut allowance = lock(&self.allowance);
        while !self.is_silent() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.allowed.wait_timeout(allowance, left);
            allowance = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether its QEMU closes the connection within the time. What it says until then is dropped.
    pub(super) fn is_closed_within(&self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        let Ok(mut socket) = self.socket.try_clone() else { return false };
        let mut room = vec![0; 64 << 10];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || socket.set_read_timeout(Some(left)).is_err() {
                return false;
            }
            match read_what_is_there(&mut socket, &mut room) {
                Ok(Heard::Bytes(_) | Heard::Nothing) => {}
                Ok(Heard::End) | Err(_) => return true,
            }
        }
    }

    /// The other relay allows more.
    pub(super) fn allow(&self, amount: u32) -> Result<(), Error> {
        let mut allowance = lock(&self.allowance);
        if allowance.window == 0 {
            allowance.window = amount;
        }
        allowance.left = match allowance.left.checked_add(amount) {
            Some(left) if left <= allowance.window => left,
            _ => {
                return Err(self
                    .fate
                    .broke(Rule::Bounds, format!("returned more credit on connection {} than was used", self.number)));
            }
        };
        self.allowed.notify_all();
        Ok(())
    }

    /// Waits until a packet of so many bytes may be sent. False: the session is broken.
    pub(super) fn take_allowance(&self, bytes: usize) -> bool {
        self.wait_for(|allowance| {
            let left = allowance.left.checked_sub(cost(bytes));
            left.is_some_and(|left| {
                allowance.left = left;
                true
            })
        })
    }

    /// Waits until the other relay's QEMU has taken all that was sent. False: the session is broken.
    pub(super) fn wait_until_taken(&self) -> bool {
        self.wait_for(|allowance| allowance.left == allowance.window)
    }

    fn wait_for(&self, mut ready: impl FnMut(&mut Allowance) -> bool) -> bool {
        let mut allowance = lock(&self.allowance);
        loop {
            if self.fate.is_broken() {
                return false;
            }
            if ready(&mut allowance) {
                return true;
            }
            allowance = self.allowed.wait(allowance).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes what has come from the other relay, whatever came before it.
    pub(super) fn arrive(&self, packet: &Packet, item: Item) -> Result<(), Error> {
        let broke = |rule, what: &str| {
            let what = format!("sent packet {} of connection {} {what}", packet.sequence, self.number);
            Err(self.fate.broke(rule, what))
        };
        let mut inbox = lock(&self.inbox);
        if packet.sequence < inbox.next || inbox.waiting.contains_key(&packet.sequence) {
            return broke(Rule::Order, "twice");
        }
        if let Item::Bytes { bytes, .. } = &item {
            inbox.used = match inbox.used.checked_add(cost(bytes.len())) {
                Some(used) if used <= WINDOW => used,
                _ => return broke(Rule::Bounds, "beyond its window"),
            };
        } else if inbox.waiting.values().any(|item| matches!(item, Item::End)) {
            return broke(Rule::Order, "after its end");
        }
        inbox.waiting.insert(packet.sequence, item);
        if packet.sequence == inbox.next {
            self.arrived.notify_all();
        }
        Ok(())
    }

    /// The next thing to write. None: the session is broken.
    pub(super) fn next_item(&self) -> Option<Item> {
        let mut inbox = lock(&self.inbox);
        loop {
            if self.fate.is_broken() {
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
    pub(super) fn wrote(&self, bytes: usize, owed: &mut u32) -> Option<u32> {
        *owed += cost(bytes);
        let mut inbox = lock(&self.inbox);
        if *owed < RETURN_AT && inbox.waiting.contains_key(&inbox.next) {
            return None;
        }
        inbox.used -= *owed; // it is part of it
        Some(std::mem::take(owed))
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
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
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
