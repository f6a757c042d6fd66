//! `transship check`.
use std::path::PathBuf;

use clap::Args;

const EXAMPLES: &str = "\
Examples:
  transship check --vm qemu:/run/vm.qmp
  transship check --vm qemu:/run/vm.qmp --json
  transship check --vm libvirt:web1

It asks QEMU by QMP and looks into /proc. It stops nothing, traces nothing and changes no setting. What would be refused \
is decided by the same code as in a move, a save or a restore. For a QEMU that waits for a guest (-incoming defer) it \
shows what could come.

The exit code is 0 if the guest could be moved (a domain of libvirt: saved), or if one could be received, and 1 \
otherwise.";

#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct CheckArgs {
    /// The VM to look at: qemu:SOCKET, libvirt:DOMAIN or libvirt:URI#DOMAIN
    #[arg(long)]
    pub(crate) vm: String,
    /// The guest has this `transship balloon`, and --balloon will be given
    #[arg(long, value_name = "PATH", hide_short_help = true)]
    pub(crate) balloon: Option<PathBuf>,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
