//! A thread's way into a mapped-ram file: pages from buffers of its own, many on their way to the disk at a time.
//!
//! ```text
//!   room 0: filled ──► runs of pages ──► requests ─┐
//!   room 1: filled ──► runs of pages ──► requests ─┼──► queue ──► file, at block's place + page × 4096
//!   room 2: being filled                          ─┘
//! ```
//!
//! A buffer is filled again when the disk has all of it.
use std::{os::fd::OwnedFd, sync::Arc};

use transship_memory::{
    FileIo, FileQueue, GuestMemory, PAGE_BYTES, PageBuffer, PageBuffers, PageCount, PageNumber, PageRange,
};
use transship_wire::qemu::{MAX_PACKET_PAGES, xbzrle};

use super::file::MappedFile;
use crate::{Error, snapshot::file::target::DEPTH, stream::store::PageWriter};

/// Buffers of one thread at most, as far as it needs them. Each is as large as a packet's pages (512 KiB), so that
/// there are 4 MiB for each channel of those that a source opens.
const MOST_BUFFERS: usize = 8;

/// A queue of its own, and the buffers that what is in it comes from.
pub(super) struct MappedWriter {
    file: Arc<MappedFile>,
    /// By the number of the file, once something goes there.
    queues: Vec<Option<FileQueue>>,
    /// The last one is the room.
    buffers: Vec<Arc<PageBuffer>>,
    /// Where they come from.
    new: PageBuffers,
    /// What was stored is not known to be in the file.
    unfinished: bool,
    /// It goes through the page cache, one after the other.
    cached: bool,
}

impl MappedWriter {
    pub(super) fn new(file: Arc<MappedFile>) -> Result<Self, Error> {
        let queue = new_queue(&file, file.target.page_descriptor(0)?, DEPTH, file.io)?;
        file.note_io(queue.is_uring());
        let cached = !file.target.is_direct() && !queue.is_uring();
        let (buffers, new) = (Vec::new(), PageBuffers::default());
        Ok(Self { file, queues: vec![Some(queue)], buffers, new, unfinished: false, cached })
    }

    /// From now on what it writes can be read soon after: it stays in the page cache.
    fn keep_in_cache(&mut self) -> Result<(), Error> {
        if !self.cached {
            self.finish()?;
            self.queues.clear();
            self.cached = true;
        }
        Ok(())
    }

    /// The queue of a file.
    fn queue(&mut self, number: usize) -> Result<&mut FileQueue, Error> {
        if self.queues.len() <= number {
            self.queues.resize_with(number + 1, || None);
        }
        let (file, cached) = (&self.file, self.cached);
        let place = &mut self.queues[number];
        if place.is_none() {
            *place = Some(match cached {
                true => new_queue(file, file.target.cached_descriptor(number)?, 1, FileIo::Plain)?,
                false => new_queue(file, file.target.page_descriptor(number)?, DEPTH, file.io)?,
            });
        }
        Ok(place.as_mut().expect("made above where there was none"))
    }

    fn wait_for_one(&mut self) -> Result<(), Error> {
        let mut queues = self.queues.iter_mut().flatten();
        queues.try_for_each(FileQueue::wait_for_one).map_err(|error| self.file.target.failed_pages(error))
    }
}

fn new_queue(file: &MappedFile, descriptor: OwnedFd, depth: u16, how: FileIo) -> Result<FileQueue, Error> {
    let queue = FileQueue::new(GuestMemory::new(Vec::new()), descriptor, depth, how)
        .map_err(|source| Error::Io { what: "prepare to write pages".into(), source })?;
    Ok(queue.taking(&file.turns))
}

impl PageWriter for MappedWriter {
    fn room(&mut self, pages: usize) -> Result<&mut [u8], Error> {
        // One that nothing on its way to the disk is in: the room as it is, if that is one.
        let free = loop {
            if let Some(free) = self.buffers.iter().rposition(|buffer| Arc::strong_count(buffer) == 1) {
                break self.buffers.remove(free);
            }
            if self.buffers.len() < MOST_BUFFERS {
                break Arc::new(self.new.take(pages.max(MAX_PACKET_PAGES)));
            }
            self.wait_for_one()?;
        };
        let fits = if free.pages() < pages { Arc::new(self.new.take(pages)) } else { free };
        self.buffers.push(fits);
        let room = self.buffers.last_mut().and_then(Arc::get_mut).expect("seen above that nobody else has it");
        Ok(&mut room.bytes_mut()[..pages * PAGE_BYTES])
    }

    fn filled(&self) -> &[u8] {
        self.buffers.last().map_or(&[], |room| room.bytes())
    }

    fn store(&mut self, at: usize, block: usize, pages: PageRange) -> Result<(), Error> {
        if !std::mem::replace(&mut self.unfinished, true) {
            self.file.begin_unfinished();
        }
        let file = Arc::clone(&self.file);
        let room = Arc::clone(self.buffers.last().expect("pages are put into it before they are stored"));
        file.with(block, |place| {
            let queue = self.queue(place.at.file)?;
            let written = queue.write_shared(&room, at..at + pages.count.index(), place.byte_of(pages.first));
            written.map_err(|error| file.target.failed_pages(error))?;
            place.note_content(pages);
            Ok(())
        })
    }

    fn clear(&mut self, block: usize, pages: PageRange) -> Result<(), Error> {
        self.file.with(block, |place| place.note_zero(pages));
        Ok(())
    }

    fn patch(&mut self, block: usize, offset: u64, delta: &[u8]) -> Result<(), Error> {
        // A source that sends differences sends many, and each needs the page's previous contents.
        self.keep_in_cache()?;
        let (number, mut page) = (PageNumber::at(offset), [0; PAGE_BYTES]);
        self.file.read_page(block, number, &mut page)?;
        xbzrle::decode(delta, 0, &mut page).map_err(|error| Error::file(error.to_string()))?;
        self.room(1)?.copy_from_slice(&page);
        self.store(0, block, number.run(PageCount::ONE))
    }

    fn finish(&mut self) -> Result<(), Error> {
        let mut queues = self.queues.iter_mut().flatten();
        queues.try_for_each(FileQueue::finish).map_err(|error| self.file.target.failed_pages(error))?;
        if std::mem::take(&mut self.unfinished) {
            self.file.end_unfinished();
        }
        Ok(())
    }
}
