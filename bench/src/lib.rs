//! The tables of docs/benchmarks.md, measured here, beside stock QEMU.
//!
//! - [`Bench`]: the arguments of `transship bench`
//! - `zero_pages`, `codecs`, `threads`, `files`, `qemu_wire`, `free_pages`, `clones`: the tables of these names
//! - `arguments`: those that tables have in common
//! - `content`, `corpus`, `pair`, `stock` and `ours`: guests, and the two sides
//! - `machine`, `processes`: what the machine can do, and what processes used of it
//! - `results`, `aims`, `table`, `plot`: from single runs to text, JSON and a picture
//!
//! Nothing here decides what is good: an aim that is missed is printed as missed, and the exit code stays 0.
#![forbid(unsafe_code)]

mod aims;
mod arguments;
mod at_hand;
mod clones;
mod codecs;
mod content;
mod corpus;
mod ends;
mod files;
mod free_pages;
mod interrupt;
mod machine;
mod ours;
mod output;
mod pair;
#[cfg(test)]
mod parsed;
mod plot;
mod processes;
mod qemu_wire;
mod results;
mod runs;
mod stock;
mod table;
mod threads;
mod units;
mod zero_pages;

pub use arguments::{Common, Moves};
pub use clones::Clones;
pub use codecs::{Codecs, Method};
pub use content::Content;
pub use files::Snapshots;
pub use free_pages::FreePages;
pub use output::Files;
pub use qemu_wire::QemuWire;
pub use threads::Threads;
pub use zero_pages::ZeroPages;

/// What `transship bench` was asked for.
#[derive(Debug, clap::Args)]
pub struct Bench {
    /// The table to measure.
    #[command(subcommand)]
    pub table: Table,
}

/// The tables.
#[derive(Debug, clap::Subcommand)]
pub enum Table {
    /// Moves of memory that was never touched, or is zero, random or mixed
    ZeroPages(ZeroPages),
    /// Moves of data that can be compressed, by method
    Codecs(Codecs),
    /// Moves of guests that keep writing, by number of encoders
    Threads(Threads),
    /// Guests saved to files and restored, by layout of the file
    Files(Snapshots),
    /// Moves between transship and stock QEMU, both ways, by QEMU's own protocol
    QemuWire(QemuWire),
    /// Moves of a Linux guest whose free memory is full of old data, without hints, with them, and with reporting
    FreePages(FreePages),
    /// Guests made from one moment of another, by number of them
    Clones(Clones),
}

impl Bench {
    /// Measures it and prints the table.
    ///
    /// # Errors
    /// One line for the user: what could not be measured, and why.
    pub fn run(&self) -> Result<(), String> {
        match &self.table {
            Table::ZeroPages(table) => zero_pages::run(table),
            Table::Codecs(table) => codecs::run(table),
            Table::Threads(table) => threads::run(table),
            Table::Files(table) => files::run(table),
            Table::QemuWire(table) => qemu_wire::run(table),
            Table::FreePages(table) => free_pages::run(table),
            Table::Clones(table) => clones::run(table),
        }
    }
}
