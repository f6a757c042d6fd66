//! The thread of one encoder.
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Instant,
};

use transship_codec::{Encoder, Outcome};
use transship_memory::PAGE_BYTES;
use transship_ring::{Worker, mpmc};

use super::{Encoded, Shared, Window, auto::Sampler, gate::Ready, meters::Meters};
use crate::cpu;

/// Encodes what comes, until there is no more.
pub(super) struct EncoderThread {
    pub(super) worker: Worker<Window, Ready>,
    /// By the number of the encoding: its method's number on the wire, and what makes it.
    pub(super) encoders: Vec<(u8, Box<dyn Encoder>)>,
    /// The encoding that leaves pages as they are.
    pub(super) raw: Option<usize>,
    pub(super) may_be_raw: bool,
    pub(super) shared: Arc<Shared>,
    pub(super) meters: Arc<Meters>,
    pub(super) spare: Arc<mpmc::Ring<Vec<u8>>>,
    /// The pages of a packet, copied.
    pub(super) pages: Vec<u8>,
    pub(super) sampler: Sampler,
}

impl EncoderThread {
    pub(super) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let mut laps = cpu::Laps::begin();
        while let Some(window) = self.worker.next_job() {
            let (begin, sample) = (Instant::now(), window.sample);
            let ready = self.handle(window);
            self.meters.encoded(begin.elapsed());
            if self.worker.deliver(ready).is_err() {
                return; // nobody takes any more
            }
            if sample {
                // The pages at hand, after they have gone.
                let sample = self.sampler.take(&mut self.encoders, self.raw, &self.pages);
                let _ = self.meters.samples.push(sample); // there is room for all that can be asked for at a time
            }
            shared.progress.cpu.encoders.add(laps.next());
        }
    }

    fn handle(&mut self, mut window: Window) -> Ready {
        self.pages.clear();
        if self.shared.failure.is_over() {
            return Ready::Window { window, encoded: None }; // nobody sends it: a cancelled move need not wait for what is slow to encode
        }
        self.meters.look(&self.shared, &mut window);
        let present = window.wanted & !window.zero.unwrap_or(0);
        let memory = &self.shared.memory.regions()[window.region];
        // A window that the region does not have can't come from a scan of it; the channel would report it.
        let copied = present == 0 || memory.copy_out(window.first, present, &mut self.pages).is_ok();
        debug_assert!(!copied || self.pages.len() == present.count_ones() as usize * PAGE_BYTES);
        let encoding = usize::from(window.encoding);
        let encoded = if self.pages.is_empty() || Some(encoding) == self.raw { None } else { self.encode(encoding) };
        Ready::Window { window, encoded }
    }

    fn encode(&mut self, encoding: usize) -> Option<Encoded> {
        let mut bytes = self.spare.pop().unwrap_or_default();
        let (method, encoder) = &mut self.encoders[encoding];
        let outcome = encoder.encode(&self.pages, &mut bytes);
        let stays_raw = outcome == Outcome::Raw && self.may_be_raw;
        let made = if stays_raw { self.pages.len() } else { bytes.len() };
        let tally = &self.shared.progress.encoding;
        tally.bytes_in.fetch_add(self.pages.len() as u64, Relaxed);
        tally.bytes_out.fetch_add(made as u64, Relaxed);
        if stays_raw {
            let _ = self.spare.push(bytes); // full: one buffer less to keep
            return None;
        }
        Some(Encoded { method: *method, bytes })
    }
}
