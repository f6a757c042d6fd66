//! What travels on a multifd channel: a greeting, then packets (section 6).
use super::{Name, Step};
use crate::guest::MAX_REGION_BYTES;
use crate::preamble::MAX_CHANNELS;
use crate::reader::{Header, Reader};
use crate::{Error, PAGE_BYTES, PAGES_PER_PACKET};

/// Length of an encoded [`Greeting`] (section 6.1).
pub const GREETING_BYTES: usize = 64;
/// The most pages that one packet speaks of (section 6.2).
pub const MAX_PACKET_PAGES: usize = PAGES_PER_PACKET as usize;
/// Length of the header of a packet with pages, however many there are (section 6.2).
pub const PACKET_HEADER_BYTES: usize = 64 + NAME_BYTES + 8 * MAX_PACKET_PAGES;
/// The longest payload: what the buffers of stock receivers hold (section 6.2).
pub const MAX_PAYLOAD_BYTES: u32 = 1 << 20;

// Sections 6.1 and 6.2.
const MAGIC: u32 = 0x1122_3344;
const VERSION: u32 = 1;
const NAME_BYTES: usize = 256;
/// Length of the header of a packet with device state (section 6.2).
const DEVICE_HEADER_BYTES: usize = 4 + 4 + 4 + NAME_BYTES + 4 + 4;

// Flags (section 6.3).
const SYNC: u32 = 0x01;
const METHOD: u32 = 0x3e;
const DEVICE_STATE: u32 = 0x40;

/// The first bytes on a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Greeting {
    /// The source VM's UUID; zero if it has none. A destination compares it with its own.
    pub uuid: [u8; 16],
    /// Number of the channel, from 0 on.
    pub channel: u8,
}

impl Greeting {
    /// The bytes to send.
    pub fn encode(&self) -> [u8; GREETING_BYTES] {
        let mut header = Header::new();
        header.put(MAGIC.to_be_bytes()).put(VERSION.to_be_bytes()).put(self.uuid).put([self.channel]).put([0; 39]);
        header.done()
    }

    /// # Errors
    /// Another magic or version, a channel above 254, or reserved bytes that are not zero.
    pub fn decode(bytes: &[u8; GREETING_BYTES]) -> Result<Self, Error> {
        let mut reader = Reader::new(bytes, 0);
        reader.constant("greeting magic", MAGIC, "no multifd channel begins here")?;
        reader.constant("greeting version", VERSION, "only version 1 is known")?;
        let uuid = reader.array("greeting UUID")?;
        let channel = reader.u8("greeting channel")?;
        if u16::from(channel) >= MAX_CHANNELS {
            return Err(reader.invalid("greeting channel", channel.into(), "channel numbers end at 254"));
        }
        reader.reserved::<39>("greeting reserved")?;
        Ok(Greeting { uuid, channel })
    }
}

/// How the payload of a packet is compressed (section 6.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// The pages as they are.
    None,
    /// A piece of the channel's one zlib stream.
    Zlib,
    /// A piece of the channel's zstd stream.
    Zstd,
    /// Lengths, then a deflate stream for each page.
    Qpl,
    /// Lengths, then a zlib stream for each page.
    Uadk,
    /// Gzip members.
    Qatzip,
}

impl Method {
    const FLAGS: [(u32, Method); 6] = [
        (0x00, Method::None),
        (0x02, Method::Zlib),
        (0x04, Method::Zstd),
        (0x08, Method::Qpl),
        (0x10, Method::Uadk),
        (0x20, Method::Qatzip),
    ];

    fn from_flags(flags: u32) -> Option<Self> {
        Self::FLAGS.iter().find(|(value, _)| *value == flags & METHOD).map(|(_, method)| *method)
    }

    fn flags(self) -> u32 {
        Self::FLAGS.iter().find(|(_, method)| *method == self).map_or(0, |(value, _)| *value)
    }
}

/// The header of a packet; its payload follows.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "one is alive for each channel, and device state is rare")]
pub enum Packet {
    /// Pages, a barrier, or both.
    Pages(Pages),
    /// State of a device (QEMU 10.0 or newer).
    DeviceState(DeviceState),
}

/// A packet that speaks of pages of one block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pages {
    /// A barrier: what comes behind it on this channel waits for the other channels (section 6.4).
    pub sync: bool,
    /// How the payload is compressed. It says nothing in a packet without pages.
    pub method: Method,
    /// A running number; senders do not agree on what it counts.
    pub number: u64,
    /// The block that the pages are of. `None` if and only if there are none.
    block: Option<Name>,
    payload_bytes: u32,
    offsets: [u64; MAX_PACKET_PAGES],
    normal: usize,
    zero: usize,
}

/// A packet with state of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceState {
    /// Name of the device's section.
    pub name: Name,
    /// Which of several with this name.
    pub instance: u32,
    /// Length of the state that follows. Not 0.
    pub payload_bytes: u32,
}

impl Packet {
    /// Reads a header from `bytes`, which begin at `position` of the channel.
    ///
    /// Headers of all versions are taken: 7.2 and 8.2 leave old names, offsets and lengths in packets without pages,
    /// which are ignored.
    ///
    /// # Errors
    /// The first field that breaks a rule of section 6.2.
    pub fn read(bytes: &[u8], position: u64) -> Result<Step<Self>, Error> {
        let mut reader = Reader::at(bytes, position);
        let packet = read_flags(&mut reader).and_then(|flags| {
            if flags & DEVICE_STATE != 0 {
                DeviceState::read(&mut reader, flags).map(Packet::DeviceState)
            } else {
                Pages::read(&mut reader, flags).map(Packet::Pages)
            }
        });
        match packet {
            Ok(record) => Ok(Step::Done { record, used: bytes.len() - reader.rest().len() }),
            Err(Error::Truncated { missing, .. }) => Ok(Step::More { at_least: bytes.len() + missing }),
            Err(error) => Err(error),
        }
    }

    /// The bytes to send.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Packet::Pages(pages) => pages.encode().to_vec(),
            Packet::DeviceState(state) => state.encode().to_vec(),
        }
    }

    /// Bytes of payload that follow the header.
    pub fn payload_bytes(&self) -> u32 {
        match self {
            Packet::Pages(pages) => pages.payload_bytes,
            Packet::DeviceState(state) => state.payload_bytes,
        }
    }
}

fn read_flags(reader: &mut Reader<'_>) -> Result<u32, Error> {
    reader.constant("packet magic", MAGIC, "no multifd packet begins here")?;
    reader.constant("packet version", VERSION, "only version 1 is known")?;
    let flags = reader.be32("packet flags")?;
    match flags & !(SYNC | METHOD | DEVICE_STATE) {
        0 => Ok(flags),
        _ => Err(reader.invalid("packet flags", flags.into(), "unknown; this channel is of a newer or foreign QEMU")),
    }
}

impl Pages {
    /// A packet with pages of `block`: those at the offsets `normal` are in the payload in this order, those at the
    /// offsets `zero` are zero. [`Method::None`] needs no `payload_bytes`, they follow from the number of pages.
    ///
    /// Only QEMU 9.0 and newer takes zero pages here.
    ///
    /// # Panics
    /// When there are no pages or more than [`MAX_PACKET_PAGES`].
    pub fn new(block: Name, normal: &[u64], zero: &[u64], method: Method, payload_bytes: u32) -> Self {
        let count = normal.len() + zero.len();
        assert!((1..=MAX_PACKET_PAGES).contains(&count), "a packet of {count} pages");
        let mut offsets = [0; MAX_PACKET_PAGES];
        offsets[..normal.len()].copy_from_slice(normal);
        offsets[normal.len()..count].copy_from_slice(zero);
        let payload_bytes = match method {
            // Stock receivers insist: no length where there is no payload.
            _ if normal.is_empty() => 0,
            Method::None => raw_bytes(normal.len()),
            _ => payload_bytes,
        };
        let (normal, zero) = (normal.len(), zero.len());
        Pages { sync: false, method, number: 0, block: Some(block), payload_bytes, offsets, normal, zero }
    }

    /// A barrier.
    pub fn barrier() -> Self {
        Pages {
            sync: true,
            method: Method::None,
            number: 0,
            block: None,
            payload_bytes: 0,
            offsets: [0; MAX_PACKET_PAGES],
            normal: 0,
            zero: 0,
        }
    }

    /// The same with this running number.
    #[must_use]
    pub fn numbered(mut self, number: u64) -> Self {
        self.number = number;
        self
    }

    /// The block that the pages are of, if there are any.
    pub fn block(&self) -> Option<&Name> {
        self.block.as_ref()
    }

    /// Offsets in the block of the pages in the payload, in its order: multiples of 4096 below 2^56.
    pub fn normal(&self) -> &[u64] {
        &self.offsets[..self.normal]
    }

    /// Offsets in the block of pages that are zero. A stock destination doesn't write to them if it has not had the
    /// page before (section 6.6); one that knows nothing of its memory must.
    pub fn zero(&self) -> &[u64] {
        &self.offsets[self.normal..self.normal + self.zero]
    }

    /// Bytes of payload that follow the header: at most [`MAX_PAYLOAD_BYTES`], and 0 without normal pages.
    pub fn payload_bytes(&self) -> u32 {
        self.payload_bytes
    }

    /// The bytes to send, as QEMU 9.0 and newer sends them.
    pub fn encode(&self) -> [u8; PACKET_HEADER_BYTES] {
        let sync = if self.sync { SYNC } else { 0 };
        // Those who send a barrier alone clear the header for it.
        let capacity = if self.block.is_some() { MAX_PACKET_PAGES as u32 } else { 0 };
        let mut header = Header::new();
        header.put(MAGIC.to_be_bytes()).put(VERSION.to_be_bytes()).put((sync | self.method.flags()).to_be_bytes());
        header.put(capacity.to_be_bytes()).put((self.normal as u32).to_be_bytes());
        header.put(self.payload_bytes.to_be_bytes()).put(self.number.to_be_bytes());
        header.put((self.zero as u32).to_be_bytes()).put([0; 28]).put(padded(self.block.as_ref()));
        for offset in self.offsets {
            header.put(offset.to_be_bytes());
        }
        header.done()
    }

    fn read(reader: &mut Reader<'_>, flags: u32) -> Result<Self, Error> {
        let method = Method::from_flags(flags)
            .ok_or_else(|| reader.invalid("packet flags", flags.into(), "no compression method has these bits"))?;
        let capacity = reader.be32("packet capacity")?;
        if capacity as usize > MAX_PACKET_PAGES {
            return Err(reader.invalid("packet capacity", capacity.into(), "a packet has room for 128 pages"));
        }
        let normal = read_count(reader, "packet normal pages", capacity)?;
        let payload_bytes = read_payload_bytes(reader, normal, method)?;
        let number = reader.be64("packet number")?;
        let zero = read_count(reader, "packet zero pages", capacity - normal as u32)?;
        reader.reserved::<28>("packet reserved")?;
        let name = read_padded(reader, "packet block")?;
        let block = if normal + zero > 0 { Some(name.read()?) } else { None };
        let mut offsets = [0; MAX_PACKET_PAGES];
        for (index, place) in offsets.iter_mut().enumerate() {
            let offset = reader.be64("packet offset")?;
            // What is behind the pages is left over from another packet.
            if index < normal + zero {
                *place = check_offset(reader, offset)?;
            }
        }
        Ok(Pages { sync: flags & SYNC != 0, method, number, block, payload_bytes, offsets, normal, zero })
    }
}

fn raw_bytes(pages: usize) -> u32 {
    (pages * PAGE_BYTES) as u32
}

fn read_count(reader: &mut Reader<'_>, field: &'static str, most: u32) -> Result<usize, Error> {
    let count = reader.be32(field)?;
    if count > most {
        return Err(reader.invalid(field, count.into(), "more pages than the packet has room for"));
    }
    Ok(count as usize)
}

fn read_payload_bytes(reader: &mut Reader<'_>, normal: usize, method: Method) -> Result<u32, Error> {
    let bytes = reader.be32("packet payload")?;
    let why = match method {
        _ if normal == 0 => return Ok(0),
        Method::None if bytes == raw_bytes(normal) => return Ok(bytes),
        Method::None => "not 4096 bytes for each normal page",
        _ if (1..=MAX_PAYLOAD_BYTES).contains(&bytes) => return Ok(bytes),
        _ => "not between 1 byte and 1 MiB",
    };
    Err(reader.invalid("packet payload", bytes.into(), why))
}

fn check_offset(reader: &Reader<'_>, offset: u64) -> Result<u64, Error> {
    if offset.is_multiple_of(PAGE_BYTES as u64) && offset < MAX_REGION_BYTES {
        Ok(offset)
    } else {
        Err(reader.invalid("packet offset", offset, "not the place of a page"))
    }
}

impl DeviceState {
    fn read(reader: &mut Reader<'_>, flags: u32) -> Result<Self, Error> {
        if flags != DEVICE_STATE {
            return Err(reader.invalid(
                "packet flags",
                flags.into(),
                "device state comes without barrier and compression",
            ));
        }
        let name = read_padded(reader, "packet device")?.read()?;
        let instance = reader.be32("packet device instance")?;
        let payload_bytes = reader.be32("packet payload")?;
        if payload_bytes == 0 {
            return Err(reader.invalid("packet payload", 0, "device state is not empty"));
        }
        Ok(DeviceState { name, instance, payload_bytes })
    }

    fn encode(&self) -> [u8; DEVICE_HEADER_BYTES] {
        let mut header = Header::new();
        header.put(MAGIC.to_be_bytes()).put(VERSION.to_be_bytes()).put(DEVICE_STATE.to_be_bytes());
        header.put(padded(Some(&self.name))).put(self.instance.to_be_bytes()).put(self.payload_bytes.to_be_bytes());
        header.done()
    }
}

/// A name in a field of 256 bytes, which may be stale: it is looked at when it is needed.
struct Padded<'a> {
    field: &'static str,
    offset: usize,
    bytes: &'a [u8],
}

fn read_padded<'a>(reader: &mut Reader<'a>, field: &'static str) -> Result<Padded<'a>, Error> {
    let bytes = reader.bytes(field, NAME_BYTES)?;
    Ok(Padded { field, offset: reader.field_start(), bytes })
}

impl Padded<'_> {
    /// The name ends at the first zero; a receiver makes the last byte one.
    fn read(&self) -> Result<Name, Error> {
        let name = &self.bytes[..NAME_BYTES - 1];
        let name = name.split(|&byte| byte == 0).next().unwrap_or(name);
        Name::from_wire(self.field, self.offset, name)
    }
}

fn padded(name: Option<&Name>) -> [u8; NAME_BYTES] {
    let mut bytes = [0; NAME_BYTES];
    let name = name.map_or("", |name| name);
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    bytes
}
