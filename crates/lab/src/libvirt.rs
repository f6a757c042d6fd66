//! Real libvirts, each as on a host of its own: a libvirtd in namespaces (mounts, host name) with folders of its own.
use crate::{LabError, Process, Result, Scratch, failed, lacks, versions::other_libvirt, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// What is run in the new namespaces: `$1` is the host's folder, `$2` its name, `$3` its UUID, `$4` libvirtd, and `$5`
/// where the files of that version are, if it is not the one that is installed.
const BOOT: &str = r#"set -e
hostname "$2"
mkdir -p "$1"/slash-run/lock "$1"/etc "$1"/lib "$1"/log "$1"/cache
cp -a /etc/libvirt/. "$1"/etc/
rm -rf "$1"/etc/qemu/networks/autostart
printf '%s\n' "unix_sock_dir = \"$1\"" 'auth_unix_rw = "none"' 'auth_unix_ro = "none"' "host_uuid = \"$3\"" \
    > "$1"/etc/libvirtd.conf
printf '%s\n' 'user = "root"' 'group = "root"' 'security_driver = "none"' 'namespaces = []' \
    'cgroup_controllers = []' 'stdio_handler = "file"' 'dynamic_ownership = 0' > "$1"/etc/qemu.conf
mount --bind "$1"/slash-run /run
mount --bind "$1"/etc /etc/libvirt
mount --bind "$1"/lib /var/lib/libvirt
mount --bind "$1"/log /var/log/libvirt
mount --bind "$1"/cache /var/cache/libvirt
for folder in usr/share/libvirt usr/lib/x86_64-linux-gnu/libvirt; do
    [ -z "$5" ] || mount --bind "$5/$folder" "/$folder"
done
exec "$4"
"#;

/// Ends the QEMUs of a host, which outlive its libvirtd: by the test's end or death its input ends.
const KEEPER: &str =
    r#"cat >/dev/null; for f in "$1"/slash-run/libvirt/qemu/*.pid; do kill -9 "$(cat "$f")"; done 2>/dev/null"#;

/// A libvirtd. When dropped, it ends with all its domains.
#[derive(Debug)]
pub struct LibvirtHost {
    daemon: Process,
    name: String,
    uuid: String,
    keeper: Child,
    programs: Programs,
    folder: Scratch,
}

/// What is run.
#[derive(Debug)]
struct Programs {
    /// Goes before it.
    prefix: Vec<String>,
    /// Where it is unpacked; none: it is installed.
    folder: Option<PathBuf>,
}

impl LibvirtHost {
    /// Starts one. None, and says so, where there is no libvirt, or no right to make namespaces.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(name: &str) -> Result<Option<Self>> {
        Self::start_by(name, &[])
    }

    /// By another command, such as [`crate::SlowLink::source`].
    ///
    /// # Errors
    /// As [`LibvirtHost::start`].
    pub fn start_by(name: &str, prefix: &[String]) -> Result<Option<Self>> {
        Self::launch(name, Programs { prefix: prefix.to_vec(), folder: None })
    }

    /// One of another version than the one that is installed, such as `9.0`. None where it was not made available.
    ///
    /// # Errors
    /// As [`LibvirtHost::start`].
    pub fn start_version(name: &str, version: &str) -> Result<Option<Self>> {
        match other_libvirt(version)? {
            Some(folder) => Self::launch(name, Programs { prefix: Vec::new(), folder: Some(folder) }),
            None => Ok(None),
        }
    }

    fn launch(name: &str, programs: Programs) -> Result<Option<Self>> {
        if let Some(missing) = Self::missing() {
            lacks(missing);
            return Ok(None);
        }
        let folder = Scratch::new()?;
        let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid").map_err(failed("a UUID"))?.trim().to_owned();
        let keeper = Command::new("sh")
            .args(["-c", KEEPER, "keeper"])
            .arg(folder.path())
            .stdin(Stdio::piped())
            .spawn()
            .map_err(failed("can't start a shell"))?;
        let daemon = programs.boot(&folder, name, &uuid)?;
        let mut host = Self { daemon, name: name.into(), uuid, keeper, programs, folder };
        host.wait_ready()?;
        Ok(Some(host))
    }

    /// What this machine lacks, if there can be no libvirtd.
    pub fn missing() -> Option<&'static str> {
        if !rustix::process::geteuid().is_root() {
            return Some("root, to give a libvirtd namespaces of its own");
        }
        let programs = ["/usr/sbin/libvirtd", "/usr/bin/virsh"];
        let are_there = programs.iter().all(|path| Path::new(path).exists());
        (!are_there).then_some("libvirt (Debian: libvirt-daemon-system and libvirt-clients)")
    }

    fn wait_ready(&mut self) -> Result<()> {
        wait_until("libvirtd", || match self.daemon.ended()? {
            Some(status) => Err(LabError(format!("libvirtd ended, {status}: {}", self.daemon.stderr().tail()))),
            None => Ok(self.run_virsh(&["list"])?.0),
        })
    }

    /// Ends libvirtd at once and starts it anew. Its domains run on meanwhile.
    ///
    /// # Errors
    /// It does not start.
    pub fn restart(&mut self) -> Result<()> {
        self.daemon.kill9();
        self.daemon = self.programs.boot(&self.folder, &self.name, &self.uuid)?;
        self.wait_ready()
    }

    /// What clients of libvirt connect to.
    pub fn uri(&self) -> String {
        format!("qemu:///system?socket={}/libvirt-sock", self.folder.path().display())
    }

    /// How the command names a domain.
    pub fn vm(&self, domain: &str) -> String {
        format!("libvirt:{}#{domain}", self.uri())
    }

    /// Runs another program as on this host: goes before it.
    pub fn prefix(&self) -> Vec<String> {
        ["nsenter", "--target", &self.daemon.pid().to_string(), "--mount", "--uts", "--net"].map(str::to_owned).to_vec()
    }

    /// Runs virsh to its end, on this host; what it printed.
    ///
    /// # Errors
    /// It fails; the error has what it said.
    pub fn virsh(&self, args: &[&str]) -> Result<String> {
        match self.run_virsh(args)? {
            (true, said) => Ok(said),
            (false, said) => Err(LabError(format!("virsh {args:?}: {said}"))),
        }
    }

    fn run_virsh(&self, args: &[&str]) -> Result<(bool, String)> {
        let uri = self.uri();
        let mut words = self.prefix();
        words.extend([&self.programs.path("virsh"), "-q", "-c", &uri].map(str::to_owned));
        let output = Command::new(&words[0]).args(&words[1..]).args(args).output().map_err(failed("virsh"))?;
        let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned());
        Ok((output.status.success(), said.join("\n").trim().to_owned()))
    }

    /// A virsh that is left running.
    ///
    /// # Errors
    /// It can't be started.
    pub fn start_virsh(&self, args: &[&str]) -> Result<Process> {
        let uri = self.uri();
        let mut words = self.prefix();
        words.extend([&self.programs.path("virsh"), "-q", "-c", &uri].map(str::to_owned));
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(args);
        Process::start(command)
    }

    /// A domain's state as libvirt sees it, such as `running`.
    ///
    /// # Errors
    /// libvirt does not say.
    pub fn state(&self, domain: &str) -> Result<String> {
        self.virsh(&["domstate", domain])
    }

    /// libvirt's version: major, minor.
    ///
    /// # Errors
    /// It does not say.
    pub fn version(&self) -> Result<(u32, u32)> {
        let said = self.virsh(&["version", "--daemon"])?;
        let version = said.lines().find_map(|line| line.strip_prefix("Running against daemon: "));
        let mut numbers = version.unwrap_or_default().trim().split('.').map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => Ok((major, minor)),
            _ => Err(LabError(format!("virsh version: {said}"))),
        }
    }

    /// The process of a domain's QEMU.
    ///
    /// # Errors
    /// It does not run.
    pub fn pid(&self, domain: &str) -> Result<u32> {
        let path = self.folder.join(&format!("slash-run/libvirt/qemu/{domain}.pid"));
        let text = std::fs::read_to_string(&path).map_err(failed(path.display()))?;
        text.trim().parse().map_err(failed(path.display()))
    }

    /// A QEMU without libvirt that waits for a domain's state: with the command line of the domain's own, but for what
    /// ties that to libvirt. Its QMP socket comes with it.
    ///
    /// # Errors
    /// The domain does not run here, or QEMU does not start.
    pub fn waiting_qemu_like(&self, domain: &str) -> Result<(QemuLike, PathBuf)> {
        let path = format!("/proc/{}/cmdline", self.pid(domain)?);
        let text = std::fs::read(&path).map_err(failed(&path))?;
        let words = text.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
        let folder = Scratch::new()?;
        let socket = folder.join("qmp");
        Ok((QemuLike { words: words_without_libvirt(words.collect(), &socket), process: None, folder }, socket))
    }

    /// A folder that lives as long as this host.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for LibvirtHost {
    fn drop(&mut self) {
        self.daemon.kill9();
        drop(self.keeper.stdin.take());
        // It ends when it has ended the QEMUs.
        let _ = self.keeper.wait();
    }
}

/// A QEMU that is like a domain's.
#[derive(Debug)]
pub struct QemuLike {
    words: Vec<String>,
    process: Option<Process>,
    folder: Scratch,
}

impl QemuLike {
    /// Starts it, when the domain itself has ended.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(&mut self) -> Result<()> {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).current_dir(self.folder.path());
        let process = self.process.insert(Process::start(command)?);
        let socket = self.folder.join("qmp");
        wait_until("QEMU's socket", || match process.ended()? {
            Some(status) => Err(LabError(format!("QEMU ended, {status}: {}", process.stderr().tail()))),
            None => Ok(socket.exists()),
        })
    }
}

/// Descriptors, sockets and secrets that libvirt passes are not there for anybody else.
fn words_without_libvirt(words: Vec<String>, socket: &Path) -> Vec<String> {
    let of_libvirt = ["id=charmonitor", "chardev=charmonitor", "qom-type\":\"secret", "guest=", "secret,id=masterKey"];
    let mut kept: Vec<String> = Vec::new();
    let mut words = words.into_iter().filter(|word| !word.is_empty() && word != "-S").peekable();
    while let Some(word) = words.next() {
        match words.peek() {
            Some(value) if word.starts_with('-') && of_libvirt.iter().any(|part| value.contains(part)) => {
                drop(words.next())
            }
            _ => kept.push(word),
        }
    }
    kept.extend(["-incoming", "defer", "-qmp"].map(str::to_owned));
    kept.push(format!("unix:{},server=on,wait=off", socket.display()));
    kept
}

impl Programs {
    /// In the foreground: it ends with us.
    fn boot(&self, folder: &Scratch, name: &str, uuid: &str) -> Result<Process> {
        let words =
            [&self.prefix, &["unshare", "--mount", "--uts", "sh", "-c", BOOT, "boot"].map(str::to_owned)[..]].concat();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg(folder.path()).args([name, uuid, &self.path("libvirtd")]);
        command.arg(self.folder.as_ref().map_or_else(PathBuf::new, |folder| folder.join("root")));
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        Process::start(command)
    }

    fn path(&self, program: &str) -> String {
        self.folder.as_ref().map_or_else(|| program.to_owned(), |folder| folder.join(program).display().to_string())
    }
}

/// Ends a process by its number, as `kill -9` does.
///
/// # Errors
/// It is gone.
pub fn kill9(pid: u32) -> Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("the kernel's pids are positive");
    kill_process(pid, Signal::KILL).map_err(failed("kill"))
}
