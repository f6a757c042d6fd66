//! The command line of clones and forks.
use std::path::PathBuf;

use clap::Args;

use super::sandbox::SandboxArgs;

const CLONE_EXAMPLES: &str = "\
Examples:
  An image of a running guest, from which any number of clones run:
    transship save --vm qemu:/run/vm.qmp --to /srv/warm --format raw --background
  The arguments that the QEMU of a clone needs beside those of the guest:
    transship clone --print-args /srv/warm
  A clone, in a QEMU that was started with these:
    transship clone --vm qemu:/run/1.qmp --from /srv/warm

The QEMU maps the image's memory for itself, so nothing is copied: a clone takes memory only for what it writes. A QEMU \
with memory of its own gets the guest as by `restore --lazy`, and the report says so. Each clone needs disks of its \
own: an overlay over the disk as it was when the image was made. docs/clones.md has more.";

const FORK_EXAMPLES: &str = "\
Examples:
  Eight clones of a running guest:
    transship fork --vm qemu:/run/vm.qmp --into /dev/shm/warm --count 8 --exec '\\
      qemu-system-x86_64 -machine q35 -m 1G {args} -qmp unix:{dir}/{n}.qmp,server=on,wait=off'
  Only the image:
    transship fork --vm qemu:/run/vm.qmp --into /dev/shm/warm

CMD is run by a shell, once for each clone. {n} is its number, from 1 on; {dir} is the folder of the image; {args} are \
the arguments that `transship clone --print-args` prints. Its QEMU must listen at {dir}/{n}.qmp; what it says goes to \
{dir}/{n}.log. The guest runs on; it stands still only while its device state is saved.";

#[derive(Debug, Args)]
#[command(after_long_help = CLONE_EXAMPLES)]
pub(crate) struct CloneArgs {
    /// The waiting guest: qemu:SOCKET
    #[arg(long, required_unless_present = "print_args")]
    pub(crate) vm: Option<String>,
    /// The folder of the image
    #[arg(long, value_name = "DIR", required_unless_present = "print_args")]
    pub(crate) from: Option<PathBuf>,
    /// Print the arguments that a QEMU needs to be a clone of the image in DIR
    #[arg(long, value_name = "DIR", conflicts_with_all = ["vm", "from"])]
    pub(crate) print_args: Option<PathBuf>,
    /// Let the clone run, even if the guest did not run when it was saved
    #[arg(long, conflicts_with = "stopped")]
    pub(crate) run: bool,
    /// Leave the clone stopped, even if the guest ran when it was saved
    #[arg(long)]
    pub(crate) stopped: bool,
    /// Run a command when the clone is there
    ///
    /// It is run by a shell. TRANSSHIP_SOCKET is the QMP socket of the clone, and TRANSSHIP_NUMBER its --number.
    #[arg(long, value_name = "CMD")]
    pub(crate) after: Option<String>,
    /// The number of the clone, for --after
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) number: u32,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_long_help = FORK_EXAMPLES)]
pub(crate) struct ForkArgs {
    /// The guest to fork: qemu:SOCKET
    #[arg(long)]
    pub(crate) vm: String,
    /// The folder for the image, which must be new
    #[arg(long, value_name = "DIR")]
    pub(crate) into: PathBuf,
    /// Number of clones, up to 10000
    #[arg(long, value_name = "N", requires = "exec")]
    pub(crate) count: Option<String>,
    /// The command that starts the QEMU of a clone, with {args}, {dir} and {n}
    #[arg(long, value_name = "CMD")]
    pub(crate) exec: Option<String>,
    /// Run a command for each clone when it is there
    ///
    /// It is run by a shell. TRANSSHIP_SOCKET is the QMP socket of the clone, and TRANSSHIP_NUMBER its number.
    #[arg(long, value_name = "CMD", requires = "exec")]
    pub(crate) after: Option<String>,
    /// Threads that write, 1 to 255 [default: by cores, at most 16]
    #[arg(long, value_name = "N")]
    pub(crate) channels: Option<String>,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Fork although devices write past the tracker; as in `transship move`
    #[arg(long, hide_short_help = true)]
    pub(crate) allow_untracked_writers: bool,
}
