//! The configuration record: which machine the stream is of, and what the two sides must have in common (section 1.3).
use super::Name;
use super::fields::put_name;
use crate::Error;
use crate::reader::Reader;

/// Type byte of the record (section 1.2).
pub(super) const TYPE: u8 = 0x07;
/// Type byte of its subsections (section 1.3).
const SUBSECTION: u8 = 0x05;
const PAGE_BITS: &str = "configuration/target-page-bits";
const CAPABILITIES: &str = "configuration/capabilities";
const UUID: &str = "configuration/uuid";
const SUBSECTION_VERSION: u32 = 1;
/// log2 of the only page size that this crate knows.
const PAGE_BITS_KNOWN: u32 = crate::PAGE_BYTES.trailing_zeros();
const IGNORE_SHARED: &str = "x-ignore-shared";
const MAPPED_RAM: &str = "mapped-ram";

/// What a stream says of itself at its beginning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Configuration {
    /// The machine type with its version: `pc-q35-10.0`.
    pub machine: Name,
    /// Whether the stream states the page size. It is the one that this crate knows, or the stream would be refused.
    pub page_bits: bool,
    /// The capability `x-ignore-shared`: blocks in shared files are listed, and their pages left out (section 3).
    pub ignore_shared: bool,
    /// The capability `mapped-ram`: every page has its own place in the file (section 4).
    pub mapped_ram: bool,
    /// The VM's UUID, if the destination is to compare it.
    pub uuid: Option<[u8; 16]>,
}

impl Configuration {
    /// A configuration that says nothing but the machine's name.
    pub fn new(machine: Name) -> Self {
        Configuration { machine, page_bits: false, ignore_shared: false, mapped_ram: false, uuid: None }
    }

    /// Reads the record behind its type byte. It ends where no subsection begins, which the next byte says.
    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, Error> {
        const FIELD: &str = "machine name";
        let count = reader.be32(FIELD)?;
        if !(1..=Name::MAX_BYTES as u32).contains(&count) {
            return Err(reader.invalid(FIELD, count.into(), "the length of a machine's name is 1 to 255"));
        }
        let bytes = reader.bytes(FIELD, count as usize)?;
        let mut configuration = Self::new(Name::from_wire(FIELD, reader.field_start(), bytes)?);
        let mut seen = Vec::new();
        while configuration.goes_on(reader)? {
            configuration.read_subsection(reader, &mut seen)?;
        }
        Ok(configuration)
    }

    fn goes_on(&self, reader: &mut Reader<'_>) -> Result<bool, Error> {
        match reader.rest().first() {
            Some(&byte) => Ok(byte == SUBSECTION),
            None => reader.u8("record type").map(|_| false),
        }
    }

    fn read_subsection<'a>(&mut self, reader: &mut Reader<'a>, seen: &mut Vec<&'a [u8]>) -> Result<(), Error> {
        const FIELD: &str = "configuration subsection";
        reader.u8(FIELD)?;
        let (offset, name) = reader.name_bytes(FIELD)?;
        let refuse = |why| Error::Refused { field: FIELD, name: String::from_utf8_lossy(name).into(), offset, why };
        if ![PAGE_BITS, CAPABILITIES, UUID].iter().any(|known| known.as_bytes() == name) {
            return Err(refuse("unknown; this stream is of a newer or foreign QEMU"));
        }
        if seen.contains(&name) {
            return Err(refuse("it is there twice"));
        }
        seen.push(name);
        reader.constant("subsection version", SUBSECTION_VERSION, "only version 1 is known")?;
        match name {
            name if name == PAGE_BITS.as_bytes() => self.read_page_bits(reader),
            name if name == CAPABILITIES.as_bytes() => self.read_capabilities(reader),
            _ => reader.array("UUID").map(|uuid| self.uuid = Some(uuid)),
        }
    }

    fn read_page_bits(&mut self, reader: &mut Reader<'_>) -> Result<(), Error> {
        self.page_bits = true;
        reader.constant("page bits", PAGE_BITS_KNOWN, "only pages of 4096 bytes (12 bits) are supported")
    }

    fn read_capabilities(&mut self, reader: &mut Reader<'_>) -> Result<(), Error> {
        // The number decides no allocation: each name must be one of two that are not there yet.
        for _ in 0..reader.be32("capability count")? {
            let name = reader.name("capability")?;
            let known = match &*name {
                IGNORE_SHARED => &mut self.ignore_shared,
                MAPPED_RAM => &mut self.mapped_ram,
                _ => return Err(reader.refused("capability", &name, "unknown, it may change the form of the stream")),
            };
            if std::mem::replace(known, true) {
                return Err(reader.refused("capability", &name, "it is there twice"));
            }
        }
        Ok(())
    }

    /// Appends the record with its type byte.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        out.push(TYPE);
        out.extend(u32::from(self.machine.len_byte()).to_be_bytes());
        out.extend(self.machine.as_bytes());
        if self.page_bits {
            put_subsection(out, PAGE_BITS);
            out.extend(PAGE_BITS_KNOWN.to_be_bytes());
        }
        // In the order in which QEMU enumerates them.
        let capabilities = [(self.ignore_shared, IGNORE_SHARED), (self.mapped_ram, MAPPED_RAM)];
        let on: Vec<_> = capabilities.iter().filter(|(on, _)| *on).map(|(_, name)| name).collect();
        if !on.is_empty() {
            put_subsection(out, CAPABILITIES);
            out.extend((on.len() as u32).to_be_bytes());
            on.iter().for_each(|name| put_text(out, name));
        }
        if let Some(uuid) = self.uuid {
            put_subsection(out, UUID);
            out.extend(uuid);
        }
    }
}

fn put_subsection(out: &mut Vec<u8>, name: &'static str) {
    out.push(SUBSECTION);
    put_text(out, name);
    out.extend(SUBSECTION_VERSION.to_be_bytes());
}

fn put_text(out: &mut Vec<u8>, text: &'static str) {
    put_name(out, &Name::new(text).expect("the names above are short"));
}
