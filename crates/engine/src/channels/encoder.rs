//! What an encoder's thread makes of a window.
use std::sync::Arc;

use transship_memory::WindowBuffer;

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
    buffer: WindowBuffer,
    is_sample: bool,
}

impl WindowEncoder {
    pub(super) fn new(shared: &Arc<Shared>, meters: &Arc<Meters>) -> Self {
        Self {
            shared: Arc::clone(shared),
            meters: Arc::clone(meters),
            buffer: WindowBuffer::default(),
            is_sample: false,
        }
    }
}

impl Work<Window, Ready> for WindowEncoder {
    fn make(&mut self, mut window: Window, coder: &mut Coder) -> Ready {
        self.is_sample = false;
        if self.shared.failure.is_over() {
            // Nobody sends it: a cancelled move need not wait for what is slow to encode.
            return Ready::Window { window, encoded: None };
        }
        let Ok(read) = self.meters.read(&self.shared, &mut window, &mut self.buffer) else {
            // The channel can't read it either, and reports that.
            return Ready::Window { window, encoded: None };
        };
        self.is_sample = window.chosen.sample;
        let encoded = coder.encode(usize::from(window.chosen.encoding), read.into_bytes());
        Ready::Window { window, encoded }
    }

    fn sample(&self) -> Option<&[u8]> {
        self.is_sample.then(|| self.buffer.bytes())
    }
}
