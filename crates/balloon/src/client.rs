//! The other end of the control protocol: for those who move or save the guest.
use std::{
    collections::VecDeque,
    os::unix::{fs::MetadataExt, net::UnixStream},
    path::Path,
    time::{Duration, Instant},
};

use serde::de::DeserializeOwned;
use serde_json::Value;
use transship_guest::{GuestError, Hint, Hints, RegionPages};
use transship_lines::LineSocket;
use transship_memory::{GuestMemory, PAGE_BYTES, PageRange};

use crate::message::{Call, Description, FileRange, Line, Request, Started, Statistics, VERSION};

/// How long the guest may take to take its memory back, and how often it is asked.
const TAKING_BACK: Duration = Duration::from_secs(3);
const ASK_AGAIN: Duration = Duration::from_millis(20);
/// The balloon answers from memory.
const PATIENCE: Duration = Duration::from_secs(30);

/// The balloon can't be used, or no more. A move goes on without it.
#[derive(Debug, thiserror::Error)]
#[error("balloon {path}: {what}")]
pub struct Error {
    path: String,
    what: String,
}

/// A connection with a balloon. When it ends, whatever the reason, the guest gets its pages back.
#[derive(Debug)]
pub struct Client {
    path: String,
    socket: LineSocket,
    last_id: u64,
    description: Description,
    regions: Vec<FileRange>,
    /// The command that hints are believed for.
    command: Option<u32>,
    heard: VecDeque<Hint>,
    /// Bytes that the guest has named for it.
    named: u64,
}

impl Client {
    /// Connects with the balloon of the guest whose memory this is.
    ///
    /// # Errors
    /// Nobody is there, or it is not this guest's balloon.
    pub fn connect(path: &Path, memory: &GuestMemory) -> Result<Self, Error> {
        let error = |what: String| Error { path: path.display().to_string(), what };
        let stream = UnixStream::connect(path).map_err(|e| error(format!("can't connect: {e}")))?;
        let regions = regions(memory).map_err(|e| error(format!("can't inspect guest memory: {e}")))?;
        let empty = Description {
            version: VERSION,
            pid: 0,
            hints: false,
            poison: None,
            target_bytes: 0,
            given_bytes: 0,
            memory: Vec::new(),
            rings: Vec::new(),
        };
        let mut client = Self {
            path: path.display().to_string(),
            socket: LineSocket::new(stream),
            last_id: 0,
            description: empty,
            regions,
            command: None,
            heard: VecDeque::new(),
            named: 0,
        };
        client.description = client.call(Call::Describe)?;
        if client.description.version != VERSION {
            let theirs = client.description.version;
            return Err(client
                .error(format!("it speaks version {theirs} of its protocol, but this transship speaks {VERSION}")));
        }
        if client.description.memory.is_empty() {
            return Err(client.error("no guest's driver uses it now".into()));
        }
        let known = |file: &FileRange| client.description.memory.iter().any(|range| same_file(range, file));
        if !client.regions.iter().any(known) {
            return Err(client.error("it belongs to another guest".into()));
        }
        Ok(client)
    }

    /// What the balloon said of itself when it was connected.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Asks the guest for hints. Writes to its memory must be tracked already, **all of it**, since before this call:
    /// what a hint says is that the page was free at some moment after it. Hints of earlier calls are void.
    ///
    /// # Errors
    /// The guest has no driver that gives hints; or the balloon is gone.
    pub fn start(&mut self) -> Result<(), Error> {
        self.command = None;
        self.heard.clear();
        self.named = 0;
        let Started { command } = self.call(Call::Start)?;
        // Hints may come right behind the answer, never before it.
        self.command = Some(command);
        Ok(())
    }

    /// What the guest says next; nothing if it says nothing until `deadline`.
    ///
    /// # Errors
    /// There will be no more hints.
    pub fn next(&mut self, deadline: Instant) -> Result<Option<Hint>, Error> {
        while self.heard.is_empty() {
            match self.socket.receive(deadline) {
                Ok(line) => self.hear(&line.text).map(drop)?,
                Err(transship_lines::LineError::TimedOut) => return Ok(None),
                Err(error) => return Err(self.error(error.to_string())),
            }
        }
        Ok(self.heard.pop_front())
    }

    /// Ends the naming: to be called before the next scan. Returns what was heard and not asked for yet; from now on
    /// there is nothing.
    ///
    /// # Errors
    /// There will be no more hints.
    pub fn stop(&mut self) -> Result<Vec<Hint>, Error> {
        self.call::<Value>(Call::Stop)?;
        self.command = None;
        Ok(self.heard.drain(..).collect())
    }

    /// Lets the guest use all its memory again. It takes a moment until it does.
    ///
    /// # Errors
    /// The balloon is gone; then the guest has its memory too.
    pub fn done(&mut self) -> Result<(), Error> {
        self.command = None;
        self.heard.clear();
        self.call::<Value>(Call::Done).map(drop)
    }

    /// After `done`: waits until the guest says that it has its memory, as far as it says anything: until then it is so
    /// short of memory that it is not to be asked for anything else, such as letting go of the device.
    ///
    /// # Errors
    /// The balloon is gone; then the guest has its memory too.
    pub fn taken_back(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + TAKING_BACK;
        // The first answer is from before.
        let mut free = self.statistics()?.free_bytes.map(|_| 0);
        while free.is_some_and(|free| free < self.named / 2) && Instant::now() < deadline {
            self.next(Instant::now() + ASK_AGAIN)?;
            free = self.statistics()?.free_bytes;
        }
        Ok(())
    }

    /// Has the balloon give no memory back to the host while this connection lasts.
    ///
    /// # Errors
    /// The balloon is gone.
    pub fn keep(&mut self) -> Result<(), Error> {
        self.call::<Value>(Call::Keep).map(drop)
    }

    /// Has the guest give up so much memory.
    ///
    /// # Errors
    /// It is too much; or the balloon is gone.
    pub fn set_target(&mut self, bytes: u64) -> Result<(), Error> {
        self.call::<Value>(Call::Target { bytes }).map(drop)
    }

    /// How the guest uses its memory, as it said last; it is asked to say it anew.
    ///
    /// # Errors
    /// The balloon is gone.
    pub fn statistics(&mut self) -> Result<Statistics, Error> {
        self.call(Call::Statistics)
    }

    /// The pages that the balloon itself writes to, and QEMU does not: those of the rings that are in use, or were.
    ///
    /// # Errors
    /// The balloon is gone.
    pub fn rings(&mut self) -> Result<Vec<RegionPages>, Error> {
        let now: Description = self.call(Call::Describe)?;
        let mut found = Vec::new();
        for (number, offset, bytes) in now.rings {
            let Some(range) = now.memory.get(number) else {
                return Err(self.error(format!("it named range {number}, which it does not have")));
            };
            found.extend(places(&self.regions, *range, offset, bytes));
        }
        Ok(found)
    }

    fn call<T: DeserializeOwned>(&mut self, call: Call) -> Result<T, Error> {
        self.last_id += 1;
        let request = Request { id: self.last_id, call };
        let text = serde_json::to_vec(&request).map_err(|e| self.error(e.to_string()))?;
        let deadline = Instant::now() + PATIENCE;
        self.socket.send(&text, &[], deadline).map_err(|e| self.error(e.to_string()))?;
        loop {
            let line = self.socket.receive(deadline).map_err(|e| self.error(e.to_string()))?;
            if let Some(answer) = self.hear(&line.text)? {
                return serde_json::from_value(answer)
                    .map_err(|e| self.error(format!("its answer makes no sense: {e}")));
            }
        }
    }

    /// Takes a line in; the answer, if it is that of the last request.
    fn hear(&mut self, text: &[u8]) -> Result<Option<Value>, Error> {
        let line =
            serde_json::from_slice(text).map_err(|e| self.error(format!("it sent no line of its protocol: {e}")))?;
        match line {
            Line::Ok { id, ok } if id == self.last_id => return Ok(Some(ok)),
            Line::Error { id, error } if id == self.last_id || id == 0 => return Err(self.error(one_line(&error))),
            Line::Lost { lost } => return Err(self.error(one_line(&lost))),
            Line::Hints { command, hints } if self.command == Some(command) => {
                for (number, offset, bytes) in hints {
                    let Some(range) = self.description.memory.get(number) else {
                        return Err(self.error(format!("it named range {number}, which it does not have")));
                    };
                    self.named = self.named.saturating_add(bytes);
                    self.heard.extend(places(&self.regions, *range, offset, bytes).map(Hint::Free));
                }
            }
            Line::NamedAll { command, .. } if self.command == Some(command) => self.heard.push_back(Hint::NamedAll),
            // Late, or for an older command.
            Line::Ok { .. } | Line::Error { .. } | Line::Hints { .. } | Line::NamedAll { .. } => {}
        }
        Ok(None)
    }

    fn error(&self, what: String) -> Error {
        Error { path: self.path.clone(), what }
    }
}

impl Hints for Client {
    fn start(&mut self) -> Result<(), GuestError> {
        Self::start(self).map_err(told)
    }

    fn next(&mut self, deadline: Instant) -> Result<Option<Hint>, GuestError> {
        Self::next(self, deadline).map_err(told)
    }

    fn stop(&mut self) -> Result<(), GuestError> {
        Self::stop(self).map(drop).map_err(told)
    }

    fn done(&mut self) -> Result<(), GuestError> {
        Self::done(self).map_err(told)
    }

    fn taken_back(&mut self) -> Result<(), GuestError> {
        Self::taken_back(self).map_err(told)
    }

    fn writes_to(&mut self) -> Vec<RegionPages> {
        // One that is gone writes nothing any more; where it has written was asked before.
        self.rings().unwrap_or_default()
    }
}

fn told(error: Error) -> GuestError {
    GuestError::vmm(error)
}

/// Where our regions lie. They are addressed by their files, so the guest's addresses are of no interest.
fn regions(memory: &GuestMemory) -> std::io::Result<Vec<FileRange>> {
    let of = |region: &transship_memory::Region| {
        let Some((file, file_offset)) = region.shared_file() else {
            let why = format!("guest memory {:?} is private to its VM, so no balloon can have it", region.name());
            return Err(std::io::Error::other(why));
        };
        let about = std::fs::File::from(file.try_clone_to_owned()?).metadata()?;
        let (device, inode) = (about.dev(), about.ino());
        Ok(FileRange { device, inode, file_offset, bytes: region.bytes(), address: 0 })
    };
    memory.regions().iter().map(of).collect()
}

fn same_file(a: &FileRange, b: &FileRange) -> bool {
    (a.device, a.inode) == (b.device, b.inode)
}

/// The whole pages of our regions that are `bytes` from `offset` of a range of the balloon's.
fn places(regions: &[FileRange], range: FileRange, offset: u64, bytes: u64) -> impl Iterator<Item = RegionPages> {
    let page = PAGE_BYTES as u64;
    let begin = range.file_offset.saturating_add(offset.min(range.bytes));
    let end = begin.saturating_add(bytes.min(range.bytes - offset.min(range.bytes)));
    regions.iter().enumerate().filter(move |(_, region)| same_file(region, &range)).filter_map(
        move |(number, region)| {
            let from = begin.max(region.file_offset) - region.file_offset;
            let to = end.min(region.file_offset + region.bytes).saturating_sub(region.file_offset) / page;
            let first = from.div_ceil(page);
            (first < to).then(|| RegionPages { region: number, pages: PageRange::new(first, to - first) })
        },
    )
}

/// Words of the other side, fit for a message.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(1000).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const MIB: u64 = 1 << 20;

    fn range(inode: u64, file_offset: u64, bytes: u64) -> FileRange {
        FileRange { device: 1, inode, file_offset, bytes, address: 0 }
    }

    #[test]
    fn hints_are_found_by_their_files() {
        // Two regions of one file, one of another; the balloon sees the first file in two ranges of another cut.
        let regions = [range(5, 0, MIB), range(5, 2 * MIB, MIB), range(6, 0, MIB)];
        let find = |range: FileRange, offset, bytes| {
            let found = places(&regions, range, offset, bytes);
            found.map(|place| (place.region, place.pages.first.get(), place.pages.count.get())).collect::<Vec<_>>()
        };
        assert_eq!(find(range(5, 0, 4 * MIB), 0, 4 * MIB), [(0, 0, 256), (1, 0, 256)]);
        assert_eq!(find(range(5, MIB / 2, 4 * MIB), 0, MIB), [(0, 128, 128)]);
        assert_eq!(find(range(5, 0, 4 * MIB), 2 * MIB + 4096, 4096), [(1, 1, 1)]);
        assert_eq!(find(range(6, 0, MIB), 1, 3 * 4096), [(2, 1, 2)]);
        assert_eq!(find(range(7, 0, MIB), 0, MIB), []);
    }

    #[test]
    fn a_hint_never_goes_past_its_range() {
        let regions = [range(5, 0, 4 * MIB)];
        let find = |offset, bytes| {
            let found = places(&regions, range(5, MIB, MIB), offset, bytes);
            found.map(|place| (place.pages.first.get(), place.pages.count.get())).collect::<Vec<_>>()
        };
        assert_eq!(find(0, u64::MAX), [(256, 256)]);
        assert_eq!(find(4096, u64::MAX), [(257, 255)]);
        assert_eq!(find(MIB, 4096), []);
        assert_eq!(find(u64::MAX, u64::MAX), []);
    }
}
