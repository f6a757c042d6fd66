//! The command line. Help, man page and completions come from here.
//!
//! Values with rules of their own (units, bounds, addresses) stay text here: [`crate::checks`] reads them all, so that
//! one attempt reports every mistake, before anything touches a VM.
use clap::{Args, Parser, Subcommand, ValueEnum};

const ABOUT: &str = "Moves the memory of running virtual machines, from outside the VMM";

const AFTER_LONG: &str = "\
VM is one of
  qemu:/run/vm.qmp         a QEMU, by its QMP unix socket
  handoff:/run/guest.sock  a VMM that hands its guest over by itself, such as `transship guest`

URI is one of
  tcp:HOST:PORT            all channels connect to this port
  unix:PATH                a unix socket, for both ends on one host

Exit codes
  0  done
  1  failed; the source guest runs on
  2  wrong usage; nothing was touched
  3  the outcome needs a person; the message says what to do

TRANSSHIP_LOG=debug writes a log to stderr (off by default; filters like transship_engine=trace work).";

const MOVE_EXAMPLES: &str = "\
Examples:
  On the destination, where a QEMU of the same configuration waits with `-incoming defer`:
    transship receive --vm qemu:/run/vm.qmp --listen tcp:0.0.0.0:4444
  On the source:
    transship move --vm qemu:/run/vm.qmp --to tcp:ship2:4444

  At most 4 Gbit/s, the guest may stand still for 100 ms, compare all memory at the end:
    transship move --vm qemu:/run/vm.qmp --to tcp:ship2:4444 --bandwidth 4Gbit --downtime 100ms --verify

  Behind a slow link, smaller instead of faster, on 8 threads:
    transship move --vm qemu:/run/vm.qmp --to tcp:ship2:4444 --compress zstd:3 --encoders 8

Ctrl-C cancels: the guest runs on at the source. Once the guest has been handed over it is the destination's, and
the move can no longer be cancelled.

K, M, G and T are powers of 1024 (4G, 512MiB); KB, MB, GB, TB and all bits are powers of 1000 (1Gbit).";

const RECEIVE_EXAMPLES: &str = "\
Examples:
  A QEMU that was started with `-incoming defer`:
    transship receive --vm qemu:/run/vm2.qmp --listen tcp:0.0.0.0:4444
  A port that the system chooses; the line `listening at tcp:127.0.0.1:PORT` on stderr names it:
    transship receive --vm qemu:/run/vm2.qmp --listen tcp:127.0.0.1:0

Receives one guest and ends. The guest runs here only after the source has given it up.";

const WATCH_EXAMPLES: &str = "\
Examples:
  transship watch --vm qemu:/run/vm.qmp
  transship watch --vm qemu:/run/vm.qmp --interval 200ms --window 30s --count 100 --json

Each line says how many pages were written in the last interval, how many different ones in the last window and
since the start (the working set), and how much of the guest's memory holds data and how much was never touched.
Watching disturbs the guest as little as a migration's tracking does. Ctrl-C ends it; nothing stays in the VMM.";

const GUEST_EXAMPLES: &str = "\
Examples:
  Two guests on one host, and a move from one to the other:
    transship guest --listen /tmp/a.sock --mem 1G --write-rate 100M &
    transship guest --listen /tmp/b.sock --mem 1G --incoming &
    transship receive --vm handoff:/tmp/b.sock --listen unix:/tmp/move.sock &
    transship move --vm handoff:/tmp/a.sock --to unix:/tmp/move.sock

The guest writes memory that it can check: after the move the receiving one looks at every page and says how many
are wrong.";

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
    /// Move a running guest to another host
    Move(MoveArgs),
    /// Receive a guest that is moved here
    Receive(ReceiveArgs),
    /// Show how fast a guest writes its memory, live
    Watch(WatchArgs),
    /// Run a synthetic guest, for trying things without a VMM
    Guest(GuestArgs),
    /// Measure on this machine, beside stock QEMU
    Bench(transship_bench::Bench),
    /// Let the guest run again if the `move` that started this dies while it stands still
    #[command(hide = true)]
    Guard {
        #[arg(long)]
        vm: String,
    },
    /// Print a completion script for a shell
    #[command(hide = true)]
    Completions { shell: clap_complete::Shell },
    /// Print the manual page of the command, or of one of its subcommands
    #[command(hide = true)]
    Man { subcommand: Option<String> },
}

#[derive(Debug, Args)]
#[command(after_long_help = MOVE_EXAMPLES)]
pub(crate) struct MoveArgs {
    /// The guest to move: qemu:SOCKET or handoff:SOCKET
    #[arg(long)]
    pub(crate) vm: String,
    /// Where a transship receives: tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "URI")]
    pub(crate) to: String,
    /// What receives at the other end
    #[arg(long, value_enum, default_value_t = Peer::Transship, hide_short_help = true)]
    pub(crate) peer: Peer,
    /// Data channels, 1 to 255 [default: by cores, at most 16]
    #[arg(long, value_name = "N")]
    pub(crate) channels: Option<String>,
    /// Make pages smaller: auto, none, zlib, zstd, qatzip or lz4, also as METHOD:LEVEL
    ///
    /// `none`: send pages as they are, for links that are faster than the cores. `zlib`: levels 0 to 9. `zstd`: -7 to 20; the
    /// best ratio for the time. `qatzip`: 1 to 9; on a QAT device where there is one, else in software. `lz4`: 1 to 12; the
    /// fastest to decode. Without a level it is 1; higher is smaller and slower. `auto`: tries none, lz4 and zstd while the
    /// guest moves, uses what gets most pages through, and keeps trying. Pages that don't shrink go as they are.
    #[arg(long, value_name = "METHOD", default_value = "none")]
    pub(crate) compress: String,
    /// Threads that compress, 1 to 255 [default: by cores]
    #[arg(long, value_name = "N")]
    pub(crate) encoders: Option<String>,
    /// When all encoders are busy: wait, or send raw
    ///
    /// `wait`: until one is free; fewer bytes. `raw`: send the pages as they are; for links that are about as fast as the
    /// encoders.
    #[arg(long, value_enum, default_value_t = WhenBusy::Wait, value_name = "WHAT", hide_possible_values = true)]
    pub(crate) when_busy: WhenBusy,
    /// Who looks for zero pages: channels, main or off
    ///
    /// `channels`: each channel, right before it sends a page. `main`: the main thread, before it hands pages to the
    /// channels; for comparison. `off`: nobody, zero pages travel as data. Memory that was never touched is skipped
    /// unread in any case.
    #[arg(long, value_enum, default_value_t = ZeroPages::Channels, value_name = "WHO", hide_possible_values = true)]
    pub(crate) zero_pages: ZeroPages,
    /// Most that all channels together send: 100M, 1Gbit
    #[arg(long, value_name = "RATE")]
    pub(crate) bandwidth: Option<String>,
    /// How long the guest may stand still, up to 60s
    #[arg(long, value_name = "TIME", default_value = "300ms")]
    pub(crate) downtime: String,
    /// Give up after this many rounds
    ///
    /// A guest that writes faster than the link carries would go on for ever. After this many rounds the move ends with
    /// the numbers that show it, and the guest runs on at the source.
    #[arg(long, value_name = "N", default_value = "30")]
    pub(crate) max_rounds: String,
    /// Compare a hash of all memory on both sides
    ///
    /// Taken while the guest stands still, so it lengthens the downtime by the time that reading all memory takes.
    #[arg(long)]
    pub(crate) verify: bool,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Move although devices write past the tracker
    ///
    /// vhost-user back ends, VFIO devices and disks that are read past the page cache write guest memory without being
    /// seen by the tracker, so such a guest is refused. With this flag you say that they are quiet for the whole move;
    /// pages that they do write are lost.
    #[arg(long, hide_short_help = true)]
    pub(crate) allow_untracked_writers: bool,
}

/// The other end. A stock QEMU as a peer is to come.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Peer {
    Transship,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum ZeroPages {
    Channels,
    Main,
    Off,
}

impl From<ZeroPages> for transship_engine::ZeroPages {
    fn from(who: ZeroPages) -> Self {
        match who {
            ZeroPages::Channels => Self::Channels,
            ZeroPages::Main => Self::Main,
            ZeroPages::Off => Self::Off,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum WhenBusy {
    Wait,
    Raw,
}

impl From<WhenBusy> for transship_engine::WhenBusy {
    fn from(what: WhenBusy) -> Self {
        match what {
            WhenBusy::Wait => Self::Wait,
            WhenBusy::Raw => Self::Raw,
        }
    }
}

#[derive(Debug, Args)]
#[command(after_long_help = RECEIVE_EXAMPLES)]
pub(crate) struct ReceiveArgs {
    /// The waiting guest: qemu:SOCKET or handoff:SOCKET
    #[arg(long)]
    pub(crate) vm: String,
    /// Where the source connects: tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "URI")]
    pub(crate) listen: String,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_long_help = WATCH_EXAMPLES)]
pub(crate) struct WatchArgs {
    /// The guest to watch: qemu:SOCKET or handoff:SOCKET
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
    /// Print each line as a JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Watch although devices write past the tracker
    #[arg(long, hide_short_help = true)]
    pub(crate) allow_untracked_writers: bool,
}

#[derive(Debug, Args)]
#[command(after_long_help = GUEST_EXAMPLES)]
pub(crate) struct GuestArgs {
    /// Socket at which the guest can be attached to
    #[arg(long, value_name = "PATH")]
    pub(crate) listen: std::path::PathBuf,
    /// Size of its memory
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub(crate) mem: String,
    /// Regions that the memory is split into
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) regions: String,
    /// Share of the memory that is written at the start
    #[arg(long, value_name = "SHARE", default_value = "50%")]
    pub(crate) touched: String,
    /// What the touched pages hold: zero, random or mixed
    #[arg(long, value_enum, default_value_t = Content::Mixed, hide_possible_values = true)]
    pub(crate) content: Content,
    /// Fill the touched pages from the files of this folder
    #[arg(long, value_name = "DIR", conflicts_with = "content")]
    pub(crate) corpus: Option<std::path::PathBuf>,
    /// How fast it writes: 100M, or max [default: not at all]
    #[arg(long, value_name = "RATE")]
    pub(crate) write_rate: Option<String>,
    /// Threads that write
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) threads: String,
    /// Memory that is written again and again [default: 64M]
    #[arg(long, value_name = "SIZE")]
    pub(crate) hot_set: Option<String>,
    /// Keep the memory in files here: a hugetlbfs or tmpfs
    #[arg(long, value_name = "DIR")]
    pub(crate) huge: Option<std::path::PathBuf>,
    /// Wait for a guest to be moved here
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
