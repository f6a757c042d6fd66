//! What can go wrong with guest memory.

use std::io;

use crate::{PageCount, PageNumber};

/// What is wrong with memory, a file or an area that was named as guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Flaw {
    /// Its size or its place, which is not that of whole pages or that no file has.
    Shape,
    /// Its file is no regular one.
    NotRegular,
    /// Its file is shorter.
    TooShort,
    /// Its file is open for appending.
    Append,
    /// It is there for reading only.
    ReadOnly,
    /// It was promised to its VM and can't be given back.
    MustStay,
    /// The file below private memory would show, or lets nobody wait.
    Below,
    /// A part of a huge page was named.
    PartOfHugePage,
    /// Its file system has not as much room left.
    NoRoom,
    /// There is no such region.
    NoRegion,
    /// An area has pages that its region has not.
    Outside,
    /// Pages of a region are in no area.
    NotMapped,
    /// Another userfaultfd has it.
    Taken,
    /// This userfaultfd has it not, or a record is that of other memory.
    NotOurs,
    /// Only the text says it.
    Else,
}

/// An operation on guest memory that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system refused.
    #[error("can't {what}: {source}")]
    System {
        /// What was tried, and on what.
        what: String,
        /// The system's reason.
        source: io::Error,
    },
    /// Pages that the region does not have.
    #[error("region {region:?}: pages {first}..{end} were requested, but it has only {pages}")]
    OutOfRange {
        /// Name of the region.
        region: String,
        /// First page asked for.
        first: PageNumber,
        /// One past the last page asked for.
        end: PageNumber,
        /// Pages that the region has.
        pages: PageCount,
    },
    /// Something that can't be used as guest memory.
    #[error("region {region:?}: {why}")]
    Unusable {
        /// Name of the region.
        region: String,
        /// By which a caller tells it.
        flaw: Flaw,
        /// Why not, and what would do.
        why: String,
    },
    /// The page contents handed over are not as long as the pages they are for.
    #[error("region {region:?}: writing {pages} pages needs {expected} bytes, but {given} were given")]
    WrongLength {
        /// Name of the region.
        region: String,
        /// Pages that are to be written.
        pages: u32,
        /// Bytes that they have.
        expected: usize,
        /// Bytes that were handed over.
        given: usize,
    },
    /// A file that is read ends before what it should hold.
    #[error("can't {what}: the file has {size} bytes, but {needed} are needed; it was cut short, use another copy")]
    FileEnds {
        /// What was tried, and on what.
        what: String,
        /// Bytes that the file has.
        size: u64,
        /// Bytes that it would have to have.
        needed: u64,
    },
    /// Areas of the tracked process that can't be tracked as they were described.
    #[error("can't track region number {region}: {why}")]
    Untrackable {
        /// Index of the region.
        region: usize,
        /// By which a caller tells it.
        flaw: Flaw,
        /// Why not.
        why: String,
    },
    /// A tracked process is gone, or no longer maps the memory as it did: what was written is not known any more.
    #[error(
        "region number {region}: a process that has it has ended, or has unmapped it or mapped it anew ({source}); if \
         the guest runs on, start again"
    )]
    Gone {
        /// Index of the region.
        region: usize,
        /// What the kernel says.
        source: io::Error,
    },
    /// The kernel lacks something.
    #[error("the kernel can't {what}: {need}")]
    Kernel {
        /// What is needed of it.
        what: &'static str,
        /// What would do.
        need: &'static str,
    },
}

impl Error {
    pub(crate) fn system(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::System { what: what.into(), source: source.into() }
    }

    pub(crate) fn unusable(region: &str, flaw: Flaw, why: impl Into<String>) -> Self {
        Self::Unusable { region: region.to_owned(), flaw, why: why.into() }
    }

    /// What is wrong with memory that can't be used or tracked.
    pub fn flaw(&self) -> Option<Flaw> {
        match self {
            Self::Unusable { flaw, .. } | Self::Untrackable { flaw, .. } => Some(*flaw),
            _ => None,
        }
    }
}
