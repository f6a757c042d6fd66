//! What travels on a data channel: a fixed header, then the pages that it announces.
use crate::Error;
use crate::guest::{MAX_REGION_BYTES, MAX_REGIONS, PAGE_BYTES};
use crate::reader::{Header, Reader};

/// Pages that one packet can speak of: a window of this many, aligned to as many.
pub const PAGES_PER_PACKET: u64 = 128;
/// Size of an encoded packet header in bytes.
pub const PACKET_BYTES: usize = 64;

const MAGIC: [u8; 4] = *b"TSPK";
const KIND_PAGES: u8 = 1;
const KIND_HOLE: u8 = 2;
const KIND_ROUND_END: u8 = 3;
const KIND_LENT: u8 = 4;
const KIND_SLOT: u8 = 5;
/// Of a `Lent`, where an encoding would be.
const LOOK_FOR_ZEROS: u8 = 1;
const ENCODING_RAW: u8 = 0;
/// No region has a page of this number or above, so a page's byte offset always fits in 56 bits.
const PAGES_END: u64 = MAX_REGION_BYTES / PAGE_BYTES as u64;

/// One header of a data channel.
///
/// A `Slot` (5) is a `Pages` without payload bytes whose pages are in a slot. The first of the reserved bytes has its
/// number.
///
/// | offset | bytes | field | `Pages` (1) | `Hole` (2) | `RoundEnd` (3) | `Lent` (4) |
/// | ---: | ---: | --- | --- | --- | --- | --- |
/// | 0 | 4 | magic | `TSPK` | `TSPK` | `TSPK` | `TSPK` |
/// | 4 | 1 | kind | 1 | 2 | 3 | 4 |
/// | 5 | 1 | encoding | 0 (raw), or a method | 0 | 0 | 1 if zero pages are looked for, else 0 |
/// | 6 | 2 | region | region | region | 0 | region |
/// | 8 | 4 | round | round | round | round | round |
/// | 12 | 4 | payload bytes that follow | 4096 for each present page; encoded: fewer, not 0 | 0 | 0 | 0 |
/// | 16 | 8 | first page | first, a multiple of 128 | first | 0 | first, a multiple of 128 |
/// | 24 | 16 | body | present mask | count u64, 8 zero bytes | packets u64, 8 zero bytes | wanted mask |
/// | 40 | 16 | body | zero mask | 16 zero bytes | 16 zero bytes | zero mask |
/// | 56 | 8 | reserved | zero | zero | zero | zero |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packet {
    /// Pages of the window that begins at page `first`. The payload holds the present pages in ascending order.
    /// The masks are disjoint and not both empty.
    Pages {
        /// The round whose scan found the pages.
        round: u32,
        /// Index of the region in the Hello.
        region: u16,
        /// A multiple of [`PAGES_PER_PACKET`].
        first: u64,
        /// Bit i: the page `first + i` travels in the payload.
        present: u128,
        /// Bit i: the page `first + i` reads as zero.
        zero: u128,
    },
    /// As `Pages`, with the present pages encoded together: on the wire a `Pages` whose encoding is not 0.
    Encoded {
        /// The round whose scan found the pages.
        round: u32,
        /// Index of the region in the Hello.
        region: u16,
        /// A multiple of [`PAGES_PER_PACKET`].
        first: u64,
        /// Bit i: the page `first + i` is in the payload. Not 0.
        present: u128,
        /// Bit i: the page `first + i` reads as zero.
        zero: u128,
        /// Number of the method; not 0. Whether there is such a method is the codec's to say.
        method: u8,
        /// Length of the payload: not 0, and less than the pages' own.
        bytes: u32,
    },
    /// `count` pages from `first` on (any alignment) read as zero.
    Hole {
        /// The round whose scan found the hole.
        round: u32,
        /// Index of the region in the Hello.
        region: u16,
        /// The first page of the hole.
        first: u64,
        /// How many pages; not 0.
        count: u64,
    },
    /// The last packet of a round on this channel.
    RoundEnd {
        /// The round that ends.
        round: u32,
        /// How many packets were sent before this one in this round on this channel.
        packets: u64,
    },
    /// As `Pages`, of a region that was lent: the destination reads the wanted pages by itself.
    Lent {
        /// The round whose scan found the pages.
        round: u32,
        /// Index of the region in the Hello.
        region: u16,
        /// A multiple of [`PAGES_PER_PACKET`].
        first: u64,
        /// Bit i: the page `first + i` is to be read.
        wanted: u128,
        /// Bit i: the page `first + i` reads as zero.
        zero: u128,
        /// Whether those that are read are looked at, and count as zero if they are.
        look: bool,
    },
    /// As `Pages`, where the present pages are in a slot of this channel. The destination tells when it is empty.
    Slot {
        /// The round whose scan found the pages.
        round: u32,
        /// Index of the region in the Hello.
        region: u16,
        /// A multiple of [`PAGES_PER_PACKET`].
        first: u64,
        /// Bit i: the page `first + i` is in the slot. Not 0.
        present: u128,
        /// Bit i: the page `first + i` reads as zero.
        zero: u128,
        /// Number of the slot.
        slot: u8,
    },
}

impl Packet {
    /// The header to send; [`Packet::payload_bytes`] of payload follow it.
    pub fn encode(&self) -> [u8; PACKET_BYTES] {
        let (kind, region, round, first, low, high) = match *self {
            Packet::Pages { round, region, first, present, zero } => (KIND_PAGES, region, round, first, present, zero),
            Packet::Encoded { round, region, first, present, zero, .. } => {
                (KIND_PAGES, region, round, first, present, zero)
            }
            Packet::Hole { round, region, first, count } => (KIND_HOLE, region, round, first, count.into(), 0),
            Packet::RoundEnd { round, packets } => (KIND_ROUND_END, 0, round, 0, packets.into(), 0),
            Packet::Lent { round, region, first, wanted, zero, .. } => (KIND_LENT, region, round, first, wanted, zero),
            Packet::Slot { round, region, first, present, zero, .. } => {
                (KIND_SLOT, region, round, first, present, zero)
            }
        };
        let slot = if let Packet::Slot { slot, .. } = *self { slot } else { 0 };
        let encoding = match *self {
            Packet::Encoded { method, .. } => method,
            Packet::Lent { look: true, .. } => LOOK_FOR_ZEROS,
            _ => ENCODING_RAW,
        };
        let mut header = Header::new();
        header.put(MAGIC).put([kind, encoding]).put(region.to_le_bytes()).put(round.to_le_bytes());
        header.put(self.payload_u32().to_le_bytes()).put(first.to_le_bytes());
        header.put(low.to_le_bytes()).put(high.to_le_bytes()).put([slot]).put([0; 7]);
        header.done()
    }

    /// # Errors
    /// Any field that breaks a rule of the layout. Whether the region and the pages exist is the engine's to check.
    pub fn decode(bytes: &[u8; PACKET_BYTES]) -> Result<Self, Error> {
        let mut reader = Reader::new(bytes, 0);
        let magic = reader.u32("packet magic")?;
        if magic != u32::from_le_bytes(MAGIC) {
            return Err(reader.invalid("packet magic", magic.into(), "no packet begins here"));
        }
        let kind = reader.u8("packet kind")?;
        if !matches!(kind, KIND_PAGES | KIND_HOLE | KIND_ROUND_END | KIND_LENT | KIND_SLOT) {
            return Err(reader.invalid("packet kind", kind.into(), "unknown"));
        }
        let encoding = reader.u8("packet encoding")?;
        if kind == KIND_LENT && encoding > LOOK_FOR_ZEROS {
            return Err(reader.invalid("packet encoding", encoding.into(), "reserved bits must be zero"));
        }
        if encoding != ENCODING_RAW && !matches!(kind, KIND_PAGES | KIND_LENT) {
            return Err(reader.invalid("packet encoding", encoding.into(), "only pages are encoded"));
        }
        let packet = match kind {
            KIND_PAGES => decode_pages(&mut reader, encoding),
            KIND_LENT => decode_lent(&mut reader, encoding == LOOK_FOR_ZEROS),
            KIND_SLOT => return decode_slot(reader),
            KIND_HOLE => decode_hole(&mut reader),
            _ => decode_round_end(&mut reader),
        }?;
        reader.reserved::<8>("packet reserved")?;
        reader.end("packet")?;
        Ok(packet)
    }

    /// Bytes of payload that follow this header: at most `PAGES_PER_PACKET * PAGE_BYTES`.
    pub fn payload_bytes(&self) -> usize {
        self.payload_u32() as usize
    }

    fn payload_u32(&self) -> u32 {
        match self {
            Packet::Pages { present, .. } => pages_payload(*present),
            Packet::Encoded { bytes, .. } => *bytes,
            Packet::Hole { .. } | Packet::RoundEnd { .. } | Packet::Lent { .. } | Packet::Slot { .. } => 0,
        }
    }
}

fn pages_payload(present: u128) -> u32 {
    present.count_ones() * PAGE_BYTES as u32
}

fn decode_pages(reader: &mut Reader<'_>, encoding: u8) -> Result<Packet, Error> {
    let region = decode_region(reader)?;
    let round = reader.u32("packet round")?;
    let payload = reader.u32("packet payload")?;
    let rule = if encoding == ENCODING_RAW {
        "not 4096 bytes for each present page"
    } else {
        "not between 0 and 4096 bytes for each present page"
    };
    let payload_error = reader.invalid("packet payload", payload.into(), rule);
    let first = decode_window(reader)?;
    let present = reader.u128("packet present mask")?;
    let fits = match encoding {
        ENCODING_RAW => payload == pages_payload(present),
        _ => 0 < payload && payload < pages_payload(present),
    };
    if !fits {
        return Err(payload_error);
    }
    let zero = decode_zero(reader, present)?;
    Ok(match encoding {
        ENCODING_RAW => Packet::Pages { round, region, first, present, zero },
        method => Packet::Encoded { round, region, first, present, zero, method, bytes: payload },
    })
}

fn decode_lent(reader: &mut Reader<'_>, look: bool) -> Result<Packet, Error> {
    let region = decode_region(reader)?;
    let round = reader.u32("packet round")?;
    reader.reserved::<4>("packet payload")?;
    let first = decode_window(reader)?;
    let wanted = reader.u128("packet wanted mask")?;
    let zero = decode_zero(reader, wanted)?;
    Ok(Packet::Lent { round, region, first, wanted, zero, look })
}

fn decode_hole(reader: &mut Reader<'_>) -> Result<Packet, Error> {
    let region = decode_region(reader)?;
    let round = reader.u32("packet round")?;
    reader.reserved::<4>("packet payload")?;
    let first = decode_first(reader, 1)?;
    let count = reader.u64("packet count")?;
    if count == 0 {
        return Err(reader.invalid("packet count", count, "the hole is empty"));
    }
    if count > PAGES_END - first {
        return Err(reader.invalid("packet count", count, "the hole ends beyond any region"));
    }
    reader.reserved::<24>("packet body")?;
    Ok(Packet::Hole { round, region, first, count })
}

fn decode_round_end(reader: &mut Reader<'_>) -> Result<Packet, Error> {
    reader.reserved::<2>("packet region")?;
    let round = reader.u32("packet round")?;
    reader.reserved::<4>("packet payload")?;
    reader.reserved::<8>("packet first page")?;
    let packets = reader.u64("packet packets")?;
    reader.reserved::<24>("packet body")?;
    Ok(Packet::RoundEnd { round, packets })
}

fn decode_slot(mut reader: Reader<'_>) -> Result<Packet, Error> {
    let region = decode_region(&mut reader)?;
    let round = reader.u32("packet round")?;
    reader.reserved::<4>("packet payload")?;
    let first = decode_window(&mut reader)?;
    let present = reader.u128("packet present mask")?;
    if present == 0 {
        return Err(reader.invalid("packet present mask", 0, "the slot has no page"));
    }
    let zero = decode_zero(&mut reader, present)?;
    let slot = reader.u8("packet slot")?;
    reader.reserved::<7>("packet reserved")?;
    reader.end("packet")?;
    Ok(Packet::Slot { round, region, first, present, zero, slot })
}

/// The first page of a window.
fn decode_window(reader: &mut Reader<'_>) -> Result<u64, Error> {
    let first = decode_first(reader, PAGES_PER_PACKET)?;
    if !first.is_multiple_of(PAGES_PER_PACKET) {
        return Err(reader.invalid("packet first page", first, "not a multiple of 128"));
    }
    Ok(first)
}

/// The zero mask of a packet with these pages.
fn decode_zero(reader: &mut Reader<'_>, present: u128) -> Result<u128, Error> {
    let zero = reader.u128("packet zero mask")?;
    if present & zero != 0 {
        return Err(reader.invalid("packet zero mask", zero as u64, "a page is both present and zero"));
    }
    // No page is both, so `^` would say the same.
    if present | zero == 0 {
        return Err(reader.invalid("packet zero mask", 0, "the packet names no page"));
    }
    Ok(zero)
}

fn decode_region(reader: &mut Reader<'_>) -> Result<u16, Error> {
    let region = reader.u16("packet region")?;
    if usize::from(region) >= MAX_REGIONS {
        return Err(reader.invalid("packet region", region.into(), "no guest has that many regions"));
    }
    Ok(region)
}

/// The first page, of at least `pages`.
fn decode_first(reader: &mut Reader<'_>, pages: u64) -> Result<u64, Error> {
    let first = reader.u64("packet first page")?;
    if first > PAGES_END - pages {
        return Err(reader.invalid("packet first page", first, "beyond any region"));
    }
    Ok(first)
}
