//! The device state as QEMU writes it.
//!
//! QEMU that is to keep its guest waits, when it has written everything, for word from the other end
//! ([`Answers::Yes`]): what it has saved is then still its own. So its stream has no end that could be read. It is
//! where the trailer ends, which describes the sections before it: if they are as it says, nothing is missing.
//!
//! The guest decides about bytes of its devices (video memory, say), and could have some that look like the end of
//! all. But QEMU waits only behind the true end, and what follows another one is on its way already: so an end counts
//! when the channel is silent for [`SILENCE`].
//!
//! [`Answers::Yes`]: super::migration::Answers::Yes
use std::{
    io::{self, Read},
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
};
use transship_wire::qemu::{Command, Record, Step, StreamReader, TailWatch};

use super::state_channel::SAVE_WAIT;

/// How long QEMU writes nothing, behind a trailer, when it waits. It adds to the time that the guest stands still, so
/// it is short. A QEMU that pauses that long in the middle, just where its guest has forged an end, is cut short there:
/// then the snapshot of that guest is not whole, and nothing else is harmed.
const SILENCE: Duration = Duration::from_millis(2);
const PIECE_BYTES: usize = 256 << 10;
/// More device state than any machine has.
const TAIL_BYTES_MAX: usize = 1 << 30;

/// Reads to the end of QEMU's stream, whether or not it is complete.
pub(super) struct ToTheEnd(pub(super) UnixStream);

impl Drop for ToTheEnd {
    fn drop(&mut self) {
        // Closing is not enough, since the source holds the channel too.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

impl Read for ToTheEnd {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        read_some(&mut self.0, buffer)
    }
}

fn read_some(stream: &mut UnixStream, buffer: &mut [u8]) -> io::Result<usize> {
    stream.read(buffer).map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => {
            io::Error::new(io::ErrorKind::TimedOut, format!("QEMU sent no device state for {} s", SAVE_WAIT.as_secs()))
        }
        _ => e,
    })
}

/// Reads to the end of the trailer, and leaves out that QEMU asks for answers.
pub(super) struct ToTheTrailer {
    stream: UnixStream,
    reader: StreamReader,
    /// Read, and not yet taken apart.
    input: Vec<u8>,
    /// To be handed out, from `handed` on.
    output: Vec<u8>,
    handed: usize,
    stage: Stage,
    watch: TailWatch,
    /// Told (Release) when the trailer has come.
    complete: Arc<AtomicBool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Records,
    Tail,
    Ended,
}

impl ToTheTrailer {
    /// `complete` becomes true when all has been read.
    pub(super) fn new(stream: UnixStream, complete: Arc<AtomicBool>) -> Self {
        let (reader, stage) = (StreamReader::new(), Stage::Records);
        Self {
            stream,
            reader,
            input: Vec::new(),
            output: Vec::new(),
            handed: 0,
            stage,
            watch: TailWatch::new(),
            complete,
        }
    }

    /// Takes apart what was read, as far as it goes.
    fn take_records(&mut self) -> io::Result<()> {
        let mut at = 0;
        while self.stage == Stage::Records {
            let bytes = &self.input[at..];
            match self.reader.next(bytes).map_err(strange)? {
                Step::More { .. } => break,
                Step::Done { record: Record::Tail, .. } => self.stage = Stage::Tail,
                Step::Done { record: Record::Command(Command::OpenReturnPath | Command::Ping(_)), used } => at += used,
                Step::Done { used, .. } => {
                    self.output.extend_from_slice(&bytes[..used]);
                    at += used;
                }
            }
        }
        self.input.drain(..at);
        Ok(())
    }

    /// Whether what was read is the whole tail. QEMU writes the trailer last, and waits then.
    fn take_tail(&mut self) -> io::Result<()> {
        if self.input.len() > TAIL_BYTES_MAX {
            return Err(strange(format!("it has more than {TAIL_BYTES_MAX} bytes in addition to memory")));
        }
        if self.watch.whole(&self.input).is_some() && self.is_silent()? {
            // Behind the records that came with it.
            self.output.append(&mut self.input);
            self.stage = Stage::Ended;
            self.complete.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Whether QEMU has no more to say. Its hanging up is not silence.
    fn is_silent(&self) -> io::Result<bool> {
        let deadline = Instant::now() + SILENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let wait = Timespec::try_from(left).map_err(io::Error::other)?;
            match rustix::event::poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], Some(&wait)) {
                Ok(ready) => return Ok(ready == 0),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn read_more(&mut self) -> io::Result<()> {
        let have = self.input.len();
        self.input.resize(have + PIECE_BYTES, 0);
        let read = read_some(&mut self.stream, &mut self.input[have..]);
        self.input.truncate(have + *read.as_ref().unwrap_or(&0));
        if read? == 0 {
            // QEMU has given up, and will say why. What has come is handed out, to be found incomplete.
            self.output.append(&mut self.input);
            self.stage = Stage::Ended;
        }
        Ok(())
    }
}

impl Drop for ToTheTrailer {
    fn drop(&mut self) {
        // If all has come QEMU waits for word, and would take a hang-up for one.
        if !self.complete.load(Ordering::Relaxed) {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }
}

impl Read for ToTheTrailer {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.handed == self.output.len() {
            self.output.clear();
            self.handed = 0;
            match self.stage {
                Stage::Ended => return Ok(0),
                Stage::Records | Stage::Tail => self.read_more()?,
            }
            if self.stage == Stage::Records {
                self.take_records()?;
            }
            if self.stage == Stage::Tail {
                self.take_tail()?;
            }
        }
        let count = buffer.len().min(self.output.len() - self.handed);
        buffer[..count].copy_from_slice(&self.output[self.handed..][..count]);
        self.handed += count;
        Ok(count)
    }
}

fn strange(error: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("can't read QEMU's device state: {error}"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write;

    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    use transship_wire::qemu::{Block, Configuration, Described, Name, StreamWriter, describe};

    use super::*;

    const SECTION: u32 = 2;

    fn stream(asks: bool) -> Vec<u8> {
        stream_with(asks, &[1; 24])
    }

    /// `bytes`: what the device has.
    fn stream_with(asks: bool, bytes: &[u8]) -> Vec<u8> {
        let name = |text: &str| Name::new(text).unwrap();
        let mut writer = StreamWriter::new(0, SECTION);
        writer.header().configuration(&Configuration::new(name("pc-q35-10.0")));
        if asks {
            writer.command(&Command::OpenReturnPath).command(&Command::Ping(0));
        }
        let (rom, timer) = (name("rom"), name("timer"));
        let block = Block { name: rom.clone(), used_bytes: 4096, gpa: None, mapped: None };
        writer.ram_start(4096).block(&block).end_of_section();
        writer.end().page(&rom, 0, &[7; 4096]).end_of_section();
        writer.full(3, &timer, 0, 2, bytes).eof();
        let fields = &[("ticks", "buffer", bytes.len() as u64)];
        writer.vmdesc(&describe(&[Described { name: &timer, instance: 0, version: 2, fields }]));
        writer.take_bytes()
    }

    /// However it is cut: what comes out is what a QEMU without questions writes.
    #[test]
    fn nothing_is_lost_wherever_the_stream_is_cut() {
        let (asked, wanted) = (stream(true), stream(false));
        for cut in [asked.len(), 1, 40, asked.len() - 200, asked.len() - 1] {
            let (ours, mut qemus) = UnixStream::pair().unwrap();
            let complete = Arc::new(AtomicBool::new(false));
            let mut reader = ToTheTrailer::new(ours, Arc::clone(&complete));
            let (first, second) = asked.split_at(cut);
            qemus.write_all(first).unwrap();
            let mut read = vec![0; wanted.len() + 1];
            // The first piece alone, if there is anything in it that can be handed out.
            let mut count = if cut == 1 { 0 } else { reader.read(&mut read).unwrap() };
            qemus.write_all(second).unwrap();
            loop {
                match reader.read(&mut read[count..]).unwrap() {
                    0 => break,
                    more => count += more,
                }
            }
            assert!(read[..count] == wanted[..], "cut at {cut}: {count} bytes of {}", wanted.len());
            assert!(complete.load(Ordering::Acquire), "cut at {cut}");
        }
    }

    /// State in small pieces, each of which looks like the end. To take all of it apart at each piece would take days.
    #[test]
    fn state_that_seems_to_end_everywhere_is_looked_at_once() {
        let (ours, _qemus) = UnixStream::pair().unwrap();
        let mut reader = ToTheTrailer::new(ours, Arc::default());
        reader.stage = Stage::Tail;
        reader.input.push(4);
        for _ in 0..1 << 20 {
            reader.input.extend_from_slice(b"}}}}}}}}");
            reader.take_tail().unwrap();
        }
        assert!(reader.stage == Stage::Tail && reader.output.is_empty());
    }

    /// A device's bytes may be such that up to some place in them all looks whole.
    #[test]
    fn an_end_that_a_guest_has_forged_is_none() {
        let wanted = stream_with(true, &[1; 24]);
        // What a guest would write into its device: the rest of a stream that has no more than 24 bytes of it.
        let at = wanted.windows(24).position(|bytes| bytes == [1; 24]).unwrap();
        let (asked, plain) = (stream_with(true, &wanted[at..]), stream_with(false, &wanted[at..]));
        let forged_end = wanted.len();
        assert!(asked[..at] == wanted[..at] && asked[at..forged_end] == wanted[at..] && asked.len() > forged_end);
        // One piece is read at a time, whatever else is there already.
        let kinds = (AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (ours, qemus) = rustix::net::socketpair(kinds.0, kinds.1, kinds.2, None).unwrap();
        for piece in [&asked[..forged_end], &asked[forged_end..]] {
            assert_eq!(rustix::io::write(&qemus, piece).unwrap(), piece.len());
        }
        let complete = Arc::new(AtomicBool::new(false));
        let mut reader = ToTheTrailer::new(UnixStream::from(ours), Arc::clone(&complete));
        let mut read = Vec::new();
        reader.read_to_end(&mut read).unwrap();
        assert!(read == plain, "{} bytes of {}", read.len(), plain.len());
        assert!(complete.load(Ordering::Acquire));
    }
}
