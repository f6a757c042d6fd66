//! What the QEMUs at both ends say.
use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    sync::atomic::{AtomicU64, Ordering::SeqCst},
    time::Duration,
};

use transship_wire::qemu::{Block, Command, Configuration, Described, Greeting, Name, Reply, StreamWriter, describe};

/// More than anything here takes.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);

/// Numbers that only look random, so that a failure comes again.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Half of it shrinks.
    pub(super) fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(count + 4096);
        while bytes.len() < count {
            let run = 1 + self.below(3000) as usize;
            match self.below(2) {
                0 => bytes.extend_from_slice(&vec![self.next() as u8; run]),
                _ => (0..run.div_ceil(8)).for_each(|_| bytes.extend_from_slice(&self.next().to_le_bytes())),
            }
        }
        bytes.truncate(count);
        bytes
    }
}

/// What a source says on its main connection, and where the byte is that hands the guest over.
pub(super) fn main_stream(random: &mut Random, pages: usize, return_path: bool) -> (Vec<u8>, usize) {
    let mut writer = StreamWriter::new(0, 1);
    writer.header().configuration(&Configuration::new(Name::new("pc-q35-10.0").unwrap()));
    if return_path {
        writer.command(&Command::OpenReturnPath).command(&Command::Ping(1));
    }
    let ram = Name::new("pc.ram").unwrap();
    let bytes = pages as u64 * 4096;
    writer
        .ram_start(bytes)
        .block(&Block { name: ram.clone(), used_bytes: bytes, gpa: None, mapped: None })
        .end_of_section();
    writer.part();
    for page in 0..pages {
        writer.page(&ram, page as u64 * 4096, random.bytes(4096).as_slice().try_into().unwrap());
    }
    writer.end_of_section().end().end_of_section();
    let (name, state) = (Name::new("globalstate").unwrap(), [&8u32.to_be_bytes()[..], b"running", &[0; 93]].concat());
    writer.full(3, &name, 0, 1, &state);
    let mut stream = writer.eof().take_bytes();
    let end = stream.len() - 1;
    let json = describe(&[Described { name: &name, instance: 0, version: 1, fields: &[("state", "buffer", 104)] }]);
    stream.extend(StreamWriter::new(0, 1).vmdesc(&json).take_bytes());
    (stream, end)
}

pub(super) fn greeting(channel: u8) -> Vec<u8> {
    Greeting { uuid: [3; 16], channel }.encode().to_vec()
}

/// Writes in pieces of all sizes, and says how much was taken.
pub(super) fn say(mut to: &UnixStream, bytes: &[u8], mut random: Random, taken: &AtomicU64) -> bool {
    let mut rest = bytes;
    while !rest.is_empty() {
        let most = if random.below(4) == 0 { 50 } else { 1 << 20 };
        let count = (1 + random.below(most) as usize).min(rest.len());
        if to.write_all(&rest[..count]).is_err() {
            return false;
        }
        taken.fetch_add(count as u64, SeqCst);
        rest = &rest[count..];
    }
    true
}

pub(super) fn read_exactly(mut from: &UnixStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    from.read_exact(&mut bytes).unwrap();
    bytes
}

/// Whether nothing more comes on it, whichever way it ended.
pub(super) fn is_closed(mut stream: &UnixStream) -> bool {
    let mut room = [0; 4096];
    loop {
        match stream.read(&mut room) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => {
                return !matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut);
            }
        }
    }
}

pub(super) fn shut(status: u32) -> Vec<u8> {
    Reply::Shut(status).encode()
}
