//! What follows the memory: device sections, the end of the sections, and the trailer that describes them (section 5).
use std::ops::Range;

use super::Name;
use super::record::{EOF, FOOTER, FULL, VMDESC};
use super::vmdesc::{Description, Device};
use crate::Error;
use crate::reader::Reader;

/// How a trailer begins: type byte, length.
pub(super) const TRAILER_HEADER_BYTES: usize = 1 + 4;
/// How many places that look like a trailer are looked at closer: each may cost a look at all that follows it.
const TRAILERS_TRIED: usize = 16;

/// The sections behind the memory, from [`Record::Tail`](super::Record::Tail) on.
///
/// Sections do not carry their lengths. The trailer says what each is made of, so with it they can be told apart;
/// without it (a QEMU can be told to leave it out, and after postcopy there is none) nothing of a section but the first
/// one's name is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tail {
    /// The device sections in their order. Empty when there is no trailer.
    pub sections: Vec<DeviceSection>,
    /// The place of the trailer's JSON text in the bytes of the tail.
    pub vmdesc: Option<Range<usize>>,
    /// Where the tail ends in these bytes. QEMU takes no notice of what is behind, as on a block device.
    pub end: usize,
}

/// The state of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceSection {
    /// The section's number.
    pub section: u32,
    /// The device's name.
    pub name: Name,
    /// Which of several with this name.
    pub instance: u32,
    /// Version of its layout.
    pub version: u32,
    /// Where it begins: an absolute position.
    pub offset: u64,
    /// Its state, in the bytes of the tail. Only the device knows what it means.
    pub body: Range<usize>,
}

impl Tail {
    /// Takes a tail apart: `bytes`, all there are from position `base` of the stream on.
    ///
    /// The tail is QEMU's own, and made for QEMU. To move or keep it there is no need to take it apart, and what this
    /// function does not understand may still be right: an unusual device could describe itself in a way that is not
    /// known here.
    ///
    /// # Errors
    /// A trailer that does not fit the sections, or none although the tail does not look like one without.
    pub fn parse(bytes: &[u8], base: u64) -> Result<Self, Error> {
        let mut first_error = None;
        for (description, json) in trailers(bytes) {
            match Self::walk(bytes, base, &description, &json) {
                Ok(sections) => return Ok(Tail { sections, end: json.end, vmdesc: Some(json) }),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        first_error.map_or_else(|| Self::parse_opaque(bytes, base), Err)
    }

    /// The same for a tail whose trailer begins at `start` and is the last thing there is, if it describes the
    /// sections.
    pub(super) fn up_to_trailer(bytes: &[u8], start: usize) -> Option<Self> {
        let (text, json) = trailer(bytes, start).filter(|(_, json)| json.end == bytes.len())?;
        let sections = Self::walk(bytes, 0, &described(text)?, &json).ok()?;
        Some(Tail { sections, end: json.end, vmdesc: Some(json) })
    }

    fn walk(
        bytes: &[u8],
        base: u64,
        description: &Description,
        json: &Range<usize>,
    ) -> Result<Vec<DeviceSection>, Error> {
        let eof = json.start - TRAILER_HEADER_BYTES - 1;
        let mut walk = Walk { reader: Reader::at(&bytes[..eof], base), base, sections: Vec::new() };
        let mut devices = description.devices.iter();
        while !walk.reader.rest().is_empty() {
            walk.section(&mut devices, eof)?;
        }
        Ok(walk.sections)
    }

    /// A tail without trailer: sections up to an EOF that nobody can find, or the EOF alone.
    fn parse_opaque(bytes: &[u8], base: u64) -> Result<Self, Error> {
        let mut reader = Reader::at(bytes, base);
        match reader.u8("record type")? {
            EOF => return Ok(Tail { sections: Vec::new(), vmdesc: None, end: 1 }),
            FULL => {}
            other => return Err(reader.invalid("record type", other.into(), "neither a device section nor the end")),
        }
        reader.be32("section number")?;
        reader.name("section name")?;
        reader.be64("section instance and version")?;
        match bytes.last() {
            Some(&EOF) => Ok(Tail { sections: Vec::new(), vmdesc: None, end: bytes.len() }),
            _ => {
                let missing = 1;
                let offset = Reader::at(&[], base.saturating_add(bytes.len() as u64)).offset();
                Err(Error::Truncated { field: "end of the device sections", offset, missing })
            }
        }
    }

    /// Whether the sections could be told apart.
    pub fn is_walked(&self) -> bool {
        self.vmdesc.is_some()
    }

    /// The first section of this name.
    pub fn section(&self, name: &str) -> Option<&DeviceSection> {
        self.sections.iter().find(|section| &*section.name == name)
    }
}

/// What looks like a trailer, and where its text is, from the end on. More than one is there when a guest has put such
/// bytes into a device, or when old bytes are behind the tail; which is the right one shows in the walk.
fn trailers(bytes: &[u8]) -> impl Iterator<Item = (Description, Range<usize>)> + '_ {
    let starts = (1..bytes.len()).rev().filter(|&at| bytes[at - 1..].starts_with(&[EOF, VMDESC]));
    let texts = starts.filter_map(|start| trailer(bytes, start));
    texts.take(TRAILERS_TRIED).filter_map(|(text, place)| Some((described(text)?, place)))
}

/// The text of what looks like a trailer and begins at `start`, and its place.
fn trailer(bytes: &[u8], start: usize) -> Option<(&[u8], Range<usize>)> {
    let length = bytes.get(start + 1..)?.first_chunk()?;
    let json = start + TRAILER_HEADER_BYTES;
    let text = bytes.get(json..)?.get(..u32::from_be_bytes(*length) as usize)?;
    (text.starts_with(b"{") && text.ends_with(b"}")).then_some((text, json..json + text.len()))
}

fn described(text: &[u8]) -> Option<Description> {
    Description::parse(std::str::from_utf8(text).ok()?).ok()
}

/// A walk over the sections, side by side with their descriptions.
struct Walk<'a> {
    reader: Reader<'a>,
    base: u64,
    sections: Vec<DeviceSection>,
}

impl Walk<'_> {
    fn section<'d>(&mut self, devices: &mut impl Iterator<Item = &'d Device>, eof: usize) -> Result<(), Error> {
        let reader = &mut self.reader;
        let offset = self.base.saturating_add((eof - reader.rest().len()) as u64);
        let kind = reader.u8("record type")?;
        let place = reader.field_start();
        if kind != FULL {
            return Err(reader.invalid(
                "record type",
                kind.into(),
                "no device section begins where the one before ends",
            ));
        }
        let section = reader.be32("section number")?;
        let name = reader.name("section name")?;
        let instance = reader.be32("section instance")?;
        let version = reader.be32("section version")?;
        // Sections that came before the memory are described too, first of all.
        let same = |device: &&Device| device.name == *name && device.instance_id as u32 == instance;
        let refused = |why| Error::Refused { field: "section", name: name.to_string(), offset: place, why };
        let Some(device) = devices.find(same) else {
            return Err(refused("the trailer does not describe it, or not in this order"));
        };
        let start = eof - reader.rest().len();
        let Some(count) = device.body_bytes().filter(|&count| count <= eof - start) else {
            return Err(refused("the trailer says that it is longer than what is there"));
        };
        reader.bytes("device state", count)?;
        let footer = reader.u8("footer")?;
        if footer != FOOTER {
            return Err(reader.named(
                "footer",
                &name,
                footer.into(),
                "the section does not end where the trailer says",
            ));
        }
        reader.constant("footer", section, "not the number of the section that ends here")?;
        self.sections.push(DeviceSection { section, name, instance, version, offset, body: start..start + count });
        Ok(())
    }
}
