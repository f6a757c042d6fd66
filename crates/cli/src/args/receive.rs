//! The command line of `receive`.
use clap::{Args, ValueEnum};

use super::{
    SandboxArgs, TlsArgs,
    save::{FileFormat, FileIo},
};

const RECEIVE_EXAMPLES: &str = "\
Examples:
  Into a QEMU that was started with `-incoming defer`:
    transship receive --vm qemu:/run/vm2.qmp --listen tcp:0.0.0.0:4444
  It prints the command for the source, with a token that only the source's user should see.
  On a port that the system chooses; the line `listening at tcp:127.0.0.1:PORT` on stderr names it:
    transship receive --vm qemu:/run/vm2.qmp --listen tcp:127.0.0.1:0
  From a stock QEMU without a transship there, into a file:
    transship receive --peer qemu --to /srv/vm.snap --listen tcp:0.0.0.0:4444 --insecure
    (qemu) migrate_set_capability return-path on
    (qemu) migrate tcp:ship2:4444
  From a stock QEMU into a waiting QEMU:
    transship receive --peer qemu --vm qemu:/run/vm2.qmp --listen tcp:0.0.0.0:4444 --insecure

The command receives one guest and ends. The guest runs here only after the source has given it up.

With a return path, a stock QEMU learns of success when its guest is loaded, or when the file is on the disk under its \
name. Without one, it takes its last write for success.";

#[derive(Debug, Args)]
#[command(after_long_help = RECEIVE_EXAMPLES)]
pub(crate) struct ReceiveArgs {
    /// The waiting guest: qemu:SOCKET or handoff:SOCKET
    #[arg(long, required_unless_present = "to")]
    pub(crate) vm: Option<String>,
    /// With --peer qemu, instead of --vm: a file, PATH, file:PATH[,offset=N] or fd:N
    #[arg(long, value_name = "FILE", conflicts_with = "vm")]
    pub(crate) to: Option<String>,
    /// Where the source connects: tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "URI")]
    pub(crate) listen: String,
    /// What sends: transship, or qemu (the migration of a stock QEMU)
    #[arg(long, value_enum, default_value_t = Sender::Transship, value_name = "WHAT", hide_possible_values = true)]
    pub(crate) peer: Sender,
    /// Layout of the file: mapped-ram or stream [default: mapped-ram]
    #[arg(long, value_enum, value_name = "FORMAT", hide_possible_values = true)]
    pub(crate) format: Option<FileFormat>,
    /// Write the file past the page cache: on, off or auto
    ///
    /// `auto` (the default): where the file system allows it; elsewhere through the page cache. `on` (also without a
    /// value): it is an error if the file system refuses. A stream is always written through the page cache, and so are
    /// pages that arrive as differences (xbzrle).
    #[arg(long, value_name = "WHETHER", default_missing_value = "on", num_args = 0..=1, require_equals = true)]
    pub(crate) direct_io: Option<String>,
    /// How to ask the kernel to write: auto, uring or plain
    #[arg(long, value_enum, value_name = "HOW", hide_possible_values = true, hide_short_help = true)]
    pub(crate) io: Option<FileIo>,
    /// With --peer qemu: its multifd-channels [default: as many as come]
    ///
    /// 0: its capability multifd is off. The source chooses compression (zlib, zstd or none), zero pages and xbzrle;
    /// `receive` recognizes them.
    #[arg(long, value_name = "N")]
    pub(crate) channels: Option<String>,
    /// Ask for a token, good for this time: 10m, 1h [default: 1h]
    ///
    /// The command makes a key and prints the command for the other side, with a token in it. Only a caller with this
    /// token is let in, once, and all connections are encrypted (TLS 1.3). Without this flag, and without --insecure,
    /// that is also done wherever other hosts can connect; addresses of this host (loopback, unix sockets) need no
    /// token.
    #[arg(long, value_name = "TIME")]
    pub(crate) token_lifetime: Option<String>,
    /// A user who may connect to the unix socket at --listen; root and you always may
    ///
    /// A name or a number. Can be given several times. The kernel says whose process has connected. With a token or
    /// certificates these are asked for instead.
    #[arg(long, value_name = "USER", hide_short_help = true)]
    pub(crate) allow_user: Vec<String>,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Let guest memory cross the network unencrypted
    ///
    /// Without this flag only addresses of this host (loopback, unix sockets) are used without encryption. With it,
    /// anybody on the way can read and change the guest's memory, and anybody can pose as the other side.
    #[arg(long)]
    pub(crate) insecure: bool,
    /// Let the guest run before its pages are here
    ///
    /// For `transship move --converge postcopy`. Until they are here the guest needs both hosts and the link.
    #[arg(long, conflicts_with = "to")]
    pub(crate) postcopy: bool,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// The other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sender {
    Transship,
    Qemu,
}
