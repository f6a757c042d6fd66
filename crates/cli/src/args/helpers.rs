//! `transship guard`, `transship stand-in` and `transship steward`: processes that other commands start.
use std::path::PathBuf;

use clap::Args;

use super::sandbox::SandboxArgs;

#[derive(Debug, Args)]
pub(crate) struct GuardArgs {
    #[arg(long)]
    pub(crate) vm: String,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
}

#[derive(Debug, Args)]
pub(crate) struct StandInArgs {
    #[arg(long)]
    pub(crate) vm: String,
    /// The VMM's process, to freeze it if its guest can't be stopped
    #[arg(long)]
    pub(crate) freeze: Option<i32>,
    /// The receiver to connect to
    #[arg(long)]
    pub(crate) connect: Option<String>,
    /// The journal to remove at the end if it is empty
    #[arg(long)]
    pub(crate) journal: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
}

#[derive(Debug, Args)]
pub(crate) struct StewardArgs {
    /// An address to connect to
    #[arg(long)]
    pub(crate) connect: Vec<String>,
    /// The socket to remove at the end
    #[arg(long)]
    pub(crate) socket: Option<PathBuf>,
    /// The folder to remove at the end
    #[arg(long)]
    pub(crate) folder: Option<PathBuf>,
    /// The journal to remove at the end if it is empty
    #[arg(long)]
    pub(crate) journal: Option<PathBuf>,
    /// How to look for processes that write a guest's memory
    #[arg(long)]
    pub(crate) lookout: Option<String>,
    /// How to know which threads of a VMM may wait
    #[arg(long)]
    pub(crate) threads: Option<String>,
    /// Which processors of a guest to hold
    #[arg(long)]
    pub(crate) hold: Option<String>,
    /// The VMM's process, to freeze it
    #[arg(long)]
    pub(crate) freeze: Option<i32>,
    /// The memory that the VMM is to give back
    #[arg(long)]
    pub(crate) give_back: Option<String>,
    /// Standard output is a pipe that ends with another process, for which the socket stays
    #[arg(long)]
    pub(crate) other: bool,
    /// What to run, by phases, as JSON
    #[arg(long)]
    pub(crate) commands: Option<String>,
    /// A domain of libvirt's, to make libvirt's calls about it and do nothing else
    #[arg(long, requires = "purpose")]
    pub(crate) domain: Option<String>,
    /// What the calls are for, as JSON
    #[arg(long)]
    pub(crate) purpose: Option<String>,
}
