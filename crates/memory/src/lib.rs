//! Guest memory as a migration sees it: regions, the pages in them, which hold something, which were written; writes
//! and touches that wait for us; pages to files and back.
//!
//! All unsafe code about guest memory is here. A running guest, or the VMM, writes to these pages while we read them:
//! so no reference to guest memory ever exists, only raw pointers inside this crate, and everything that leaves it is
//! a copy, a mask or a count.
#![deny(unsafe_code)]

mod all_cores;
mod area;
mod byte_range;
#[allow(unsafe_code)]
mod cached;
#[allow(unsafe_code)]
mod claims;
#[allow(unsafe_code)]
mod clear;
#[allow(unsafe_code)]
mod copy;
mod count;
mod error;
#[allow(unsafe_code)]
mod fault;
mod file_io;
mod given_back;
mod holes;
mod huge_holes;
mod lent;
#[allow(unsafe_code)]
mod make;
#[allow(unsafe_code)]
mod mapping;
#[allow(unsafe_code)]
mod missing;
mod number;
#[allow(unsafe_code)]
mod pagemap;
mod pages;
mod private;
#[allow(unsafe_code)]
mod process;
mod protect;
mod reach;
mod read;
#[allow(unsafe_code)]
mod receive;
mod region;
mod room;
mod seek;
#[allow(unsafe_code)]
mod send;
#[allow(unsafe_code)]
mod shared;
#[allow(unsafe_code)]
mod slots;
mod streaks;
mod sweep;
mod sync_tracker;
mod tracker;
#[allow(unsafe_code)]
mod uffd;
mod waits;
mod window;
#[allow(unsafe_code)]
mod zero;

pub use area::Area;
pub use byte_range::ByteRange;
pub use cached::cached_pages;
pub use claims::Claims;
pub use clear::Keep;
pub use count::PageCount;
pub use error::{Error, Flaw};
pub use fault::Fault;
pub use file_io::{FileIo, FileQueue, PageBuffer, PageBuffers, REQUEST_PAGES, Turns, Writeback};
pub use given_back::Note;
pub use holes::{Freeing, Holes};
pub use lent::{Lent, LentFile};
pub use missing::Missing;
pub use number::PageNumber;
pub use pages::{PAGE, PAGE_BYTES, PageRange, PageSet, WINDOW_PAGES};
pub use process::Process;
pub use protect::Protection;
pub use read::{WindowBuffer, WindowRead};
pub use region::{Access, GuestMemory, InProcess, Region};
pub use slots::{LentSlots, make_slots};
pub use sync_tracker::SyncTracker;
pub use tracker::{Tracker, UffdTracker};
pub use waits::{LetWait, Waited, Waits, WriterPace};
pub use window::WindowPages;
