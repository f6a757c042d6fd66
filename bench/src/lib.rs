//! The tables of docs/benchmarks.md, measured here, beside stock QEMU.
//!
//! - [`Bench`]: the arguments of `transship bench`
//! - `tables`: which tables there are; `zero_pages`, `codecs`, `threads`, `files`, `qemu_wire`, `free_pages`, `tls`,
//!   `clones`, `libvirt`, `relays`, `guest_view`, `converge`, `limits`: those of these names
//! - `all`: every table, into one folder with a page
//! - `arguments`: those that tables have in common
//! - `content`, `corpus`, `pair`, `stock` and `ours`: guests, and the two sides
//! - `machine`, `processes`: what the machine can do, and what processes used of it
//! - `rows`, `verdict`, `order`: what all tables say alike, and who goes first
//! - `results`, `aims`, `table`, `plot`: from single runs to text, JSON and a picture
//!
//! Nothing here decides what is good: an aim that is missed is printed as missed, and the exit code stays 0.
#![forbid(unsafe_code)]

mod aims;
mod all;
mod arguments;
mod at_hand;
mod clones;
mod codecs;
mod content;
mod converge;
mod corpus;
mod ends;
mod files;
mod free_pages;
mod guest_memory;
mod guest_view;
mod interrupt;
mod libvirt;
mod limits;
mod machine;
mod order;
mod ours;
mod output;
mod pair;
#[cfg(test)]
mod parsed;
mod plot;
mod processes;
mod qemu_wire;
mod relays;
mod results;
mod rows;
mod runs;
mod stock;
mod table;
mod tables;
mod threads;
mod tls;
mod units;
mod verdict;
mod zero_pages;

pub use all::All;
pub use arguments::{Common, Moves};
pub use clones::Clones;
pub use codecs::{Codecs, Method};
pub use content::Content;
pub use converge::Converge;
pub use files::Snapshots;
pub use free_pages::FreePages;
pub use guest_memory::{GuestMemory, MemoryKind, MemoryState};
pub use guest_view::GuestView;
pub use libvirt::{Deed, Libvirt};
pub use limits::Limits;
pub use output::Files;
pub use qemu_wire::QemuWire;
pub use relays::Relays;
pub use tables::Table;
pub use threads::Threads;
pub use tls::Tls;
pub use zero_pages::ZeroPages;

/// What `transship bench` was asked for.
#[derive(Debug, clap::Args)]
pub struct Bench {
    /// The table to measure.
    #[command(subcommand)]
    pub table: Table,
}

impl Bench {
    /// Measures it and prints the table.
    ///
    /// # Errors
    /// One line for the user: what could not be measured, and why.
    pub fn run(&self) -> Result<(), String> {
        self.table.run()
    }
}
