//! Pages between guest memory and files at fixed places, many at a time. They are written from the mapping, or from a
//! copy in buffers on huge pages, which is what a disk takes in the largest pieces. Read pages take the way that is
//! fastest into the memory's own file.
//!
//! A caller asks for runs of pages; runs that continue each other, in memory and in the file, become one request of the
//! kernel:
//!
//! ```text
//!   write(0, 8..12, at 32 KiB)  ┐                       ┌────────────────────────┐
//!   write(0, 12..14, at 48 KiB) ├──► pending: 8..14 ──► │ plain: one after the   │ ──► file
//!   write(0, 20..21, at 80 KiB) ┘      full, or not     │ other. uring: up to    │
//!                                      continued        │ `depth` in flight      │
//!                                                       └────────────────────────┘
//! ```

#[allow(unsafe_code)]
mod buffer;
#[allow(unsafe_code)]
mod page_cache;
#[allow(unsafe_code)]
mod plain;
mod request;
#[allow(unsafe_code)]
mod uring;
mod window;

use std::{
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use rustix::fs::OFlags;

use self::{
    buffer::Spare,
    request::{Body, Direction, Request, RequestFailure},
    uring::Ring,
};
pub use self::{
    buffer::{PageBuffer, PageBuffers},
    page_cache::{Turns, Writeback},
};
use crate::{ByteRange, Error, Flaw, GuestMemory, PageCount, PageRange, Region, WindowBuffer};

/// Pages of one request at most that has a buffer: 2 MiB, a huge page. With less the disk below is slower, by half at
/// 128 KiB.
pub const REQUEST_PAGES: PageCount = PageCount::within(2 << 20);
/// The same of one that is written from a mapping, where each page of 4 KiB is a piece: a disk takes few of these.
const MAPPED_PAGES: PageCount = PageCount::within(1 << 20);

/// How the kernel is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FileIo {
    /// io_uring where the file is open for direct I/O and the kernel lets us, else plain.
    ///
    /// Measured with examples/file_io.rs on one thread, two busy cores, ext4 on a virtual disk of 2 GB/s, in MB/s and
    /// ms of CPU time for 256 MiB:
    ///
    /// | | plain, writing | io_uring 16, writing | plain, reading | io_uring 16, reading |
    /// | --- | --- | --- | --- | --- |
    /// | direct, 1 MiB requests | 1030, 35 | 1880, 24 | 400, 133 | 510, 130 |
    /// | direct, 64 KiB requests | 470, 66 | 1290, 23 | 205, 129 | 380, 91 |
    /// | direct, single pages | 43, 780 | 80, 315 | 41, 770 | 107, 339 |
    /// | page cache, 1 MiB requests | 2920, 32 | 2320, 38 | 945, 122 | 655, 134 |
    /// | page cache, 64 KiB requests | 1850, 27 | 1540, 36 | 875, 60 | 865, 65 |
    /// | page cache, single pages | 725, 74 | 192, 226 | 765, 105 | 343, 144 |
    ///
    /// Past the page cache it is the disk's answer that a thread waits for, and many requests at once hide it. Into the
    /// page cache the kernel copies, which it hands to threads of its own with io_uring, and those wait for each other.
    /// 16 in flight are enough; 64 were no faster. Those figures are of requests of 1 MiB at most, on pages of 4 KiB.
    /// On huge pages, 2 MiB at a time, four in flight on each of four threads were enough.
    #[default]
    Auto,
    /// io_uring: many requests in flight from one thread.
    Uring,
    /// pwrite and pread, one after the other.
    Plain,
}

/// Requests of one thread on one file. Not shared: each thread makes its own. Dropping it waits for what is in flight:
/// the kernel uses the memory until then. What was asked for and not finished may then be in the file or not.
///
/// After an error nothing more is asked of the kernel, and every later call repeats that error.
pub struct FileQueue {
    /// None: plain.
    ring: Option<Ring>,
    memory: GuestMemory,
    file: OwnedFd,
    /// For plain requests.
    spare: Spare,
    /// Plain reading and writing through the page cache; none: past it.
    cached: Option<Cached>,
    /// Not given to the kernel yet, as the next call may continue it. Pages, never a buffer.
    pending: Option<Request>,
    /// For copied pages that are moved once more.
    moved: WindowBuffer,
    /// The first one.
    failed: Option<RequestFailure>,
}

impl FileQueue {
    /// A queue of `depth` requests in flight (1 to 1024) on a descriptor of the file; `memory` is kept until the last
    /// has ended.
    ///
    /// # Errors
    /// io_uring was asked for by name and the kernel does not allow it.
    pub fn new(memory: GuestMemory, file: OwnedFd, depth: u16, how: FileIo) -> io::Result<Self> {
        if !(1..=1024).contains(&depth) {
            let text = format!("a queue of {depth} requests is not possible; 1 to 1024 are");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let ring = match how {
            FileIo::Plain => None,
            FileIo::Uring => Some(Ring::new(memory.clone(), depth).map_err(no_uring)?),
            FileIo::Auto if is_direct(file.as_fd()) => Ring::new(memory.clone(), depth).ok(),
            FileIo::Auto => None,
        };
        let cached = (!is_direct(file.as_fd())).then(Cached::default);
        let (spare, moved) = (Spare::default(), WindowBuffer::default());
        Ok(Self { ring, memory, file, spare, cached, pending: None, moved, failed: None })
    }

    /// Others write to the same file, or read it, and have the same `turns`.
    #[must_use]
    pub fn taking(mut self, turns: &Turns) -> Self {
        if let Some(cached) = &mut self.cached {
            cached.turns = turns.clone();
        }
        self
    }

    /// Whether it is io_uring.
    pub fn is_uring(&self) -> bool {
        self.ring.is_some()
    }

    /// Asks to write the pages of a region from byte `offset` of the file on. Waits for the oldest request when all
    /// places are taken. The guest may write the pages meanwhile: what ends up in the file is then any mix of bytes,
    /// and a later round's business. Pages that are holes are made by this, as by any read.
    ///
    /// # Errors
    /// OutOfRange; or the error of this or an earlier request (short ones are gone on with, and interrupted ones
    /// repeated).
    pub fn write(&mut self, region: usize, pages: PageRange, offset: u64) -> Result<(), Error> {
        self.region(region)?.check(pages)?;
        self.ask(Direction::Write, region, pages, offset, None)
    }

    /// Asks to write bytes of our own, all of the buffer.
    ///
    /// # Errors
    /// As [`FileQueue::write`].
    pub fn write_buffer(&mut self, buffer: PageBuffer, offset: u64) -> Result<(), Error> {
        self.flush()?;
        self.start(Request::new(Direction::Write, Body::Buffer(buffer), offset))
    }

    /// Asks to write pages of a buffer of our own from byte `offset` of the file on. The buffer is held until that is
    /// done; the caller can write to it again when nothing else holds it ([`Arc::get_mut`]). What was asked for in this
    /// way before, for the same bytes of the file, is done first: the last one counts.
    ///
    /// # Errors
    /// As [`FileQueue::write`].
    ///
    /// # Panics
    /// The buffer does not have these pages.
    pub fn write_shared(&mut self, buffer: &Arc<PageBuffer>, pages: Range<usize>, offset: u64) -> Result<(), Error> {
        assert!(pages.start <= pages.end && pages.end <= buffer.pages(), "pages {pages:?} of {}", buffer.pages());
        self.flush()?;
        let request = Request::new(Direction::Write, Body::Shared(Arc::clone(buffer), pages), offset);
        if let Some(ring) = &mut self.ring
            && let Err(failure) = ring.wait_for_place(self.file.as_fd(), &request)
        {
            self.failed.get_or_insert(failure);
        }
        self.check_failed()?;
        self.start(request)
    }

    /// Waits until something that was asked for is done, if anything is not.
    ///
    /// # Errors
    /// As [`FileQueue::write`].
    pub fn wait_for_one(&mut self) -> Result<(), Error> {
        self.flush()?;
        if let Some(Err(failure)) = self.ring.as_mut().map(|ring| ring.wait_for_one(self.file.as_fd())) {
            self.failed.get_or_insert(failure);
        }
        self.check_failed()
    }

    /// Asks to read `pages` of a region from byte `offset` of the file on, into place. Whoever looks at them meanwhile
    /// may see parts of it.
    ///
    /// # Errors
    /// As [`FileQueue::write`]; a region mapped for reading; a file that ends too early.
    pub fn read(&mut self, region: usize, pages: PageRange, offset: u64) -> Result<(), Error> {
        let of = self.region(region)?;
        of.check_writable()?;
        of.check(pages)?;
        self.ask(Direction::Read, region, pages, offset, None)
    }

    /// Waits until all that was asked for is done.
    ///
    /// # Errors
    /// The first error of any of them.
    pub fn finish(&mut self) -> Result<(), Error> {
        let flushed = self.flush();
        if let Some(Err(failure)) = self.ring.as_mut().map(|ring| ring.finish(self.file.as_fd())) {
            self.failed.get_or_insert(failure);
        }
        flushed.and_then(|()| self.check_failed())
    }

    fn region(&self, region: usize) -> Result<&Region, Error> {
        self.memory
            .get(region)
            .ok_or_else(|| Error::unusable(&format!("number {region}"), Flaw::NoRegion, "there is no such region"))
    }

    /// Adds to the pending request what continues it, and cuts the rest into requests; the last one stays pending
    /// unless it is full. `copied`: what the pages hold, if they are not to be read again.
    fn ask(
        &mut self,
        direction: Direction,
        region: usize,
        pages: PageRange,
        offset: u64,
        mut copied: Option<&[u8]>,
    ) -> Result<(), Error> {
        self.check_failed()?;
        let is_mapped = direction == Direction::Write && copied.is_none();
        let most = if is_mapped { MAPPED_PAGES } else { REQUEST_PAGES };
        let (mut rest, mut at) = (pages, offset);
        while !rest.count.is_zero() {
            let next = Request::of_pages(direction, region, rest.first.run(PageCount::ZERO), at);
            if !self.pending.as_ref().is_some_and(|pending| pending.is_continued_by(&next, copied.is_some())) {
                self.flush()?;
                let copies = copied.is_some();
                self.pending = Some(if copies { next.through(self.spare().take()) } else { next });
            }
            let pending = self.pending.as_mut().expect("made above where there was none");
            let taken = rest.count.min(most.saturating_sub(pending.pages()));
            if let (Some(bytes), Some(room)) = (&mut copied, pending.room_behind(taken)) {
                room.copy_from_slice(bytes.split_off(..room.len()).expect("the bytes of these pages"));
            }
            pending.extend(taken);
            if pending.pages() == most {
                self.flush()?;
            }
            rest = (rest.first + taken).to(rest.end());
            at = at.saturating_add(taken.bytes());
        }
        Ok(())
    }

    /// Gives the pending request to the kernel.
    fn flush(&mut self) -> Result<(), Error> {
        self.check_failed()?;
        self.pending.take().map_or(Ok(()), |request| self.start(request))
    }

    fn start(&mut self, mut request: Request) -> Result<(), Error> {
        let file = self.file.as_fd();
        let started = request.check_place(&self.memory, file).and_then(|()| match &mut self.ring {
            Some(ring) => ring.start(file, request),
            None => {
                request.get_ready(&self.memory, file, &mut self.spare)?;
                let transferred = match &mut self.cached {
                    Some(cached) => cached.transfer(&self.memory, file, &mut request),
                    None => plain::transfer(&self.memory, file, &mut request, None),
                };
                self.spare.give(request.into_spare());
                transferred
            }
        });
        if let Err(failure) = started {
            self.failed.get_or_insert(failure);
        }
        self.check_failed()
    }

    /// Where buffers of requests come back to.
    fn spare(&mut self) -> &mut Spare {
        self.ring.as_mut().map_or(&mut self.spare, Ring::spare)
    }

    fn check_failed(&self) -> Result<(), Error> {
        self.failed.as_ref().map_or(Ok(()), |failure| Err(failure.error()))
    }
}

impl Drop for FileQueue {
    fn drop(&mut self) {
        if let Some(ring) = &mut self.ring {
            // Callers that want to know of errors call finish().
            let _ = ring.finish(self.file.as_fd());
        }
    }
}

/// What plain reading and writing through the page cache takes.
#[derive(Default)]
struct Cached {
    turns: Turns,
    writeback: Writeback,
}

impl Cached {
    fn transfer(
        &mut self,
        memory: &GuestMemory,
        file: BorrowedFd<'_>,
        request: &mut Request,
    ) -> Result<(), RequestFailure> {
        let offset = request.offset();
        plain::transfer(memory, file, request, request.takes_turns(memory).then_some(&self.turns))?;
        if request.direction() == Direction::Write {
            self.writeback.wrote(file, ByteRange { start: offset, end: request.offset() });
        }
        Ok(())
    }
}

/// Whether the file is open for direct I/O.
fn is_direct(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.contains(OFlags::DIRECT))
}

fn no_uring(error: io::Error) -> io::Error {
    let why = match error.raw_os_error() {
        Some(libc::EPERM) => "; the sysctl kernel.io_uring_disabled or a seccomp filter forbids it",
        Some(libc::ENOSYS) => "; the kernel has none, or a seccomp filter forbids it",
        _ => "",
    };
    io::Error::new(error.kind(), format!("io_uring can't be used here ({error}){why}; use plain file I/O"))
}
