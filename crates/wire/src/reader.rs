//! The one reader of bytes: it knows its offset and names what is missing. Its counterpart, the writer, can't fail.
use std::ops::RangeInclusive;

use crate::Error;

/// Reads fields one after the other. Offsets in its errors count from `base`, the place of the first byte.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
    offset: usize,
    /// Where the field that was read last begins: the offset of an error about its value.
    field_start: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8], base: usize) -> Self {
        Reader { rest: bytes, offset: base, field_start: base }
    }

    pub(crate) fn bytes(&mut self, field: &'static str, count: usize) -> Result<&'a [u8], Error> {
        let Some((taken, rest)) = self.rest.split_at_checked(count) else {
            return Err(self.truncated(field, count));
        };
        self.advance(count, rest);
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], Error> {
        let Some((taken, rest)) = self.rest.split_first_chunk::<N>() else {
            return Err(self.truncated(field, N));
        };
        self.advance(N, rest);
        Ok(*taken)
    }

    pub(crate) fn u8(&mut self, field: &'static str) -> Result<u8, Error> {
        self.array(field).map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self, field: &'static str) -> Result<u16, Error> {
        self.array(field).map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, Error> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, field: &'static str) -> Result<u64, Error> {
        self.array(field).map(u64::from_le_bytes)
    }

    pub(crate) fn u128(&mut self, field: &'static str) -> Result<u128, Error> {
        self.array(field).map(u128::from_le_bytes)
    }

    /// A text behind its u16 length, which must be one of `sizes`. Control characters are refused: the text ends up on
    /// a terminal, which would obey them.
    pub(crate) fn text(&mut self, field: &'static str, sizes: RangeInclusive<usize>) -> Result<&'a str, Error> {
        let count = self.u16(field)?;
        if !sizes.contains(&count.into()) {
            return Err(self.invalid(field, count.into(), "a length that this text can't have"));
        }
        self.printable(field, count.into())
    }

    /// A text of `count` bytes, under the same rules.
    pub(crate) fn printable(&mut self, field: &'static str, count: usize) -> Result<&'a str, Error> {
        let bytes = self.bytes(field, count)?;
        check_printable(field, self.field_start, bytes)
    }

    /// Where the field that was read last begins.
    pub(crate) fn field_start(&self) -> usize {
        self.field_start
    }

    /// Where the next field begins.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    /// What has not been read.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Bytes that this version gives no meaning to. They are zero, so that a later version can.
    pub(crate) fn reserved<const N: usize>(&mut self, field: &'static str) -> Result<(), Error> {
        let bytes: [u8; N] = self.array(field)?;
        match bytes.iter().position(|&byte| byte != 0) {
            Some(at) => Err(Error::Invalid {
                field,
                offset: self.field_start + at,
                value: bytes[at].into(),
                why: "reserved, must be zero",
            }),
            None => Ok(()),
        }
    }

    /// Nothing may be left after the last field.
    pub(crate) fn end(self, field: &'static str) -> Result<(), Error> {
        match self.rest.len() {
            0 => Ok(()),
            extra => Err(Error::Trailing { field, offset: self.offset, extra }),
        }
    }

    /// The error about the value of the field that was read last.
    pub(crate) fn invalid(&self, field: &'static str, value: u64, why: &'static str) -> Error {
        Error::Invalid { field, offset: self.field_start, value, why }
    }

    fn advance(&mut self, count: usize, rest: &'a [u8]) {
        self.field_start = self.offset;
        self.offset = self.offset.saturating_add(count);
        self.rest = rest;
    }

    fn truncated(&self, field: &'static str, count: usize) -> Error {
        Error::Truncated { field, offset: self.offset, missing: count - self.rest.len() }
    }
}

/// The text that `bytes`, the contents of `field` at `offset`, are: UTF-8 without control characters.
pub(crate) fn check_printable<'a>(field: &'static str, offset: usize, bytes: &'a [u8]) -> Result<&'a str, Error> {
    let text = std::str::from_utf8(bytes)
        .map_err(|error| Error::Text { field, offset: offset.saturating_add(error.valid_up_to()) })?;
    match text.char_indices().find(|(_, c)| c.is_control()) {
        Some((at, c)) => Err(Error::Invalid {
            field,
            offset: offset.saturating_add(at),
            value: u32::from(c).into(),
            why: "a control character",
        }),
        None => Ok(text),
    }
}

/// Puts fields one after the other.
#[derive(Default)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

impl Writer {
    pub(crate) fn put<const N: usize>(&mut self, bytes: [u8; N]) -> &mut Self {
        self.0.extend_from_slice(&bytes);
        self
    }

    /// A text behind its length. A text whose length does not fit gets the largest length instead: far more than any
    /// reader allows, so the other side refuses it and does not misread it.
    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        self.put(u16::try_from(text.len()).unwrap_or(u16::MAX).to_le_bytes());
        self.0.extend_from_slice(text.as_bytes());
        self
    }
}

/// Puts fields into a header of a fixed size, the rest of which stays zero.
pub(crate) struct Header<const N: usize> {
    bytes: [u8; N],
    used: usize,
}

impl<const N: usize> Header<N> {
    pub(crate) fn new() -> Self {
        Header { bytes: [0; N], used: 0 }
    }

    /// # Panics
    /// When the header is full: the layout is ours, the golden tests write each to its end.
    pub(crate) fn put<const M: usize>(&mut self, bytes: [u8; M]) -> &mut Self {
        self.bytes[self.used..self.used + M].copy_from_slice(&bytes);
        self.used += M;
        self
    }

    pub(crate) fn done(&self) -> [u8; N] {
        self.bytes
    }
}
