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
    /// A domain of libvirt's, to make libvirt's calls about it and do nothing else
    #[arg(long, requires = "purpose")]
    pub(crate) domain: Option<String>,
    /// What the calls are for, as JSON
    #[arg(long)]
    pub(crate) purpose: Option<String>,
}
