//! The command line. Help, man page and completions come from here.
//!
//! Values with rules of their own (units, bounds, addresses) stay text here: [`crate::checks`] reads them all, so that
//! one attempt reports every mistake, before anything touches a VM.
mod check;
mod clones;
mod convert;
mod receive;
mod relay;
mod restore;
mod tracker;

use clap::{Args, Parser, Subcommand, ValueEnum};

pub(crate) use check::CheckArgs;
pub(crate) use clones::{CloneArgs, ForkArgs};
pub(crate) use convert::ConvertArgs;
pub(crate) use receive::{ReceiveArgs, Sender};
pub(crate) use relay::RelayArgs;
pub(crate) use restore::{InfoArgs, RestoreArgs};
pub(crate) use tracker::{Converge, Tracker};

use crate::trust::TokenText;

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

const MOVE_EXAMPLES: &str = "\
Examples:
  On the destination, where a QEMU with the same configuration waits with `-incoming defer`:
    transship receive --vm qemu:/run/vm.qmp --listen tcp:0.0.0.0:4444
  On the source, with the token that it prints:
    transship move --vm qemu:/run/vm.qmp --to tcp:ship2:4444 --token ts1-...

  At most 4 Gbit/s and 100 ms of downtime, with all memory compared at the end:
    transship move --vm qemu:/run/vm.qmp --to tcp:ship2:4444 --token @/run/token --bandwidth 4Gbit --downtime 100ms \
      --verify

  Over a slow link, with stronger compression on 8 threads:
    transship move --vm qemu:/run/vm.qmp --to tcp:ship2:4444 --token @/run/token --compress zstd:3 --encoders 8

  A guest that writes faster than the link carries, moved within ten minutes or not at all:
    transship move --vm qemu:/run/vm.qmp --to tcp:ship2:4444 --token @/run/token --converge pace --deadline 10m

  To a stock QEMU that was started with `-incoming tcp:0.0.0.0:4444`, over a network of your own:
    transship move --vm qemu:/run/vm.qmp --to tcp:ship2:4444 --peer qemu --insecure

Ctrl-C cancels the move, and the guest keeps running at the source. Once the guest has been handed over to the \
destination, the move can no longer be cancelled.

K, M, G and T are powers of 1024 (4G, 512MiB); KB, MB, GB, TB and all bits are powers of 1000 (1Gbit).";

const SAVE_EXAMPLES: &str = "\
Examples:
  While the guest runs, with a stop of at most 300 ms:
    transship save --vm qemu:/run/vm.qmp --to /srv/vm.snap
  The fastest way: stop the guest first, and leave it stopped:
    transship save --vm qemu:/run/vm.qmp --to /srv/vm.snap --paused --stay-stopped
  Into a file that a manager has opened twice, with and without O_DIRECT:
    transship save --vm qemu:/run/vm.qmp --to fdset:3,4

FILE is PATH, file:PATH[,offset=N], fd:N or fdset:N,M. A stock QEMU can load it, too:
  qemu-system-x86_64 ... -incoming defer
  (qemu) migrate_set_capability mapped-ram on
  (qemu) migrate_incoming file:/srv/vm.snap

A file given by name is replaced only when the new one is complete and on the disk. Ctrl-C cancels the save: the \
guest runs on, and an older file stays as it was.";

const WATCH_EXAMPLES: &str = "\
Examples:
  transship watch --vm qemu:/run/vm.qmp
  transship watch --vm qemu:/run/vm.qmp --interval 200ms --window 30s --count 100 --json

Each line shows how many pages were written in the last interval, how many different pages in the last window and \
since the start (the working set), and how much of the guest's memory holds data and how much was never touched. \
Watching disturbs the guest as little as the tracking of a migration. Ctrl-C ends it; nothing stays in the VMM.";

const GUEST_EXAMPLES: &str = "\
Examples:
  Two guests on one host, and a move from one to the other:
    transship guest --listen /tmp/a.sock --mem 1G --write-rate 100M &
    transship guest --listen /tmp/b.sock --mem 1G --incoming &
    transship receive --vm handoff:/tmp/b.sock --listen unix:/tmp/move.sock &
    transship move --vm handoff:/tmp/a.sock --to unix:/tmp/move.sock

The guest writes memory that it can check. After the move, the receiving guest checks every page and reports how \
many are wrong.";

const BALLOON_EXAMPLES: &str = "\
Examples:
  The device, and a QEMU that gives it to its guest (11.1 or newer; Linux has the driver):
    transship balloon --socket /run/vm.balloon &
    qemu-system-x86_64 ... -chardev socket,id=balloon,path=/run/vm.balloon \\
      -device pcie-root-port,id=port0 -device vhost-user-test-device-pci,id=balloon,bus=port0,chardev=balloon,\\
        virtio-id=5,num_vqs=5,config_size=16,vq_size=1024

The balloon inflates and deflates, and gives back memory that the guest reports as free. With --balloon, `move` and \
`save` ask it which memory they can leave out. Guest memory must be a shared file, as always with transship.

After Ctrl-C the balloon ends as soon as QEMU has disconnected (device_del, then chardev-remove). If it ended earlier, \
QEMU 11.1 could crash, and the guest with it.";

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
    /// Move a running guest to another host
    Move(MoveArgs),
    /// Receive a guest that is moved here
    Receive(ReceiveArgs),
    /// Carry the migration of two stock QEMUs over a slow link
    Relay(RelayArgs),
    /// Save a guest to a file
    Save(SaveArgs),
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
    Guard {
        #[arg(long)]
        vm: String,
        /// What the guest's adapter needs to know for that
        #[arg(long, default_value = "", allow_hyphen_values = true)]
        will: String,
    },
    /// Bring the pages of a guest if the `restore --lazy` that started this dies
    #[command(hide = true)]
    StandIn {
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
    /// The receiver: tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "URI")]
    pub(crate) to: String,
    /// What receives at the other end: transship or qemu
    ///
    /// `qemu`: a stock QEMU that was started with `-incoming URI`; its host needs no transship. Set it up as for a
    /// migration from QEMU; see docs/qemu-peer.md.
    #[arg(long, value_enum, default_value_t = Peer::Transship, value_name = "WHAT", hide_possible_values = true)]
    pub(crate) peer: Peer,
    /// Data channels, 1 to 255 [default: by cores, at most 16]
    ///
    /// With --peer qemu, the value of the destination's `multifd-channels`. The default is then 0, which means that
    /// `multifd` is off there, as is QEMU's own default.
    #[arg(long, value_name = "N")]
    pub(crate) channels: Option<String>,
    /// Compress pages: auto, none, zlib, zstd, qatzip or lz4, also as METHOD:LEVEL
    ///
    /// `none`: send pages as they are, for links that are faster than the cores. `zlib`: levels 0 to 9. `zstd`: -7 to
    /// 20; the best ratio for the time. `qatzip`: 1 to 9; on a QAT device if there is one, otherwise in software.
    /// `lz4`: 1 to 12; the fastest to decode. The default level is 1; higher levels compress better and take longer.
    /// `auto`: none, lz4 or zstd, whichever gets the most pages through; it measures link and encoders during the move
    /// and switches when they change.
    ///
    /// Pages that don't shrink are sent as they are. With --peer qemu, give the value of the destination's
    /// `multifd-compression`: none, zlib or zstd.
    #[arg(long, value_name = "METHOD", default_value = "none")]
    pub(crate) compress: String,
    /// Threads that compress, 1 to 255 [default: by cores]
    #[arg(long, value_name = "N")]
    pub(crate) encoders: Option<String>,
    /// When all encoders are busy: wait, or send raw
    ///
    /// `wait`: wait until one is free; sends fewer bytes. `raw`: send the pages as they are; for links that are about
    /// as fast as the encoders.
    #[arg(long, value_enum, default_value_t = WhenBusy::Wait, value_name = "WHAT", hide_possible_values = true, hide_short_help = true)]
    pub(crate) when_busy: WhenBusy,
    /// Where zero pages are detected: channels, main or off
    ///
    /// `channels`: in each channel, right before it sends a page. `main`: in the main thread, before it hands pages to
    /// the channels; for comparison. `off`: nowhere; zero pages are sent as data. Memory that was never touched is
    /// always skipped unread. With --peer qemu and channels, `main` also clears memory of the destination that was not
    /// empty when that QEMU started.
    #[arg(long, value_enum, default_value_t = ZeroPages::Channels, value_name = "HOW", hide_possible_values = true, hide_short_help = true)]
    pub(crate) zero_pages: ZeroPages,
    /// Limit for all channels together: 100M, 1Gbit
    #[arg(long, value_name = "RATE")]
    pub(crate) bandwidth: Option<String>,
    /// How long the guest may be stopped, up to 60s
    #[arg(long, value_name = "TIME", default_value = "300ms")]
    pub(crate) downtime: String,
    /// Give up after this many rounds
    ///
    /// If the guest writes faster than the link can carry, the rounds would never end. After this many rounds the move
    /// ends and reports the numbers, and the guest keeps running at the source.
    #[arg(long, value_name = "N", default_value = "30", hide_short_help = true)]
    pub(crate) max_rounds: String,
    /// If it writes too fast: never, pace
    ///
    /// `never`: after some rounds the move ends and reports the numbers, and the guest keeps running at the source.
    /// `pace`: writers that are faster than the link are held, for a few milliseconds at a time, so that each round is
    /// smaller than the one before; a guest that writes little is never held. This needs `--tracker sync`, and chooses
    /// it. See docs/converging.md.
    #[arg(long, value_enum, default_value_t = Converge::Never, value_name = "HOW", hide_possible_values = true)]
    pub(crate) converge: Converge,
    /// End within this time: moved, or running on here
    ///
    /// The guest is at the destination by then, or keeps running at the source (exit 1). With `--converge pace` writers
    /// are held the harder the less time is left. See docs/converging.md.
    #[arg(long, value_name = "TIME")]
    pub(crate) deadline: Option<String>,
    /// Rather than give up, stop the guest for up to this time
    ///
    /// When the move would end with a verdict, because the guest does not converge or there is no time for another
    /// round before the deadline, the guest is stopped all the same if the rest then takes no longer than this.
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    pub(crate) max_downtime: Option<String>,
    /// Run this command while the guest stands still, before it is given up
    ///
    /// By `/bin/sh -c`, when all else is done; TRANSSHIP_PHASE=stopped, TRANSSHIP_COMMAND, TRANSSHIP_VM and
    /// TRANSSHIP_TO are in its environment. If it fails, the guest runs on at the source (exit 1). If the guest stays
    /// after it was started, it runs again before the guest does, with TRANSSHIP_PHASE=back. See docs/converging.md.
    #[arg(long, value_name = "CMD", hide_short_help = true)]
    pub(crate) at_stop: Option<String>,
    /// How long that command may take, 1s to 60s
    #[arg(long, value_name = "TIME", default_value = "30s", hide_short_help = true)]
    pub(crate) at_stop_timeout: String,
    /// Ask the guest's `transship balloon` which memory is free
    ///
    /// PATH is the socket of the balloon. Memory that the guest does not need is left out of the first round. QEMU
    /// can't save this device: transship unplugs it before the guest is stopped, and plugs it in again if the guest
    /// stays.
    #[arg(long, value_name = "PATH", hide_short_help = true)]
    pub(crate) balloon: Option<std::path::PathBuf>,
    /// How written pages are found: auto, async or sync
    ///
    /// `async`: the kernel notes writes, and the guest notices nothing; Linux 6.7 or newer. `sync`: the first write to
    /// a page in each round waits until transship lets it through; Linux 5.14 or newer, for shared memory 5.19, and
    /// not on huge pages of a hugetlbfs. `auto`: what the kernel can do, `async` if both.
    #[arg(long, value_enum, default_value_t = Tracker::Auto, value_name = "HOW", hide_possible_values = true, hide_short_help = true)]
    pub(crate) tracker: Tracker,
    /// Compare a hash of all memory on both sides
    ///
    /// The hash is computed while the guest is stopped, so the downtime grows by the time needed to read all memory.
    #[arg(long)]
    pub(crate) verify: bool,
    /// The token that the receiver printed, or @FILE with it
    ///
    /// All connections are encrypted (TLS 1.3), the receiver is known to be the one that made the token, and it knows
    /// that you have it. A token is good for one move. Users of this host can see the command line: with @FILE they see
    /// only the file's name.
    #[arg(long, value_name = "TOKEN")]
    pub(crate) token: Option<TokenText>,
    /// Let guest memory cross the network unencrypted
    ///
    /// Without this flag only addresses of this host (loopback, unix sockets) are used without encryption. With it,
    /// anybody on the way can read and change the guest's memory, and anybody can pose as the other side.
    #[arg(long, conflicts_with = "token", hide_short_help = true)]
    pub(crate) insecure: bool,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Move although devices write past the tracker
    ///
    /// The tracker does not see writes by vhost-user back ends, by VFIO devices, by disks whose driver is outside the
    /// kernel (nvme://), and by disks with cache=none that are added meanwhile. A guest with such devices is refused,
    /// at the latest when it is stopped. With this flag you promise that they write nothing during the whole move.
    /// Pages that they do write are lost.
    #[arg(long, hide_short_help = true)]
    pub(crate) allow_untracked_writers: bool,
}

/// The other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    Transship,
    Qemu,
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

#[derive(Debug, Clone, Args)]
#[command(after_long_help = SAVE_EXAMPLES)]
pub(crate) struct SaveArgs {
    /// The guest to save: qemu:SOCKET, libvirt:DOMAIN, libvirt:URI#DOMAIN or handoff:SOCKET
    #[arg(long, required_unless_present = "all_of", conflicts_with = "all_of")]
    pub(crate) vm: Option<String>,
    /// Save all domains of a libvirt that run: libvirt: or libvirt:URI
    ///
    /// The largest begin, --parallel at a time. Each gets a file NAME.save in the folder that --to names. If one fails,
    /// the others go on. The report says for each how to bring it back.
    #[arg(long, value_name = "libvirt:[URI]", hide_short_help = true)]
    pub(crate) all_of: Option<String>,
    /// With --all-of: how many domains at a time, 1 to 255
    #[arg(long, value_name = "N", requires = "all_of", hide_short_help = true)]
    pub(crate) parallel: Option<String>,
    /// The file: PATH, file:PATH[,offset=N], fd:N or fdset:N,M
    #[arg(long, value_name = "FILE")]
    pub(crate) to: String,
    /// Write pages at most at this rate while the guest runs, such as 200MiB/s
    ///
    /// With --all-of: all domains together. What a guest waits for (a page that it is about to write, with
    /// --background) is written at once, and so is everything while it stands still.
    #[arg(long, value_name = "RATE", hide_short_help = true)]
    pub(crate) bandwidth: Option<String>,
    /// Stop the guest for the whole save
    #[arg(long, group = "way")]
    pub(crate) paused: bool,
    /// Save in rounds while the guest runs, then stop it briefly (default)
    #[arg(long, group = "way")]
    pub(crate) live: bool,
    /// Save the moment of the call; the guest runs on
    ///
    /// A page is saved before the first write to it goes through, so the file holds the guest as it was when the
    /// command began. The guest is stopped only while its device state is saved.
    #[arg(long, group = "way")]
    pub(crate) background: bool,
    /// Let the guest run on afterwards (default)
    #[arg(long, group = "then", hide_short_help = true)]
    pub(crate) resume: bool,
    /// Leave the guest stopped afterwards
    #[arg(long, group = "then", conflicts_with = "background")]
    pub(crate) stay_stopped: bool,
    /// Threads that write, 1 to 255 [default: by cores, at most 16]
    #[arg(long, value_name = "N")]
    pub(crate) channels: Option<String>,
    /// Write past the page cache: on, off or auto
    ///
    /// `auto`: where the file system allows it; elsewhere through the page cache. `on` (also without a value): it is an
    /// error if the file system refuses. A stream is always written through the page cache.
    #[arg(long, value_name = "WHETHER", default_value = "auto", default_missing_value = "on", num_args = 0..=1, require_equals = true)]
    pub(crate) direct_io: String,
    /// Layout of the file: mapped-ram, stream, raw, libvirt or libvirt-sparse
    ///
    /// `mapped-ram`: every page has its place, so many threads write at once, and the file never takes more than the
    /// guest's memory. QEMU 9.0 and newer load it. `stream`: one page after the other; a page that changes is written
    /// again. QEMU of any version loads it. `raw`: a folder with the guest's memory as it is, from which `transship
    /// clone` makes guests that share it. `libvirt`: a save image of a domain of libvirt, for `virsh restore`;
    /// `libvirt-sparse`: the same with places for pages, for libvirt 11.2 and newer.
    #[arg(long, value_enum, default_value_t = FileFormat::MappedRam, value_name = "FORMAT", hide_possible_values = true)]
    pub(crate) format: FileFormat,
    /// How long a live guest may be stopped, up to 60s
    #[arg(long, value_name = "TIME", default_value = "300ms")]
    pub(crate) downtime: String,
    /// Give up on a live guest after this many rounds
    #[arg(long, value_name = "N", default_value = "30", hide_short_help = true)]
    pub(crate) max_rounds: String,
    /// If a live guest writes too fast: never, pace
    ///
    /// As in `transship move`, with the disk in place of the link.
    #[arg(long, value_enum, default_value_t = Converge::Never, value_name = "HOW", hide_possible_values = true, hide_short_help = true)]
    pub(crate) converge: Converge,
    /// End within this time: saved, or given up
    ///
    /// The file is complete by then, or the save ends as if it had been cancelled (exit 1). With `--converge pace`
    /// writers are held the harder the less time is left. See docs/converging.md.
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    pub(crate) deadline: Option<String>,
    /// Rather than give up, stop a live guest for up to this time
    ///
    /// As in `transship move`.
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    pub(crate) max_downtime: Option<String>,
    /// Run this command while the guest stands still for its save
    ///
    /// As in `transship move`, for a snapshot of its disks, say. If it fails, so does the save, and the guest runs on.
    #[arg(long, value_name = "CMD", conflicts_with = "all_of", hide_short_help = true)]
    pub(crate) at_stop: Option<String>,
    /// How long that command may take, 1s to 60s
    #[arg(long, value_name = "TIME", default_value = "30s", hide_short_help = true)]
    pub(crate) at_stop_timeout: String,
    /// Ask the guest's `transship balloon` which memory is free
    ///
    /// PATH is the socket of the balloon. With --live, memory that the guest does not need is left out. QEMU can't save
    /// this device: transship unplugs it before the guest is stopped, and plugs it in again afterwards.
    #[arg(long, value_name = "PATH", hide_short_help = true)]
    pub(crate) balloon: Option<std::path::PathBuf>,
    /// How written pages are found: auto, async or sync
    ///
    /// `async`: the kernel notes writes, and the guest notices nothing; Linux 6.7 or newer. `sync`: the first write to
    /// a page in each round waits until transship lets it through; Linux 5.14 or newer, for shared memory 5.19, and
    /// not on huge pages of a hugetlbfs. `auto`: what the kernel can do, `async` if both.
    #[arg(long, value_enum, default_value_t = Tracker::Auto, value_name = "HOW", hide_possible_values = true, hide_short_help = true)]
    pub(crate) tracker: Tracker,
    /// How to ask the kernel to write: auto, uring or plain
    #[arg(long, value_enum, default_value_t = FileIo::Auto, value_name = "HOW", hide_possible_values = true, hide_short_help = true)]
    pub(crate) io: FileIo,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Save although devices write past the tracker
    ///
    /// As in `transship move`. With --paused it is not needed.
    #[arg(long, hide_short_help = true)]
    pub(crate) allow_untracked_writers: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FileFormat {
    MappedRam,
    Stream,
    Raw,
    Libvirt,
    LibvirtSparse,
}

impl From<FileFormat> for transship_engine::Format {
    fn from(format: FileFormat) -> Self {
        match format {
            FileFormat::MappedRam => Self::MappedRam,
            FileFormat::Stream => Self::Stream,
            FileFormat::Raw => Self::Raw,
            FileFormat::Libvirt => Self::Libvirt,
            FileFormat::LibvirtSparse => Self::LibvirtSparse,
        }
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum FileIo {
    Auto,
    Uring,
    Plain,
}

impl From<FileIo> for transship_engine::FileIo {
    fn from(how: FileIo) -> Self {
        match how {
            FileIo::Auto => Self::Auto,
            FileIo::Uring => Self::Uring,
            FileIo::Plain => Self::Plain,
        }
    }
}

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
}

#[derive(Debug, Args)]
#[command(after_long_help = BALLOON_EXAMPLES)]
pub(crate) struct BalloonArgs {
    /// Socket for QEMU, and for `move` and `save`
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: std::path::PathBuf,
    /// User that QEMU runs as: owns the socket, and may connect as well as root [default: yourself]
    #[arg(long, value_name = "NAME")]
    pub(crate) user: Option<String>,
}

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
