//! `transship plan`.

use clap::Args;

use super::sandbox::SandboxArgs;
use super::tls::TlsArgs;
use super::tracker::Tracker;
use crate::trust::TokenText;

const PLAN_EXAMPLES: &str = "\
Examples:
  How a move to the receiver that waits there would go; its token is as good as before:
    transship plan --vm qemu:/run/vm.qmp --to tcp:ship2:4444 --token @/run/token
  The same over a link of which the speed is known:
    transship plan --vm qemu:/run/vm.qmp --bandwidth 1Gbit --downtime 100ms

For some seconds the guest's writes are tracked, as by `transship watch`; a sample of its pages is read, and the \
receiver is sent data for a second. Nothing else is done to either. Each line is what a move with these flags would be \
like. A guest that does not converge says for how long it would have to be stopped.";

#[derive(Debug, Args)]
#[command(after_long_help = PLAN_EXAMPLES)]
pub(crate) struct PlanArgs {
    /// The guest: qemu:SOCKET or handoff:SOCKET
    #[arg(long)]
    pub(crate) vm: String,
    /// A `transship receive` that waits: tcp:HOST:PORT or unix:PATH
    ///
    /// The link to it is measured. Without it, the speed is that of --bandwidth, or a gigabit.
    #[arg(long, value_name = "URI")]
    pub(crate) to: Option<String>,
    /// How long the guest is looked at, 1s to 10m
    #[arg(long, value_name = "TIME", default_value = "5s")]
    pub(crate) time: String,
    /// Limit for all channels together: 100M, 1Gbit
    #[arg(long, value_name = "RATE")]
    pub(crate) bandwidth: Option<String>,
    /// How long the guest may be stopped, up to 60s
    #[arg(long, value_name = "TIME", default_value = "300ms")]
    pub(crate) downtime: String,
    /// Give up after this many rounds
    #[arg(long, value_name = "N", default_value = "30")]
    pub(crate) max_rounds: String,
    /// Data channels, 1 to 255 [default: by cores, at most 16]
    #[arg(long, value_name = "N")]
    pub(crate) channels: Option<String>,
    /// Threads that compress, 1 to 255 [default: by cores]
    #[arg(long, value_name = "N")]
    pub(crate) encoders: Option<String>,
    /// How written pages are found: auto, async or sync
    ///
    /// As in `transship watch`.
    #[arg(long, value_enum, default_value_t = Tracker::Auto, value_name = "HOW", hide_possible_values = true)]
    pub(crate) tracker: Tracker,
    /// What the receiver has printed, or @FILE with it
    #[arg(long, value_name = "TOKEN")]
    pub(crate) token: Option<TokenText>,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Send in clear over a network that is nobody else's
    #[arg(long)]
    pub(crate) insecure: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Look although devices write past the tracker
    #[arg(long, hide_short_help = true)]
    pub(crate) allow_untracked_writers: bool,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
}
