//! The records of a stream, one after the other: from a file, where the reader jumps over the pages of a mapped-ram
//! file, or from a pipe.
use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::FileExt,
    sync::Arc,
};

use transship_wire::qemu::{Record, Step, StreamReader};

use super::whence::{Whence, damaged};
use crate::{Error, Rule};

/// Read at once from a file while only headers are wanted: the bytes behind one may be a hole of gigabytes.
const HEADER_CHUNK: usize = 4 << 10;
/// Read at once from a stream that holds pages.
const STREAM_CHUNK: usize = 256 << 10;
/// More device state than any machine has: graphics adapters keep their pictures in it, some hundred MiB at most.
const MAX_TAIL_BYTES: usize = 2 << 30;

/// Where the bytes come from.
pub(crate) enum Input {
    /// A file, at any position.
    File(Arc<File>),
    /// A pipe or a connection, from where it is on.
    Pipe { pipe: Box<dyn Read + Send>, position: u64 },
    /// What comes out of a decompressor.
    Decompressed { pipe: Box<dyn Read + Send>, position: u64 },
    /// What is in an encrypted file; its bytes have been checked.
    Encrypted { pipe: Box<dyn Read + Send>, position: u64 },
}

impl Input {
    fn read_at(&mut self, at: u64, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = match self {
                Self::File(file) => file.read_at(into, at),
                Self::Encrypted { position, .. } if *position != at => {
                    let why = "it is an encrypted mapped-ram file, whose pages have fixed places: decrypt it with age";
                    return Err(io::Error::new(io::ErrorKind::NotSeekable, why));
                }
                Self::Pipe { position, .. } | Self::Decompressed { position, .. } if *position != at => {
                    let why = "it is a mapped-ram file, whose pages have fixed places: name the file itself";
                    return Err(io::Error::new(io::ErrorKind::NotSeekable, why));
                }
                Self::Pipe { pipe, position }
                | Self::Decompressed { pipe, position }
                | Self::Encrypted { pipe, position } => pipe.read(into).inspect(|count| *position += *count as u64),
            };
            match read {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => return read,
            }
        }
    }
}

/// The stream, and how far it has been read.
pub(crate) struct Records {
    whence: Whence,
    input: Input,
    reader: StreamReader,
    /// What has come, up to `end`, and room for more. Bytes before `used` have been taken.
    buffer: Vec<u8>,
    used: usize,
    end: usize,
    /// Position of `buffer[used]`.
    at: u64,
    chunk: usize,
}

impl Records {
    /// `reader` says where the stream begins.
    pub(crate) fn new(whence: Whence, input: Input, reader: StreamReader) -> Self {
        let at = reader.position();
        Self { whence, input, reader, buffer: Vec::new(), used: 0, end: 0, at, chunk: HEADER_CHUNK }
    }

    /// Whether it comes out of an encrypted file.
    pub(crate) fn is_encrypted(&self) -> bool {
        matches!(self.input, Input::Encrypted { .. })
    }

    /// Whether the bytes are those of a file as they are in it.
    pub(crate) fn are_of_a_file(&self) -> bool {
        matches!(self.input, Input::File(_))
    }

    /// Where in the file the next byte is that was not read.
    pub(crate) fn unread(&self) -> u64 {
        self.at + (self.end - self.used) as u64
    }

    /// Goes on with what `rest` gives, which begins with the first byte that was not read.
    pub(crate) fn go_on_with(&mut self, rest: Box<dyn Read + Send>) {
        self.input = Input::Pipe { pipe: rest, position: self.unread() };
    }

    /// What has been read so far.
    pub(crate) fn reader(&self) -> &StreamReader {
        &self.reader
    }

    /// From now on there is more to come than headers.
    pub(crate) fn expect_pages(&mut self) {
        self.chunk = STREAM_CHUNK;
    }

    /// Hands the next record to `take`, and its bytes.
    ///
    /// # Errors
    /// Bytes that can't be, an end too early, the system's own, and those of `take`.
    pub(crate) fn step<T>(&mut self, take: impl FnOnce(Record<'_>, &[u8]) -> Result<T, Error>) -> Result<T, Error> {
        loop {
            let bytes = &self.buffer[self.used..self.end];
            let step = self.reader.next(bytes).map_err(|error| self.whence.bad(error))?;
            let at_least = match step {
                Step::More { at_least } => at_least,
                Step::Done { record, used } => {
                    let result = take(record, &bytes[..used]);
                    self.take(used);
                    return result;
                }
            };
            self.fill(at_least)?;
        }
    }

    /// `count` bytes were taken; the reader may want to go on further behind.
    fn take(&mut self, count: usize) {
        self.used += count;
        self.at += count as u64;
        let position = self.reader.position();
        if position != self.at {
            (self.at, self.used) = (position, self.end);
        }
    }

    /// Reads until `wanted` bytes are there. A read may bring much less than there is room for: the room is made once.
    fn fill(&mut self, wanted: usize) -> Result<(), Error> {
        self.buffer.copy_within(self.used..self.end, 0);
        self.end -= std::mem::take(&mut self.used);
        while self.end < wanted {
            let room = self.end + self.chunk.max(wanted - self.end);
            super::make_room(&mut self.buffer, self.end, room);
            let at = self.at + self.end as u64;
            match self.input.read_at(at, &mut self.buffer[self.end..room]) {
                Ok(0) => return Err(self.ended()),
                Ok(read) => self.end += read,
                Err(source) => return Err(self.failed(at, source)),
            }
        }
        Ok(())
    }

    /// All that follows, once the reader has come to the device sections.
    ///
    /// # Errors
    /// More than any machine has; no memory for it; the system's own.
    pub(crate) fn tail(self) -> Result<Vec<u8>, Error> {
        self.tail_until(|_| false)
    }

    /// The same, but no further than until `is_all` of what has come.
    ///
    /// # Errors
    /// As [`Records::tail`].
    pub(crate) fn tail_until(mut self, mut is_all: impl FnMut(&[u8]) -> bool) -> Result<Vec<u8>, Error> {
        let begin = self.at;
        let mut filled = self.end - self.used;
        let mut tail = self.buffer.split_off(self.used);
        // Room behind what has come is used up before there is more: pieces may be small.
        let mut ended = is_all(&tail[..filled]);
        while !ended {
            if filled > MAX_TAIL_BYTES {
                let what = format!(
                    "more than {MAX_TAIL_BYTES} bytes follow the memory, from offset {begin:#x} on: no machine has so much"
                );
                return Err(self.whence.broke(Rule::Bounds, what));
            }
            if filled == tail.len() {
                self.grow(&mut tail)?;
            }
            match self.input.read_at(begin + filled as u64, &mut tail[filled..]) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(source) => return Err(self.failed(begin + filled as u64, source)),
            }
            ended = is_all(&tail[..filled]);
        }
        tail.truncate(filled);
        Ok(tail)
    }

    /// By an eighth: a tail of gigabytes must not take twice as much.
    fn grow(&self, tail: &mut Vec<u8>) -> Result<(), Error> {
        let more = STREAM_CHUNK.max(tail.len() / 8);
        if tail.try_reserve_exact(more).is_err() {
            let what = format!("there is not enough memory for {} or more bytes of device state", tail.len());
            return Err(self.whence.broke(Rule::Bounds, what));
        }
        tail.resize(tail.len() + more, 0);
        Ok(())
    }

    /// It ended too early.
    fn ended(&self) -> Error {
        let cut = self.reader.cut_short(&self.buffer[self.used..self.end]);
        match &self.whence {
            Whence::File(name) => damaged(name, cut),
            Whence::Peer(peer) => {
                Error::breach(peer, Rule::Stays, format!("has closed the connection in mid-stream ({cut})"))
            }
        }
    }

    fn failed(&self, at: u64, source: io::Error) -> Error {
        if let Input::Encrypted { .. } = self.input
            && matches!(source.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof)
        {
            let cure = self.whence.cure();
            return self
                .whence
                .broke(Rule::Encoding, format!("its encryption was changed or cut short after {at:#x} bytes{cure}"));
        }
        if let Input::Decompressed { .. } = self.input
            && source.raw_os_error().is_none()
        {
            let cure = self.whence.cure();
            return self
                .whence
                .broke(Rule::Encoding, format!("it can't be decompressed after {at:#x} bytes: {source}{cure}"));
        }
        let (Whence::File(name) | Whence::Peer(name)) = &self.whence;
        Error::Io { what: format!("read {name} at offset {at:#x}"), source }
    }
}
