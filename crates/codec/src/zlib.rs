//! zlib: each packet a run of deflate blocks that ends with a sync flush and refers to nothing before it.
//!
//! All packets of a channel, one after another behind [`STREAM_HEADER`], form one zlib stream that never ends: what a
//! stock QEMU's multifd zlib expects. Between our own peers there is no header and no order.
use crate::deflate::{self, PacketDeflater};
use crate::{DecodeError, Decoder, Encoder, Fault, Method, Outcome};
use transship_isal::{Ending, Inflater, StoppedAt};

/// What comes once before the first packet of a channel to a stock QEMU: deflate with a window of 32 KiB, no
/// dictionary.
pub const STREAM_HEADER: [u8; 2] = [0x78, 0x01];

pub(crate) struct ZlibEncoder {
    deflater: PacketDeflater,
}

impl ZlibEncoder {
    pub(crate) fn new(level: i32) -> Self {
        Self { deflater: PacketDeflater::new(level) }
    }
}

impl Encoder for ZlibEncoder {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Outcome {
        out.clear();
        self.deflater.deflate(pages, out, Ending::SyncFlush);
        Outcome::of(pages.len(), out.len())
    }
}

/// Stored blocks.
pub(crate) struct ZlibStorer;

impl Encoder for ZlibStorer {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Outcome {
        out.clear();
        deflate::store(pages, out, Ending::SyncFlush);
        Outcome::Raw
    }
}

/// The end of every packet: an empty stored block, on a byte boundary.
const SYNC_FLUSH: [u8; 4] = [0, 0, 0xff, 0xff];

/// Packets of our encoders, each on its own.
pub(crate) struct ZlibDecoder {
    inflater: Inflater,
}

impl ZlibDecoder {
    pub(crate) fn new() -> Self {
        Self { inflater: Inflater::new() }
    }
}

impl Decoder for ZlibDecoder {
    fn decode(&mut self, encoded: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
        self.inflater.reset();
        deflate::inflate(&mut self.inflater, encoded, pages, StoppedAt::BetweenBlocks)
            // The blocks before the flush may end on a byte boundary too; then only the flush is missing.
            .and_then(
                |()| if encoded.ends_with(&SYNC_FLUSH) { Ok(()) } else { Err(Fault::Truncated { made: pages.len() }) },
            )
            .map_err(|fault| DecodeError::new(Method::Zlib, encoded, pages, fault))
    }
}

/// The packets of one channel of a stock QEMU: one stream, whose packets may refer to earlier ones.
pub(crate) struct ZlibStreamDecoder {
    inflater: Inflater,
    state: State,
}

enum State {
    BeforeHeader,
    Running,
    Broken,
}

impl ZlibStreamDecoder {
    pub(crate) fn new() -> Self {
        Self { inflater: Inflater::new(), state: State::BeforeHeader }
    }

    fn decode_next(&mut self, encoded: &[u8], pages: &mut [u8]) -> Result<(), Fault> {
        let blocks = match self.state {
            State::Broken => return Err(Fault::Broken),
            State::Running => encoded,
            State::BeforeHeader => check_header(encoded)?,
        };
        deflate::inflate(&mut self.inflater, blocks, pages, StoppedAt::BetweenBlocks)
    }
}

/// RFC 1950, 2.2. Returns what follows the header.
fn check_header(encoded: &[u8]) -> Result<&[u8], Fault> {
    let ([method, flags], rest) = encoded.split_first_chunk().ok_or(Fault::Truncated { made: 0 })?;
    let header = u16::from_be_bytes([*method, *flags]);
    if method & 0x0f != 8 || method >> 4 > 7 || header % 31 != 0 || flags & 0x20 != 0 {
        let why = "a zlib header is deflate, a window of at most 32 KiB, no dictionary, a multiple of 31";
        return Err(Fault::Field { field: "the stream's header", value: header.into(), why });
    }
    Ok(rest)
}

impl Decoder for ZlibStreamDecoder {
    fn decode(&mut self, encoded: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
        let result = self.decode_next(encoded, pages);
        self.state = if result.is_ok() { State::Running } else { State::Broken };
        result.map_err(|fault| DecodeError::new(Method::Zlib, encoded, pages, fault))
    }
}

/// Fills `page` from a zlib stream of its own, checksum and all: the form of QEMU's capability `compress`, before 9.1.
///
/// # Errors
/// It is none, or none of so many bytes.
pub fn inflate_page(encoded: &[u8], page: &mut [u8]) -> Result<(), DecodeError> {
    let mut inflater = flate2::Decompress::new(true);
    let result = inflater.decompress(encoded, page, flate2::FlushDecompress::Finish);
    let made = inflater.total_out() as usize;
    let fault = match result {
        Ok(flate2::Status::StreamEnd) if made < page.len() => Fault::Truncated { made },
        Ok(flate2::Status::StreamEnd) if (inflater.total_in() as usize) < encoded.len() => {
            Fault::Trailing { extra: encoded.len() - inflater.total_in() as usize }
        }
        Ok(flate2::Status::StreamEnd) => return Ok(()),
        Ok(_) if made < page.len() => Fault::Truncated { made },
        Ok(_) => Fault::TooLong,
        Err(_) => Fault::Corrupt { what: "a zlib stream" },
    };
    Err(DecodeError::new(Method::Zlib, encoded, page, fault))
}
