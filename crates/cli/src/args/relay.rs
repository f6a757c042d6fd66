//! The command line of `relay`.
use clap::Args;

use super::{SandboxArgs, TlsArgs};
use crate::trust::TokenText;

const RELAY_EXAMPLES: &str = "\
Examples:
  Near the destination, where a QEMU waits with `-incoming tcp:127.0.0.1:4444`:
    transship relay --listen relay:tcp:0.0.0.0:4445 --to tcp:127.0.0.1:4444
  Near the source, with the token that it prints:
    transship relay --listen tcp:127.0.0.1:4444 --to relay:tcp:ship2:4445 --token ts1-...
  Finally, in the monitor of the source QEMU:
    (qemu) migrate_set_capability return-path on
    (qemu) migrate tcp:127.0.0.1:4444

`relay:` marks the address of the link between the two relays. They carry the QEMUs' bytes unchanged, with or without \
multifd. Each relay carries one migration and ends; with --many it carries one after the other, several at once, \
until it is stopped.

If anything breaks before the guest has been handed over, it keeps running at the source. If the link breaks just at \
the hand-over, the guest stands still, and the relay near the source says what to do.";

#[derive(Debug, Args)]
#[command(after_long_help = RELAY_EXAMPLES)]
pub(crate) struct RelayArgs {
    /// Near the source: where its QEMU connects, tcp:HOST:PORT or unix:PATH; near the destination: relay:URI
    #[arg(long, value_name = "[relay:]URI")]
    pub(crate) listen: String,
    /// Near the source: the other relay, relay:URI; near the destination: the waiting QEMU, tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "[relay:]URI")]
    pub(crate) to: String,
    /// Near the source: connections of the link, 1 to 255 [default: by cores, at most 16]
    #[arg(long, value_name = "N")]
    pub(crate) channels: Option<String>,
    /// Near the source: auto, none, zlib, zstd, qatzip or lz4, also as METHOD:LEVEL [default: auto]
    ///
    /// As for `move`: `auto` uses none, lz4 or zstd, whichever gets the most through. Data that does not shrink is sent
    /// as it is. Turn QEMU's own compression (multifd-compression, xbzrle) off: its output does not shrink any further.
    #[arg(long, value_name = "METHOD")]
    pub(crate) compress: Option<String>,
    /// Near the source: threads that compress, 1 to 255 [default: by cores]
    #[arg(long, value_name = "N")]
    pub(crate) encoders: Option<String>,
    /// Near the source: accept a QEMU without a return path
    ///
    /// Such a QEMU takes its last write for success. If anything breaks afterwards, its guest stands still until you
    /// let it run with `cont` there.
    #[arg(long, hide_short_help = true)]
    pub(crate) without_return_path: bool,
    /// Near the source: the token that the other relay printed, or @FILE with it
    ///
    /// All connections are encrypted (TLS 1.3), the receiver is known to be the one that made the token, and it knows
    /// that you have it. A token is good for one move. Users of this host can see the command line: with @FILE they see
    /// only the file's name.
    #[arg(long, value_name = "TOKEN")]
    pub(crate) token: Option<TokenText>,
    /// Near the destination: ask for a token, good for this time: 10m, 1h [default: 1h]
    ///
    /// The command makes a key and prints the command for the other side, with a token in it. Only a caller with this
    /// token is let in, once, and all connections are encrypted (TLS 1.3). Without this flag, and without --insecure,
    /// that is also done wherever other hosts can connect; addresses of this host (loopback, unix sockets) need no
    /// token.
    #[arg(long, value_name = "TIME", hide_short_help = true)]
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
    #[arg(long, conflicts_with = "token", hide_short_help = true)]
    pub(crate) insecure: bool,
    /// Go on with further migrations, up to N at once [default of N: 16]
    ///
    /// Each migration has a relay of its own: if one fails, the others go on. More than N are turned away, and their
    /// guests run on at their sources. Ctrl-C or SIGTERM ends the service; migrations that have not been handed over
    /// are broken off, and their guests run on, too. With --json there is one object for each migration.
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "16")]
    pub(crate) many: Option<String>,
    /// Permissions of the unix socket at --listen, octal, such as 0660
    #[arg(long, value_name = "MODE", hide_short_help = true)]
    pub(crate) socket_mode: Option<String>,
    /// Owner of the unix socket at --listen: USER, USER:GROUP or :GROUP, names or numbers
    #[arg(long, value_name = "OWNER", hide_short_help = true)]
    pub(crate) socket_owner: Option<String>,
    /// SELinux label of the unix socket at --listen, such as system_u:system_r:svirt_socket_t:s0
    ///
    /// A QEMU that SELinux confines may connect only to sockets of some types: svirt_socket_t in Fedora's policy,
    /// virtd_t in Debian's. Without the flag the socket has the label of this process, and such a QEMU may not connect.
    /// It is an error on a host without SELinux.
    #[arg(long, value_name = "LABEL", hide_short_help = true)]
    pub(crate) socket_label: Option<String>,
    /// SELinux label of the file of that socket, such as system_u:object_r:svirt_image_t:s0
    ///
    /// A QEMU that connects must be allowed to write to the file, too. Without the flag it has the type of files in its
    /// folder, which is a right one in /var/lib/libvirt/qemu. It is an error on a host without SELinux.
    #[arg(long, value_name = "LABEL", hide_short_help = true)]
    pub(crate) socket_file_label: Option<String>,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
