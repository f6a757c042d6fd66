//! The threads at a QEMU's connection: one carries what it says to the other relay, one tells it what comes from there.
use std::{
    io,
    sync::{
        Arc,
        atomic::Ordering::{Relaxed, SeqCst},
    },
};

use rustix::io::Errno;
use transship_wire::relay::{MAX_BYTES, Message};

use super::{
    buffers::Buffer,
    outlet::{Chunk, Outlet},
    session::RelaySession,
    stream::{Heard, Item, Stream, read_what_is_there},
};
use crate::{Error, Phase, Rule};

/// What is read from a QEMU goes out by this.
pub(super) struct Sender {
    pub(super) stream: Arc<Stream>,
    outlet: Arc<Outlet>,
    session: Arc<RelaySession>,
    sequence: u64,
}

impl Sender {
    pub(super) fn new(stream: &Arc<Stream>, outlet: &Arc<Outlet>, session: &Arc<RelaySession>) -> Self {
        Self { stream: Arc::clone(stream), outlet: Arc::clone(outlet), session: Arc::clone(session), sequence: 0 }
    }

    /// Sends bytes when the other side has room for them. A session that is broken takes no more, and says so
    /// elsewhere.
    pub(super) fn send(&mut self, bytes: &[u8], gives_end: bool) -> Result<(), Error> {
        bytes.chunks(MAX_BYTES).try_for_each(|bytes| self.send_chunk(self.session.buffers.copy(bytes), gives_end))
    }

    /// As `send`, with the first bytes of a whole buffer, in whose place there may be another one then.
    pub(super) fn send_first(&mut self, room: &mut Buffer, length: usize) -> Result<(), Error> {
        let first = self.session.buffers.first(room, length);
        self.send_chunk(first, false)
    }

    fn send_chunk(&mut self, bytes: Buffer, gives_end: bool) -> Result<(), Error> {
        if self.session.fate.is_broken() {
            return Ok(());
        }
        if gives_end {
            self.session.end_given.store(true, SeqCst);
        }
        let length = bytes.len();
        if !self.stream.take_allowance(length) {
            return Ok(());
        }
        let chunk = Chunk::new(self.stream.number, self.sequence, bytes, gives_end);
        self.sequence += 1;
        self.session.counts.from_qemu.fetch_add(length as u64, Relaxed);
        self.session.progress.relayed_bytes.fetch_add(length as u64, Relaxed);
        self.outlet.send(chunk)
    }

    /// A whole one to read into.
    pub(super) fn room(&self) -> Buffer {
        self.session.buffers.whole()
    }

    /// Waits until the other side has taken everything that was sent on any connection. False: the session is broken.
    pub(super) fn wait_until_all_is_taken(&self) -> bool {
        self.session.streams().iter().all(|stream| stream.wait_until_taken())
    }

    pub(super) fn is_broken(&self) -> bool {
        self.session.fate.is_broken()
    }

    /// The end is about to be sent. Not if that might have been so from the beginning.
    pub(super) fn hands_over(&self) {
        if !self.session.end_given.load(SeqCst) {
            self.session.progress.set_phase(Phase::HandedOver);
        }
    }

    pub(super) fn end(self) -> Result<(), Error> {
        self.outlet.end(self.stream.number, self.sequence)?;
        self.stream.has_said_all();
        self.session.tell();
        Ok(())
    }
}

/// Hears what a QEMU says.
type Listener<'a> = &'a mut dyn FnMut(&[u8]);

/// Carries what a QEMU says to the other relay, to its end. `listener` hears all of it, also what comes after the
/// session has broken: nobody else may read from this connection, as each would hear a part.
pub(super) fn read_on(mut sender: Sender, mut listener: Option<Listener<'_>>) -> Result<(), Error> {
    let mut socket = sender.stream.handle()?;
    let mut room = sender.room();
    loop {
        match read_what_is_there(&mut socket, &mut room) {
            Ok(Heard::Bytes(count)) => {
                if let Some(hear) = &mut listener {
                    hear(&room[..count]);
                }
                sender.send_first(&mut room, count)?;
            }
            Ok(Heard::Nothing) => {}
            Ok(Heard::End) => return sender.end(),
            Err(error) => return broken(sender, error),
        }
        if listener.is_none() && sender.session.fate.is_broken() {
            return Ok(());
        }
    }
}

/// A QEMU's connection has broken. While the end of the stream is withheld, this ends all: the other QEMU is to hear of
/// it as it would have without relays. Afterwards the guest may be on the other side, and a source that is gone is an
/// end like any other.
pub(super) fn broken(sender: Sender, error: io::Error) -> Result<(), Error> {
    if sender.session.end_given.load(SeqCst) {
        return sender.end();
    }
    Err(lost(&sender.stream, error))
}

fn lost(stream: &Stream, source: io::Error) -> Error {
    match Errno::from_io_error(&source) {
        Some(Errno::CONNRESET | Errno::PIPE) => {
            Error::breach(&stream.qemu, Rule::Stays, "has broken the connection; its own output says why")
        }
        _ => Error::Io { what: format!("relay the data of {}", stream.qemu), source },
    }
}

/// Tells a QEMU what comes from the other relay, to its end. `look` sees everything that was written.
pub(super) fn write_on(
    stream: &Arc<Stream>,
    session: &Arc<RelaySession>,
    mut look: impl FnMut(&[u8]),
) -> Result<(), Error> {
    let mut socket = stream.handle()?;
    let mut owed = 0;
    while let Some(item) = stream.next_item() {
        let Item::Bytes { bytes, gives_end } = item else {
            if owed > 0 {
                session.say(&Message::Credit { connection: stream.number, amount: owed })?;
            }
            socket.end_writing();
            stream.was_told_all();
            session.tell();
            return Ok(());
        };
        if gives_end {
            session.end_given.store(true, SeqCst);
        }
        if let Err(error) = stream.tell(&mut socket, &bytes, &mut look) {
            return if session.fate.is_broken() { Ok(()) } else { Err(lost(stream, error)) };
        }
        session.counts.to_qemu.fetch_add(bytes.len() as u64, Relaxed);
        session.progress.relayed_bytes.fetch_add(bytes.len() as u64, Relaxed);
        if let Some(amount) = stream.wrote(bytes.len(), &mut owed) {
            session.say(&Message::Credit { connection: stream.number, amount })?;
        }
    }
    Ok(())
}
