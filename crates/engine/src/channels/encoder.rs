//! The thread of one encoder.
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use transship_codec::{Encoder, Outcome};
use transship_memory::PAGE_BYTES;
use transship_ring::{Worker, mpmc};

use super::{
    Encoded, Shared, Window,
    auto::{self, Sample},
    gate::Ready,
    meters::Meters,
};
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
    /// For what is encoded to learn from, and not sent.
    pub(super) scratch: Vec<u8>,
    /// Its encoders have made something.
    pub(super) is_warm: bool,
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
                self.sample();
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

    /// Encodes the pages at hand in all ways, after they have gone, and keeps only what there is to learn from it.
    fn sample(&mut self) {
        let Self { encoders, raw, pages, scratch, is_warm, .. } = self;
        if !std::mem::replace(is_warm, *is_warm || !pages.is_empty()) {
            auto::warm_up(encoders.iter_mut().map(|(_, encoder)| encoder), pages, scratch);
        }
        let mut outcomes = Vec::with_capacity(encoders.len());
        for (index, (_, encoder)) in encoders.iter_mut().enumerate() {
            let (begin, mut laps) = (Instant::now(), cpu::Laps::begin());
            let is_raw = Some(index) == *raw || pages.is_empty() || encoder.encode(pages, scratch) == Outcome::Raw;
            let left = if is_raw { pages.len() } else { scratch.len() };
            let needs = match Some(index) == *raw {
                true => Duration::ZERO,
                false => auto::needs(begin.elapsed().as_secs_f64(), laps.next()),
            };
            outcomes.push((left as u64, needs));
        }
        let sample = Sample { pages: (pages.len() / PAGE_BYTES) as u64, outcomes };
        let _ = self.meters.samples.push(sample); // there is room for all that can be asked for at a time
    }
}
