//! `transship stand-in`: waits beside a `transship restore --lazy`, `move` or `receive` for its end. See
//! `crate::stand_in`.
use std::{
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::{Duration, Instant},
};

use transship_engine::{Caller, Charge, Ending, Error, Given, Host, Received, Serving, TakeOver, Taken, Uri};
use transship_lines::{Line, LineSocket};
use transship_vmm::{VmAddress, settle_restored, start_abandoned, stop_abandoned};

use zeroize::Zeroizing;

use crate::{
    args::StandInArgs,
    checks::Checks,
    failure::Failure,
    journal::Journal,
    output,
    sandbox::{Errands, Left, Role, Sandbox, Steward},
    stand_in::{MAY_BE_GIVEN, READY, SETTLED, STARTED, STARTS, ending},
};

/// Longer than anything runs: whoever has started this says what there is to take over when there is something.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

pub(crate) fn run(args: &StandInArgs) -> Result<(), Failure> {
    let mut checks = Checks::default();
    let vm = checks.read("--vm", &args.vm, str::parse::<VmAddress>);
    let to = args.connect.as_deref().map(|to| checks.read("--connect", to, str::parse::<Uri>));
    let sandbox = Sandbox::check(&args.sandbox, &mut checks);
    let (vm, sandbox) = checks.finish(vm.zip(sandbox))?;
    let unusable = |what: &dyn std::fmt::Display| {
        Failure::Failed(format!("this process is started by other commands of transship: {what}"))
    };
    let stdin = io::stdin().as_fd().try_clone_to_owned().map_err(|e| unusable(&e))?;
    let _steward = confined(&vm, to.flatten(), args, &sandbox)?;
    let mut socket = LineSocket::new(UnixStream::from(stdin));
    let Line { text, mut fds } = socket.receive(Instant::now() + FOREVER).map_err(|e| unusable(&e))?;
    let Told { charge, key_bytes, has_journal } = serde_json::from_slice(&text).map_err(|e| unusable(&e))?;
    let mut talk = Talk(fds.pop().map(File::from));
    let journal = if has_journal { fds.pop().map(Journal::passed) } else { None };
    let key = key(&mut socket, key_bytes).map_err(|e| unusable(&e))?;
    let heard = listen(&mut socket);
    match charge {
        Charge::File(what) => restored(&vm, &what, fds, heard.ending, &mut talk),
        Charge::Move(what) => received(&vm, &what, (fds, key), &heard, &mut talk),
        Charge::Serve(what) if heard.is_settled && heard.ending.is_none() => {
            served(&what, fds, key, &mut talk)?;
            journal.into_iter().for_each(|mut journal| journal.erase());
            Ok(())
        }
        Charge::Serve(_) => Ok(()),
    }
}

/// All that takes rights; then they are gone. The steward keeps the ways to the VMM and to the receiver, which are
/// taken only if the other process dies.
fn confined(
    vm: &VmAddress,
    to: Option<Uri>,
    args: &StandInArgs,
    sandbox: &Sandbox,
) -> Result<Option<Steward>, Failure> {
    let vm = match vm {
        VmAddress::Qemu(path) | VmAddress::Handoff(path) => Some(Uri::Unix(path.clone())),
        VmAddress::Libvirt(_) => None,
    };
    let connect = vm.into_iter().chain(to).collect();
    let errands = Errands { connect, freeze: args.freeze, journal: args.journal.as_deref(), ..Errands::default() };
    let steward = sandbox.steward(&errands)?;
    sandbox.confine(Role::StandIn, Left::Nothing)?;
    Ok(steward)
}

/// What comes first.
#[derive(serde::Deserialize)]
struct Told {
    charge: Charge,
    /// Of the text behind it, by which connections are encrypted; 0: they are not.
    key_bytes: usize,
    /// The journal is the last descriptor but one.
    has_journal: bool,
}

/// Takes what is behind the first line.
fn key(socket: &mut LineSocket, bytes: usize) -> io::Result<Option<Zeroizing<String>>> {
    socket.stream().write_all(&[READY])?;
    if bytes == 0 {
        return Ok(None);
    }
    let mut text = Zeroizing::new(vec![0; bytes]);
    socket.stream().read_exact(&mut text)?;
    let key = str::from_utf8(&text).map_err(io::Error::other)?.to_owned();
    socket.stream().write_all(&[READY])?;
    Ok(Some(Zeroizing::new(key)))
}

/// What was heard until the end.
#[derive(Default)]
struct Heard {
    /// The source may have given its guest away.
    may_be_given: bool,
    /// There was no way back any more.
    is_settled: bool,
    /// The guest was about to be let run, and it is not known whether it was.
    is_starting: bool,
    /// How it ended; none: by dying.
    ending: Option<Ending>,
}

/// Waits for the end.
fn listen(socket: &mut LineSocket) -> Heard {
    let (mut heard, mut word) = (Heard::default(), [0]);
    loop {
        match socket.stream().read(&mut word) {
            Ok(1) if word[0] == MAY_BE_GIVEN => heard.may_be_given = true,
            Ok(1) if word[0] == SETTLED => heard.is_settled = true,
            Ok(1) if word[0] == STARTS => heard.is_starting = true,
            Ok(1) if word[0] == STARTED => heard.is_starting = false,
            Ok(1) => return Heard { ending: ending(word[0]), ..heard },
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            _ => return heard,
        }
    }
}

/// Stands in for a restore that has ended so, or has died.
fn restored(
    vm: &VmAddress,
    what: &TakeOver,
    fds: Vec<OwnedFd>,
    ending: Option<Ending>,
    talk: &mut Talk,
) -> Result<(), Failure> {
    match ending {
        Some(Ending::Complete) => Ok(()),
        Some(Ending::Hold) => {
            talk.end();
            Ok(what.hold(fds)?)
        }
        Some(Ending::GoOn) => {
            talk.end();
            Ok(what.run(fds, |_| drop(stop_abandoned(vm)))?)
        }
        None => {
            talk.say("the restore has died; this process brings the rest of the guest's memory");
            what.run(fds, |error| talk.stopped(vm, error, error.restore_anew()))?;
            talk.say("all of the guest's memory is in place, or its VMM has ended");
            // Not before: a VMM that waits for a page answers nothing.
            if let Err(why) = settle_restored(vm, &what.will) {
                talk.say(&format!("can't restore the VMM's settings: {why}"));
            }
            Ok(())
        }
    }
}

/// Stands in for a receiver that has ended so, or has died.
fn received(
    vm: &VmAddress,
    what: &Received,
    (fds, key): (Vec<OwnedFd>, Option<Zeroizing<String>>),
    heard: &Heard,
    talk: &mut Talk,
) -> Result<(), Failure> {
    // A damaged one is none.
    let host = key.and_then(|key| Host::revealed(&key).ok());
    match heard.ending {
        Some(Ending::Complete) => Ok(()),
        Some(Ending::Hold | Ending::GoOn) => {
            talk.end();
            Ok(what.hold(fds)?)
        }
        // The guest has not run here, and does not: it is the source's.
        None if !heard.is_settled && (!heard.may_be_given || what.is_locked && host.is_none()) => Ok(()),
        None if what.is_locked && host.is_none() => {
            talk.say(
                "the receiver has died before all pages of its guest were here. Until its VMM has ended, this process \
                 makes sure that missing pages are not read as zeros: the guest waits at them for good",
            );
            talk.end();
            Ok(what.hold(fds)?)
        }
        None => {
            let given = if heard.is_settled { Given::Yes } else { Given::Perhaps };
            talk.say(match given {
                Given::Yes => "the receiver has died; this process takes the rest of the guest's pages",
                Given::Perhaps => {
                    "the receiver has died; this process waits for a source that may have given its guest away already"
                }
            });
            let mut not_started = None;
            let start = |run: Option<bool>| {
                !run.unwrap_or(heard.is_starting) || start_abandoned(vm).map_err(|why| not_started = Some(why)).is_ok()
            };
            if what.run(fds, host, (given, start), |error| talk.stopped(vm, error, Received::START_ANEW))?
                == Taken::Nothing
            {
                talk.say("the source has not come: it has not given its guest away, which was never run here");
                return Ok(());
            }
            talk.say("all of the guest's pages are here, or its VMM has ended");
            if let Some(why) = not_started {
                talk.say(&format!("the guest, which was handed over, can't be started: {why}. Start it here by cont"));
            }
            // Not before: a VMM that waits for a page answers nothing.
            if let Err(why) = settle_restored(vm, &what.will) {
                talk.say(&format!("can't restore the VMM's settings: {why}"));
            }
            Ok(())
        }
    }
}

/// Stands in for a move that has died after its guest was given up.
fn served(what: &Serving, fds: Vec<OwnedFd>, key: Option<Zeroizing<String>>, talk: &mut Talk) -> Result<(), Failure> {
    talk.say(
        "the move has died after its guest was handed over; this process sends the rest of its pages. If the receiver \
         has ended and its guest never ran, end this process and resume the guest here",
    );
    let caller = key.map(|key| Caller::revealed(&key)).transpose();
    // Nobody hears what this process says when it ends.
    what.run(fds, caller.map_err(|why| Failure::Failed(why.to_string()))?)
        .inspect_err(|error| talk.say(&error.to_string()))?;
    talk.say("the destination has all pages of its guest");
    Ok(())
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

    /// A page can't be brought: the guest must not go on to where it would need it. `cure`: what a person does then.
    fn stopped(&mut self, vm: &VmAddress, error: &Error, cure: &str) {
        let found = stop_abandoned(vm).unwrap_or_else(|why| format!("can't stop it: {why}"));
        self.say(&format!(
            "{error}. The guest was stopped where it was, before it read any wrong data: {found}. Until it has ended, \
             this process makes sure that missing pages are not read as zeros. {cure}"
        ));
        self.end();
    }
}
