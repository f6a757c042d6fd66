//! A plain stream made of another one's parts: pages are appended as they come, the last one counts.
use std::sync::{Arc, Mutex, MutexGuard};

use transship_memory::{PAGE_BYTES, PageRange};
use transship_wire::qemu::{Block, Configuration, Name};

use super::file::{appending::Appending, target::Target};
use crate::{
    Error, FileReport, Progress,
    stream::{
        recompose::Recomposer,
        store::{FileStore, PageWriter, PromptStore, PromptWriter, Store},
    },
};

/// Bytes that are written at once.
const PIECE: usize = 1 << 20;
/// Magic and version, which come last: without them it is no stream.
const HEAD_BYTES: usize = 8;

/// The file as far as it is written.
pub(crate) struct StreamStore {
    target: Target,
    out: Mutex<Out>,
}

struct Out {
    recomposer: Recomposer,
    to: Appending,
    /// The first bytes, once they are known.
    head: Option<Vec<u8>>,
    names: Vec<Name>,
    pages: u64,
}

impl StreamStore {
    /// A stream of a machine as `configuration` describes it. `ram_section`: the number that no section behind the
    /// memory has.
    pub(crate) fn begin(target: Target, configuration: &Configuration, ram_section: u32) -> Self {
        let at = target.offset();
        let recomposer = Recomposer::of_all(at, ram_section, configuration);
        let to = Appending::at(at);
        let out = Out { recomposer, to, head: None, names: Vec::new(), pages: 0 };
        Self { target, out: Mutex::new(out) }
    }

    fn out(&self) -> MutexGuard<'_, Out> {
        self.out.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Out {
    /// Writes if there is enough for a piece.
    fn flush_pieces(&mut self, target: &Target) -> Result<(), Error> {
        if self.recomposer.buffered() < PIECE { Ok(()) } else { self.flush(target) }
    }

    fn flush(&mut self, target: &Target) -> Result<(), Error> {
        let mut bytes = self.recomposer.take();
        if self.head.is_none() {
            let rest = bytes.split_off(HEAD_BYTES);
            self.to.go_on_at(self.to.place() + HEAD_BYTES as u64);
            self.head = Some(target.append_head(std::mem::replace(&mut bytes, rest))?);
        }
        target.expect(self.to.place() + bytes.len() as u64 - target.offset());
        target.append(&bytes, &mut self.to)
    }
}

impl Store for StreamStore {
    fn list(&self, blocks: &[Block]) -> Result<(), Error> {
        let mut out = self.out();
        // The reader of the list has seen that it can be added up.
        out.recomposer.start_again(blocks.iter().map(|block| block.used_bytes).sum());
        for block in blocks {
            out.recomposer.block(block);
            out.names.push(block.name.clone());
        }
        out.flush_pieces(&self.target)
    }

    fn writer(self: Arc<Self>) -> Result<Box<dyn PageWriter>, Error> {
        Ok(Box::new(PromptWriter::new(self)))
    }

    fn early(&self, bytes: &[u8]) -> Result<(), Error> {
        let mut out = self.out();
        out.recomposer.early(bytes);
        out.flush_pieces(&self.target)
    }

    fn switchover(&self) {
        self.out().recomposer.switchover();
    }

    fn last(&self) {
        self.out().recomposer.last();
    }
}

impl PromptStore for StreamStore {
    fn write(&self, block: usize, offset: u64, pages: &[u8]) -> Result<(), Error> {
        let out = &mut *self.out();
        for (page, at) in pages.as_chunks::<PAGE_BYTES>().0.iter().zip((offset..).step_by(PAGE_BYTES)) {
            out.recomposer.page(&out.names[block], at, page);
            out.pages += 1;
        }
        out.flush_pieces(&self.target)
    }

    fn clear(&self, block: usize, pages: PageRange) -> Result<(), Error> {
        let out = &mut *self.out();
        for page in pages.iter() {
            out.recomposer.zero_page(&out.names[block], page.offset());
            out.flush_pieces(&self.target)?;
        }
        Ok(())
    }

    /// What it refers to is among the records before.
    fn patch(&self, block: usize, offset: u64, delta: &[u8]) -> Result<(), Error> {
        let out = &mut *self.out();
        out.recomposer.xbzrle_page(&out.names[block], offset, delta);
        out.pages += 1;
        out.flush_pieces(&self.target)
    }
}

impl FileStore for StreamStore {
    fn complete(&self, tail: &[u8], file: &mut FileReport, progress: &Progress) -> Result<(), Error> {
        let mut out = self.out();
        out.recomposer.finish();
        out.flush(&self.target)?;
        self.target.expect(out.to.place() + tail.len() as u64 - self.target.offset());
        self.target.append(tail, &mut out.to)?;
        self.target.give_space_back(&mut out.to)?;
        file.pages_stored = out.pages;
        let head = out.head.take().unwrap_or_default();
        self.target.complete(&head, progress)?;
        (file.bytes, file.allocated) = self.target.size()?;
        Ok(())
    }
}
