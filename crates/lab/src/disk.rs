//! A disk of its own: an ext4 on a loop device with sectors of a chosen size, which a test can also break.
use crate::{Process, Result, Scratch, failed, lines::Mark};
use std::path::PathBuf;
use std::process::Command;

/// Makes the disk, where nobody else sees it, and stays for as long as it is needed.
const MAKE: &str = r#"
set -e
mount --make-rprivate /
device=$(losetup --find --show --sector-size "$3" "$1")
mkfs.ext4 -q -E nodiscard,lazy_itable_init=0 "$device"
mount -o noatime "$device" "$2"
# It ends with its last user.
losetup --detach "$device"
echo ready
exec sleep infinity
"#;

/// A mounted disk. It is gone when this is dropped, or this process ends.
#[derive(Debug)]
pub struct Disk {
    keeper: Process,
    folder: Scratch,
}

impl Disk {
    /// A disk of `mib` MiB. Needs root.
    ///
    /// # Errors
    /// It can't be made.
    pub fn new(mib: u64, sector_bytes: u32) -> Result<Self> {
        let folder = Scratch::on_disk()?;
        let image = std::fs::File::create(folder.join("image")).map_err(failed("a disk image"))?;
        image.set_len(mib << 20).map_err(failed("a disk image"))?;
        std::fs::create_dir(folder.join("mnt")).map_err(failed("a mount point"))?;
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", MAKE, "sh"]);
        command.arg(folder.join("image")).arg(folder.join("mnt")).arg(sector_bytes.to_string());
        let keeper = Process::start(command)?;
        let ready = keeper.stdout().wait(Mark::START, "the disk", |line| (line == "ready").then_some(()));
        ready.map_err(|error| crate::LabError(format!("{error}: {}", keeper.stderr().tail())))?;
        Ok(Self { keeper, folder })
    }

    /// A path on it, by which any process reaches it.
    pub fn join(&self, name: &str) -> PathBuf {
        let mounted = self.folder.join("mnt");
        let below = mounted.strip_prefix("/").unwrap_or(&mounted).join(name);
        PathBuf::from(format!("/proc/{}/root", self.keeper.pid())).join(below)
    }

    /// The disk loses what lies behind its first `mib` MiB: reading there is an I/O error from now on, unless it is in
    /// memory already.
    ///
    /// # Errors
    /// It can't be cut.
    pub fn cut(&self, mib: u64) -> Result<()> {
        // What is written later would make the image long again, with zeros in between.
        let mounted = std::fs::File::open(self.join("")).map_err(failed("can't open a disk's folder"))?;
        rustix::fs::syncfs(&mounted).map_err(failed("can't write a disk out"))?;
        let image = std::fs::OpenOptions::new().write(true).open(self.folder.join("image"));
        image.and_then(|image| image.set_len(mib << 20)).map_err(failed("can't size a disk image"))
    }
}
