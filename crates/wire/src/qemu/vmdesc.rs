//! The trailer that describes the device sections, and by which alone their ends can be found (section 5.2).
use serde::{Deserialize, Serialize};

use super::Name;
use crate::PAGE_BYTES;

/// What the JSON says, as far as it is needed. Values that are not named here are skipped.
#[derive(Debug, Deserialize)]
pub(super) struct Description {
    pub(super) devices: Vec<Device>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Device {
    pub(super) name: String,
    #[serde(default)]
    pub(super) instance_id: i64,
    #[serde(default)]
    fields: Vec<Field>,
    #[serde(default)]
    subsections: Vec<Subsection>,
}

#[derive(Debug, Deserialize)]
struct Field {
    size: u64,
    /// How many such elements follow one another. What a `struct` holds is in its size already.
    #[serde(default = "one")]
    array_len: u64,
}

#[derive(Debug, Deserialize)]
struct Subsection {
    vmsd_name: String,
    #[serde(default)]
    fields: Vec<Field>,
    #[serde(default)]
    subsections: Vec<Subsection>,
}

fn one() -> u64 {
    1
}

impl Description {
    /// The description that this text is, if it is one.
    pub(super) fn parse(json: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(json)
    }
}

impl Device {
    /// Length of the section's body. `None`: no section is that long.
    pub(super) fn body_bytes(&self) -> Option<usize> {
        sum(&self.fields, &self.subsections).and_then(|bytes| usize::try_from(bytes).ok())
    }
}

fn sum(fields: &[Field], subsections: &[Subsection]) -> Option<u64> {
    let fields = fields.iter().map(|field| field.size.checked_mul(field.array_len));
    let subsections = subsections.iter().map(Subsection::bytes);
    fields.chain(subsections).try_fold(0u64, |sum, bytes| sum.checked_add(bytes?))
}

impl Subsection {
    /// A type byte, the name behind its length, the version, and what it holds.
    fn bytes(&self) -> Option<u64> {
        sum(&self.fields, &self.subsections)?.checked_add(1 + 1 + self.vmsd_name.len() as u64 + 4)
    }
}

/// A device section to describe.
#[derive(Debug, Clone, Copy)]
pub struct Described<'a> {
    /// The section's name.
    pub name: &'a Name,
    /// Which of several with this name.
    pub instance: u32,
    /// Version of its layout.
    pub version: u32,
    /// Name, type and length of each field. The lengths add up to that of the section's body.
    pub fields: &'a [(&'a str, &'a str, u64)],
}

/// The JSON text that describes these sections, for [`StreamWriter::vmdesc`](super::StreamWriter::vmdesc). They must be
/// in the order of the stream.
pub fn describe<'a>(sections: &[Described<'a>]) -> String {
    #[derive(Serialize)]
    struct Description<'a> {
        page_size: usize,
        devices: Vec<Device<'a>>,
    }
    #[derive(Serialize)]
    struct Device<'a> {
        name: &'a str,
        instance_id: u32,
        vmsd_name: &'a str,
        version: u32,
        fields: Vec<Field<'a>>,
    }
    #[derive(Serialize)]
    struct Field<'a> {
        name: &'a str,
        r#type: &'a str,
        size: u64,
    }
    let device = |section: &Described<'a>| Device {
        name: section.name,
        instance_id: section.instance,
        vmsd_name: section.name,
        version: section.version,
        fields: section.fields.iter().map(|&(name, r#type, size)| Field { name, r#type, size }).collect(),
    };
    let description = Description { page_size: PAGE_BYTES, devices: sections.iter().map(device).collect() };
    serde_json::to_string(&description).expect("texts and numbers can always be written as JSON")
}
