//! The command line of the commands that read snapshot files.
use std::path::PathBuf;

use clap::Args;

use super::{SandboxArgs, save::FileIo};

const RESTORE_EXAMPLES: &str = "\
Examples:
  Into a QEMU that was started like the saved one, plus `-incoming defer`:
    transship restore --vm qemu:/run/vm.qmp --from /srv/vm.snap
  The guest runs at once, and its pages come when it touches them:
    transship restore --vm qemu:/run/vm.qmp --from /srv/vm.snap --lazy
  From a file that a manager has opened twice, with and without O_DIRECT:
    transship restore --vm qemu:/run/vm.qmp --from fdset:3,4 --direct-io=on

`restore` reads mapped-ram files of QEMU 9.0 and newer and of `transship save`, and plain streams, also from a pipe \
(fd:0). Before it touches anything, it checks the file, and that machine type and memory fit the VM.

With --lazy, this process brings the guest's pages while the guest runs, until all are there. A second process stands \
by, and takes over if this one is killed. If the file fails midway, the guest is stopped where it is; it never sees \
wrong zeros.";

const INFO_EXAMPLES: &str = "\
Examples:
  transship info /srv/vm.snap
  transship info /srv/vm.snap --check --json
  ssh ship2 cat vm.stream | transship info -

`info` reads mapped-ram files and plain streams. Without --check it reads only headers and bitmaps, with --check the \
whole file.";

#[derive(Debug, Args)]
#[command(after_long_help = RESTORE_EXAMPLES)]
pub(crate) struct RestoreArgs {
    /// The waiting guest: qemu:SOCKET or handoff:SOCKET
    #[arg(long)]
    pub(crate) vm: String,
    /// The snapshot: PATH, file:PATH,offset=N, fd:N or fdset:N,M
    #[arg(long, value_name = "FILE")]
    pub(crate) from: String,
    /// Decrypt it by the keys in this file, as `age-keygen` writes it
    ///
    /// It may be given several times. A file that is not encrypted is refused then: it is not the one that was meant.
    #[arg(long, value_name = "KEYFILE")]
    pub(crate) identity: Vec<PathBuf>,
    /// Let the guest run first, and bring its pages when it touches them
    #[arg(long)]
    pub(crate) lazy: bool,
    /// Let the guest run, even if it did not run when it was saved
    #[arg(long, conflicts_with = "stopped")]
    pub(crate) run: bool,
    /// Leave the guest stopped, even if it ran when it was saved
    #[arg(long)]
    pub(crate) stopped: bool,
    /// Threads that read, 1 to 255 [default: by cores, at most 16]
    ///
    /// Where io_uring reads, there are no more of them than cores: each has several requests under way.
    #[arg(long, value_name = "N")]
    pub(crate) channels: Option<String>,
    /// Read past the page cache: on, off or auto
    ///
    /// `auto`: where the file system allows it; elsewhere through the page cache. `on` (also without a value): it is an
    /// error if the file system refuses. With `auto`, a stream that is in the page cache is read from there. One that
    /// is compressed or encrypted, or comes from a pipe, always goes through it.
    #[arg(long, value_name = "WHETHER", default_value = "auto", default_missing_value = "on", num_args = 0..=1, require_equals = true)]
    pub(crate) direct_io: String,
    /// How to ask the kernel to read: auto, uring or plain
    #[arg(long, value_enum, default_value_t = FileIo::Auto, value_name = "HOW", hide_possible_values = true, hide_short_help = true)]
    pub(crate) io: FileIo,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
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
    /// Decrypt it by the keys in this file, as `age-keygen` writes it
    ///
    /// It may be given several times. A file that is not encrypted is refused then: it is not the one that was meant.
    #[arg(long, value_name = "KEYFILE")]
    pub(crate) identity: Vec<PathBuf>,
    /// Read the whole file, and check that it is complete
    #[arg(long)]
    pub(crate) check: bool,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
