//! What goes out.
use std::{
    fmt,
    io::{self, ErrorKind, Write},
    sync::Arc,
};

use crate::{
    RECORD_BYTES,
    cipher::{Cipher, HEADER_BYTES, Keys, TAG_BYTES, kind},
};

/// Sealed bytes that wait to be written together: they stay in a core's second-level cache.
const BATCH: usize = 128 << 10;
/// A message that changes the key, and asks for nothing in return (RFC 8446, 4.6.3).
const NEW_KEY: [u8; 5] = [24, 0, 0, 1, 0];

/// A warning that nothing more comes (RFC 8446, 6.1).
const CLOSE: [u8; 2] = [1, 0];

/// How many records go out under one key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit(pub(crate) u64);

impl Default for Limit {
    /// With AES-GCM, fewer than 2^24.5 (RFC 8446, 5.5). This is 128 GiB.
    fn default() -> Self {
        Self(1 << 23)
    }
}

/// Seals bytes into records and writes them. After a write that failed it never writes again: what the other side did
/// not get then must not reach it later, when this side believes that it was never sent.
pub struct Sealer {
    cipher: Cipher,
    keys: Arc<Keys>,
    limit: Limit,
    /// Records that are sealed and not written.
    room: Vec<u8>,
    is_dead: bool,
}

impl Sealer {
    pub(crate) fn new(cipher: Cipher, keys: Arc<Keys>) -> Self {
        Self { cipher, keys, limit: Limit::default(), room: Vec::new(), is_dead: false }
    }

    #[cfg(test)]
    pub(crate) fn set_limit(&mut self, limit: Limit) {
        self.limit = limit;
    }

    /// Seals all bytes and writes them, and what was appended before.
    ///
    /// # Errors
    /// The connection's own; an unknown part was written by then. From then on only errors.
    pub fn write(&mut self, to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
        for piece in bytes.chunks(RECORD_BYTES) {
            self.append(to, |room| {
                room.extend_from_slice(piece);
                Ok(())
            })?;
        }
        self.flush(to)
    }

    /// Seals at most [`RECORD_BYTES`] that `fill` appends to what it is given, as one record. It is written at the next
    /// [`Sealer::flush`], or at once with what waits, if that is much.
    ///
    /// # Errors
    /// That of `fill`; those of [`Sealer::write`]. From then on only errors.
    pub fn append(&mut self, to: &mut impl Write, fill: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> io::Result<()> {
        self.check()?;
        if self.room.capacity() == 0 {
            self.room.reserve_exact(BATCH + HEADER_BYTES + RECORD_BYTES + 1 + TAG_BYTES);
        }
        if self.keys.take_wanted() || self.cipher.used() >= self.limit.0 {
            self.seal(kind::HANDSHAKE, |room| {
                room.extend_from_slice(&NEW_KEY);
                Ok(())
            })?;
            self.cipher = self.keys.next_to_seal()?;
        }
        self.seal(kind::DATA, fill)?;
        if self.room.len() >= BATCH { self.flush(to) } else { Ok(()) }
    }

    /// Writes what was appended.
    ///
    /// # Errors
    /// As [`Sealer::write`].
    pub fn flush(&mut self, to: &mut impl Write) -> io::Result<()> {
        self.check()?;
        let written = to.write_all(&self.room);
        self.is_dead = written.is_err();
        self.room.clear();
        written
    }

    /// Writes a few bytes that the system takes whole, or not at all: after an error the other side can't have got one
    /// of them, and never will. Nothing may wait.
    ///
    /// # Errors
    /// As [`Sealer::write`].
    pub fn write_whole(&mut self, to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
        self.flush(to)?;
        self.append(to, |room| {
            room.extend_from_slice(bytes);
            Ok(())
        })?;
        let sealed = std::mem::take(&mut self.room);
        let taken = write_some(to, &sealed).inspect_err(|_| self.is_dead = true)?;
        // The rest of a record of a few bytes. Whether it goes out or not, the other side may have it all from here on:
        // so this is no failure of this message, but no other one can follow.
        self.is_dead = to.write_all(&sealed[taken..]).is_err();
        Ok(())
    }

    /// Seals bytes that somebody else writes, in order and with nothing between them; nothing may wait. If he can't
    /// write all of them, he says so by [`Sealer::end`].
    ///
    /// # Errors
    /// An earlier write has failed.
    pub fn seal_all(&mut self, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut sealed = Vec::with_capacity(bytes.len() + bytes.len() / 64 + BATCH);
        for piece in bytes.chunks(RECORD_BYTES) {
            self.append(&mut sealed, |room| {
                room.extend_from_slice(piece);
                Ok(())
            })?;
        }
        self.flush(&mut sealed)?;
        Ok(sealed)
    }

    /// Writes nothing more.
    pub fn end(&mut self) {
        self.is_dead = true;
    }

    /// Says that nothing more comes, as TLS has it: the other side can tell this from a connection that somebody has
    /// cut. From then on only errors.
    ///
    /// # Errors
    /// As [`Sealer::write`].
    pub fn close(&mut self, to: &mut impl Write) -> io::Result<()> {
        self.check()?;
        self.seal(kind::ALERT, |room| {
            room.extend_from_slice(&CLOSE);
            Ok(())
        })?;
        let flushed = self.flush(to);
        self.is_dead = true;
        flushed
    }

    fn seal(&mut self, kind: u8, fill: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> io::Result<()> {
        let start = self.room.len();
        self.room.extend_from_slice(&[0; HEADER_BYTES]);
        let filled = fill(&mut self.room);
        let length = self.room.len().saturating_sub(start + HEADER_BYTES);
        if filled.is_ok() && length <= RECORD_BYTES {
            self.room.push(kind);
            self.cipher.seal(&mut self.room, start);
            return Ok(());
        }
        self.room.clear();
        self.is_dead = true;
        filled.and_then(|()| Err(io::Error::new(ErrorKind::InvalidInput, "a record has at most 16 KiB")))
    }

    fn check(&self) -> io::Result<()> {
        match self.is_dead {
            true => Err(io::Error::new(ErrorKind::BrokenPipe, "an earlier write has failed")),
            false => Ok(()),
        }
    }
}

/// A first write: how much of it was taken.
fn write_some(to: &mut impl Write, bytes: &[u8]) -> io::Result<usize> {
    loop {
        match to.write(bytes) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Without keys, for logs.
impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sealer(…)")
    }
}
