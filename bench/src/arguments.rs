//! The arguments that tables have in common.
use std::path::PathBuf;

use crate::output::Files;

/// What every table is told.
#[derive(Debug, Clone, clap::Args)]
pub struct Common {
    /// The QEMU to use and to compare with
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64")]
    pub peer: String,
    /// Where results go.
    #[command(flatten)]
    pub files: Files,
}

/// What a table is told whose guests hold data that can be compressed.
#[derive(Debug, Clone, clap::Args)]
pub struct Moves {
    /// Fill memory with the files of this folder, repeatedly
    #[arg(long, value_name = "DIR")]
    pub corpus: Option<PathBuf>,
    /// Moves by each program; the table shows the median
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,
    /// What every table is told.
    #[command(flatten)]
    pub common: Common,
}
