//! LZ4: one block a packet, without a frame: the packet's header has both lengths. Between our own peers only.
use crate::{DecodeError, Decoder, Encoder, Fault, Method, Outcome, PACKET_BYTES_MAX};
use lz4_sys::{LZ4_compress_HC, LZ4_compress_fast, LZ4_compressBound, LZ4_decompress_safe};

pub(crate) struct Lz4Encoder {
    level: i32,
}

impl Lz4Encoder {
    pub(crate) fn new(level: i32) -> Self {
        Self { level }
    }
}

impl Encoder for Lz4Encoder {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Outcome {
        assert!(pages.len() <= PACKET_BYTES_MAX, "a packet of {} bytes", pages.len());
        out.clear();
        let length = length(pages);
        // SAFETY: the function only computes.
        let room = unsafe { LZ4_compressBound(length) };
        out.reserve(usize::try_from(room).expect("a packet's bound is positive"));
        let (from, to) = (pages.as_ptr().cast(), out.as_mut_ptr().cast());
        let written = if self.level == 1 {
            // SAFETY: `from` has `length` readable bytes, `to` has `room` writable ones (reserved above); they do not
            // overlap.
            unsafe { LZ4_compress_fast(from, to, length, room, 1) }
        } else {
            // SAFETY: as above.
            unsafe { LZ4_compress_HC(from, to, length, room, self.level) }
        };
        let written = usize::try_from(written).expect("LZ4 returns no negative length");
        if written == 0 && !pages.is_empty() {
            // With this room only LZ4_compress_HC's own allocation can fail.
            out.extend_from_slice(pages);
            return Outcome::Raw;
        }
        // SAFETY: LZ4 wrote `written` bytes, at most the `room` that was reserved.
        unsafe { out.set_len(written) };
        Outcome::of(pages.len(), out.len())
    }
}

pub(crate) struct Lz4Decoder;

impl Decoder for Lz4Decoder {
    fn decode(&mut self, encoded: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
        if encoded.len() > 2 * PACKET_BYTES_MAX || pages.len() > PACKET_BYTES_MAX {
            let why = "a packet has at most 1 MiB of pages";
            let fault = Fault::Field { field: "its length", value: encoded.len() as u64, why };
            return Err(DecodeError::new(Method::Lz4, encoded, pages, fault));
        }
        // SAFETY: pointers and lengths describe a readable and a writable slice that do not overlap; the function
        // stays within them whatever the bytes are, as its documentation promises.
        let made = unsafe {
            let (from, to) = (encoded.as_ptr().cast(), pages.as_mut_ptr().cast());
            LZ4_decompress_safe(from, to, length(encoded), length(pages))
        };
        let fault = match usize::try_from(made) {
            Ok(made) if made == pages.len() => return Ok(()),
            Ok(made) => Fault::Truncated { made },
            Err(_) => Fault::Corrupt { what: "an LZ4 block that makes no more than the pages" },
        };
        Err(DecodeError::new(Method::Lz4, encoded, pages, fault))
    }
}

fn length(bytes: &[u8]) -> i32 {
    i32::try_from(bytes.len()).expect("checked to be a few MiB at most")
}
