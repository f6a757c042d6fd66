//! Flags and commands by which a move or save that runs is steered from outside.
use std::path::PathBuf;

use clap::Args;

const STATUS_EXAMPLES: &str = "\
WHICH is the VM as it was given to `move` or `save`, or its name alone, or the number of the process, or the path of \
its socket. Without it, all that run for this user are shown.

Examples:
  transship status
  transship status qemu:/run/vm1.qmp --json";

const CANCEL_EXAMPLES: &str = "\
The move or save ends as with Ctrl-C, and the guest keeps running at the source. Once the guest has been handed over \
to the destination, this is refused (exit 1).

WHICH is the VM as it was given to `move` or `save`, or its name alone, or the number of the process, or the path of \
its socket.";

const GO_EXAMPLES: &str = "\
Examples:
  Two guests that are held ready switch over together:
    transship move --vm qemu:/run/vm1.qmp --to tcp:ship2:4444 --token @/run/token1 --hold &
    transship move --vm qemu:/run/vm2.qmp --to tcp:ship2:4445 --token @/run/token2 --hold &
    transship go qemu:/run/vm1.qmp qemu:/run/vm2.qmp

If one of them is not ready, none is released (exit 1).

WHICH is the VM as it was given to `move` or `save`, or its name alone, or the number of the process, or the path of \
its socket.";

/// How a move or save is held, and steered.
#[derive(Debug, Clone, Args)]
pub(crate) struct SteeringArgs {
    /// When it could be stopped, keep it ready until `transship go`
    ///
    /// The guest runs on, and what it writes is sent when it would make the stop too long, and every 10 seconds.
    /// `transship status` shows what is held. See docs/converging.md.
    #[arg(long, hide_short_help = true)]
    pub(crate) hold: bool,
    /// The same, but go on by itself after this time
    ///
    /// It counts from the moment when the guest could have been stopped for the first time.
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    pub(crate) hold_for: Option<String>,
    /// The same, but go on when this command has succeeded
    ///
    /// It is run by `/bin/sh -c` when the guest could have been stopped for the first time, with TRANSSHIP_PHASE=held
    /// and the other variables of --at-stop. If it fails, the guest runs on here (exit 1).
    #[arg(long, value_name = "CMD", hide_short_help = true)]
    pub(crate) hold_until: Option<String>,
    /// Listen here for `transship status`, `cancel` and `go`
    ///
    /// PATH is a unix socket. By default it is in /run/transship/control for root, and in
    /// $XDG_RUNTIME_DIR/transship/control for others. The same user and root may connect.
    #[arg(long, value_name = "PATH", hide_short_help = true)]
    pub(crate) control: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(after_long_help = STATUS_EXAMPLES)]
pub(crate) struct StatusArgs {
    /// VM, process or socket [default: all]
    pub(crate) which: Option<String>,
    /// Print one JSON array
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_long_help = CANCEL_EXAMPLES)]
pub(crate) struct CancelArgs {
    /// VM, process or socket
    pub(crate) which: String,
}

#[derive(Debug, Args)]
#[command(after_long_help = GO_EXAMPLES)]
pub(crate) struct GoArgs {
    /// VM, process or socket
    #[arg(required = true)]
    pub(crate) which: Vec<String>,
    /// Also those that have not converged: they go on when they have
    #[arg(long)]
    pub(crate) early: bool,
}
