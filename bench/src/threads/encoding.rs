//! What every thread of both models does.
use transship_codec::{Encoder, Setting};

/// An encoder, and the packets that it may be asked for.
pub(super) struct Encoding<'a> {
    encoder: Box<dyn Encoder>,
    packets: &'a [&'a [u8]],
    /// Copied first, as from a guest that writes meanwhile.
    copy: Vec<u8>,
}

impl<'a> Encoding<'a> {
    pub(super) fn new(setting: Setting, packets: &'a [&'a [u8]]) -> Self {
        Self { encoder: setting.encoder(), packets, copy: Vec::new() }
    }

    pub(super) fn encode(&mut self, packet: usize, out: &mut Vec<u8>) {
        self.copy.clear();
        self.copy.extend_from_slice(self.packets[packet % self.packets.len()]);
        // Whether it was worth it makes no difference to how long it took.
        let _ = self.encoder.encode(&self.copy, out);
    }
}
