//! Waits for the chosen moment, and hurts the victim.
use crate::plan::{Blow, Harm, Moment};
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;
use std::time::Duration;
use transship_lab::process::status_field;
use transship_lab::transship::TransshipBuilder;
use transship_lab::{LabError, Proxy, Result, Transship, wait_until};

/// How long who is held stands still.
const HELD: Duration = Duration::from_secs(1);

/// Who it is, once there is somebody.
pub(crate) enum Target<'a> {
    Process(u32),
    Link(&'a Proxy),
    /// The link takes others after these.
    Connections(&'a Proxy),
    Nobody,
}

/// Has a command wait at the moment of the blow, if that is one of its steps.
pub(crate) fn armed(command: TransshipBuilder, blow: &Blow, side: &str, gate: &Path) -> TransshipBuilder {
    match blow.moment {
        Moment::At(step) if step.starts_with(side) => {
            command.env("TRANSSHIP_FAIL_POINT", format!("{step}=stall")).env("TRANSSHIP_FAIL_FILE", gate)
        }
        _ => command,
    }
}

/// The moment has come; or the command, which waits for it by `gate`, has ended before.
pub(crate) fn has_come(blow: &Blow, command: &mut Transship, gate: &Path) -> Result<bool> {
    match blow.moment {
        Moment::After(time) => Ok(command.process().wait(time).is_err()),
        Moment::At(step) => {
            wait_until(step, || Ok(gate.exists() || command.process().ended()?.is_some()))?;
            Ok(gate.exists())
        }
    }
}

/// Hurts it, and has whoever waits at the gate go on. Whether there was anybody to be hurt.
pub(crate) fn strike(harm: Harm, target: &Target<'_>, gate: &Path) -> Result<bool> {
    let hit = match (harm, target) {
        (Harm::Kill, Target::Process(pid)) => send(*pid, Signal::KILL) && dead(*pid)?,
        (Harm::Hold, Target::Process(pid)) => send(*pid, Signal::STOP),
        (Harm::Kill, Target::Link(link)) => {
            link.cut();
            true
        }
        (Harm::Kill, Target::Connections(link)) => {
            link.snap();
            true
        }
        (Harm::Hold, Target::Link(link) | Target::Connections(link)) => {
            link.hold();
            true
        }
        (_, Target::Nobody) => false,
    };
    // It may be gone with the process that waits for its removal.
    let _ = std::fs::remove_file(gate);
    if harm == Harm::Hold && hit {
        std::thread::sleep(HELD);
        match target {
            Target::Process(pid) => _ = send(*pid, Signal::CONT),
            Target::Link(link) | Target::Connections(link) => link.let_go(),
            Target::Nobody => {}
        }
    }
    Ok(hit)
}

/// False: it is gone.
fn send(pid: u32, signal: Signal) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("the kernel's pids are positive");
    kill_process(pid, signal).is_ok()
}

/// Waits until it runs nothing any more, whoever is to take notice of its end.
fn dead(pid: u32) -> Result<bool> {
    wait_until("a killed process to end", || {
        Ok::<_, LabError>(status_field(pid, "State").map_or(true, |state| state.starts_with(['Z', 'X'])))
    })?;
    Ok(true)
}
