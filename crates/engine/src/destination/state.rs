//! The device state as a stream, made of the messages that carry it.
use std::{
    io::{self, Read},
    time::{Duration, Instant},
};

use crossbeam_channel::Sender;
use transship_wire::Message;

use crate::{Error, Progress, Rule, control::Control, transport::STALL_TIMEOUT};

/// How long a cancelled reader waits for more of a state that it has begun to read.
const REST_WAIT: Duration = Duration::from_secs(1);

/// Reads the state to its end. The end is only reported once length and hash are right: whoever loads it must not take
/// a cut stream for a whole one.
pub(super) struct StateReader<'a> {
    control: &'a Control,
    progress: &'a Progress,
    hasher: blake3::Hasher,
    total: u64,
    /// A message that was received and not yet looked at.
    next: Option<Message>,
    piece: Vec<u8>,
    used: usize,
    ended: bool,
    failed: Option<Error>,
    /// For the thread that is to hear that the state is whole; closed if it is not.
    whole: Option<Sender<()>>,
}

impl<'a> StateReader<'a> {
    pub(super) fn new(control: &'a Control, first: Message, progress: &'a Progress) -> Self {
        Self {
            control,
            progress,
            hasher: blake3::Hasher::new(),
            total: 0,
            next: Some(first),
            piece: Vec::new(),
            used: 0,
            ended: false,
            failed: None,
            whole: None,
        }
    }

    /// Has somebody hear when it is whole, by a word, or that it will not be, by a channel that is closed.
    pub(super) fn telling(self, whole: Sender<()>) -> Self {
        Self { whole: Some(whole), ..self }
    }

    /// The length of the state, once it came to its proper end: what the guest left unread is read here, so that the
    /// length and the hash are always checked.
    pub(super) fn finish(mut self) -> Result<u64, Error> {
        while self.failed.is_none() && !self.ended {
            self.advance()?;
        }
        self.failed.map_or(Ok(self.total), Err)
    }

    /// The next message. Once the VMM has a part of the state, older ones end if they do not get the rest, and it is on
    /// its way as a rule: whoever cancels waits that long.
    fn more(&self) -> Result<Message, Error> {
        let since = Instant::now();
        self.control.receive_while("its device state", STALL_TIMEOUT * 2, || {
            match self.progress.is_cancelled() && since.elapsed() > REST_WAIT {
                true => Err(Error::CANCELLED),
                false => Ok(()),
            }
        })
    }

    fn advance(&mut self) -> Result<(), Error> {
        let message = match self.next.take() {
            Some(message) => message,
            None => self.more()?,
        };
        match message {
            Message::State { bytes } => {
                self.hasher.update(&bytes);
                self.total += bytes.len() as u64;
                self.piece = bytes;
                self.used = 0;
                Ok(())
            }
            Message::StateEnd { bytes, digest } => {
                if (bytes, digest) != (self.total, self.hasher.finalize().into()) {
                    let what = format!(
                        "sent {} bytes of device state, which do not match the announced length {bytes} or hash",
                        self.total
                    );
                    return Err(Error::breach(&self.control.peer, Rule::Digest, what));
                }
                self.ended = true;
                // Whoever does not listen any more need not know.
                self.whole.take().map(|whole| whole.try_send(()));
                Ok(())
            }
            other => Err(self.control.unexpected(&other, "within the device state")),
        }
    }
}

impl Read for StateReader<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.used == self.piece.len() && !self.ended {
            if let Err(error) = self.advance() {
                let text = error.to_string();
                self.failed = Some(error);
                self.whole = None;
                return Err(io::Error::other(text));
            }
        }
        let length = out.len().min(self.piece.len() - self.used);
        out[..length].copy_from_slice(&self.piece[self.used..][..length]);
        self.used += length;
        Ok(length)
    }
}
