//! The lines of the control protocol (docs/free-pages.md) as types.
use serde::{Deserialize, Serialize};

/// The version of the protocol that this is.
pub(crate) const VERSION: u32 = 1;

/// What a client asks for. Fields that are not known are ignored.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    pub(crate) id: u64,
    #[serde(flatten)]
    pub(crate) call: Call,
}

/// The calls.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "call", rename_all = "kebab-case")]
pub(crate) enum Call {
    /// What this is: [`Description`].
    Describe,
    /// Ask the guest for hints: the id is [`Started`].
    Start,
    /// No more hints: what comes after the answer is void.
    Stop,
    /// As `stop`, and the guest may use its pages again.
    Done,
    /// Give no memory back to the host while this client is connected.
    Keep,
    /// Have the guest give memory up until so much of it is gone.
    Target { bytes: u64 },
    /// How the guest uses its memory: [`Statistics`].
    Statistics,
}

/// What is sent to a client.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Line {
    /// The answer to a request that was done.
    Ok { id: u64, ok: serde_json::Value },
    /// The answer to one that was not; a sentence.
    Error { id: u64, error: String },
    /// Free memory: number in the table of the description, offset, bytes.
    Hints { command: u32, hints: Vec<(usize, u64, u64)> },
    /// The guest has named all that it had for this command.
    NamedAll { command: u32, named_all: bool },
    /// There will be no more hints on this connection; a sentence.
    Lost { lost: String },
}

/// The answer to `start`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Started {
    pub(crate) command: u32,
}

/// The answer to `describe`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// Of the control protocol.
    pub version: u32,
    /// Process that is the device.
    pub pid: u32,
    /// Whether a driver uses the device now, and names free pages when asked.
    pub hints: bool,
    /// What each 4 bytes of a free page hold, if the guest sees to that.
    pub poison: Option<u32>,
    /// Memory that the guest is to give up, in bytes.
    pub target_bytes: u64,
    /// Memory that it has given up, in bytes.
    pub given_bytes: u64,
    /// Guest memory. Hints name its ranges by their place in this list.
    pub memory: Vec<FileRange>,
    /// What the balloon writes to by itself: the pages of the rings that it has used since QEMU is there. Named as
    /// hints are.
    #[serde(default)]
    pub rings: Vec<(usize, u64, u64)>,
}

/// Guest memory that is one range of one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRange {
    /// The file: its device number …
    pub device: u64,
    /// … and inode number.
    pub inode: u64,
    /// Where in the file it begins.
    pub file_offset: u64,
    /// Its size.
    pub bytes: u64,
    /// The guest's own address of it.
    pub address: u64,
}

/// How the guest uses its memory, as it said last. What it did not say is missing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // these are virtio's names
pub struct Statistics {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swapped_in_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swapped_out_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major_faults: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor_faults: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub huge_pages_allocated: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub huge_pages_failed: Option<u64>,
}

impl Statistics {
    /// Takes a value by virtio's number for it. Those that later drivers may have are left out.
    pub(crate) fn set(&mut self, tag: u16, value: u64) {
        let fields = [
            &mut self.swapped_in_bytes,
            &mut self.swapped_out_bytes,
            &mut self.major_faults,
            &mut self.minor_faults,
            &mut self.free_bytes,
            &mut self.total_bytes,
            &mut self.available_bytes,
            &mut self.cache_bytes,
            &mut self.huge_pages_allocated,
            &mut self.huge_pages_failed,
        ];
        if let Some(field) = fields.into_iter().nth(tag.into()) {
            *field = Some(value);
        }
    }
}
