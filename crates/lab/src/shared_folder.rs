//! A folder that guests share with this host by another process than QEMU: virtiofsd, a stock back end of vhost-user.
//! What it reads for them it writes to guest memory through a mapping of its own.
use crate::back_end::listening;
use crate::slow_disk::numbered;
use crate::versions::back_end;
use crate::{Process, Result, Scratch, failed};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// The folder, with one file of which each block says its number. It is gone when this is dropped.
#[derive(Debug)]
pub struct SharedFolder {
    program: PathBuf,
    folder: Scratch,
}

/// A running virtiofsd with the folder. It is gone when this is dropped.
#[derive(Debug)]
pub struct FileBackEnd {
    process: Process,
    socket: PathBuf,
    _folder: Scratch,
}

impl SharedFolder {
    /// With a file of `mib` MiB. Nothing without the variable that names the folder of such programs.
    ///
    /// # Errors
    /// The variable is set, but the program is missing; the file can't be written.
    pub fn new(mib: u64) -> Result<Option<Self>> {
        let Some(program) = back_end("virtiofsd")? else { return Ok(None) };
        let folder = Scratch::new()?;
        fs::create_dir(folder.join("share")).map_err(failed("can't make the folder that is shared"))?;
        numbered(&folder.join("share").join("image"), mib)?;
        Ok(Some(Self { program, folder }))
    }

    /// Offers it to one guest, and waits until it listens. The guest caches nothing of it. `options`: more for
    /// virtiofsd.
    ///
    /// # Errors
    /// It does not.
    pub fn serve(&self, options: &[&str]) -> Result<FileBackEnd> {
        let folder = Scratch::new()?;
        let socket = folder.join("fs");
        let mut command = Command::new(&self.program);
        command.arg("--socket-path").arg(&socket).arg("--shared-dir").arg(self.folder.join("share"));
        command.args(["--cache", "never"]).args(options);
        let mut process = Process::start(command)?;
        listening(&mut process, "the back end of a file system", &socket)?;
        Ok(FileBackEnd { process, socket, _folder: folder })
    }

    /// Arguments for the kernel of a Linux guest that reads the file into so many MiB of its memory all the time, and
    /// knows what each read has to bring.
    pub fn words(mib: u32) -> String {
        format!("workload.slots={mib} workload.slots_from=/share/image")
    }
}

impl FileBackEnd {
    /// The arguments by which a QEMU has it. The guest's memory must be shared.
    pub fn args(&self) -> [String; 4] {
        let chardev = format!("socket,id=fs,path={}", self.socket.display());
        ["-chardev", &chardev, "-device", "vhost-user-fs-pci,chardev=fs,tag=share"].map(str::to_owned)
    }

    /// Its process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }
}
