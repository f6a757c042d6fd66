//! A disk for guests that is read straight into guest memory, and slowly: the kernel holds back what a QEMU asks for.
use crate::scratch::left_by_the_dead;
use crate::{Qemu, Result, Scratch, failed};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const BLOCK_BYTES: usize = 4096;

/// How the kernel is told to hold back reads.
struct Throttle {
    /// Where the groups of processes are.
    groups: &'static str,
    /// Where it says that it has this.
    sign: &'static str,
    /// The file of a group that takes a limit, and what stands before the number.
    limit: (&'static str, &'static str),
}

const THROTTLES: [Throttle; 2] = [
    Throttle {
        groups: "/sys/fs/cgroup/blkio",
        sign: "blkio.throttle.read_iops_device",
        limit: ("blkio.throttle.read_iops_device", ""),
    },
    Throttle { groups: "/sys/fs/cgroup", sign: "cgroup.controllers", limit: ("io.max", "riops=") },
];

/// The image of a disk, and a group of processes that may read the device below it only so often. Both are gone when
/// this is dropped; end the QEMUs before.
#[derive(Debug)]
pub struct SlowDisk {
    folder: Scratch,
    group: PathBuf,
}

impl SlowDisk {
    /// A disk of `mib` MiB, [numbered], for QEMUs that read `reads` times a second together. Nothing where the kernel
    /// can't hold them back; that is said.
    ///
    /// # Errors
    /// The image can't be written.
    pub fn new(mib: u64, reads: u32) -> Result<Option<Self>> {
        // Seldom a tmpfs, which has no device.
        let folder = Scratch::within(Path::new("/var/tmp"))?;
        let image = folder.join("image");
        // Else it would be written to the device when the first guest reads it.
        numbered(&image, mib)?.sync_all().map_err(failed("a disk image"))?;
        match Self::group(&folder, &image, reads) {
            Ok(group) => Ok(Some(Self { folder, group })),
            Err(why) => {
                eprintln!("skipped: the kernel does not hold back reads of {}: {why}", image.display());
                Ok(None)
            }
        }
    }

    /// A group of processes with the limit, called as the folder is.
    fn group(folder: &Scratch, image: &Path, reads: u32) -> Result<PathBuf> {
        let device = device_below(image)?;
        let has = |throttle: &&Throttle| Path::new(throttle.groups).join(throttle.sign).exists();
        let throttle = THROTTLES.iter().find(has).ok_or_else(|| failed("cgroups")("none that limits devices"))?;
        for left in left_by_the_dead(Path::new(throttle.groups)) {
            // Another test process may be removing it too.
            let _ = fs::remove_dir(left);
        }
        let name = folder.path().file_name().expect("a scratch folder has a name");
        let group = Path::new(throttle.groups).join(name);
        fs::create_dir(&group).map_err(failed(group.display()))?;
        let (file, prefix) = throttle.limit;
        let limit = fs::OpenOptions::new().write(true).open(group.join(file));
        let limited = limit.and_then(|mut file| file.write_all(format!("{device} {prefix}{reads}").as_bytes()));
        limited.map_err(|error| {
            let _ = fs::remove_dir(&group);
            failed(group.join(file).display())(error)
        })?;
        Ok(group)
    }

    /// The arguments by which a QEMU has it as a virtio disk, past the page cache. It can't be written to.
    pub fn args(&self) -> [String; 4] {
        let image = self.folder.join("image");
        let drive = format!(
            "file={},format=raw,if=none,id=disk,readonly=on,cache.direct=on,cache.no-flush=off,aio=threads",
            image.display()
        );
        ["-drive".into(), drive, "-device".into(), "virtio-blk-pci,drive=disk".into()]
    }

    /// From now on the QEMU's reads are held back.
    ///
    /// # Errors
    /// It is gone.
    pub fn slow_down(&self, qemu: &Qemu) -> Result<()> {
        let processes = self.group.join("cgroup.procs");
        fs::write(&processes, qemu.pid().to_string()).map_err(failed(processes.display()))
    }
}

/// Makes an image of which each block of 4 KiB says its own number, all through, in words of 8 bytes.
///
/// # Errors
/// It can't be written.
pub fn numbered(image: &Path, mib: u64) -> Result<File> {
    let mut file = File::create(image).map_err(failed("a disk image"))?;
    for block in 0..mib << 8 {
        file.write_all(&block.to_le_bytes().repeat(BLOCK_BYTES / 8)).map_err(failed("a disk image"))?;
    }
    Ok(file)
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        // One with processes in it stays, and is removed by the next test run.
        let _ = fs::remove_dir(&self.group);
    }
}

/// The number of the device that a file lies on, such as `254:0`: of the whole device if it is a partition.
fn device_below(file: &Path) -> Result<String> {
    let device = fs::metadata(file).map_err(failed(file.display()))?.dev();
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let device = Path::new("/sys/dev/block").join(&number);
    // The link leads into the folder of the whole device.
    let whole = if device.join("partition").exists() { device.join("../dev") } else { device.join("dev") };
    let number = fs::read_to_string(&whole).map_err(failed(whole.display()))?;
    Ok(number.trim().to_owned())
}
