//! `transship guest`.

use clap::{Args, ValueEnum};

const GUEST_EXAMPLES: &str = "\
Examples:
  Two guests on one host, and a move from one to the other:
    transship guest --listen /tmp/a.sock --mem 1G --write-rate 100M &
    transship guest --listen /tmp/b.sock --mem 1G --incoming &
    transship receive --vm handoff:/tmp/b.sock --listen unix:/tmp/move.sock &
    transship move --vm handoff:/tmp/a.sock --to unix:/tmp/move.sock

The guest writes memory that it can check. After the move, the receiving guest checks every page and reports how \
many are wrong.";

#[derive(Debug, Args)]
#[command(after_long_help = GUEST_EXAMPLES)]
pub(crate) struct GuestArgs {
    /// Socket of the guest
    #[arg(long, value_name = "PATH")]
    pub(crate) listen: std::path::PathBuf,
    /// Size of its memory
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub(crate) mem: String,
    /// Number of regions of the memory
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) regions: String,
    /// Share of the memory that is written at the start
    #[arg(long, value_name = "SHARE", default_value = "50%")]
    pub(crate) touched: String,
    /// Contents of the touched pages: zero, random or mixed
    #[arg(long, value_enum, default_value_t = Content::Mixed, hide_possible_values = true)]
    pub(crate) content: Content,
    /// Fill the touched pages from the files of this folder
    #[arg(long, value_name = "DIR", conflicts_with = "content")]
    pub(crate) corpus: Option<std::path::PathBuf>,
    /// How fast the guest writes: 100M, or max [default: not at all]
    #[arg(long, value_name = "RATE")]
    pub(crate) write_rate: Option<String>,
    /// Threads that write
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) threads: String,
    /// Size of the memory that is written again and again [default: 64M]
    #[arg(long, value_name = "SIZE")]
    pub(crate) hot_set: Option<String>,
    /// Keep the memory in files in this hugetlbfs or tmpfs
    #[arg(long, value_name = "DIR")]
    pub(crate) huge: Option<std::path::PathBuf>,
    /// Wait for a guest that is moved here
    #[arg(long)]
    pub(crate) incoming: bool,
    /// End after this time [default: run on]
    #[arg(long, value_name = "TIME")]
    pub(crate) duration: Option<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Content {
    Zero,
    Random,
    Mixed,
}
