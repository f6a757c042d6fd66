//! QEMU's control protocol: one command at a time, each with a deadline. A [`Carrier`] carries it: QEMU's own socket
//! (`socket`), or somebody who keeps that socket ([`super::libvirt`]).
#[allow(unsafe_code)]
mod socket;

use std::{
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use transship_guest::{DiskSnapshot, GuestError, NO_DISK_SNAPSHOT};
use transship_wire::libvirt::Definition;

use super::opened::Opened;

pub(super) use socket::{listener, peer_of};

/// How long an ordinary command may take: QEMU's main loop may be busy with a disk for some seconds.
const COMMAND_WAIT: Duration = Duration::from_secs(20);

/// The same of files that are made: their disk may be slow.
const FILES_WAIT: Duration = Duration::from_secs(120);

/// Why a command has no result.
#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum QmpError {
    /// QEMU's own refusal, in its words.
    #[error("QEMU refused {command}: {reason}")]
    Refused { command: String, reason: String },
    /// No answer. The command may still be carried out.
    #[error("QEMU at {path} did not answer {command} within {seconds} s; is it stopped or overloaded?")]
    Timeout { path: PathBuf, command: String, seconds: u64 },
    /// The other end is gone.
    #[error("QEMU (process {pid}) at {path} closed its QMP socket: it has ended; its own output says why")]
    Closed { path: PathBuf, pid: i32 },
    /// No connection, or no QMP on it.
    #[error("{0}")]
    Connection(String),
    /// What came is not QMP.
    #[error("QEMU at {path} sent {what}, which is not QMP")]
    Protocol { path: PathBuf, what: String },
}

impl From<QmpError> for GuestError {
    fn from(error: QmpError) -> Self {
        match error {
            // Nobody listens, or somebody else is heard: the user has named the wrong socket, or must free it.
            QmpError::Connection(what) => Self::Unfit(what),
            other => Self::vmm(other),
        }
    }
}

/// A command and its arguments.
pub(super) type Command = (&'static str, Value);

/// A command that changes nothing, and its arguments.
pub(super) type Question = Command;

/// Has QEMU let its guest run.
fn cont() -> Command {
    ("cont", json!({}))
}

/// What QEMU is told with a stop.
#[derive(Debug, Default)]
pub(super) struct WithStop {
    /// Asked ahead right before it: the guest does not stand still for these.
    pub(super) before: Vec<Question>,
    /// Asked ahead behind it.
    pub(super) questions: Vec<Question>,
    /// Typed ahead behind these.
    pub(super) next: Option<Command>,
}

/// Something that QEMU said by itself.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Event {
    pub(super) name: String,
    pub(super) data: Value,
}

/// The program that has the guest beside us: whoever changes its state, or QEMU's settings, must tell that one.
#[cfg_attr(not(feature = "libvirt"), allow(dead_code, reason = "nobody else is known"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keeper {
    /// Nobody: QEMU is ours to ask for anything.
    Nobody,
    /// libvirt: QEMU's migration is its own, and so is what the domain does.
    Libvirt,
}

/// Carries commands to QEMU, and answers back.
pub(super) trait Carrier: Send {
    /// QEMU's process.
    fn pid(&self) -> i32;
    /// QEMU's version: major, minor.
    fn version(&self) -> (u64, u64);
    fn path(&self) -> &Path;
    fn keeper(&self) -> Keeper;
    /// When QEMU itself answered for the first time; none: that is not known.
    fn answered(&self) -> Option<Instant> {
        None
    }
    /// Gives a command, with a descriptor if it needs one, and waits for its result.
    fn execute(
        &mut self,
        command: &str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> Result<Value, QmpError>;
    /// Whether QEMU has hung up, which it does when it ends. Costs no word with it.
    ///
    /// # Errors
    /// It has.
    fn check_alive(&self) -> Result<(), QmpError> {
        Ok(())
    }
    /// Gives a command that has QEMU write to the other end of `output`. Returns when it is answered, or when there is
    /// something to read: QEMU may hold its main lock while it writes what nobody reads, and then answers to nothing.
    fn execute_until_written(
        &mut self,
        command: &str,
        arguments: Value,
        output: BorrowedFd<'_>,
        limit: Duration,
    ) -> Result<(), QmpError>;
    /// Asks all of these, in this order, in one go if that saves time, and need not wait. A command among them that is
    /// given later is answered from here until [`Carrier::forget_answers`]. None of them may change anything.
    ///
    /// # Errors
    /// QEMU is gone or does not answer; that it refuses one is an answer.
    fn ask_ahead(&mut self, _questions: &[Question]) -> Result<(), QmpError> {
        Ok(())
    }
    /// What was asked ahead counts no more.
    fn forget_answers(&mut self) {}
    /// The same of these alone.
    fn forget_answers_to(&mut self, _questions: &[Question]) {}
    /// Has QEMU read this command but for its end, if that saves time. Given later, it takes no longer than that end;
    /// any other that is given before withdraws it. Whether it saves time.
    ///
    /// # Errors
    /// QEMU is gone, or does not read.
    fn type_ahead(&mut self, _command: &Command) -> Result<bool, QmpError> {
        Ok(false)
    }
    /// Gives all of these, in this order, and asks `questions` ahead behind them, in one go if that saves time: each of
    /// them is given, also if one before it is refused.
    ///
    /// # Errors
    /// The first refusal; or QEMU is gone or does not answer.
    fn execute_all(&mut self, commands: &[Command], questions: &[Question], limit: Duration) -> Result<(), QmpError> {
        let given = commands.iter().map(|(name, arguments)| self.execute(name, arguments.clone(), None, limit));
        let given: Vec<_> = given.collect();
        self.ask_ahead(questions)?;
        given.into_iter().try_for_each(|result| result.map(drop))
    }
    /// Hands a file descriptor to QEMU for a set of its own, and asks these ahead, in one go if that saves time. The
    /// answer to `add-fd`: the number that the descriptor has in QEMU, and that of the set.
    fn add_fd(&mut self, fd: BorrowedFd<'_>, questions: &[Question], limit: Duration) -> Result<Value, QmpError> {
        let added = self.execute("add-fd", json!({}), Some(fd), limit)?;
        self.ask_ahead(questions)?;
        Ok(added)
    }
    /// Gives a command whose result nobody wants to know, and does not wait for it if that saves time.
    fn give_away(&mut self, command: &'static str, arguments: Value, limit: Duration) -> Result<(), QmpError> {
        self.execute(command, arguments, None, limit).map(drop)
    }
    /// Stops the guest.
    fn stop(&mut self, limit: Duration) -> Result<(), QmpError> {
        self.execute("stop", json!({}), None, limit).map(drop)
    }
    /// Stops the guest, with these in one go if that saves time.
    fn stop_with(&mut self, with: &WithStop, limit: Duration) -> Result<(), QmpError> {
        self.ask_ahead(&with.before)?;
        self.stop(limit)?;
        self.ask_ahead(&with.questions)
    }
    /// Lets the guest run.
    fn cont(&mut self, limit: Duration) -> Result<(), QmpError> {
        let (command, arguments) = cont();
        self.execute(command, arguments, None, limit).map(drop)
    }
    /// How a person lets the guest run: a command line.
    fn cont_by_hand(&self) -> String;
    /// The guest's definition, if somebody keeps one.
    fn definition(&mut self, _limit: Duration) -> Result<Option<Definition>, QmpError> {
        Ok(None)
    }
    /// Which overlays the guest's disks would have, in this folder or beside them.
    fn plan_disks(&mut self, _folder: Option<&Path>, _limit: Duration) -> Result<Vec<DiskSnapshot>, QmpError> {
        Err(QmpError::Connection(NO_DISK_SNAPSHOT.to_owned()))
    }
    /// Makes the files of those overlays. They read as what is below them, and go again if they are not used.
    fn make_overlays(&mut self, _limit: Duration) -> Result<(), QmpError> {
        Err(QmpError::Connection(NO_DISK_SNAPSHOT.to_owned()))
    }
    /// Has the guest, which stands still, write to these overlays from now on: all of them or none.
    fn use_overlays(&mut self, _limit: Duration) -> Result<(), QmpError> {
        Err(QmpError::Connection(NO_DISK_SNAPSHOT.to_owned()))
    }
    /// The next event of this name, or none at the deadline. Earlier ones that wait in the queue come first.
    fn wait_event(&mut self, name: &str, deadline: Instant) -> Result<Option<Event>, QmpError>;
    /// The events of this name that have come.
    ///
    /// # Errors
    /// There may have been others, of which nobody knows any more.
    fn take_events(&mut self, name: &str) -> Result<Vec<Event>, QmpError>;
    /// Forgets events that came before now.
    fn forget_events(&mut self);
}

/// A descriptor that QEMU has been handed.
#[derive(Debug)]
pub(super) struct Added {
    /// The one that it has in QEMU.
    pub(super) number: i32,
    /// The set's.
    pub(super) set: u64,
}

/// A QEMU to which commands may be given.
pub(super) struct Qmp {
    carrier: Box<dyn Carrier>,
    process: Opened,
}

impl Qmp {
    /// Connects to QEMU's own socket.
    pub(super) fn connect(path: &Path) -> Result<Self, QmpError> {
        Ok(Self::over(Box::new(socket::Socket::connect(path)?)))
    }

    /// A QEMU whose socket somebody else has.
    #[cfg_attr(not(feature = "libvirt"), allow(dead_code, reason = "nobody else is known"))]
    pub(super) fn through(carrier: Box<dyn Carrier>) -> Self {
        Self::over(carrier)
    }

    fn over(carrier: Box<dyn Carrier>) -> Self {
        Self { process: Opened::of(carrier.pid()), carrier }
    }

    /// What is open of its process.
    pub(super) fn process(&mut self) -> &mut Opened {
        &mut self.process
    }

    /// The process that listens on the socket.
    pub(super) fn pid(&self) -> i32 {
        self.carrier.pid()
    }

    pub(super) fn path(&self) -> &Path {
        self.carrier.path()
    }

    pub(super) fn keeper(&self) -> Keeper {
        self.carrier.keeper()
    }

    /// See [`Carrier::answered`].
    pub(super) fn answered(&self) -> Option<Instant> {
        self.carrier.answered()
    }

    /// QEMU's version: major, minor.
    pub(super) fn version(&self) -> (u64, u64) {
        self.carrier.version()
    }

    /// Gives a command and waits for its result.
    pub(super) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.carrier.execute(command, arguments, None, COMMAND_WAIT)
    }

    /// The same, within `limit`.
    pub(super) fn execute_within(
        &mut self,
        command: &str,
        arguments: Value,
        limit: Duration,
    ) -> Result<Value, QmpError> {
        self.carrier.execute(command, arguments, None, limit)
    }

    /// See [`Carrier::ask_ahead`].
    pub(super) fn ask_ahead(&mut self, questions: &[Question]) -> Result<(), QmpError> {
        self.carrier.ask_ahead(questions)
    }

    /// See [`Carrier::forget_answers`].
    pub(super) fn forget_answers(&mut self) {
        self.carrier.forget_answers();
    }

    /// See [`Carrier::forget_answers_to`].
    pub(super) fn forget_answers_to(&mut self, questions: &[Question]) {
        self.carrier.forget_answers_to(questions);
    }

    /// See [`Carrier::type_ahead`].
    pub(super) fn type_ahead(&mut self, command: &Command) -> Result<bool, QmpError> {
        self.carrier.type_ahead(command)
    }

    /// See [`Carrier::check_alive`].
    pub(super) fn check_alive(&self) -> Result<(), QmpError> {
        self.carrier.check_alive()
    }

    /// See [`Carrier::execute_all`].
    pub(super) fn execute_all(&mut self, commands: &[Command], questions: &[Question]) -> Result<(), QmpError> {
        self.carrier.execute_all(commands, questions, COMMAND_WAIT)
    }

    /// Stops the guest.
    pub(super) fn stop(&mut self, limit: Duration) -> Result<(), QmpError> {
        self.carrier.stop(limit)
    }

    /// See [`Carrier::stop_with`].
    pub(super) fn stop_with(&mut self, with: &WithStop, limit: Duration) -> Result<(), QmpError> {
        self.carrier.stop_with(with, limit)
    }

    /// Lets the guest run.
    pub(super) fn cont(&mut self) -> Result<(), QmpError> {
        self.carrier.cont(COMMAND_WAIT)
    }

    /// Has QEMU read what [`Qmp::cont`] says but for its end, as [`Carrier::type_ahead`] does.
    pub(super) fn type_cont_ahead(&mut self) -> Result<bool, QmpError> {
        self.carrier.type_ahead(&cont())
    }

    /// How a person lets the guest run: a command line.
    pub(super) fn cont_by_hand(&self) -> String {
        self.carrier.cont_by_hand()
    }

    /// See [`Carrier::definition`].
    pub(super) fn definition(&mut self) -> Result<Option<Definition>, QmpError> {
        self.carrier.definition(COMMAND_WAIT)
    }

    /// See [`Carrier::plan_disks`].
    pub(super) fn plan_disks(&mut self, folder: Option<&Path>) -> Result<Vec<DiskSnapshot>, QmpError> {
        self.carrier.plan_disks(folder, COMMAND_WAIT)
    }

    /// See [`Carrier::make_overlays`].
    pub(super) fn make_overlays(&mut self) -> Result<(), QmpError> {
        self.carrier.make_overlays(FILES_WAIT)
    }

    /// See [`Carrier::use_overlays`].
    pub(super) fn use_overlays(&mut self) -> Result<(), QmpError> {
        self.carrier.use_overlays(COMMAND_WAIT)
    }

    /// Waits until no request of the guest's to a disk is under way: a transaction of nothing does that before it
    /// begins. The guest runs meanwhile, and its new requests wait.
    pub(super) fn drain_disks(&mut self, limit: Duration) -> Result<(), QmpError> {
        self.carrier.execute("transaction", json!({ "actions": [] }), None, limit).map(drop)
    }

    /// Hands a file descriptor to QEMU, to be named `name` in a later command. Replaces one of the same name.
    pub(super) fn send_fd(&mut self, name: &str, fd: BorrowedFd<'_>) -> Result<(), QmpError> {
        self.carrier.execute("getfd", json!({ "fdname": name }), Some(fd), COMMAND_WAIT).map(drop)
    }

    /// Hands a file descriptor to QEMU for a set of its own, and asks these ahead.
    ///
    /// # Errors
    /// QEMU does not take the descriptor; or it is gone, or does not answer.
    pub(super) fn add_fd(&mut self, fd: BorrowedFd<'_>, questions: &[Question]) -> Result<Added, QmpError> {
        let added = self.carrier.add_fd(fd, questions, COMMAND_WAIT)?;
        let number = added["fd"].as_i64().and_then(|number| i32::try_from(number).ok());
        match (number, added["fdset-id"].as_u64()) {
            (Some(number), Some(set)) => Ok(Added { number, set }),
            _ => Err(QmpError::Protocol {
                path: self.path().to_owned(),
                what: "an answer to add-fd without the descriptor's number".to_owned(),
            }),
        }
    }

    /// Takes such a descriptor away again. If this fails QEMU keeps an open file that nobody uses, until we disconnect.
    pub(super) fn remove_fd(&mut self, added: &Added) {
        let arguments = json!({ "fdset-id": added.set, "fd": added.number });
        let _ = self.carrier.give_away("remove-fd", arguments, COMMAND_WAIT);
    }

    /// See [`Carrier::execute_until_written`].
    pub(super) fn execute_until_written(
        &mut self,
        command: &str,
        arguments: Value,
        output: BorrowedFd<'_>,
    ) -> Result<(), QmpError> {
        self.carrier.execute_until_written(command, arguments, output, COMMAND_WAIT)
    }

    /// See [`Carrier::wait_event`].
    pub(super) fn wait_event(&mut self, name: &str, deadline: Instant) -> Result<Option<Event>, QmpError> {
        self.carrier.wait_event(name, deadline)
    }

    /// See [`Carrier::take_events`].
    pub(super) fn take_events(&mut self, name: &str) -> Result<Vec<Event>, QmpError> {
        self.carrier.take_events(name)
    }

    /// See [`Carrier::forget_events`].
    pub(super) fn forget_events(&mut self) {
        self.carrier.forget_events();
    }
}

#[cfg(test)]
pub(super) mod tests;
