//! The second process beside one that fills a guest which runs already, a lazy restore or a receiver: see
//! `transship_engine::StandIn`.
//!
//! The two speak over a socket, which is the standard input of the second: a line with what to take over, and the
//! descriptors for it; then, at the end, one byte that says how the restore ended. No byte, and the restore has died.
//! Our standard error comes as the last of the descriptors, so that the second process can close it: whoever waits for
//! its end is to wait no longer than there is something to say.
use std::{
    env,
    io::{self, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use transship_engine::{Ending, StandIn, guest::GuestError};
use transship_lines::LineSocket;
use zeroize::Zeroizing;

/// How long the second process may take to be there and to listen: it is this same program.
const ARM_WAIT: Duration = Duration::from_secs(30);

/// The byte for each ending.
const WORDS: [(Ending, u8); 3] = [(Ending::Complete, b'c'), (Ending::Hold, b'h'), (Ending::GoOn, b'g')];

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
    vm: String,
    /// What the second process needs to have connections encrypted.
    key: Option<Zeroizing<String>>,
    started: Option<(Child, UnixStream)>,
}

impl Process {
    /// `vm`: the guest's address, for the second process.
    pub(crate) fn new(vm: &str) -> Self {
        Self { vm: vm.to_owned(), key: None, started: None }
    }

    /// The same, with a key for its connections.
    pub(crate) fn with_key(self, key: Option<Zeroizing<String>>) -> Self {
        Self { key, ..self }
    }

    fn start(&mut self, charge: &str, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let (ours, theirs) = UnixStream::pair()?;
        let child = Command::new(env::current_exe()?)
            .args(["stand-in", "--vm", &self.vm])
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A Ctrl-C in the terminal, and a kill of our group, are not for it.
            .process_group(0)
            .spawn()?;
        let key = self.key.as_ref().map(|key| key.as_str());
        let key = Zeroizing::new(serde_json::to_string(&key)?);
        let text = Zeroizing::new(format!("{{\"charge\":{charge},\"key\":{}}}", *key));
        let line = LineSocket::new(ours.try_clone()?);
        let stderr = io::stderr();
        let all: Vec<_> = files.iter().copied().chain([stderr.as_fd()]).collect();
        let sent = line.send(text.as_bytes(), &all, Instant::now() + ARM_WAIT);
        self.started = Some((child, ours));
        sent.map_err(io::Error::other)
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
        let failed = "start the stand-in, which would bring the guest's pages if this process died";
        self.start(charge, files).map_err(GuestError::system(failed))
    }

    fn may_be_given(&mut self) {
        self.say(MAY_BE_GIVEN);
    }

    fn settle(&mut self) {
        self.say(SETTLED);
    }

    fn starts(&mut self) {
        self.say(STARTS);
    }

    fn started(&mut self) {
        self.say(STARTED);
    }

    fn end(&mut self, how: Ending) {
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
