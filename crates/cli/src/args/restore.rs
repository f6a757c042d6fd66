//! The command line of what reads snapshot files.
use clap::Args;

use super::FileIo;

const RESTORE_EXAMPLES: &str = "\
Examples:
  A QEMU that was started like the one that was saved, and with `-incoming defer`:
    transship restore --vm qemu:/run/vm.qmp --from /srv/vm.snap
  The guest runs at once, and its pages come when it touches them:
    transship restore --vm qemu:/run/vm.qmp --from /srv/vm.snap --lazy
  A file that a manager has opened twice, with O_DIRECT and without:
    transship restore --vm qemu:/run/vm.qmp --from fdset:3,4 --direct-io=on

Takes mapped-ram files of QEMU 9.0 or newer and of `transship save`, and plain streams, also from a pipe (fd:0).
Before anything is touched the file is checked, and whether it fits the VM: machine type, memory.

--lazy: from the moment that the guest runs, this process brings its pages, until all are there; a second process stands by and takes
over should this one be killed. Should the file fail midway, the guest is stopped where it is, and never sees zeros.";

const INFO_EXAMPLES: &str = "\
Examples:
  transship info /srv/vm.snap
  transship info /srv/vm.snap --check --json
  ssh ship2 cat vm.stream | transship info -

Takes mapped-ram files and plain streams. Without --check only headers and bitmaps are read; with it everything is, to its end.";

#[derive(Debug, Args)]
#[command(after_long_help = RESTORE_EXAMPLES)]
pub(crate) struct RestoreArgs {
    /// The waiting guest: qemu:SOCKET or handoff:SOCKET
    #[arg(long)]
    pub(crate) vm: String,
    /// The snapshot: PATH, file:PATH,offset=N, fd:N or fdset:N,M
    #[arg(long, value_name = "FILE")]
    pub(crate) from: String,
    /// Let the guest run first, and bring its pages when it touches them
    #[arg(long)]
    pub(crate) lazy: bool,
    /// Let it run, also if it did not when it was saved
    #[arg(long, conflicts_with = "stopped")]
    pub(crate) run: bool,
    /// Leave it stopped, also if it ran when it was saved
    #[arg(long)]
    pub(crate) stopped: bool,
    /// Threads that read, 1 to 255 [default: by cores, at most 16]
    #[arg(long, value_name = "N")]
    pub(crate) channels: Option<String>,
    /// Read past the page cache: on, off or auto
    ///
    /// `auto`: where the file system can, and through the page cache elsewhere. `on` (also without a value): a file
    /// system that refuses it is an error. A stream is always read through the page cache.
    #[arg(long, value_name = "WHETHER", default_value = "auto", default_missing_value = "on", num_args = 0..=1, require_equals = true)]
    pub(crate) direct_io: String,
    /// How to ask the kernel to read: auto, uring or plain
    #[arg(long, value_enum, default_value_t = FileIo::Auto, value_name = "HOW", hide_possible_values = true, hide_short_help = true)]
    pub(crate) io: FileIo,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_long_help = INFO_EXAMPLES)]
pub(crate) struct InfoArgs {
    /// The file: PATH, file:PATH,offset=N, fd:N, or - for standard input
    #[arg(value_name = "FILE")]
    pub(crate) file: String,
    /// Read everything, and check that it is whole
    #[arg(long)]
    pub(crate) check: bool,
    /// Print it as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
