//! The section that says whether the guest ran (section 5.3).
use std::ops::Range;

use super::Tail;
use super::record::{EOF, FOOTER, FULL, VMDESC};
use crate::Error;
use crate::reader::Reader;

// Section 5.3.
const NAME: &str = "globalstate";
const VERSION: u32 = 1;
/// Length of the section's body: the state's length, its name, two flags, and what is not used.
const BODY_BYTES: usize = 4 + STATE_BYTES + 1 + 1 + 66;
/// The name of the state, filled up with zeros.
const STATE_BYTES: usize = 32;

/// The state in which a destination is to leave the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    /// It runs as soon as it is loaded.
    Running,
    /// It waits for `cont`.
    Paused,
    /// The same; it has never run.
    Prelaunch,
    /// The same; a disk has failed it.
    IoError,
}

impl RunState {
    /// QEMU's name for it.
    pub fn name(self) -> &'static str {
        match self {
            RunState::Running => "running",
            RunState::Paused => "paused",
            RunState::Prelaunch => "prelaunch",
            RunState::IoError => "io-error",
        }
    }

    /// As what a guest that has been stopped arrives, by the name of the state that it is in now.
    pub fn of_stopped(name: &str) -> Self {
        let known = [RunState::Prelaunch, RunState::IoError];
        known.into_iter().find(|state| state.name() == name).unwrap_or(RunState::Paused)
    }
}

/// The state that the guest had before the source stopped it, which decides what the destination does with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GlobalState {
    /// QEMU's name of it: `running`, `paused`, `prelaunch`, `suspended`, ….
    pub state: String,
    /// Where the section's body is in the tail.
    body: Range<usize>,
}

impl GlobalState {
    /// Length of the whole section, from its type byte to the end of its footer: the same in all versions.
    pub const SECTION_BYTES: usize = 1 + 4 + (1 + NAME.len()) + 4 + 4 + BODY_BYTES + 5;

    /// Looks for the section in a tail that begins at position `base` of the stream. `None`: it has none.
    ///
    /// If the trailer says where it is, it is taken from there; else it is recognised by what is around it, at the end
    /// of the sections.
    ///
    /// # Errors
    /// The section is there, and its body is not what it should be.
    pub fn find(tail: &[u8], base: u64) -> Result<Option<Self>, Error> {
        match Self::place(tail, base) {
            Some(body) => Self::read(tail, base, body).map(Some),
            None => Ok(None),
        }
    }

    /// Whether a destination runs the guest as soon as it has loaded it.
    pub fn runs(&self) -> bool {
        matches!(&*self.state, "running" | "suspended")
    }

    /// Where the section's body is in the tail that it was found in.
    pub fn body(&self) -> Range<usize> {
        self.body.clone()
    }

    /// Changes the state, here and in the tail that it was found in.
    ///
    /// # Panics
    /// When `tail` is shorter than that.
    pub fn patch(&mut self, tail: &mut [u8], state: RunState) {
        let name = state.name();
        let body = &mut tail[self.body.clone()];
        body[..4].copy_from_slice(&(name.len() as u32 + 1).to_be_bytes());
        body[4..4 + STATE_BYTES].fill(0);
        body[4..4 + name.len()].copy_from_slice(name.as_bytes());
        self.state = name.into();
    }

    fn place(tail: &[u8], base: u64) -> Option<Range<usize>> {
        match Tail::parse(tail, base) {
            Ok(parsed) if parsed.is_walked() => parsed.section(NAME).map(|section| section.body.clone()),
            // The tail is taken apart for its looks alone; a device that we can't follow must not keep anybody from
            // saving it.
            _ => recognise(tail),
        }
    }

    fn read(tail: &[u8], base: u64, body: Range<usize>) -> Result<Self, Error> {
        let mut reader = Reader::at(&tail[body.clone()], base.saturating_add(body.start as u64));
        if body.len() != BODY_BYTES {
            return Err(reader.named("section length", NAME, body.len() as u64, "it is 104 bytes in all versions"));
        }
        let count = reader.be32("state length")?;
        if !(2..=STATE_BYTES as u32).contains(&count) {
            return Err(reader.invalid("state length", count.into(), "not that of a name of 1 to 31 bytes and a zero"));
        }
        let state = reader.printable("state", count as usize - 1)?.to_owned();
        let rest = reader.bytes("state", STATE_BYTES + 1 - count as usize)?;
        match rest.iter().find(|&&byte| byte != 0) {
            Some(&byte) => Err(reader.invalid("state", byte.into(), "its name is longer than its length says")),
            None => Ok(GlobalState { state, body }),
        }
    }
}

/// The last thing that looks like the section: header and footer with the same number, and behind it the end of the
/// sections. A guest can put such bytes into the buffers of its devices, but not there.
fn recognise(tail: &[u8]) -> Option<Range<usize>> {
    let mut header = vec![NAME.len() as u8];
    header.extend(NAME.as_bytes());
    header.extend(0u32.to_be_bytes());
    header.extend(VERSION.to_be_bytes());
    let fits = |&at: &usize| {
        let (number, body) = (at.checked_sub(4)?, at + header.len());
        let end = tail.get(body + BODY_BYTES..)?;
        let closed = end.first() == Some(&FOOTER) && end.get(1..5) == Some(&tail[number..at]);
        let last = end.get(5) == Some(&EOF) && matches!(end.get(6), None | Some(&VMDESC));
        (tail[..number].last() == Some(&FULL) && closed && last).then_some(body..body + BODY_BYTES)
    };
    let places = (0..tail.len()).rev().filter(|&at| tail[at..].starts_with(&header));
    places.filter_map(|at| fits(&at)).next()
}
