//! QATzip: gzip members with the extra field that Intel's library writes and needs.
//!
//! ```text
//!  0  1f 8b 08 04        gzip, deflate, an extra field follows
//!  4  mtime u32          0
//!  8  xfl u8, os u8      0, 255
//! 10  12 u16             length of the extra field
//! 12  "QZ" 8 u16         its one subfield
//! 16  size u32           bytes before deflate   } what plain gzip does not say in front, and what lets
//! 20  deflated u32       bytes of deflate data  } a device decode without looking
//! 24  deflate data, then crc u32 and size u32 as in every gzip member; all little-endian
//! ```
use crate::deflate::{self, PacketDeflater};
use crate::qat::{self, QatSession};
use crate::{DecodeError, Decoder, Encoder, Fault, Method, Outcome};
use transship_isal::{Ending, Inflater, StoppedAt, crc32};

const HEADER: usize = 24;
const FOOTER: usize = 8;
/// Bytes before deflate in one of our members: what the hardware's default buffer takes.
const MEMBER: usize = 64 * 1024;

pub(crate) struct QatzipEncoder {
    level: i32,
    route: Route,
    deflater: PacketDeflater,
}

/// What makes the members.
enum Route {
    /// Decided at the first packet, on the thread that encodes.
    Undecided,
    Device(QatSession),
    Software,
}

impl QatzipEncoder {
    pub(crate) fn new(level: i32) -> Self {
        Self { level, route: Route::Undecided, deflater: PacketDeflater::new(level) }
    }

    /// Whether the device has made `out` from `pages`. When it fails it is not asked again.
    fn by_device(&mut self, pages: &[u8], out: &mut Vec<u8>) -> bool {
        if matches!(self.route, Route::Undecided) {
            self.route = qat::session(self.level).map_or(Route::Software, Route::Device);
        }
        let Route::Device(session) = &mut self.route else { return false };
        match session.compress(pages, out) {
            Ok(()) => true,
            Err(code) => {
                qat::say_once_that_it_failed(code);
                self.route = Route::Software;
                false
            }
        }
    }
}

impl Encoder for QatzipEncoder {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Outcome {
        out.clear();
        if !self.by_device(pages, out) {
            out.clear();
            for part in pages.chunks(MEMBER) {
                write_member(&mut self.deflater, part, out);
            }
        }
        Outcome::of(pages.len(), out.len())
    }
}

fn write_member(deflater: &mut PacketDeflater, part: &[u8], out: &mut Vec<u8>) {
    let size = u32::try_from(part.len()).expect("at most MEMBER").to_le_bytes();
    out.extend_from_slice(&[0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 255, 12, 0, b'Q', b'Z', 8, 0]);
    out.extend_from_slice(&size);
    out.extend_from_slice(&[0; 4]);
    let begin = out.len();
    deflater.deflate(part, out, Ending::Final);
    let deflated = u32::try_from(out.len() - begin).expect("at most a stored MEMBER");
    out[begin - 4..begin].copy_from_slice(&deflated.to_le_bytes());
    out.extend_from_slice(&crc32(0, part).to_le_bytes());
    out.extend_from_slice(&size);
}

/// Members of any maker. Always in software: inflating is faster than the way to a device and back.
pub(crate) struct QatzipDecoder {
    inflater: Inflater,
}

impl QatzipDecoder {
    pub(crate) fn new() -> Self {
        Self { inflater: Inflater::new() }
    }

    fn decode_members(&mut self, encoded: &[u8], pages: &mut [u8]) -> Result<(), Fault> {
        let (mut rest, mut made) = (encoded, 0);
        while made < pages.len() {
            let member = Member::parse(rest).map_err(|fault| fault.after(made))?;
            let part = pages[made..].get_mut(..member.size).ok_or(Fault::TooLong)?;
            self.inflater.reset();
            deflate::inflate(&mut self.inflater, member.deflated, part, StoppedAt::AfterFinal)
                .map_err(|fault| fault.after(made))?;
            let found = crc32(0, part);
            if found != member.crc {
                return Err(Fault::Checksum { found, expected: member.crc });
            }
            made += member.size;
            rest = member.rest;
        }
        if rest.is_empty() { Ok(()) } else { Err(Fault::Trailing { extra: rest.len() }) }
    }
}

impl Decoder for QatzipDecoder {
    fn decode(&mut self, encoded: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
        self.decode_members(encoded, pages).map_err(|fault| DecodeError::new(Method::Qatzip, encoded, pages, fault))
    }
}

/// One member, its lengths checked against each other and the bytes that there are.
struct Member<'a> {
    /// Bytes of pages, not 0.
    size: usize,
    deflated: &'a [u8],
    crc: u32,
    rest: &'a [u8],
}

impl<'a> Member<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Self, Fault> {
        let short = Fault::Truncated { made: 0 };
        let (header, after) = bytes.split_first_chunk::<HEADER>().ok_or(short)?;
        let is_ours = header[..4] == [0x1f, 0x8b, 8, 4] && header[10..16] == [12, 0, b'Q', b'Z', 8, 0];
        if !is_ours {
            return Err(Fault::Corrupt { what: "a gzip header with the QZ field alone" });
        }
        let size = u32_at(header, 16);
        let (deflated, after) = after.split_at_checked(u32_at(header, 20) as usize).ok_or(short)?;
        let (footer, rest) = after.split_first_chunk::<FOOTER>().ok_or(short)?;
        let (crc, size_again) = (u32_at(footer, 0), u32_at(footer, 4));
        if size == 0 || size != size_again {
            let why = "a member is not empty, and its header and footer have the same size";
            return Err(Fault::Field { field: "a member's size", value: size_again.into(), why });
        }
        Ok(Self { size: size as usize, deflated, crc, rest })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

impl Fault {
    /// The same, for a member that comes after `before` bytes of pages.
    fn after(self, before: usize) -> Self {
        match self {
            Self::Truncated { made } => Self::Truncated { made: made + before },
            other => other,
        }
    }
}
