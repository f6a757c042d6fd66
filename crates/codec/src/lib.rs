//! Page codecs behind one trait pair, a file a method.
//!
//! An [`Encoder`] turns one packet (up to 128 pages, contiguous) into bytes that stand for themselves: they refer to
//! nothing before them, so any encoder may serve any channel. A [`Decoder`] takes such bytes and the buffer that they
//! must fill exactly. What a stock QEMU sends on a zlib or zstd channel is one stream across packets;
//! [`Method::stock_decoder`] reads that.
//!
//! Encoders must never be given memory that a guest can write meanwhile: copy first, a compressor may misbehave on
//! input that changes. Decoders believe nothing: whatever the bytes, they end with a full buffer or an error, and
//! allocate nothing that the bytes ask for, except zstd's window in stock streams, which has a bound.
//!
//! `unsafe` here is for foreign functions only: LZ4, and the QATzip library where there is one.
#![deny(unsafe_code)]
mod deflate;
mod error;
#[allow(unsafe_code)]
mod lz4;
#[allow(unsafe_code)]
mod qat;
mod qatzip;
mod setting;
mod zlib;
mod zstd;

pub use error::{DecodeError, Fault, SettingError};
pub use qat::{Backend, backend as qatzip_backend};
pub use setting::{Method, Setting};
pub use zlib::{STREAM_HEADER as ZLIB_STREAM_HEADER, inflate_page};

/// The most bytes that one packet may hold before encoding.
pub const PACKET_BYTES_MAX: usize = 1 << 20;

/// Whether encoding was worth it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Outcome {
    /// The encoded bytes are shorter by at least a thirty-second.
    Encoded,
    /// They are not: send the pages as they are. To a peer that can't take raw pages among encoded ones (a stock QEMU),
    /// send the encoded bytes all the same; they are valid and about as long as the pages.
    Raw,
}

impl Outcome {
    /// Saving less than 1/32 is not worth the other side's time to decode.
    fn of(pages: usize, encoded: usize) -> Self {
        if encoded < pages - pages / 32 { Self::Encoded } else { Self::Raw }
    }
}

/// Makes packets shorter. One thread holds it; nothing carries over from packet to packet.
pub trait Encoder: Send {
    /// Replaces what is in `out` by `pages`, encoded. `pages` must not change meanwhile and holds at most
    /// [`PACKET_BYTES_MAX`] bytes.
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Outcome;
}

/// Gives pages back.
pub trait Decoder: Send {
    /// Fills `pages` from `encoded`, which must hold just that. After an error `pages` holds anything.
    ///
    /// # Errors
    /// Bytes that are no packet of this method, too few, too many, or that make another number of bytes.
    fn decode(&mut self, encoded: &[u8], pages: &mut [u8]) -> Result<(), DecodeError>;
}

impl Setting {
    /// An encoder of this method and level. [`Method::None`] has one too: it always says [`Outcome::Raw`].
    #[must_use]
    pub fn encoder(&self) -> Box<dyn Encoder> {
        match self.method() {
            Method::None => Box::new(Plain),
            Method::Zlib => Box::new(zlib::ZlibEncoder::new(self.level())),
            Method::Zstd => Box::new(zstd::ZstdEncoder::new(self.level())),
            Method::Qatzip => Box::new(qatzip::QatzipEncoder::new(self.level())),
            Method::Lz4 => Box::new(lz4::Lz4Encoder::new(self.level())),
        }
    }
}

impl Method {
    /// A decoder for packets of our own encoders, in any order.
    #[must_use]
    pub fn decoder(self) -> Box<dyn Decoder> {
        match self {
            Self::None => Box::new(Plain),
            Self::Zlib => Box::new(zlib::ZlibDecoder::new()),
            Self::Zstd => Box::new(zstd::ZstdDecoder::new()),
            Self::Qatzip => Box::new(qatzip::QatzipDecoder::new()),
            Self::Lz4 => Box::new(lz4::Lz4Decoder),
        }
    }

    /// An encoder that makes nothing shorter, for pages that are to go as they are where only this method is
    /// understood: it costs hardly more than a copy. For the methods of a stock QEMU's channels; [`Method::None`] needs
    /// none.
    #[must_use]
    pub fn storing_encoder(self) -> Option<Box<dyn Encoder>> {
        match self {
            Self::Zlib => Some(Box::new(zlib::ZlibStorer)),
            Self::Zstd => Some(Box::new(zstd::ZstdStorer)),
            Self::None | Self::Qatzip | Self::Lz4 => None,
        }
    }

    /// A decoder for one channel of a stock QEMU: its packets, all of them, in order. It also reads what our encoders
    /// make for such a channel. None for LZ4, which stock QEMU does not have. After an error every further packet is
    /// an error.
    #[must_use]
    pub fn stock_decoder(self) -> Option<Box<dyn Decoder>> {
        match self {
            Self::None => Some(Box::new(Plain)),
            Self::Zlib => Some(Box::new(zlib::ZlibStreamDecoder::new())),
            Self::Zstd => Some(Box::new(zstd::ZstdStreamDecoder::new())),
            Self::Qatzip => Some(Box::new(qatzip::QatzipDecoder::new())),
            Self::Lz4 => None,
        }
    }
}

/// Pages as they are.
struct Plain;

impl Encoder for Plain {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Outcome {
        out.clear();
        out.extend_from_slice(pages);
        Outcome::Raw
    }
}

impl Decoder for Plain {
    fn decode(&mut self, encoded: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
        let fault = match encoded.len().cmp(&pages.len()) {
            std::cmp::Ordering::Less => Fault::Truncated { made: encoded.len() },
            std::cmp::Ordering::Greater => Fault::TooLong,
            std::cmp::Ordering::Equal => {
                pages.copy_from_slice(encoded);
                return Ok(());
            }
        };
        Err(DecodeError::new(Method::None, encoded, pages, fault))
    }
}
