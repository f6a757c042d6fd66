//! QEMU's migration stream, its multifd channels and its mapped-ram files: bytes to types and back.
//!
//! What the bytes mean is written in `docs/qemu-stream.md`; "section 2.1" in this module is a section of that page.
//!
//! | to read | to write | what |
//! | --- | --- | --- |
//! | [`StreamReader`] | [`StreamWriter`] | the main stream up to the end of memory, as a stream or a mapped-ram file |
//! | [`Tail`], [`GlobalState`] | [`StreamWriter`], [`describe`] | what follows: device sections, and their description |
//! | [`Greeting`], [`Packet`] | the same | multifd channels |
//! | [`Reply`] | the same | what a destination answers |
//! | [`xbzrle`] | | pages that travel as differences |
//!
//! Nothing here does I/O. A reader is given bytes and says how many it took, or that it needs more:
//!
//! ```
//! use transship_wire::qemu::{Name, Record, Step, StreamReader, StreamWriter, Configuration};
//!
//! let mut writer = StreamWriter::new(0, 1);
//! writer.header().configuration(&Configuration::new(Name::new("pc-q35-10.0")?));
//! let stream = writer.take_bytes();
//!
//! let mut reader = StreamReader::new();
//! let mut at = 0;
//! let step = loop {
//!     match reader.next(&stream[at..])? {
//!         Step::Done { record: Record::Header, used } => at += used,
//!         step => break step,
//!     }
//! };
//! // One byte more is needed: it says whether the configuration goes on.
//! assert_eq!(step, Step::More { at_least: stream.len() - at + 1 });
//! # Ok::<(), transship_wire::Error>(())
//! ```
//!
//! Pages have [`PAGE_BYTES`](crate::PAGE_BYTES) (4096) bytes here, as on x86; streams that say otherwise are refused.
//! Page numbers, bitmaps and offsets count in these, whatever the size of the pages that the memory is made of.

mod block;
mod command;
mod configuration;
mod fields;
mod global_state;
mod layout;
mod multifd;
mod name;
mod page;
mod record;
mod reply;
mod stream;
mod tail;
mod tail_watch;
mod vmdesc;
mod writer;
pub mod xbzrle;

pub use block::{Block, Geometry, MAX_BLOCKS, Mapped, PAGES_ALIGNMENT, bitmap_bytes};
pub use command::{Command, PageSizes, RamDiscard};
pub use configuration::Configuration;
pub use global_state::{GlobalState, RunState};
pub use multifd::{
    DeviceState, GREETING_BYTES, Greeting, MAX_PACKET_PAGES, MAX_PAYLOAD_BYTES, Method, PACKET_HEADER_BYTES, Packet,
    Pages,
};
pub use name::Name;
pub use page::{MAX_COMPRESSED_BYTES, Page, PageContent};
pub use record::{EarlySection, MAX_RECORD_BYTES, Record, Step};
pub use reply::Reply;
pub use stream::StreamReader;
pub use tail::{DeviceSection, Tail};
pub use tail_watch::TailWatch;
pub use vmdesc::{Described, describe};
pub use writer::{Piece, StreamWriter};
