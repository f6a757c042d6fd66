//! `transship save`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::sandbox::SandboxArgs;
use super::steering::SteeringArgs;
use super::tracker::{Converge, Tracker};

const SAVE_EXAMPLES: &str = "\
Examples:
  While the guest runs, with a stop of at most 300 ms:
    transship save --vm qemu:/run/vm.qmp --to /srv/vm.snap
  The fastest way: stop the guest first, and leave it stopped:
    transship save --vm qemu:/run/vm.qmp --to /srv/vm.snap --paused --stay-stopped
  Into a file that a manager has opened twice, with and without O_DIRECT:
    transship save --vm qemu:/run/vm.qmp --to fdset:3,4
  Encrypted, for those who have the key:
    transship save --vm qemu:/run/vm.qmp --to /srv/vm.age --format stream --encrypt-to age1…

FILE is PATH, file:PATH[,offset=N], fd:N or fdset:N,M. A stock QEMU can load it, too:
  qemu-system-x86_64 ... -incoming defer
  (qemu) migrate_set_capability mapped-ram on
  (qemu) migrate_incoming file:/srv/vm.snap

A file given by name is replaced only when the new one is complete and on the disk. Ctrl-C cancels the save: the \
guest runs on, and an older file stays as it was.";

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
    /// Encrypt the file for this key of age, or the keys in this file
    ///
    /// With --format stream alone. WHO is a public key (age1…), or a file of them, or the file that `age-keygen` has
    /// written. It may be given several times: each of the keys opens the file, with `--identity` or with `age -d`.
    #[arg(long, value_name = "WHO", conflicts_with = "all_of", hide_short_help = true)]
    pub(crate) encrypt_to: Vec<String>,
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
    /// Take a snapshot of the disks in the same moment, by libvirt's own call
    ///
    /// For a domain of libvirt (--vm libvirt:DOMAIN). From the stop on, the guest writes to overlays (qcow2), which are
    /// made beside its disks, or in FOLDER. The files below them stay as they were in that moment: with the saved
    /// memory they are the guest as it was. See docs/libvirt.md for how to bring it back, and how to merge the
    /// overlays.
    #[arg(long, value_name = "FOLDER", num_args = 0..=1, require_equals = true, hide_short_help = true)]
    pub(crate) disks: Option<Option<PathBuf>>,
    #[command(flatten)]
    pub(crate) steering: SteeringArgs,
    /// Ask the guest's `transship balloon` which memory is free
    ///
    /// PATH is the socket of the balloon. With --live, memory that the guest does not need is left out. QEMU can't save
    /// this device: transship unplugs it before the guest is stopped, and plugs it in again afterwards.
    #[arg(long, value_name = "PATH", hide_short_help = true)]
    pub(crate) balloon: Option<PathBuf>,
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
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
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
