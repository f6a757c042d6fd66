//! A plain stream, read into a store: from its first page to its end.
use std::sync::{Arc, atomic::Ordering::Relaxed};

use transship_memory::PAGE;

use super::{
    DirectIo,
    open::{LEFT_OUT, Stream, needs_source},
};
use crate::{
    Error, Misfit, Progress,
    stream::{
        ahead::Ahead,
        feed::{Feed, Flow},
        store::{Counts, Store},
        tail::check_tail,
        whence::{Whence, misfit},
    },
};

/// What is known of a stream when all of it was read.
pub(super) struct ReadStream {
    pub(super) counts: Counts,
    /// Bytes of all blocks.
    pub(super) guest_bytes: u64,
    /// What follows the memory, checked, and where it begins.
    pub(super) tail: Vec<u8>,
    pub(super) base: u64,
}

impl Stream {
    /// That all of the guest is in it, as far as its head says.
    ///
    /// # Errors
    /// What is not.
    pub(super) fn check_whole(&self) -> Result<(), Error> {
        if let Some(why) = &self.refusal {
            return Err(misfit(Misfit::NeedsAnswers, &self.origin.name, why));
        }
        if self.configuration.ignore_shared {
            return Err(misfit(Misfit::LeftOut, &self.origin.name, LEFT_OUT));
        }
        Ok(())
    }

    /// Makes up how the rest is read: by a thread of its own past the page cache, if that was wished and can be. Where
    /// the wish was only for what is possible, not if it is in the page cache.
    ///
    /// # Errors
    /// It was wished by all means; there can be no thread.
    pub(super) fn settle_direct_io(&mut self, wish: DirectIo) -> Result<(), Error> {
        if wish == DirectIo::Auto && self.origin.is_in_page_cache() {
            self.origin.direct = None;
        }
        let at = self.records.unread();
        self.origin.settle_direct_io(wish, at - at % PAGE)?;
        if let Some(direct) = &self.origin.direct {
            let ahead = Ahead::start(Arc::clone(direct), at);
            let failed = |source| Error::Io { what: format!("read {} ahead", self.origin.name), source };
            self.records.go_on_with(Box::new(ahead.map_err(failed)?));
        }
        Ok(())
    }

    /// Reads on to the end. `store` knows the blocks that were listed so far. `cancelled`: the error for it.
    ///
    /// # Errors
    /// Those of the file and of the store; cancelled.
    pub(super) fn read_into(
        mut self,
        store: Arc<dyn Store>,
        progress: &Progress,
        cancelled: Error,
    ) -> Result<ReadStream, Error> {
        let name = &self.origin.name;
        let whence = Whence::File(name.clone());
        let mut feed = Feed::new(&whence, store.as_ref(), Arc::clone(&store).writer()?, progress);
        loop {
            if progress.is_cancelled() {
                return Err(cancelled);
            }
            let position = self.records.reader().position();
            let flow = self.records.step(|record, bytes| feed.take(record, bytes, position))?;
            progress.wire_bytes.store(position, Relaxed);
            match flow {
                Flow::On | Flow::EndOfBody | Flow::Last => {}
                Flow::Flush => {
                    let what = "its pages went over separate multifd channels and are not in it";
                    return Err(misfit(Misfit::NeedsAnswers, name, what));
                }
                Flow::Command(command) => {
                    needs_source(&command).map_or(Ok(()), |why| Err(misfit(Misfit::NeedsAnswers, name, why)))?;
                }
                Flow::Tail => break,
            }
        }
        let counts = feed.counts;
        let guest_bytes = self.records.reader().blocks().iter().map(|block| block.used_bytes).sum();
        let base = self.records.reader().position();
        let tail = self.records.tail()?;
        check_tail(&whence, &tail, base)?;
        Ok(ReadStream { counts, guest_bytes, tail, base })
    }
}
