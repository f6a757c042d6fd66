//! Flags about the rights that a process keeps.
use clap::Args;

#[derive(Debug, Clone, Args)]
pub(crate) struct SandboxArgs {
    /// User that root becomes as soon as nothing needs root any more, by name or number [default: nobody]
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pub(crate) user: Option<String>,
    /// Keep all rights, to find out whether they were what was missing
    ///
    /// Without this flag, the process gives up all rights that it needs no more once it has opened everything: it
    /// becomes another user, without capabilities, can open no file, and can make only a few system calls.
    #[arg(long, hide_short_help = true)]
    pub(crate) no_sandbox: bool,
}
