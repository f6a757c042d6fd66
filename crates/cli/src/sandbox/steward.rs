//! A second process beside a confined one, which keeps the rights. It does a few things that the first named before it
//! was confined, and nothing else: it makes connections to these addresses, looks for processes that write guest
//! memory, runs the user's own commands, and removes what the first process leaves behind. What it is asked is which of
//! these, and it takes no other word.
//!
//! To start a program takes a few milliseconds. So it may be started before anybody knows what it is to do, and hears
//! that by its first line.
mod serving;

use std::{
    ffi::OsString,
    io::{self, Read},
    net::Shutdown,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{
            net::UnixStream,
            process::{CommandExt, ExitStatusExt},
        },
    },
    path::Path,
    process::{Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use transship_engine::{Started, Uri, UserCommand, connect_by, start_by};
use transship_guest::{AskOthers, AskToHold, DestinationGuest, GuestError, Hold};
use transship_lines::{Line, LineSocket};
use transship_memory::LetWait;
use transship_vmm::{
    freeze_by, give_back_by,
    qemu::libvirt::{Address, Purpose, reach_domain_by},
};

pub(crate) use serving::run;

/// This program, also when its file was replaced or removed since it was started.
pub(crate) const OURSELVES: &str = "/proc/self/exe";
/// What an answer may take: a name may have several addresses, and each of them its time.
const ANSWER_WAIT: Duration = Duration::from_secs(120);

/// What a steward is to do.
#[derive(Debug, Default)]
pub(crate) struct Errands<'a> {
    /// Connects there, as often as it is asked.
    pub(crate) connect: Vec<Uri>,
    /// A socket to be removed at the end.
    pub(crate) socket: Option<&'a Path>,
    /// A folder of ours, the same.
    pub(crate) folder: Option<&'a Path>,
    /// A journal to be removed at the end if there is nothing in it.
    pub(crate) journal: Option<&'a Path>,
    /// Looks for those that write to a guest's memory: what its adapter says of it.
    pub(crate) lookout: Option<String>,
    /// Knows which threads of a VMM may wait: what its guest's adapter says of it.
    pub(crate) threads: Option<String>,
    /// Holds a guest's processors for a moment: what its adapter says of them.
    pub(crate) hold: Option<String>,
    /// Runs these; by their phases.
    pub(crate) commands: Vec<(&'static str, UserCommand)>,
    /// The VMM's process, which it freezes if its guest can't be stopped otherwise.
    pub(crate) freeze: Option<i32>,
    /// Has the VMM give back this memory: what its guest's adapter says of it.
    pub(crate) give_back: Option<String>,
    /// A pipe that ends with another process, which may go on to listen at the socket: it is removed when both have
    /// ended.
    pub(crate) other: Option<OwnedFd>,
}

impl<'a> Errands<'a> {
    /// Of a process that listens there.
    pub(crate) fn of_listener(at: &'a Uri) -> Self {
        match at {
            Uri::Unix(path) => Self { socket: Some(path), ..Self::default() },
            Uri::Tcp { .. } => Self::default(),
        }
    }

    /// Of a process that may let this guest run before its pages are there, and that is prepared for it.
    pub(crate) fn of_filling(guest: &dyn DestinationGuest) -> Self {
        Self { freeze: guest.process(), give_back: guest.own_memory(), ..Self::default() }
    }

    pub(super) fn is_empty(&self) -> bool {
        let Self { connect, socket, folder, journal, lookout, threads, hold, commands, freeze, give_back, other: _ } =
            self;
        let looks = lookout.is_some() || threads.is_some() || freeze.is_some() || give_back.is_some() || hold.is_some();
        let is_asked = looks || !connect.is_empty() || !commands.is_empty();
        !is_asked && socket.is_none() && folder.is_none() && journal.is_none()
    }

    /// As its first line has them.
    fn charge(&self) -> Charge {
        let Self { connect, socket, folder, journal, lookout, threads, hold, commands, freeze, give_back, other } =
            self;
        let path = |path: &Option<&Path>| path.map(OsString::from);
        Charge {
            connect: connect.iter().map(Uri::to_string).collect(),
            socket: path(socket),
            folder: path(folder),
            journal: path(journal),
            lookout: lookout.clone(),
            threads: threads.clone(),
            hold: hold.clone(),
            commands: commands.iter().map(|(phase, command)| ((*phase).to_owned(), command.clone())).collect(),
            freeze: *freeze,
            give_back: give_back.clone(),
            other: other.is_some(),
        }
    }
}

/// What a steward is to do, as it hears it: [`Errands`]. Paths need not be text.
#[derive(Debug, Serialize, Deserialize)]
struct Charge {
    connect: Vec<String>,
    socket: Option<OsString>,
    folder: Option<OsString>,
    journal: Option<OsString>,
    lookout: Option<String>,
    threads: Option<String>,
    hold: Option<String>,
    commands: Vec<(String, UserCommand)>,
    freeze: Option<i32>,
    give_back: Option<String>,
    /// Standard output is the pipe.
    other: bool,
}

/// A second process that has not heard yet what it is to do. It ends when this is dropped.
pub(crate) struct Idle(UnixStream);

impl Idle {
    /// Starts it. `other`: of [`Errands`].
    pub(super) fn start(other: Option<&OwnedFd>) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let other = other.map(OwnedFd::try_clone).transpose()?;
        // Whoever waits for the end of what the first process says does not wait for the other one.
        let stderr = if other.is_some() { Stdio::null() } else { Stdio::inherit() };
        program(theirs).stdout(other.map_or_else(Stdio::null, Stdio::from)).stderr(stderr).spawn()?;
        Ok(Self(ours))
    }

    /// Says what it is to do. From now on new connections and commands of this process come from it, if it has any.
    pub(super) fn charge(self, errands: &Errands<'_>) -> io::Result<Steward> {
        let Self(socket) = self;
        let line = LineSocket::new(socket.try_clone()?);
        let text = serde_json::to_vec(&errands.charge())?;
        line.send(&text, &[], Instant::now() + ANSWER_WAIT).map_err(io::Error::other)?;
        Ok(Steward::new(socket, line, errands))
    }
}

/// The second process, as the first has it. When it is dropped, all that was to be removed has been.
pub(crate) struct Steward {
    socket: UnixStream,
    line: Arc<Mutex<LineSocket>>,
}

impl Steward {
    fn new(socket: UnixStream, line: LineSocket, errands: &Errands<'_>) -> Self {
        let line = Arc::new(Mutex::new(line));
        if !errands.connect.is_empty() {
            let (to_engine, to_adapters) = (Arc::clone(&line), Arc::clone(&line));
            connect_by(move |uri| connect(&to_engine, uri));
            transship_vmm::connect_by(move |path| connect(&to_adapters, &Uri::Unix(path.into())));
        }
        if !errands.commands.is_empty() {
            let line = Arc::clone(&line);
            // It knows by its phase which one is meant.
            start_by(move |_, phase| start(&line, phase));
        }
        if let Some(known) = errands.freeze {
            let line = Arc::clone(&line);
            freeze_by(
                move |pid| if pid == known { freeze(&line) } else { Err(format!("process {pid} is another one")) },
            );
        }
        if let Some(known) = errands.give_back.clone() {
            let line = Arc::clone(&line);
            give_back_by(move |wanted| give_back(&line, wanted == known));
        }
        Self { socket, line }
    }

    /// For a tracker for which threads wait that it knows.
    pub(crate) fn threads(&self) -> Box<dyn LetWait> {
        Box::new(KnownThere(Arc::clone(&self.line)))
    }

    /// For a guest whose processors it holds.
    pub(crate) fn hold(&self) -> AskToHold {
        let line = Arc::clone(&self.line);
        Box::new(move |hold| ask(&line, &Ask::Processors(hold)).map(drop))
    }

    /// For a guest whose other writers it looks for.
    pub(crate) fn lookout(&self) -> AskOthers {
        let line = Arc::clone(&self.line);
        Box::new(move || ask(&line, &Ask::Writers).map(|(answer, _)| answer.found))
    }
}

/// A steward that hears this socket.
fn program(socket: UnixStream) -> Command {
    let mut command = Command::new(OURSELVES);
    // A Ctrl-C in the terminal, and a kill of our group, are not for it.
    command.arg0("transship").arg("steward").stdin(Stdio::from(OwnedFd::from(socket))).process_group(0);
    command
}

/// Starts one that makes libvirt's calls for this process from now on, and nothing else. It is there before the domain
/// is attached to, and ends with this process, whatever becomes of the other steward.
pub(super) fn start_for_domain(address: &Address, purpose: &Purpose) -> io::Result<()> {
    let (ours, theirs) = UnixStream::pair()?;
    let purpose = serde_json::to_string(purpose)?;
    let domain = address.to_string();
    program(theirs).args(["--domain", &domain, "--purpose", &purpose]).stdout(Stdio::null()).spawn()?;
    reach_domain_by(ours);
    Ok(())
}

impl Drop for Steward {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Write);
        // It says nothing more; its end is the end of this.
        let _ = self.socket.read_to_end(&mut Vec::new());
    }
}

/// All that it is ever asked.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Ask {
    /// A connection to this address, which is one of those that it was told before.
    Connect(String),
    /// The VMM's process is to stand still.
    Freeze,
    /// The VMM is to give back all that was named before.
    GiveBack,
    /// The processes that write to the guest's memory, too.
    Writers,
    /// For how long a thread of the VMM may be held at most.
    MayWait(u32),
    /// The guest's processors are to stand still, or to go on.
    Processors(Hold),
    /// The command of this phase.
    Start(String),
    /// How that one has ended, if it has.
    Status(String),
    /// That it ends now.
    End(String),
}

/// What it answers. A connection that came about, or a handle of a command, is beside it.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Answer {
    /// Why it could not be done.
    error: Option<String>,
    /// The system's number for that.
    number: Option<i32>,
    found: Vec<String>,
    /// How long.
    micros: u64,
    /// As the system has it.
    status: Option<i32>,
    /// There was a process to freeze.
    frozen: bool,
}

fn ask(line: &Mutex<LineSocket>, what: &Ask) -> io::Result<(Answer, Vec<OwnedFd>)> {
    let mut line = line.lock().unwrap_or_else(PoisonError::into_inner);
    let deadline = Instant::now() + ANSWER_WAIT;
    line.send(&serde_json::to_vec(what)?, &[], deadline).map_err(io::Error::other)?;
    let Line { text, fds } = line.receive(deadline).map_err(io::Error::other)?;
    match serde_json::from_slice::<Answer>(&text)? {
        Answer { number: Some(number), .. } => Err(io::Error::from_raw_os_error(number)),
        Answer { error: Some(error), .. } => Err(io::Error::other(error)),
        answer => Ok((answer, fds)),
    }
}

fn one(fds: Vec<OwnedFd>) -> io::Result<OwnedFd> {
    fds.into_iter().next().ok_or_else(|| io::Error::other("no descriptor came"))
}

fn connect(line: &Mutex<LineSocket>, to: &Uri) -> io::Result<OwnedFd> {
    one(ask(line, &Ask::Connect(to.to_string()))?.1)
}

fn freeze(line: &Mutex<LineSocket>) -> Result<bool, String> {
    ask(line, &Ask::Freeze).map(|(answer, _)| answer.frozen).map_err(|error| error.to_string())
}

fn give_back(line: &Mutex<LineSocket>, is_known: bool) -> Result<(), GuestError> {
    if !is_known {
        return Err(GuestError::Bug("other memory is to be given back than was said before".into()));
    }
    ask(line, &Ask::GiveBack).map(drop).map_err(|error| GuestError::Unfit(error.to_string()))
}

fn start(line: &Arc<Mutex<LineSocket>>, phase: &str) -> io::Result<Box<dyn Started>> {
    let ended = one(ask(line, &Ask::Start(phase.to_owned()))?.1)?;
    Ok(Box::new(There { line: Arc::clone(line), phase: phase.to_owned(), ended }))
}

/// Threads that the steward knows.
struct KnownThere(Arc<Mutex<LineSocket>>);

impl LetWait for KnownThere {
    fn at_most(&mut self, thread: u32) -> Duration {
        // A thread of which nothing is known is not held.
        ask(&self.0, &Ask::MayWait(thread)).map_or(Duration::ZERO, |(answer, _)| Duration::from_micros(answer.micros))
    }
}

/// A command that the steward has started.
struct There {
    line: Arc<Mutex<LineSocket>>,
    phase: String,
    ended: OwnedFd,
}

impl Started for There {
    fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    fn status(&mut self) -> io::Result<Option<ExitStatus>> {
        let (answer, _) = ask(&self.line, &Ask::Status(self.phase.clone()))?;
        Ok(answer.status.map(ExitStatus::from_raw))
    }

    fn end(&mut self) -> io::Result<()> {
        ask(&self.line, &Ask::End(self.phase.clone())).map(drop)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn a_charge_is_heard_as_it_was_said_whatever_its_paths_are() {
        let path = Path::new(std::ffi::OsStr::from_bytes(b"/run/no text \xff"));
        let command = UserCommand { shell: "echo \"a\"".into(), environment: vec![("A".into(), "b c".into())] };
        let errands = Errands {
            connect: vec![Uri::Unix("/run/move".into())],
            socket: Some(path),
            commands: vec![("stop", command.clone())],
            freeze: Some(7),
            ..Errands::default()
        };
        let heard: Charge = serde_json::from_slice(&serde_json::to_vec(&errands.charge()).unwrap()).unwrap();
        assert_eq!(heard.connect, ["unix:/run/move"]);
        assert_eq!(heard.socket.as_deref().map(Path::new), Some(path));
        assert_eq!(heard.commands, [("stop".to_owned(), command)]);
        assert_eq!((heard.freeze, heard.folder, heard.other), (Some(7), None, false));
        assert!(Errands::default().is_empty());
    }
}
