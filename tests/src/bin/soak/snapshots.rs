//! Saves and restores, each with its blow.
use crate::guest;
use crate::harm::{Target, armed, has_come, strike};
use crate::host::Host;
use crate::moves::PATIENT;
use crate::plan::{Blow, Victim};
use crate::shelf::Shelf;
use crate::story::Story;
use crate::verdict::{Done, Outcome, follow, lost_with, told};
use serde_json::json;
use transship_lab::transship::TransshipBuilder;
use transship_lab::{Finished, LabError, Result, Scratch, Transship, process::of_ours, wait_until};

fn wrong<T>(what: impl Into<String>) -> Result<T> {
    Err(LabError(what.into()))
}

/// Saves the guest, whose disk is at rest; it stays where it is.
pub(crate) fn save(
    blow: Option<&Blow>,
    how: &str,
    host: &mut Host,
    shelf: &Shelf,
    story: &mut Story,
) -> Result<(Outcome, bool)> {
    let balloon = host.plug(false)?;
    guest::rest(&host.qemu)?;
    let before = shelf.identity();
    // A save that was killed leaves its file, which the next one that gets so far removes.
    let earlier = shelf.strangers();
    let vm = host.qemu.vm();
    let command = Transship::command(["save", "--vm", &vm, how, "--json", "--to"]).args([shelf.snapshot()]);
    let command = if how == "--live" { command.args(PATIENT) } else { command };
    let command = command.args(balloon.iter().flat_map(|path| ["--balloon", path]));
    let blow = blow.filter(|blow| matches!(blow.victim, Victim::Save | Victim::Guard | Victim::SourceQemu));
    let (ended, hit) = run(command, blow, "save", host, story)?;
    let is_new = shelf.identity() != before;
    if is_new {
        shelf.keep_disk()?;
    }
    let killed = |victim| blow.is_some_and(|blow| Done { blow, hit, follows: false }.killed(victim));
    let mut left = shelf.strangers();
    if ended.code() != Some(0) {
        left.retain(|name| !earlier.contains(name));
    }
    if !killed(Victim::Save) && !left.is_empty() {
        return wrong(format!("left behind on the disk: {left:?}"));
    }
    if !host.is_alive()? {
        let lost = blow.map(|blow| lost_with(Victim::SourceQemu, Done { blow, hit, follows: false }));
        return Ok((lost.unwrap_or_else(|| wrong("the guest's QEMU has ended"))?, hit));
    }
    match ended.code() {
        Some(0) if !is_new => return wrong("it says that it has saved, and there is no new snapshot"),
        Some(1) if is_new => return wrong("it says that it has failed, and there is a new snapshot"),
        Some(1) if !hit => return wrong("nobody was hurt, and the save failed"),
        _ => {}
    }
    let mut outcome = Outcome::Stayed;
    if !host.runs()? {
        let Some(line) = told(&ended, "resume it with: ") else {
            return wrong("the guest stands still, and nobody says what to do");
        };
        outcome = follow(&line, host, story)?;
    }
    guest::go_on(&host.qemu)?;
    Ok((outcome, hit))
}

/// Restores the last snapshot into a QEMU that waits, with the disk that belongs to it. No other QEMU is left.
pub(crate) fn restore(
    blow: Option<&Blow>,
    lazy: bool,
    host: &mut Host,
    shelf: &Shelf,
    story: &mut Story,
) -> Result<(Outcome, bool)> {
    shelf.put_disk_back()?;
    let command = Transship::command(["restore", "--vm", &host.qemu.vm(), "--json", "--from"]).args([shelf.snapshot()]);
    let command = if lazy { command.args(["--lazy"]) } else { command };
    let blow = blow.filter(|blow| matches!(blow.victim, Victim::Restore | Victim::StandIn | Victim::DestinationQemu));
    let (ended, hit) = run(command, blow, "restore", host, story)?;
    let killed = |victim| blow.is_some_and(|blow| Done { blow, hit, follows: false }.killed(victim));
    if !host.is_alive()? {
        return match killed(Victim::DestinationQemu) {
            true if host.has_run()? => Ok((Outcome::Lost, hit)),
            true => Ok((Outcome::Again, hit)),
            false => wrong("the QEMU has ended"),
        };
    }
    let outcome = match host.runs()? {
        true if ended.code() == Some(0) || killed(Victim::Restore) => Outcome::Arrived,
        true => return wrong("the guest runs, and the restore says otherwise"),
        false => by_hand(&ended, killed(Victim::Restore), hit, host, story)?,
    };
    if outcome != Outcome::Again {
        guest::go_on(&host.qemu)?;
    }
    Ok((outcome, hit))
}

/// The guest does not run.
fn by_hand(ended: &Finished, killed: bool, hit: bool, host: &mut Host, story: &mut Story) -> Result<Outcome> {
    if let Some(line) = told(ended, "start it with: ") {
        return follow(&line, host, story);
    }
    if killed && ended.stderr.contains("this process brings the rest") && host.qemu.status()? == "paused" {
        story.say("it is loaded, and has all of its memory: cont");
        host.qemu.qmp("cont", json!({}))?;
        return Ok(Outcome::ByHand);
    }
    match hit && matches!(ended.code(), None | Some(1)) {
        true => Ok(Outcome::Again),
        false => wrong("nothing runs after the restore"),
    }
}

/// Runs one command with its blow.
fn run(
    command: TransshipBuilder,
    blow: Option<&Blow>,
    side: &str,
    host: &Host,
    story: &mut Story,
) -> Result<(Finished, bool)> {
    let folder = Scratch::new()?;
    let (gate, vm) = (folder.join("gate"), host.qemu.vm());
    let command = command.env("TMPDIR", folder.path());
    let mut hit = false;
    let mut command = blow.map_or(command.clone(), |blow| armed(command, blow, side, &gate)).start()?;
    if let Some(blow) = blow
        && has_come(blow, &mut command, &gate)?
    {
        hit = strike(blow.harm, &target(blow.victim, &command, host), &gate)?;
    }
    let ended = command.wait()?;
    story.say(&format!("--- {side}: {ended}"));
    wait_until("all of ours to end", || Ok(of_ours(&vm, "").is_empty()))?;
    Ok((ended, hit))
}

fn target(victim: Victim, command: &Transship, host: &Host) -> Target<'static> {
    let other = |kind| of_ours(&host.qemu.vm(), kind).first().map_or(Target::Nobody, |pid| Target::Process(*pid));
    match victim {
        Victim::Save | Victim::Restore => Target::Process(command.pid()),
        Victim::SourceQemu | Victim::DestinationQemu => Target::Process(host.qemu.pid()),
        Victim::Guard => other("guard"),
        Victim::StandIn => other("stand-in"),
        Victim::Nobody | Victim::Move | Victim::Receive | Victim::Link => Target::Nobody,
    }
}
