//! Guests, receivers and movers of one test: processes in a folder of their own, which end with it.
use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Output, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::Duration,
};

use tempfile::TempDir;
use transship_vmm::handoff::{CheckResult, check};

/// How long anything may take before it's taken for stuck. The machine may be busy.
const PATIENCE: Duration = Duration::from_secs(120);

/// The command with arguments.
pub(crate) fn transship(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_transship"));
    command.args(arguments).env_remove("TRANSSHIP_LOG").stdin(Stdio::null());
    command
}

/// A run that has ended.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    pub(crate) fn of(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let code = output.status.code().unwrap_or_else(|| panic!("ended by a signal: {output:?}"));
        Self { code, stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

/// A folder for sockets.
pub(crate) struct Sockets {
    folder: TempDir,
}

/// A synthetic guest that runs.
pub(crate) struct Guest {
    pub(crate) vm: String,
    _process: Process,
}

impl Sockets {
    pub(crate) fn new() -> Self {
        Self { folder: TempDir::new().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    /// Where a source and a destination meet.
    pub(crate) fn uri(&self) -> String {
        format!("unix:{}", self.path("move"))
    }

    pub(crate) fn has_socket(&self) -> bool {
        self.folder.path().join("move").exists()
    }

    /// Starts a guest, and waits until it can be attached to.
    pub(crate) fn guest(&self, name: &str, flags: &[&str]) -> Guest {
        let socket = self.path(name);
        let mut process = Process::start(transship(&[&["guest", "--listen", &socket], flags].concat()), Stream::Stdout);
        process.wait_for_line("listening on");
        Guest { vm: format!("handoff:{socket}"), _process: process }
    }

    /// Starts a receiver, and waits until a source may come.
    pub(crate) fn receive(&self, guest: &Guest) -> Process {
        let mut process = self.start(self.receiving(guest, &[]));
        process.wait_for_line("listening at");
        process
    }

    /// A receiver.
    pub(crate) fn receiving(&self, guest: &Guest, flags: &[&str]) -> Command {
        transship(&[&["receive", "--vm", &guest.vm, "--listen", &self.uri()], flags].concat())
    }

    /// A move to the receiver.
    pub(crate) fn moving(&self, guest: &Guest, flags: &[&str]) -> Command {
        transship(&[&["move", "--vm", &guest.vm, "--to", &self.uri()], flags].concat())
    }

    /// Starts something that talks on stderr.
    pub(crate) fn start(&self, command: Command) -> Process {
        Process::start(command, Stream::Stderr)
    }
}

impl Guest {
    /// Has the guest check all its memory.
    pub(crate) fn check(&self) -> CheckResult {
        check(self.vm.strip_prefix("handoff:").unwrap().as_ref()).unwrap()
    }
}

/// Which stream is read line by line while the process runs.
#[derive(Clone, Copy, PartialEq)]
enum Stream {
    Stdout,
    Stderr,
}

/// A process that runs. Dropping it kills it.
pub(crate) struct Process {
    child: Child,
    lines: Receiver<String>,
    seen: String,
    rest: Option<thread::JoinHandle<String>>,
    stream: Stream,
}

impl Process {
    fn start(mut command: Command, stream: Stream) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let (live, rest): (Box<dyn Read + Send>, Box<dyn Read + Send>) = match stream {
            Stream::Stdout => (Box::new(stdout), Box::new(stderr)),
            Stream::Stderr => (Box::new(stderr), Box::new(stdout)),
        };
        let (send, lines) = channel();
        thread::spawn(move || BufReader::new(live).lines().map_while(Result::ok).try_for_each(|line| send.send(line)));
        let rest = thread::spawn(move || std::io::read_to_string(rest).unwrap());
        Self { child, lines, seen: String::new(), rest: Some(rest), stream }
    }

    /// Waits for a line with these words.
    pub(crate) fn wait_for_line(&mut self, words: &str) {
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) => {
                    let found = line.contains(words);
                    self.note(&line);
                    if found {
                        return;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let rest = self.rest.take().map(|rest| rest.join().unwrap());
                    panic!("it ended without {words:?}: {}{rest:?}", self.seen)
                }
                Err(RecvTimeoutError::Timeout) => panic!("it never said {words:?}: {}", self.seen),
            }
        }
    }

    fn note(&mut self, line: &str) {
        self.seen.push_str(line);
        self.seen.push('\n');
    }

    /// Asks it to end, as Ctrl-C does.
    pub(crate) fn terminate(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }

    /// Waits for its end.
    pub(crate) fn wait(mut self) -> Run {
        // Its streams end when it does.
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) => self.note(&line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("it does not end: {}", self.seen),
            }
        }
        let rest = self.rest.take().unwrap().join().unwrap();
        let live = std::mem::take(&mut self.seen);
        let (stdout, stderr) = if self.stream == Stream::Stdout { (live, rest) } else { (rest, live) };
        let code = self.child.wait().unwrap().code().unwrap_or_else(|| panic!("ended by a signal: {stderr}"));
        Run { code, stdout, stderr }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
