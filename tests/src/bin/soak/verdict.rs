//! Who runs the guest after a move, and whether that is as it was promised. What a message tells a person to do is
//! done, word for word.
use crate::host::Host;
use crate::plan::{Blow, Harm, Victim};
use crate::story::Story;
use serde_json::json;
use std::process::Command;
use transship_lab::{Finished, LabError, Process, Result, wait_until};

/// How a step ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    /// At the other QEMU.
    Arrived,
    /// It runs on where it was.
    Stayed,
    /// At either, after a person has done what a message or the documents say.
    ByHand,
    /// Nothing ran, and a restore into a new QEMU did.
    Again,
    /// With the QEMU that ran it.
    Lost,
}

/// What was done to whom: nothing, if the step had ended before.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Done<'a> {
    pub(crate) blow: &'a Blow,
    pub(crate) hit: bool,
    /// The guest's pages come after it.
    pub(crate) follows: bool,
}

impl Done<'_> {
    pub(crate) fn killed(&self, victim: Victim) -> bool {
        self.hit && self.blow.harm == Harm::Kill && self.blow.victim == victim
    }
}

/// How both commands of a move ended.
pub(crate) struct Ends {
    pub(crate) here: Finished,
    pub(crate) there: Finished,
}

fn wrong<T>(what: impl Into<String>) -> Result<T> {
    Err(LabError(what.into()))
}

/// Sees to it that exactly one QEMU runs the guest, or says why that is not so.
pub(crate) fn after_a_move(
    done: Done<'_>,
    source: &mut Host,
    destination: &mut Host,
    ends: &Ends,
    story: &mut Story,
) -> Result<Outcome> {
    match (source.runs()?, destination.runs()?) {
        (true, true) => wrong("it runs on both sides"),
        (false, true) => arrived(done, ends),
        (true, false) => stayed(done, destination, ends),
        (false, false) => stands(done, source, destination, ends, story),
    }
}

fn arrived(done: Done<'_>, ends: &Ends) -> Result<Outcome> {
    if !matches!(ends.here.code(), Some(0 | 3)) && !done.killed(Victim::Move) {
        return wrong("it runs there, and the source says otherwise");
    }
    if ends.there.code() != Some(0) && !done.killed(Victim::Receive) {
        return wrong("it runs there, and the destination says otherwise");
    }
    if !done.hit && ends.here.code() != Some(0) {
        return wrong("nobody was hurt, and the move did not end well");
    }
    Ok(Outcome::Arrived)
}

fn stayed(done: Done<'_>, destination: &mut Host, ends: &Ends) -> Result<Outcome> {
    if !destination.is_alive()? && destination.has_run()? {
        return wrong("it ran there, and runs here again");
    }
    if ends.here.code() != Some(1) && !done.killed(Victim::Move) {
        return wrong("it runs on here, and the source says otherwise");
    }
    match done.hit {
        true => Ok(Outcome::Stayed),
        false => wrong("nobody was hurt, and the guest was not moved"),
    }
}

/// It runs nowhere.
fn stands(
    done: Done<'_>,
    source: &mut Host,
    destination: &mut Host,
    ends: &Ends,
    story: &mut Story,
) -> Result<Outcome> {
    if !destination.is_alive()? && destination.has_run()? {
        // Where the pages follow, either end may be the one that had some of them alone.
        let had_pages = done.follows && done.killed(Victim::SourceQemu);
        return lost_with(if had_pages { Victim::SourceQemu } else { Victim::DestinationQemu }, done);
    }
    // "If the VMM still runs".
    if destination.is_alive()?
        && let Some(line) = told(&ends.there, "start it with: ")
    {
        return follow(&line, destination, story);
    }
    if !source.is_alive()? {
        if ends.here.code() == Some(0) {
            return wrong("the source says that it has arrived, and it runs nowhere");
        }
        return lost_with(Victim::SourceQemu, done);
    }
    if let Some(line) = told(&ends.here, "resume it here with: ") {
        // "Only if it does not run there and will not be started there".
        destination.qemu.kill9();
        return follow(&line, source, story);
    }
    if let Some(line) = told(&ends.here, "resume it with: ") {
        return follow(&line, source, story);
    }
    if done.killed(Victim::Move) && ends.there.code() == Some(1) {
        story.say(
            "as docs/protocol.md says: the word to the guard was written, and no Go arrived: resume it at the source",
        );
        destination.qemu.kill9();
        source.qemu.qmp("cont", json!({}))?;
        return Ok(Outcome::ByHand);
    }
    wrong("it runs nowhere, and nobody says what to do")
}

pub(crate) fn lost_with(victim: Victim, done: Done<'_>) -> Result<Outcome> {
    match done.killed(victim) {
        true => Ok(Outcome::Lost),
        false => wrong(format!("the guest is lost, and {victim:?} was not killed")),
    }
}

/// The command line of a message, for exit code 3.
pub(crate) fn told(ended: &Finished, before: &str) -> Option<String> {
    if ended.code() != Some(3) {
        return None;
    }
    let line = ended.stderr.lines().find_map(|line| line.split_once(before))?.1;
    // What follows is another sentence.
    Some(line[..=line.rfind('\'')?].to_owned())
}

/// Does what a message says, and waits until the guest runs.
pub(crate) fn follow(line: &str, host: &mut Host, story: &mut Story) -> Result<Outcome> {
    story.say(&format!("as it was told: {line}"));
    let mut command = Command::new("sh");
    command.args(["-c", line]);
    let mut person = Process::start(command)?;
    wait_until("what a message says to be done", || Ok(host.runs()? || person.ended()?.is_some()))?;
    match host.runs()? {
        true => Ok(Outcome::ByHand),
        false => wrong(format!("what the message says does not help: {}", person.stdout().tail())),
    }
}
