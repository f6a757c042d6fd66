//! What a kernel has for its file system when it boots: the programs of this machine, and a script that starts them.
use crate::launch::KERNEL_WORDS;
use crate::{LabError, Process, Result, failed};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// One that is being put together, in a folder of the caller's.
#[derive(Debug)]
pub struct Initrd {
    folder: PathBuf,
}

impl Initrd {
    /// An empty one. `folder` is for it alone.
    ///
    /// # Errors
    /// There is no room.
    pub fn new(folder: &Path) -> Result<Self> {
        let new = Self { folder: folder.to_path_buf() };
        for mount in ["proc", "sys", "dev", "run", "tmp", "var", "etc"] {
            make_folder(&new.place(mount))?;
        }
        new.text("etc/passwd", "root:x:0:0::/:\nnobody:x:65534:65534::/:\n")?;
        Ok(new)
    }

    fn place(&self, name: &str) -> PathBuf {
        self.folder.join("tree").join(name.trim_start_matches('/'))
    }

    /// A copy of a file.
    ///
    /// # Errors
    /// It can't be read, or there is no room.
    pub fn file(&self, from: &Path, to: &str) -> Result<()> {
        let to = self.place(to);
        make_folder(to.parent().expect("it is in the tree"))?;
        fs::copy(from, &to).map(drop).map_err(failed(format!("can't copy {}", from.display())))
    }

    /// A program, with the libraries that it needs.
    ///
    /// # Errors
    /// It can't be read, or there is no room.
    pub fn program(&self, from: &Path, to: &str) -> Result<()> {
        self.file(from, to)?;
        let needs = Command::new("ldd").arg(from).output().map_err(failed("can't run ldd"))?;
        let needs = String::from_utf8_lossy(&needs.stdout).into_owned();
        let libraries = needs.split_whitespace().filter(|word| word.starts_with('/'));
        libraries.into_iter().try_for_each(|library| self.file(Path::new(library), library))
    }

    /// A QEMU as `bin/qemu-system-x86_64`, which finds its firmware in `/firmware` (`-L`).
    ///
    /// # Errors
    /// It can't be read, or there is no room.
    pub fn emulator(&self, qemu: &Path) -> Result<()> {
        self.program(qemu, "bin/qemu-system-x86_64")?;
        let firmware = ["seabios/bios-256k.bin", "qemu/bios-256k.bin"];
        let firmware = firmware.into_iter().chain(["qemu/qboot.rom", "qemu/kvmvapic.bin", "qemu/linuxboot_dma.bin"]);
        let paths = firmware.map(|name| Path::new("/usr/share").join(name));
        paths.filter(|path| path.exists()).try_for_each(|path| {
            self.file(&path, &format!("firmware/{}", path.file_name().expect("it has one").display()))
        })
    }

    /// What the kernel starts.
    ///
    /// # Errors
    /// There is no room.
    pub fn init(&self, script: &str) -> Result<()> {
        self.text("init", script)?;
        fs::set_permissions(self.place("init"), Permissions::from_mode(0o755)).map_err(failed("can't change the init"))
    }

    fn text(&self, to: &str, text: &str) -> Result<()> {
        fs::write(self.place(to), text).map_err(failed(format!("can't write {to}")))
    }

    /// Boots a kernel with it, emulated, with more arguments for that kernel. Its console is the process's output.
    ///
    /// # Errors
    /// It can't be packed, or QEMU does not start.
    pub fn boot(&self, kernel: &Path, arguments: &str) -> Result<Process> {
        let packed = self.folder.join("initrd");
        let into = File::create(&packed).map_err(failed("can't pack the files"))?;
        let mut packing = Command::new("sh");
        packing.args(["-c", "find . | cpio --quiet -o -H newc -R 0:0"]).current_dir(self.place(""));
        let done = packing.stdout(Stdio::from(into)).status().map_err(failed("can't pack the files"))?;
        if !done.success() {
            return Err(LabError(format!("cpio: {done}")));
        }
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args("-nodefaults -no-user-config -display none -accel tcg -m 1G -smp 2 -no-reboot".split(' '));
        qemu.args("-serial stdio -append".split(' '));
        qemu.arg(format!("{KERNEL_WORDS} {arguments}"));
        qemu.arg("-kernel").arg(kernel).arg("-initrd").arg(&packed);
        Process::start(qemu)
    }
}

fn make_folder(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(failed(format!("can't make {}", folder.display())))
}
