//! `transship move`.

use clap::{Args, ValueEnum};

use super::encoding::{WhenBusy, ZeroPages};
use super::sandbox::SandboxArgs;
use super::steering::SteeringArgs;
use super::tls::TlsArgs;
use super::tracker::{Converge, Tracker};
use crate::trust::TokenText;

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

  A guest that was handed over before its pages, when all processes of the move were killed:
    transship move --vm qemu:/run/vm.qmp --to tcp:ship2:4444 --token @/run/token --recover

  To a stock QEMU that was started with `-incoming tcp:0.0.0.0:4444`, over a network of your own:
    transship move --vm qemu:/run/vm.qmp --to tcp:ship2:4444 --peer qemu --insecure

Ctrl-C cancels the move, and the guest keeps running at the source. Once the guest has been handed over to the \
destination, the move can no longer be cancelled.

K, M, G and T are powers of 1024 (4G, 512MiB); KB, MB, GB, TB and all bits are powers of 1000 (1Gbit).";

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
    /// If it writes too fast: never, pace, postcopy
    ///
    /// `never`: after some rounds the move ends and reports the numbers, and the guest keeps running at the source.
    /// `pace`: writers that are faster than the link are held, for a few milliseconds at a time, so that each round is
    /// smaller than the one before; a guest that writes little is never held. This needs `--tracker sync`, and chooses
    /// it.
    ///
    /// `postcopy`: after some rounds the guest is handed over all the same. It runs at the destination, the rest of its
    /// pages follow, and it waits for those that it touches first. Until they are all there the guest needs both hosts
    /// and the link: if the link breaks, it waits and goes on when the link is back; if the source's host is lost, so
    /// is the guest. See docs/converging.md, also on what happens if a process is killed.
    #[arg(long, value_enum, default_value_t = Converge::Never, value_name = "HOW", hide_possible_values = true)]
    pub(crate) converge: Converge,
    /// With --converge postcopy: hand over after this many rounds [default: at most 2]
    ///
    /// 0: at once, before any page was sent. A guest whose rest fits --downtime earlier is moved as always. By default
    /// the guest is handed over after the first round, if a second would hardly leave less, and else after the second.
    #[arg(long, value_name = "ROUNDS", hide_short_help = true)]
    pub(crate) postcopy_after: Option<String>,
    /// Go on with a move by post-copy that was killed
    ///
    /// A guest that was handed over before its pages waits at those that it lacks. If nobody is left who sends them,
    /// neither `transship move` nor its second process, this does, from the memory that the source's VMM still has.
    /// Write --vm, --to and the token or certificates as before. The guest must not have been let run here since.
    #[arg(long, hide_short_help = true)]
    pub(crate) recover: bool,
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
    #[command(flatten)]
    pub(crate) steering: SteeringArgs,
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
    /// Send all pages, also on one host
    ///
    /// Over a unix socket in clear, a receiver that root or you have started reads the pages itself, from the files of
    /// the guest's memory, which it gets for reading only, or from a buffer that both share. That copies them once and
    /// not twice. Memory in a file on a disk is sent, and so is all of it with --bandwidth, --converge postcopy, or a
    /// --compress other than none and auto.
    #[arg(long, hide_short_help = true)]
    pub(crate) no_lending: bool,
    /// The token that the receiver printed, or @FILE with it
    ///
    /// All connections are encrypted (TLS 1.3), the receiver is known to be the one that made the token, and it knows
    /// that you have it. A token is good for one move. Users of this host can see the command line: with @FILE they see
    /// only the file's name.
    #[arg(long, value_name = "TOKEN")]
    pub(crate) token: Option<TokenText>,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
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
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
}

/// The other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    Transship,
    Qemu,
}
