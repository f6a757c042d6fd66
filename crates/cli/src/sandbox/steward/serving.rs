//! The steward's own process: `transship steward`.
use std::{
    collections::HashMap,
    fs,
    io::{self, Read},
    net::Shutdown,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            fs::{FileTypeExt, MetadataExt},
            net::UnixStream,
            process::ExitStatusExt,
        },
    },
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use transship_engine::{Started, Uri, UserCommand, connect};
use transship_guest::AskToHold;
use transship_lines::{Line, LineSocket};
use transship_memory::LetWait;
use transship_vmm::{
    Freezer, VmAddress, give_back_there, look_for_writers, processors_to_hold, qemu::libvirt::serve_domain,
    threads_that_may_wait,
};

use super::{ANSWER_WAIT, Answer, Ask, Charge};
use crate::{args::StewardArgs, failure::Failure, journal, signals};

/// Longer than anything runs.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Does what it is asked until the process that asks has ended; then removes what that one has left behind.
///
/// # Errors
/// It was not started by a process of ours.
pub(crate) fn run(args: &StewardArgs) -> Result<(), Failure> {
    let unusable = |what: &dyn std::fmt::Display| {
        Failure::Failed(format!("this process is started by other commands of transship: {what}"))
    };
    // Whoever ends a whole service ends the process that this one is for, which ends this one.
    signals::outlive_requests_to_end()?;
    let stdin = io::stdin().as_fd().try_clone_to_owned().map_err(|e| unusable(&e))?;
    if let (Some(domain), Some(purpose)) = (&args.domain, &args.purpose) {
        let purpose = serde_json::from_str(purpose).map_err(|why| unusable(&why))?;
        let Ok(VmAddress::Libvirt(address)) = domain.parse() else { return Err(unusable(&domain)) };
        serve_domain(UnixStream::from(stdin), &address, &purpose);
        return Ok(());
    }
    let mut line = LineSocket::new(UnixStream::from(stdin));
    // Whoever has started us may have ended, or found that there is nothing to do.
    let Ok(Line { text, .. }) = line.receive(Instant::now() + FOREVER) else { return Ok(()) };
    let charge: Charge = serde_json::from_slice(&text).map_err(|why| unusable(&why))?;
    let tasks = Tasks::of(&charge).map_err(|why| unusable(&why))?;
    // Somebody else may have put another one there when it is to be removed.
    let socket = charge.socket.as_ref().map(Path::new).and_then(|path| Some((identity(path)?, path)));
    match tasks {
        Some(mut tasks) => {
            while let Ok(Line { text, .. }) = line.receive(Instant::now() + FOREVER) {
                let Ok(asked) = serde_json::from_slice(&text) else { break };
                if answer(&line, tasks.carry_out(asked)).is_err() {
                    break;
                }
            }
        }
        None => while line.stream().read(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::Interrupted) {},
    }
    if charge.other {
        await_other(&line);
    }
    if let Some((_, path)) = socket.filter(|(id, path)| identity(path) == Some(*id)) {
        let _ = fs::remove_file(path);
    }
    if let Some(path) = &charge.folder {
        let _ = fs::remove_dir_all(path);
    }
    charge.journal.iter().for_each(|path| journal::remove_empty(Path::new(path)));
    Ok(())
}

/// Waits for the end of the other process, which is that of the pipe at our standard output. Whoever waits for us does
/// not wait for that.
fn await_other(line: &LineSocket) {
    let pipe = io::stdout();
    let ends = |wait: Option<&Timespec>| poll(&mut [PollFd::new(&pipe, PollFlags::empty())], wait);
    if ends(Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) != Ok(0) {
        return;
    }
    let _ = line.stream().shutdown(Shutdown::Both);
    while ends(None) == Err(Errno::INTR) {}
}

/// What it may be asked.
struct Tasks {
    connect: Vec<Uri>,
    lookout: Option<String>,
    threads: Option<Box<dyn LetWait>>,
    hold: Option<AskToHold>,
    freezer: Option<Freezer>,
    give_back: Option<String>,
    commands: HashMap<String, UserCommand>,
    /// Those that run, or whose end nobody has asked about.
    started: HashMap<String, Box<dyn Started>>,
}

/// What comes of it, and a descriptor that goes with it.
type Done = io::Result<(Answer, Option<OwnedFd>)>;

impl Tasks {
    /// None: there are none.
    fn of(charge: &Charge) -> Result<Option<Self>, String> {
        let connect: Vec<Uri> = charge.connect.iter().map(|uri| uri.parse()).collect::<Result<_, String>>()?;
        let commands: HashMap<_, _> = charge.commands.iter().cloned().collect();
        let lookout = charge.lookout.clone();
        let threads = charge.threads.as_deref().map(threads_that_may_wait).transpose().map_err(|e| e.to_string())?;
        // Whoever has started us is connected to it.
        let hold = charge.hold.as_deref().map(processors_to_hold).transpose().map_err(|e| e.to_string())?;
        let freezer = charge.freeze.map(Freezer::of).transpose().map_err(|e| e.to_string())?;
        let give_back = charge.give_back.clone();
        let looks =
            lookout.is_some() || threads.is_some() || hold.is_some() || freezer.is_some() || give_back.is_some();
        let is_idle = !looks && connect.is_empty() && commands.is_empty();
        let started = HashMap::new();
        Ok((!is_idle).then(|| Self { connect, lookout, threads, hold, freezer, give_back, commands, started }))
    }

    fn carry_out(&mut self, asked: Ask) -> Done {
        let not_told = || io::Error::from(Errno::PERM);
        let plain = |answer: Answer| Ok((answer, None));
        match asked {
            Ask::Connect(to) => {
                let to = self.connect.iter().find(|known| known.to_string() == to).ok_or_else(not_told)?;
                Ok((Answer::default(), Some(connect(to)?)))
            }
            Ask::Freeze => {
                let freezer = self.freezer.as_ref().ok_or_else(not_told)?;
                let frozen = freezer.freeze().map_err(io::Error::other)?;
                plain(Answer { frozen, ..Answer::default() })
            }
            Ask::GiveBack => {
                let wanted = self.give_back.as_deref().ok_or_else(not_told)?;
                give_back_there(wanted).map_err(io::Error::other)?;
                plain(Answer::default())
            }
            Ask::Writers => {
                let lookout = self.lookout.as_deref().ok_or_else(not_told)?;
                let found = look_for_writers(lookout).map_err(io::Error::other)?;
                plain(Answer { found, ..Answer::default() })
            }
            Ask::MayWait(thread) => {
                let most = self.threads.as_mut().ok_or_else(not_told)?.at_most(thread);
                plain(Answer { micros: most.as_micros() as u64, ..Answer::default() })
            }
            Ask::Processors(hold) => {
                self.hold.as_mut().ok_or_else(not_told)?(hold)?;
                plain(Answer::default())
            }
            Ask::Start(phase) => {
                let command = self.commands.get(&phase).ok_or_else(not_told)?.start_here(&phase)?;
                let ended = command.ended().try_clone_to_owned()?;
                self.started.insert(phase, command);
                Ok((Answer::default(), Some(ended)))
            }
            Ask::Status(phase) => {
                let status = self.started.get_mut(&phase).ok_or_else(not_told)?.status()?;
                plain(Answer { status: status.map(ExitStatusExt::into_raw), ..Answer::default() })
            }
            Ask::End(phase) => {
                self.started.remove(&phase).map_or(Ok(()), |mut command| command.end())?;
                plain(Answer::default())
            }
        }
    }
}

fn answer(line: &LineSocket, done: Done) -> io::Result<()> {
    let (answer, beside) = done.unwrap_or_else(|error| {
        (Answer { number: error.raw_os_error(), error: Some(error.to_string()), ..Answer::default() }, None)
    });
    let text = serde_json::to_vec(&answer)?;
    let beside: Vec<_> = beside.iter().map(AsFd::as_fd).collect();
    line.send(&text, &beside, Instant::now() + ANSWER_WAIT).map_err(io::Error::other)
}

/// Of a socket's file: device and number.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let there = fs::symlink_metadata(path).ok()?;
    there.file_type().is_socket().then(|| (there.dev(), there.ino()))
}
