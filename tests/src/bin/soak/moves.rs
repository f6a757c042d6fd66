//! One move, with its blow.
use crate::harm::{Target, armed, has_come, strike};
use crate::host::Host;
use crate::plan::{Blow, Memory, Moment, Victim};
use crate::story::Story;
use crate::verdict::{Done, Ends};
use rustix::process::Signal;
use std::path::Path;
use std::time::Duration;
use transship_lab::{Finished, LabError, Proxy, Result, Scratch, Transship, process::of_ours, wait_until};

/// How long a destination may take to end after its source.
const ENDING: Duration = Duration::from_secs(10);

/// Flags of both ways that have a guest stand still: none is to fail because the machine is busy.
pub(crate) const PATIENT: [&str; 4] = ["--downtime", "20s", "--max-rounds", "100"];

/// Moves it; gives how both ends came out, and whether the victim was hit.
pub(crate) fn run(
    blow: &Blow,
    flags: &[&str],
    source: &Host,
    destination: &mut Host,
    story: &mut Story,
) -> Result<(Ends, bool)> {
    let folder = Scratch::new()?;
    let (gate, there, here) = (folder.join("gate"), folder.join("there"), folder.join("here"));
    let (from, to) = (source.qemu.vm(), destination.qemu.vm());
    // Nobody is to be hurt: nobody waits.
    let none = Blow { moment: Moment::After(Duration::ZERO), ..*blow };
    let wait_at = if blow.victim == Victim::Nobody { &none } else { blow };
    let receiving = Transship::receiving(&to, &format!("unix:{}", there.display()));
    let follows = flags.contains(&"postcopy");
    let receiving = if follows { receiving.args(["--postcopy"]) } else { receiving };
    let mut receive = armed(receiving, wait_at, "destination", &gate).env("TMPDIR", folder.path()).start()?;
    receive.listening()?;
    let link = Proxy::start(&here, &there)?;
    let moving = Transship::moving(&from, &format!("unix:{}", here.display())).args(PATIENT);
    let moving = moving.args(flags.iter().copied()).env("TMPDIR", folder.path());
    let mut command = armed(moving, wait_at, "source", &gate).start()?;
    let hit = blow.victim != Victim::Nobody && {
        let waits = if is_there(blow) { &mut receive } else { &mut command };
        has_come(blow, waits, &gate)? && {
            let target = match target(blow.victim, &command, &receive, source, destination, &link) {
                // Else the two would dial again for as long as the guest runs at the destination.
                Target::Link(link) if follows => Target::Connections(link),
                target => target,
            };
            strike(blow.harm, &target, &gate)?
        }
    };
    let done = Done { blow, hit, follows };
    let ended = command.wait().inspect_err(|_| {
        story.say(&format!("--- what receive has said\n{}", receive.process().stderr().tail()));
    })?;
    story.say(&format!("--- move: {ended}"));
    // Nobody else sends what only its VMM has.
    if follows && source.memory == Memory::Own && done.killed(Victim::Move) {
        recover(&from, &here, story)?;
    }
    let there = end(receive, &link)?;
    story.say(&format!("--- receive: {there}"));
    if follows && blow.victim == Victim::SourceQemu && there.stderr.contains("not read as zeros") {
        story.say("its pages are gone with the source: a second process holds it until it has ended");
        destination.qemu.kill9();
    }
    wait_until("all of ours to end", || Ok(of_ours(&from, "").is_empty() && of_ours(&to, "").is_empty()))?;
    drop(link);
    assert_only_ours(folder.path(), done)?;
    Ok((Ends { here: ended, there }, hit))
}

/// As a person does after a move was killed that may have handed its guest over before its pages.
fn recover(from: &str, to: &Path, story: &mut Story) -> Result<()> {
    let recovered = Transship::moving(from, &format!("unix:{}", to.display())).args(["--recover"]).run()?;
    story.say(&format!("--- move --recover: {recovered}"));
    let is_here = recovered.code() == Some(1)
        && ["was not given away", "was not handed over", "there is no record"]
            .iter()
            .any(|why| recovered.stderr.contains(why));
    if is_here || recovered.code() == Some(0) {
        return Ok(());
    }
    Err(LabError(format!("the move can't be gone on with: {recovered}")))
}

fn is_there(blow: &Blow) -> bool {
    matches!(blow.moment, Moment::At(step) if step.starts_with("destination"))
}

fn target<'a>(
    victim: Victim,
    command: &Transship,
    receive: &Transship,
    source: &Host,
    destination: &Host,
    link: &'a Proxy,
) -> Target<'a> {
    match victim {
        Victim::Move => Target::Process(command.pid()),
        Victim::Receive => Target::Process(receive.pid()),
        Victim::Guard => {
            of_ours(&source.qemu.vm(), "guard").first().map_or(Target::Nobody, |pid| Target::Process(*pid))
        }
        Victim::SourceQemu => Target::Process(source.qemu.pid()),
        Victim::DestinationQemu => Target::Process(destination.qemu.pid()),
        Victim::Link => Target::Link(link),
        Victim::Nobody | Victim::Save | Victim::Restore | Victim::StandIn => Target::Nobody,
    }
}

/// A destination that no source has spoken to waits for another one: it is told to end.
fn end(mut receive: Transship, link: &Proxy) -> Result<Finished> {
    let patience = if link.in_use() { ENDING } else { Duration::ZERO };
    if receive.process().wait(patience).is_err() {
        // It may end just now.
        let _ = receive.signal(Signal::INT);
    }
    receive.wait()
}

/// What lies in the folder: our end of the link, and nothing of the two commands.
fn assert_only_ours(folder: &Path, done: Done<'_>) -> Result<()> {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let left: Vec<_> = names
        .map(|name| name.to_string_lossy().into_owned())
        .filter(|name| name != "here" && !(name == "there" && done.killed(Victim::Receive)))
        .collect();
    match left.is_empty() {
        true => Ok(()),
        false => Err(LabError(format!("left behind on the disk: {left:?}"))),
    }
}
