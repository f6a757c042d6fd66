//! What an encoder's thread makes of a window.
use std::sync::Arc;

use transship_memory::PAGE_BYTES;

use super::{
    Shared, Window,
    coder::{Coder, Work},
    gate::Ready,
    meters::Meters,
};

/// Of one thread.
pub(super) struct WindowEncoder {
    shared: Arc<Shared>,
    meters: Arc<Meters>,
    /// The pages of the last window, copied.
    pages: Vec<u8>,
    is_sample: bool,
}

impl WindowEncoder {
    pub(super) fn new(shared: &Arc<Shared>, meters: &Arc<Meters>) -> Self {
        Self { shared: Arc::clone(shared), meters: Arc::clone(meters), pages: Vec::new(), is_sample: false }
    }
}

impl Work<Window, Ready> for WindowEncoder {
    fn make(&mut self, mut window: Window, coder: &mut Coder) -> Ready {
        self.is_sample = window.chosen.sample;
        self.pages.clear();
        if self.shared.failure.is_over() {
            return Ready::Window { window, encoded: None }; // nobody sends it: a cancelled move need not wait for what is slow to encode
        }
        self.meters.look(&self.shared, &mut window);
        let present = window.wanted & !window.zero.unwrap_or(0);
        let memory = &self.shared.memory.regions()[window.region];
        // A window that the region does not have can't come from a scan of it; the channel would report it.
        let copied = present == 0 || memory.copy_out(window.pages(present), &mut self.pages).is_ok();
        debug_assert!(!copied || self.pages.len() == present.count_ones() as usize * PAGE_BYTES);
        let encoded = coder.encode(usize::from(window.chosen.encoding), &self.pages);
        Ready::Window { window, encoded }
    }

    fn sample(&self) -> Option<&[u8]> {
        self.is_sample.then_some(&self.pages)
    }
}
