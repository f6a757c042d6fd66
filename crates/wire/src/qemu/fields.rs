//! What all parts of a stream are made of: big-endian numbers, and names behind one byte of length (section 1).
use super::Name;
use crate::reader::Reader;
use crate::{Error, PAGE_BYTES};

impl<'a> Reader<'a> {
    /// A reader at a place of a stream. A place that memory can't address is said to be the last one: it only ends up
    /// in messages.
    pub(super) fn at(bytes: &'a [u8], position: u64) -> Self {
        Reader::new(bytes, usize::try_from(position).unwrap_or(usize::MAX))
    }

    pub(super) fn be16(&mut self, field: &'static str) -> Result<u16, Error> {
        self.array(field).map(u16::from_be_bytes)
    }

    pub(super) fn be32(&mut self, field: &'static str) -> Result<u32, Error> {
        self.array(field).map(u32::from_be_bytes)
    }

    pub(super) fn be64(&mut self, field: &'static str) -> Result<u64, Error> {
        self.array(field).map(u64::from_be_bytes)
    }

    /// A name behind its length.
    pub(super) fn name(&mut self, field: &'static str) -> Result<Name, Error> {
        let (offset, bytes) = self.name_bytes(field)?;
        if bytes.is_empty() {
            return Err(Error::Invalid {
                field,
                offset: offset.saturating_sub(1),
                value: 0,
                why: "it has no characters",
            });
        }
        Name::from_wire(field, offset, bytes)
    }

    /// A name behind its length, as it is, and where its first byte is.
    pub(super) fn name_bytes(&mut self, field: &'static str) -> Result<(usize, &'a [u8]), Error> {
        let count = self.u8(field)?;
        let bytes = self.bytes(field, count.into())?;
        Ok((self.field_start(), bytes))
    }

    /// A page, where it is.
    pub(super) fn page(&mut self, field: &'static str) -> Result<&'a [u8; PAGE_BYTES], Error> {
        let bytes = self.bytes(field, PAGE_BYTES)?;
        Ok(bytes.try_into().expect("bytes() gives as many as it was asked for"))
    }

    /// A number that can only have one value.
    pub(super) fn constant(&mut self, field: &'static str, value: u32, why: &'static str) -> Result<(), Error> {
        match self.be32(field)? {
            read if read == value => Ok(()),
            read => Err(self.invalid(field, read.into(), why)),
        }
    }

    /// The error about something with a name, at the field that was read last.
    pub(super) fn refused(&self, field: &'static str, name: &str, why: &'static str) -> Error {
        Error::Refused { field, name: name.into(), offset: self.field_start(), why }
    }

    /// The error about the number that was read last, which belongs to `name`.
    pub(super) fn named(&self, field: &'static str, name: &str, value: u64, why: &'static str) -> Error {
        Error::Named { field, name: name.into(), offset: self.field_start(), value, why }
    }
}

/// Appends a name behind its length.
pub(super) fn put_name(out: &mut Vec<u8>, name: &Name) {
    out.push(name.len_byte());
    out.extend_from_slice(name.as_bytes());
}
