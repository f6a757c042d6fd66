//! The command line of `convert`.
use std::path::PathBuf;

use clap::Args;

use super::sandbox::SandboxArgs;
use super::save::FileFormat;

const CONVERT_EXAMPLES: &str = "\
Examples:
  A saved migration stream, to a file for QEMU 9.0 and newer and for `transship restore --lazy`:
    transship convert vm.stream vm.snap
  A snapshot, to a stream for a QEMU before 9.0:
    transship convert vm.snap vm.stream
  An image from which clones run:
    transship convert vm.snap /srv/warm --format raw
  What `virsh save` wrote, to a file for QEMU itself:
    transship convert g1.save vm.snap
  A stream that comes through a pipe:
    ssh ship2 cat vm.stream | transship convert - /srv/vm.snap

Only the layout changes: memory, device state and machine type stay the same. `convert` needs neither a VM nor QEMU. \
TO is written under another name, and renamed when it is complete and on the disk.";

#[derive(Debug, Args)]
#[command(after_long_help = CONVERT_EXAMPLES)]
pub(crate) struct ConvertArgs {
    /// What to read: PATH, file:PATH,offset=N, fd:N, - for standard input, or the folder of an image
    #[arg(value_name = "FROM")]
    pub(crate) from: String,
    /// The file to write, or the folder of an image: PATH, file:PATH,offset=N or fd:N
    #[arg(value_name = "TO")]
    pub(crate) to: String,
    /// Layout of TO: mapped-ram, stream, raw, libvirt or libvirt-sparse [default: by FROM]
    ///
    /// By default a stream is made of a mapped-ram file, and a mapped-ram file of anything else. `libvirt` and
    /// `libvirt-sparse` are save images for `virsh restore`; they are made of other such images alone, because no other
    /// file has the definition of a domain.
    #[arg(long, value_enum, value_name = "FORMAT", hide_possible_values = true)]
    pub(crate) format: Option<FileFormat>,
    /// Decrypt FROM by the keys in this file, as `age-keygen` writes it
    ///
    /// It may be given several times. TO is in clear unless --encrypt-to is given, too. A FROM that is not encrypted is
    /// refused then: it is not the one that was meant.
    #[arg(long, value_name = "KEYFILE")]
    pub(crate) identity: Vec<PathBuf>,
    /// Encrypt TO, which is a stream, for this key of age, or the keys in this file
    ///
    /// WHO is a public key (age1…), or a file of them, or the file that `age-keygen` has written. It may be given
    /// several times: each of the keys opens the file.
    #[arg(long, value_name = "WHO")]
    pub(crate) encrypt_to: Vec<String>,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
}
