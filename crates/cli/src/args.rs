//! The command line. Help, man page and completions come from here.
//!
//! Values with rules of their own (units, bounds, addresses) stay text here: [`crate::checks`] reads them all, so that
//! one attempt reports every mistake, before anything touches a VM.
mod balloon;
mod check;
mod clones;
mod convert;
mod encoding;
mod guest;
mod helpers;
mod moving;
mod plan;
mod receive;
mod relay;
mod restore;
mod sandbox;
mod save;
mod steering;
mod tls;
mod tracker;
mod watch;

use clap::{Parser, Subcommand};

pub(crate) use balloon::BalloonArgs;
pub(crate) use check::CheckArgs;
pub(crate) use clones::{CloneArgs, ForkArgs};
pub(crate) use convert::ConvertArgs;
pub(crate) use guest::{Content, GuestArgs};
pub(crate) use helpers::{GuardArgs, StandInArgs, StewardArgs};
pub(crate) use moving::{MoveArgs, Peer};
pub(crate) use plan::PlanArgs;
pub(crate) use receive::{ReceiveArgs, Sender};
pub(crate) use relay::RelayArgs;
pub(crate) use restore::{InfoArgs, RestoreArgs};
pub(crate) use sandbox::SandboxArgs;
pub(crate) use save::{FileFormat, SaveArgs};
pub(crate) use steering::{CancelArgs, GoArgs, StatusArgs, SteeringArgs};
pub(crate) use tls::TlsArgs;
pub(crate) use tracker::{Converge, Tracker};
pub(crate) use watch::WatchArgs;

const ABOUT: &str = "Moves the memory of running virtual machines, from outside the VMM";

const AFTER_LONG: &str = "\
VM is one of
  qemu:/run/vm.qmp         a QEMU, by its QMP unix socket
  handoff:/run/guest.sock  a VMM that speaks the hand-off protocol, such as `transship guest`

URI is one of
  tcp:HOST:PORT            all channels connect to this port; encrypted if it is another host's
  unix:PATH                a unix socket, for both ends on one host

Exit codes
  0  done
  1  failed; the guest keeps running at the source
  2  wrong usage; nothing was touched
  3  a person must decide; the message says what to do

TRANSSHIP_LOG=debug writes a log to stderr (by default, only warnings appear). It also takes filters such as \
transship_engine=trace.";

/// The whole command line.
#[derive(Debug, Parser)]
#[command(name = "transship", version, about = ABOUT, after_long_help = AFTER_LONG, max_term_width = 100)]
#[command(disable_help_subcommand = true, subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show what a VM is made of and what would work with it, without touching it
    Check(CheckArgs),
    /// Show what a move would take, and what would end it, before it begins
    Plan(PlanArgs),
    /// Move a running guest to another host
    Move(MoveArgs),
    /// Receive a guest that is moved here
    Receive(ReceiveArgs),
    /// Carry the migration of two stock QEMUs over a slow link
    Relay(RelayArgs),
    /// Save a guest to a file
    Save(SaveArgs),
    /// Show the moves and saves that run, and how they do
    Status(StatusArgs),
    /// End a move or save that runs; the guest keeps running at the source
    Cancel(CancelArgs),
    /// Let guests that are held ready be stopped and handed over
    Go(GoArgs),
    /// Restore a guest from a snapshot file
    Restore(RestoreArgs),
    /// Make a guest that shares the memory of an image with others
    Clone(CloneArgs),
    /// Make an image of a running guest, and clones of it
    Fork(ForkArgs),
    /// Show what a snapshot file holds, and check it
    Info(InfoArgs),
    /// Convert a snapshot to another layout
    Convert(ConvertArgs),
    /// Show how fast a guest writes its memory, live
    Watch(WatchArgs),
    /// Run a balloon device, through which a guest reports free memory
    Balloon(BalloonArgs),
    /// Run a synthetic guest, for trying things without a VMM
    Guest(GuestArgs),
    /// Measure on this machine, compared with stock QEMU
    #[command(disable_help_flag = true)]
    Bench {
        /// The table and its options: see `transship bench --help`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "TABLE")]
        arguments: Vec<std::ffi::OsString>,
    },
    /// Let the guest run again if the command that started this dies while the guest is stopped
    #[command(hide = true)]
    Guard(GuardArgs),
    /// Bring the pages of a guest if the `restore --lazy` that started this dies
    #[command(hide = true)]
    StandIn(StandInArgs),
    /// Do what the process that started this gave up the right to
    #[command(hide = true)]
    Steward(StewardArgs),
    /// Print a completion script for a shell
    #[command(hide = true)]
    Completions { shell: clap_complete::Shell },
    /// Print the manual page of the command, or of one of its subcommands
    #[command(hide = true)]
    Man { subcommand: Option<String> },
}
