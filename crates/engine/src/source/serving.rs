//! Goes on for a move that has died after its guest was handed over, and before all pages were there. It needs nothing
//! but the files of the guest's memory: what the destination lacks, that says.
use std::os::fd::{BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};
use transship_memory::{Access, ByteRange, GuestMemory, PageCount, Region};
use transship_secure::Caller;
use transship_wire::SessionId;

use super::{line::Base, post_copy::serve};
use crate::{Error, MoveOptions, MoveTerms, Progress, Report, Uri};

/// The number of a stand-in's first line: above all of the process that has died.
pub(super) const FIRST_LINE: u32 = 1 << 24;

/// What a stand-in is told, beside the files: those of the guest's regions, in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Serving {
    /// The receiver's address.
    pub to: String,
    /// The number of the session.
    pub session: [u8; 16],
    /// Push connections of a supply line.
    pub channels: u8,
    /// The guest ran when it was stopped.
    pub ran: bool,
    /// Most bytes a second.
    pub bandwidth: Option<u64>,
    /// By region: its name, where it begins in its file, and its length.
    pub regions: Vec<(String, u64, u64)>,
}

impl Serving {
    /// None: the memory is not in files that outlive this process's view of it.
    pub(super) fn of<'a>(base: &'a Base<'_>, ran: bool) -> Option<(Self, Vec<BorrowedFd<'a>>)> {
        let Base { to, options, session, memory, .. } = base;
        let (mut regions, mut files) = (Vec::new(), Vec::new());
        for region in memory.regions() {
            let (file, offset) = region.shared_file()?;
            regions.push((region.name().to_owned(), offset, region.bytes()));
            files.push(file);
        }
        let (channels, bandwidth) = (options.channels, options.terms.bandwidth);
        Some((Self { to: to.to_string(), session: session.0, channels, ran, bandwidth, regions }, files))
    }

    /// Takes over from a move that has ended, with all its threads: dials the receiver, and serves until that has all
    /// pages. `caller`: by whom connections are encrypted.
    ///
    /// # Errors
    /// The memory can't be mapped; the receiver has ended the session.
    pub fn run(&self, files: Vec<OwnedFd>, caller: Option<Caller>) -> Result<(), Error> {
        let to: Uri = self.to.parse().map_err(|_| Error::Bug("the stand-in got no address"))?;
        let map = |((name, offset, bytes), file): (&(String, u64, u64), OwnedFd)| {
            Region::map(name, file, ByteRange::sized(*offset, *bytes), Access::Read)
        };
        let regions = self.regions.iter().zip(files).map(map).collect::<Result<_, _>>()?;
        let Self { channels, ran, bandwidth, .. } = *self;
        let terms = MoveTerms { bandwidth, caller, ..MoveTerms::default() };
        let options = MoveOptions { channels, terms, ..MoveOptions::default() };
        let progress = Progress::new();
        progress.settle();
        let (session, memory) = (SessionId(self.session), GuestMemory::new(regions));
        let base = Base { to: &to, options: &options, session, memory, progress, carries: None };
        serve((&base, ran), &|| None, (None, FIRST_LINE), PageCount::ZERO, &mut Report::default()).map(drop)
    }
}
