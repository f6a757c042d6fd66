//! `transship stand-in`: waits beside a `transship restore --lazy` for its end. See `crate::stand_in`.
use std::{
    fs::File,
    io::{self, Read, Write},
    os::{fd::AsFd, unix::net::UnixStream},
    time::{Duration, Instant},
};

use transship_engine::{Ending, Error, TakeOver};
use transship_lines::{Line, LineSocket};
use transship_vmm::{VmAddress, settle_restored, stop_abandoned};

use crate::{failure::Failure, output, stand_in::ending};

/// How long the restore may take to say what there is to take over: it does so at once.
const LINE_WAIT: Duration = Duration::from_secs(60);

pub(crate) fn run(vm: &str) -> Result<(), Failure> {
    let vm: VmAddress = vm.parse().map_err(|why| Failure::Usage(vec![why]))?;
    let unusable = |what: &dyn std::fmt::Display| {
        Failure::Failed(format!("this process is started by `transship restore`: {what}"))
    };
    let stdin = io::stdin().as_fd().try_clone_to_owned().map_err(|e| unusable(&e))?;
    let mut socket = LineSocket::new(UnixStream::from(stdin));
    let Line { text, mut fds } = socket.receive(Instant::now() + LINE_WAIT).map_err(|e| unusable(&e))?;
    let what: TakeOver = serde_json::from_slice(&text).map_err(|e| unusable(&e))?;
    let mut talk = Talk(fds.pop().map(File::from));

    let mut word = [0];
    let heard = socket.stream().read(&mut word);
    match heard.ok().filter(|count| *count == 1).and_then(|_| ending(word[0])) {
        Some(Ending::Complete) => Ok(()),
        Some(Ending::Hold) => {
            talk.end();
            Ok(what.hold(fds)?)
        }
        Some(Ending::GoOn) => {
            talk.end();
            Ok(what.run(fds, |_| drop(stop_abandoned(&vm)))?)
        }
        None => {
            talk.say("the restore has died; this process brings the rest of the guest's memory");
            what.run(fds, |error| talk.stopped(&vm, error))?;
            talk.say("all of the guest's memory is in place, or its VMM has ended");
            // Not before: a VMM that waits for a page answers nothing.
            if let Err(why) = settle_restored(&vm, &what.will) {
                talk.say(&format!("can't restore the VMM's settings: {why}"));
            }
            Ok(())
        }
    }
}

/// The standard error of the restore.
struct Talk(Option<File>);

impl Talk {
    fn say(&mut self, line: &str) {
        if let Some(to) = &mut self.0 {
            // If nobody can read it, nobody can be told so either.
            let _ = to.write_all(format!("transship: {}\n", output::one_line(line)).as_bytes());
        }
    }

    /// There is nothing more to say, and whoever waits for the end of it need not.
    fn end(&mut self) {
        self.0 = None;
    }

    /// A page can't be brought: the guest must not go on to where it would need it.
    fn stopped(&mut self, vm: &VmAddress, error: &Error) {
        let found = stop_abandoned(vm).unwrap_or_else(|why| format!("can't stop it: {why}"));
        self.say(&format!(
            "{error}. The guest was stopped where it was, before it read any wrong data: {found}. Until it has ended, \
             this process makes sure that missing pages are not read as zeros. Restore it into a new VMM from another \
             copy of the file"
        ));
        self.end();
    }
}
