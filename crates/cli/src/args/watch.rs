//! `transship watch`.

use clap::Args;

use super::sandbox::SandboxArgs;
use super::tracker::Tracker;

const WATCH_EXAMPLES: &str = "\
Examples:
  transship watch --vm qemu:/run/vm.qmp
  transship watch --vm qemu:/run/vm.qmp --interval 200ms --window 30s --count 100 --json

Each line shows how many pages were written in the last interval, how many different pages in the last window and \
since the start (the working set), and how much of the guest's memory holds data and how much was never touched. \
Watching disturbs the guest as little as the tracking of a migration. Ctrl-C ends it; nothing stays in the VMM.";

#[derive(Debug, Args)]
#[command(after_long_help = WATCH_EXAMPLES)]
pub(crate) struct WatchArgs {
    /// The guest to watch: qemu:SOCKET, libvirt:DOMAIN, libvirt:URI#DOMAIN or handoff:SOCKET
    #[arg(long)]
    pub(crate) vm: String,
    /// Time between two lines, 10ms to 1h
    #[arg(long, value_name = "TIME", default_value = "1s")]
    pub(crate) interval: String,
    /// Time over which the working set is counted
    #[arg(long, value_name = "TIME", default_value = "10s")]
    pub(crate) window: String,
    /// Lines to print [default: until Ctrl-C]
    #[arg(long, value_name = "N")]
    pub(crate) count: Option<String>,
    /// How written pages are found: auto, async or sync
    ///
    /// `async`: the kernel notes writes, and the guest notices nothing; Linux 6.7 or newer. `sync`: the first write to
    /// a page in each round waits until transship lets it through; Linux 5.14 or newer, for shared memory 5.19, and
    /// not on huge pages of a hugetlbfs. `auto`: what the kernel can do, `async` if both.
    #[arg(long, value_enum, default_value_t = Tracker::Auto, value_name = "HOW", hide_possible_values = true, hide_short_help = true)]
    pub(crate) tracker: Tracker,
    /// Print each line as a JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Watch although devices write past the tracker
    #[arg(long, hide_short_help = true)]
    pub(crate) allow_untracked_writers: bool,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
}
