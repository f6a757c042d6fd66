//! Child processes that do not outlive their owner.
use crate::lines::Lines;
use crate::{LabError, Result, failed};
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// How often a process that is waited for is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A child process: killed when dropped, and by the kernel when this process dies.
#[derive(Debug)]
pub struct Process {
    child: Child,
    name: String,
    stdout: Lines,
    stderr: Lines,
}

impl Process {
    /// Starts `command`: its program, arguments and environment. It reads nothing; what it writes is kept.
    ///
    /// # Errors
    /// It can't be started.
    pub fn start(command: Command) -> Result<Self> {
        let name = format!("{} {:?}", command.get_program().to_string_lossy(), command.get_args().collect::<Vec<_>>());
        let mut child = keeper_spawns(command).map_err(failed(format!("can't start {name}")))?;
        let stdout = Lines::of("stdout", child.stdout.take().expect("tied_to_us makes a pipe"));
        let stderr = Lines::of("stderr", child.stderr.take().expect("tied_to_us makes a pipe"));
        Ok(Self { child, name, stdout, stderr })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it wrote on standard output.
    pub fn stdout(&self) -> &Lines {
        &self.stdout
    }

    /// What it wrote on standard error.
    pub fn stderr(&self) -> &Lines {
        &self.stderr
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// It has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self::signal(self.pid(), signal)
    }

    /// Ends it as `kill -9` does, and waits until it is gone.
    pub fn kill9(&mut self) {
        // Both fail only when it is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Has it ended, and how?
    ///
    /// # Errors
    /// The kernel can't say.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().map_err(failed(format!("can't look at {}", self.name)))
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It still runs after `patience`. It is left running.
    pub fn wait(&mut self, patience: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                let said = self.stderr.tail();
                return Err(LabError(format!("still running after {patience:?}: {}\n{said}", self.name)));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill9();
    }
}

/// In words: `exit code 1`, `signal 9`.
pub fn in_words(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

/// The processes of transship that were started for a VM by such a subcommand, such as `guard`; of any, if `subcommand`
/// is empty.
pub fn of_ours(vm: &str, subcommand: &str) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_one = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<_> = line.split(|byte| *byte == 0).collect();
        words.contains(&vm.as_bytes()) && (subcommand.is_empty() || words.get(1) == Some(&subcommand.as_bytes()))
    };
    pids.filter(is_one).collect()
}

/// Sends a signal to any process.
///
/// # Errors
/// It has ended.
pub fn signal(pid: u32, signal: Signal) -> Result<()> {
    let known = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("the kernel's pids are positive");
    kill_process(known, signal).map_err(failed(format!("can't send {signal:?} to process {pid}")))
}

/// What a process holds open: the targets of `/proc/PID/fd`, such as `anon_inode:[userfaultfd]`.
///
/// # Errors
/// It is gone, or belongs to somebody else.
pub fn open_files(pid: u32) -> Result<Vec<String>> {
    let folder = PathBuf::from(format!("/proc/{pid}/fd"));
    let entries = std::fs::read_dir(&folder).map_err(failed(folder.display()))?;
    let targets = entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let mut targets: Vec<String> = targets.map(|path| path.to_string_lossy().into_owned()).collect();
    targets.sort();
    Ok(targets)
}

/// A line of `/proc/PID/status`, such as `TracerPid`.
///
/// # Errors
/// The process is gone, or the line is unknown.
pub fn status_field(pid: u32, field: &str) -> Result<String> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).map_err(failed(&path))?;
    let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    value.map(|v| v.trim().to_owned()).ok_or_else(|| LabError(format!("{path} has no {field}")))
}

type Order = (Command, Sender<std::io::Result<Child>>);

/// The kernel sends the parent-death signal when the *thread* that started the child ends, and a test's thread ends
/// while a guest that is shared between tests has to live on. So one thread that never ends starts them all.
fn keeper_spawns(command: Command) -> std::io::Result<Child> {
    static KEEPER: OnceLock<Mutex<Sender<Order>>> = OnceLock::new();
    let keeper = KEEPER.get_or_init(|| {
        let (sender, orders) = channel::<Order>();
        std::thread::spawn(move || {
            for (command, answer) in orders {
                let _ = answer.send(tied_to_us(command).spawn());
            }
        });
        Mutex::new(sender)
    });
    let (answer, child) = channel();
    keeper.lock().expect("nobody panics with the lock held").send((command, answer)).expect("the keeper never ends");
    child.recv().expect("the keeper always answers")
}

/// `setpriv` asks for the parent-death signal and then becomes the program, with the same process id.
fn tied_to_us(command: Command) -> Command {
    let program = command.get_program().to_owned();
    let arguments: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
    let mut tied = Command::new("setpriv");
    tied.args(["--pdeathsig", "KILL", "--"]).arg(program).args(arguments);
    for (key, value) in command.get_envs() {
        match value {
            Some(value) => tied.env(key, value),
            None => tied.env_remove(key),
        };
    }
    tied.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    tied
}
