//! The command line of `relay`.
use clap::Args;

const RELAY_EXAMPLES: &str = "\
Examples:
  Near the destination, where a QEMU waits with `-incoming tcp:127.0.0.1:4444`; then near the source:
    transship relay --listen relay:tcp:0.0.0.0:4445 --to tcp:127.0.0.1:4444
    transship relay --listen tcp:127.0.0.1:4444 --to relay:tcp:ship2:4445 --compress zstd
  At last, in the monitor of the QEMU at the source:
    (qemu) migrate_set_capability return-path on
    (qemu) migrate tcp:127.0.0.1:4444

`relay:` stands before the address of the link between the two relays. They carry what the QEMUs say to each other, with multifd or
without, and change nothing of it. Each relays one migration and ends. The source's guest runs on if anything breaks before
it has been handed over; if the link breaks just then, the guest stands still, and the relay near the source says what to do.";

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
    /// As of `move`: `auto` uses none, lz4 or zstd, whichever gets most through. What does not shrink goes as it is.
    /// QEMU's own compression (multifd-compression, xbzrle) had better be off: what it has made does not shrink any
    /// more.
    #[arg(long, value_name = "METHOD")]
    pub(crate) compress: Option<String>,
    /// Near the source: threads that compress, 1 to 255 [default: by cores]
    #[arg(long, value_name = "N")]
    pub(crate) encoders: Option<String>,
    /// Near the source: also relay for a QEMU without return path
    ///
    /// Such a QEMU takes its last write for success. If anything breaks afterwards, its guest stands still, and `cont`
    /// there lets it run again; nothing does so by itself.
    #[arg(long)]
    pub(crate) without_return_path: bool,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
