//! zstd: one whole frame a packet, which a stock QEMU's streaming decoder reads as well as its own endless one.
use crate::{DecodeError, Decoder, Encoder, Fault, Method, Outcome};
use zstd_safe::{CCtx, CParameter, DCtx, DParameter, InBuffer, OutBuffer};

/// The largest window that a stock stream may ask for, as a power of two: what zstd's level 20, the highest of QEMU,
/// uses.
const STOCK_WINDOW_LOG_MAX: u32 = 25;

/// The window of the fast levels, as a power of two: half a packet, which the second cache of a core holds. Level 1
/// is 7 to 10 % faster by it, and level 2 15 %, at 0.999 and 0.997 of the ratio. On higher levels the ratio loses as
/// much as the speed gains.
const FAST_WINDOW_LOG: u32 = 18;
/// The highest level that searches in one hash table.
const FAST_LEVEL_MAX: i32 = 2;

pub(crate) struct ZstdEncoder {
    context: CCtx<'static>,
}

impl ZstdEncoder {
    pub(crate) fn new(level: i32) -> Self {
        let mut context = CCtx::create();
        context.set_parameter(CParameter::CompressionLevel(level)).expect("a Setting has a level that zstd has");
        if level <= FAST_LEVEL_MAX {
            context.set_parameter(CParameter::WindowLog(FAST_WINDOW_LOG)).expect("within zstd's bounds");
        }
        Self { context }
    }
}

impl Encoder for ZstdEncoder {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Outcome {
        out.clear();
        out.reserve(zstd_safe::compress_bound(pages.len()));
        self.context.compress2(out, pages).expect("the room is zstd's own bound, the input is complete");
        Outcome::of(pages.len(), out.len())
    }
}

/// Frames of raw blocks (RFC 8878, 3.1.1), which the library makes only of what it has tried to compress.
pub(crate) struct ZstdStorer;

impl ZstdStorer {
    /// The magic number; then a descriptor: a single segment, its size in 4 bytes.
    const FRAME: [u8; 5] = [0x28, 0xb5, 0x2f, 0xfd, 0b1010_0000];
    const BLOCK_BYTES_MAX: usize = 128 << 10;
}

impl Encoder for ZstdStorer {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Outcome {
        out.clear();
        out.extend(Self::FRAME);
        out.extend((pages.len() as u32).to_le_bytes()); // at most PACKET_BYTES_MAX
        let mut blocks = pages.chunks(Self::BLOCK_BYTES_MAX).peekable();
        while let Some(block) = blocks.next() {
            let last = u32::from(blocks.peek().is_none());
            // Type 0: raw.
            out.extend_from_slice(&(last | (block.len() as u32) << 3).to_le_bytes()[..3]);
            out.extend_from_slice(block);
        }
        Outcome::Raw
    }
}

/// Packets of our encoders: exactly one frame, decoded at once into place.
pub(crate) struct ZstdDecoder {
    context: DCtx<'static>,
}

impl ZstdDecoder {
    pub(crate) fn new() -> Self {
        Self { context: DCtx::create() }
    }

    fn decode_frame(&mut self, encoded: &[u8], pages: &mut [u8]) -> Result<(), Fault> {
        let frame = Fault::Corrupt { what: "a zstd frame" };
        // An incomplete frame and one of other bytes give the same answer here; the decoder's error would not be
        // better.
        let length = zstd_safe::find_frame_compressed_size(encoded).map_err(|_| frame)?;
        if length < encoded.len() {
            return Err(Fault::Trailing { extra: encoded.len() - length });
        }
        match zstd_safe::get_frame_content_size(encoded) {
            Ok(Some(size)) if size > pages.len() as u64 => return Err(Fault::TooLong),
            Ok(_) => {}
            Err(_) => return Err(frame),
        }
        let made = self.context.decompress(pages, encoded).map_err(|_| frame)?;
        if made < pages.len() { Err(Fault::Truncated { made }) } else { Ok(()) }
    }
}

impl Decoder for ZstdDecoder {
    fn decode(&mut self, encoded: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
        self.decode_frame(encoded, pages).map_err(|fault| DecodeError::new(Method::Zstd, encoded, pages, fault))
    }
}

/// The packets of one channel of a stock QEMU: one endless frame, flushed a packet, or a whole frame a packet.
pub(crate) struct ZstdStreamDecoder {
    context: DCtx<'static>,
    broken: bool,
}

impl ZstdStreamDecoder {
    pub(crate) fn new() -> Self {
        let mut context = DCtx::create();
        context.set_parameter(DParameter::WindowLogMax(STOCK_WINDOW_LOG_MAX)).expect("within zstd's bounds");
        Self { context, broken: false }
    }

    fn decode_next(&mut self, encoded: &[u8], pages: &mut [u8]) -> Result<(), Fault> {
        if self.broken {
            return Err(Fault::Broken);
        }
        let mut input = InBuffer::around(encoded);
        let made = self.run(&mut input, pages)?;
        if made < pages.len() {
            return Err(Fault::Truncated { made });
        }
        // The pages are full; what remains (a checksum, an empty block, bytes that zstd holds back) must make nothing.
        match self.run(&mut input, &mut [0])? {
            0 => Ok(()),
            _ => Err(Fault::TooLong),
        }
    }

    /// Decodes until the input is used up and nothing is held back, or the output is full.
    fn run(&mut self, input: &mut InBuffer<'_>, pages: &mut [u8]) -> Result<usize, Fault> {
        let size = pages.len();
        let mut output = OutBuffer::around(pages);
        while output.pos() < size {
            let before = (input.pos, output.pos());
            self.context
                .decompress_stream(&mut output, input)
                .map_err(|_| Fault::Corrupt { what: "a zstd stream, its window at most 32 MiB" })?;
            if (input.pos, output.pos()) == before {
                break;
            }
        }
        Ok(output.pos())
    }
}

impl Decoder for ZstdStreamDecoder {
    fn decode(&mut self, encoded: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
        let result = self.decode_next(encoded, pages);
        self.broken = result.is_err();
        result.map_err(|fault| DecodeError::new(Method::Zstd, encoded, pages, fault))
    }
}
