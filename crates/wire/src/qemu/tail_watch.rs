//! Where a tail ends that comes piece by piece.
use super::Tail;
use super::record::{EOF, VMDESC};
use super::tail::TRAILER_HEADER_BYTES;

/// Tells when a tail is whole whose trailer says so. However many pieces it comes in, and whatever they are, each byte
/// is looked at once: a peer chooses both.
#[derive(Debug, Clone, Default)]
pub struct TailWatch {
    /// Before this place no beginning of a trailer need be looked for.
    seen: usize,
    /// The last beginning there. The text of a trailer has no zero byte, so none but the last one can be that of the
    /// trailer at the end.
    trailer: Option<usize>,
}

impl TailWatch {
    /// Nothing has come.
    pub fn new() -> Self {
        Self::default()
    }

    /// The tail's parts, if `tail` is all of it: if it ends with a trailer that describes all sections before. It
    /// begins with the bytes of the call before this one.
    pub fn whole(&mut self, tail: &[u8]) -> Option<Tail> {
        if !tail.ends_with(b"}") {
            return None;
        }
        let end = tail.len().saturating_sub(TRAILER_HEADER_BYTES);
        let found = (self.seen.max(1)..end).rev().find(|&at| begins(&tail[at - 1..]));
        self.seen = self.seen.max(end);
        self.trailer = found.or(self.trailer);
        Tail::up_to_trailer(tail, self.trailer?)
    }
}

/// Whether a trailer may begin behind the first of these bytes, which ends the sections.
fn begins(bytes: &[u8]) -> bool {
    bytes.starts_with(&[EOF, VMDESC]) && bytes.get(1 + TRAILER_HEADER_BYTES) == Some(&b'{')
}
