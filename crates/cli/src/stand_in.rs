//! The second process beside one that fills a guest which runs already, a lazy restore or a receiver: see
//! `transship_engine::StandIn`.
//!
//! It is started while there is the right to, and gives up its own rights before it hears anything. The two speak over
//! a socket, which is the standard input of the second: a line with what to take over, and the descriptors for it,
//! which it confirms by a byte; what its connections need to be encrypted, which may be longer than a line, and is
//! confirmed, too; then, at the end, one byte that says how the restore ended. No byte, and the restore has died. The
//! last descriptors are the journal, if one is kept, and our standard error, so that the second process can close that:
//! whoever waits for its end is to wait no longer than there is something to say.
use std::{
    env,
    ffi::OsString,
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::pipe::{PipeFlags, pipe_with};
use transship_engine::{Ending, StandIn, Uri, guest::GuestError};
use transship_lines::LineSocket;
use zeroize::Zeroizing;

use crate::{
    journal::Journal,
    sandbox::{OURSELVES, Sandbox},
};

/// How long the second process may take to be there and to listen: it is this same program.
const ARM_WAIT: Duration = Duration::from_secs(30);

/// The byte for each ending.
const WORDS: [(Ending, u8); 3] = [(Ending::Complete, b'c'), (Ending::Hold, b'h'), (Ending::GoOn, b'g')];

/// The byte by which the second process says that it stands by.
pub(crate) const READY: u8 = b'y';

/// The byte that says that a guest may be given away to us from now on, before that of the ending.
pub(crate) const MAY_BE_GIVEN: u8 = b'm';

/// The byte that says that there is no way back, before that of the ending.
pub(crate) const SETTLED: u8 = b's';

/// The byte that says that a guest is about to be let run, before that.
pub(crate) const STARTS: u8 = b'r';

/// The byte that says that this is done.
pub(crate) const STARTED: u8 = b'd';

/// What a byte of the socket says.
pub(crate) fn ending(word: u8) -> Option<Ending> {
    WORDS.iter().find(|(_, byte)| *byte == word).map(|(ending, _)| *ending)
}

/// The process, as the restore has it.
pub(crate) struct Process {
    arguments: Vec<OsString>,
    /// What the second process needs to have connections encrypted, of `Host::reveal` or `Caller::reveal`.
    key: Option<Zeroizing<String>>,
    /// Of a guest that is handed over before its pages: for a third process.
    journal: Option<Journal>,
    started: Option<(Child, UnixStream)>,
    /// It knows what to take over.
    is_armed: bool,
    /// A pipe that ends with it.
    life: Option<OwnedFd>,
}

impl Process {
    /// `vm`: the guest's address, for the second process. `sandbox`: the rights that it keeps.
    pub(crate) fn new(vm: &str, sandbox: &Sandbox) -> Self {
        let arguments = ["--vm".to_owned(), vm.to_owned()].into_iter().chain(sandbox.arguments());
        Self {
            arguments: arguments.map(OsString::from).collect(),
            key: None,
            journal: None,
            started: None,
            is_armed: false,
            life: None,
        }
    }

    fn with(mut self, flag: &str, value: Option<OsString>) -> Self {
        self.arguments.extend(value.into_iter().flat_map(|value| [OsString::from(flag), value]));
        self
    }

    /// Of a guest that is to stand still if its pages can't be brought. `process`: its VMM's.
    pub(crate) fn freezing(self, process: Option<i32>) -> Self {
        self.with("--freeze", process.map(|pid| pid.to_string().into()))
    }

    /// It may have to call this receiver.
    pub(crate) fn calling(self, to: &Uri) -> Self {
        self.with("--connect", Some(to.to_string().into()))
    }

    /// The same, with a key for its connections.
    pub(crate) fn with_key(mut self, key: Option<Zeroizing<String>>) -> Self {
        self.key = key;
        self
    }

    /// The same, which keeps this journal.
    pub(crate) fn keeping(mut self, journal: Option<Journal>) -> Self {
        let path = journal.as_ref().and_then(Journal::path).map(Into::into);
        self.journal = journal;
        self.with("--journal", path)
    }

    /// Starts it now rather than when it is needed: this process is about to give up the right to.
    ///
    /// # Errors
    /// It can't be started.
    pub(crate) fn start(mut self) -> Result<Self, GuestError> {
        self.started = Some(self.spawn().map_err(GuestError::system(FAILED))?);
        Ok(self)
    }

    /// A pipe that ends when the process that was started does.
    pub(crate) fn take_life(&mut self) -> Option<OwnedFd> {
        self.life.take()
    }

    fn spawn(&mut self) -> io::Result<(Child, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        let (life, held) = pipe_with(PipeFlags::CLOEXEC)?;
        self.life = Some(life);
        let mut command = Command::new(OURSELVES);
        command.arg0("transship").arg("stand-in").args(&self.arguments);
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::from(held)).stderr(own_stderr());
        // A test that holds this process at a step does not mean the second one.
        if cfg!(feature = "fail-points") && env::var_os("TRANSSHIP_FAIL_FILE").is_some() {
            command.env_remove("TRANSSHIP_FAIL_FILE").env_remove("TRANSSHIP_FAIL_POINT");
        }
        // A Ctrl-C in the terminal, and a kill of our group, are not for it.
        Ok((command.process_group(0).spawn()?, ours))
    }

    fn tell(&mut self, charge: &str, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        if self.started.is_none() {
            self.started = Some(self.spawn()?);
        }
        let Some((_, ours)) = &mut self.started else { return Ok(()) };
        let key = self.key.as_ref().map_or(&[][..], |key| key.as_bytes());
        let journal = self.journal.as_ref().map(Journal::fd);
        let has_journal = journal.is_some();
        let text = format!("{{\"charge\":{charge},\"key_bytes\":{},\"has_journal\":{has_journal}}}", key.len());
        let line = LineSocket::new(ours.try_clone()?);
        let stderr = io::stderr();
        let all: Vec<_> = files.iter().copied().chain(journal).chain([stderr.as_fd()]).collect();
        line.send(text.as_bytes(), &all, Instant::now() + ARM_WAIT).map_err(io::Error::other)?;
        ours.set_read_timeout(Some(ARM_WAIT))?;
        await_ready(ours)?;
        self.is_armed = true;
        if key.is_empty() {
            return Ok(());
        }
        ours.set_write_timeout(Some(ARM_WAIT))?;
        ours.write_all(key)?;
        await_ready(ours)
    }
}

fn await_ready(socket: &mut UnixStream) -> io::Result<()> {
    let mut word = [0];
    socket.read_exact(&mut word)?;
    if word == [READY] { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
}

const FAILED: &str = "start the stand-in, which would bring the guest's pages if this process died";

/// What it says by itself nobody is to wait for the end of; a test may want to hear it.
fn own_stderr() -> Stdio {
    let is_heard = cfg!(feature = "fail-points") && env::var_os("TRANSSHIP_TRY").is_some();
    if is_heard { Stdio::inherit() } else { Stdio::null() }
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that knows of nothing ends when we hang up. What it may have to clean up it has, then.
        if let (Some((mut child, socket)), false) = (self.started.take(), self.is_armed) {
            drop(socket);
            let _ = child.wait();
        }
    }
}

impl Process {
    fn say(&mut self, word: u8) {
        if let Some((_, socket)) = &mut self.started {
            // If it is gone nobody goes on, as is the case without it.
            let _ = socket.write_all(&[word]);
        }
    }
}

impl StandIn for Process {
    fn arm(&mut self, charge: &str, files: &[BorrowedFd<'_>]) -> Result<(), GuestError> {
        self.tell(charge, files).map_err(GuestError::system(FAILED))
    }

    fn may_be_given(&mut self) {
        self.say(MAY_BE_GIVEN);
    }

    fn note(&mut self, record: &str) {
        self.journal.iter_mut().for_each(|journal| journal.note(record));
    }

    fn settle(&mut self) {
        self.journal.iter_mut().for_each(Journal::given);
        self.say(SETTLED);
    }

    fn starts(&mut self) {
        self.say(STARTS);
    }

    fn started(&mut self) {
        self.say(STARTED);
    }

    fn end(&mut self, how: Ending) {
        self.journal.iter_mut().for_each(Journal::erase);
        if !self.is_armed {
            return;
        }
        let Some((mut child, mut socket)) = self.started.take() else { return };
        let word = WORDS.iter().find(|(ending, _)| *ending == how).map(|(_, byte)| *byte);
        // If it is gone nothing is to be said.
        let _ = socket.write_all(word.as_slice());
        if how == Ending::Complete {
            // Whoever waits for us finds nothing of ours left.
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ending_has_its_word() {
        for how in [Ending::Complete, Ending::Hold, Ending::GoOn] {
            let word = WORDS.iter().find(|(ending, _)| *ending == how).expect("a word").1;
            assert_eq!(ending(word), Some(how));
        }
        for word in [b'?', MAY_BE_GIVEN, SETTLED, STARTS, STARTED] {
            assert_eq!(ending(word), None);
        }
    }
}
