//! A disk whose device is another process than QEMU: a stock back end of vhost-user-blk, which writes to guest memory
//! through a mapping of its own.
use crate::{LabError, Process, Result, Scratch, wait_until};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Waits until a process that was just started has made its socket.
pub(crate) fn listening(process: &mut Process, what: &str, socket: &Path) -> Result<()> {
    wait_until(what, || match process.ended()? {
        None => Ok(socket.exists()),
        Some(status) => Err(LabError(format!("it has ended, {status}: {}", process.stderr().tail()))),
    })
}

/// `qemu-storage-daemon` with one disk. It is gone when this is dropped.
#[derive(Debug)]
pub struct BlockBackEnd {
    process: Process,
    socket: PathBuf,
    _folder: Scratch,
}

impl BlockBackEnd {
    /// Offers the image, which can't be written to, and waits until it listens. It reads `reads` times a second at
    /// most. `options`: more for the image's `--blockdev`, such as `cache.direct=on`.
    ///
    /// # Errors
    /// It does not.
    pub fn start(image: &Path, reads: u32, options: &str) -> Result<Self> {
        let folder = Scratch::new()?;
        let socket = folder.join("disk");
        let disk =
            format!("driver=file,node-name=file,read-only=on,locking=off,filename={},{options}", image.display());
        let export =
            format!("type=vhost-user-blk,id=disk,node-name=disk,addr.type=unix,addr.path={}", socket.display());
        let mut command = Command::new("qemu-storage-daemon");
        // A guest whose reads come at once does nothing else.
        command.args(["--object", &format!("throttle-group,id=slow,limits.iops-total={reads}"), "--blockdev"]);
        command.arg(disk.trim_end_matches(','));
        command.args(["--blockdev", "driver=throttle,node-name=disk,read-only=on,throttle-group=slow,file=file"]);
        command.args(["--export", &export]);
        let mut process = Process::start(command)?;
        listening(&mut process, "the back end of a disk", &socket)?;
        Ok(Self { process, socket, _folder: folder })
    }

    /// The arguments by which a QEMU has it as a disk that it can boot from. The guest's memory must be shared.
    pub fn args(&self) -> [String; 4] {
        let chardev = format!("socket,id=disk,path={}", self.socket.display());
        ["-chardev".into(), chardev, "-device".into(), "vhost-user-blk-pci,chardev=disk,bootindex=1".into()]
    }

    /// Its process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }
}
