//! The names in a stream: machines, blocks, sections.
use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;

use crate::Error;
use crate::guest::MAX_NAME_BYTES;
use crate::reader::check_printable;

/// A name as it can stand in a stream: 1 to 255 bytes of UTF-8 without control characters.
///
/// The length is one byte on the wire (section 1). QEMU makes names of ASCII alone; that they hold nothing which a
/// terminal would obey is our rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Box<str>);

impl Name {
    /// The longest name in bytes.
    pub const MAX_BYTES: usize = MAX_NAME_BYTES;

    /// # Errors
    /// A text that is empty, too long, or has a control character. Offsets count in the text.
    pub fn new(text: &str) -> Result<Self, Error> {
        Self::from_wire("name", 0, text.as_bytes())
    }

    /// The name that `bytes`, found at `offset` as the contents of `field`, are.
    pub(crate) fn from_wire(field: &'static str, offset: usize, bytes: &[u8]) -> Result<Self, Error> {
        if bytes.is_empty() || bytes.len() > Self::MAX_BYTES {
            let why = "the length of a name is 1 to 255";
            return Err(Error::Invalid { field, offset, value: bytes.len() as u64, why });
        }
        check_printable(field, offset, bytes).map(|text| Name(text.into()))
    }

    pub(crate) fn len_byte(&self) -> u8 {
        u8::try_from(self.0.len()).expect("a name has at most 255 bytes: both constructors see to it")
    }
}

impl Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for Name {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

/// Maps by name can be asked with a text: a name hashes and compares as its text does.
impl Borrow<str> for Name {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<&str> for Name {
    type Error = Error;

    fn try_from(text: &str) -> Result<Self, Error> {
        Self::new(text)
    }
}
