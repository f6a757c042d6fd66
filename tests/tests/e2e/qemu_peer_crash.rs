//! Whoever dies, stalls or says no while a guest goes to a stock QEMU: at most one side runs, and the guest is lost on
//! neither. Checked on the guests themselves.
use std::fs;

use crate::peer::{PLAIN, Wires, assert_never_ran, assert_nothing_of_ours, assert_runs_on, multifd};
use rustix::process::Signal;
use serde_json::json;
use transship_lab::{LabError, Qemu, Result, Scratch, Transship, lines::Mark, wait_until};

fn source() -> Result<Qemu> {
    let source = Qemu::multiboot().booted()?;
    Ok(source)
}

/// A move that stands at a step until the file `gate` is removed.
struct Stalled {
    moving: Transship,
    folder: Scratch,
}

impl Stalled {
    fn at(step: &str, wires: Wires, source: &Qemu, to: &str) -> Result<Self> {
        Self::at_first_of(&[step], wires, source, to)
    }

    /// It will stand at each of the steps.
    fn at_first_of(steps: &[&str], wires: Wires, source: &Qemu, to: &str) -> Result<Self> {
        let folder = Scratch::new()?;
        let armed: Vec<_> = steps.iter().map(|step| format!("{step}=stall")).collect();
        let moving = wires.moving(source, to).env("TRANSSHIP_FAIL_POINT", armed.join(","));
        let moving = moving.env("TRANSSHIP_FAIL_FILE", folder.join("gate")).start()?;
        let mut stalled = Self { moving, folder };
        stalled.wait_at(steps[0])?;
        Ok(stalled)
    }

    fn wait_at(&mut self, step: &str) -> Result<()> {
        let gate = self.folder.join("gate");
        wait_until(step, || {
            if let Some(status) = self.moving.process().ended()? {
                return Err(LabError(format!("it ended before {step}, {status}: {}", self.moving.stderr().tail())));
            }
            Ok(fs::read_to_string(&gate).is_ok_and(|at| at == step))
        })
    }

    fn go_on_to(&mut self, step: &str) -> Result<()> {
        self.open()?;
        self.wait_at(step)
    }

    fn go_on(self) -> Result<Transship> {
        self.open()?;
        Ok(self.moving)
    }

    fn open(&self) -> Result<()> {
        Ok(fs::remove_file(self.folder.join("gate"))?)
    }
}

/// Up to the byte that ends the stream the destination must not run, whatever it has loaded; the guard lets the
/// source's guest run again.
#[test]
#[ignore = "long: make test-long"]
fn a_move_that_is_killed_before_the_end_leaves_the_guest_here() -> Result<()> {
    for wires in [PLAIN, multifd(2, "zstd")] {
        for step in ["peer.round-sent", "peer.stopped", "peer.last-round", "peer.state-sent", "peer.loaded"] {
            let story = format!("{step}, {wires:?}");
            let source = source()?;
            let mut destination = Qemu::multiboot().incoming().start()?;
            let to = wires.wait_for_a_guest(&destination)?;
            let mut stalled = Stalled::at(step, wires, &source, &to)?;
            stalled.moving.kill9();
            assert_never_ran(&mut destination, &story)?;
            source.wait_status("running")?;
            assert_eq!(source.next_count()?.errors, 0, "{story}");
            assert_nothing_of_ours(&source)?;
            assert_eq!(source.sweep()?.errors, 0, "{story}");
        }
    }
    Ok(())
}

#[test]
fn a_move_that_is_killed_after_the_end_leaves_the_guest_there() -> Result<()> {
    let source = source()?;
    let destination = Qemu::multiboot().incoming().start()?;
    let to = PLAIN.wait_for_a_guest(&destination)?;
    let mut stalled = Stalled::at("peer.end-sent", PLAIN, &source, &to)?;
    stalled.moving.kill9();
    destination.wait_status("running")?;
    assert_eq!(destination.sweep()?.errors, 0);
    assert_eq!(source.status()?, "postmigrate");
    assert_nothing_of_ours(&source)
}

/// The next attempt, to another destination, works.
#[test]
fn a_destination_that_dies_before_the_end_leaves_the_guest_here() -> Result<()> {
    let source = source()?;
    for wires in [PLAIN, multifd(2, "none")] {
        for step in ["peer.connected", "peer.round", "peer.stopped", "peer.state-sent", "peer.loaded"] {
            let mut destination = Qemu::multiboot().incoming().start()?;
            let to = wires.wait_for_a_guest(&destination)?;
            let stalled = Stalled::at(step, wires, &source, &to)?;
            destination.kill9();
            let ended = stalled.go_on()?.wait()?;
            assert_runs_on(&source, &ended, &format!("{step}, {wires:?}"))?;
        }
    }
    let destination = Qemu::multiboot().incoming().start()?;
    let left = source.next_count()?.count;
    PLAIN.move_over(&source, &destination)?;
    crate::peer::assert_moved(&source, &destination, left)
}

/// Nobody can tell from here: exit code 3, the guest stands still, and the line that the message shows resumes it.
#[test]
fn a_destination_that_dies_after_the_end_needs_a_person() -> Result<()> {
    let source = source()?;
    let mut destination = Qemu::multiboot().incoming().start()?;
    let to = PLAIN.wait_for_a_guest(&destination)?;
    let mut stalled = Stalled::at_first_of(&["peer.loaded", "peer.end-sent"], PLAIN, &source, &to)?;
    // It does not get to say that it has it.
    destination.freeze()?;
    stalled.go_on_to("peer.end-sent")?;
    destination.kill9();
    let ended = stalled.go_on()?.wait()?;
    assert_eq!(ended.status.code(), Some(3), "{ended}");
    assert_eq!(ended.report()?["status"], "unknown");
    assert!(ended.stderr.contains("info status") && ended.stderr.contains("cont"), "{ended}");
    assert_eq!(source.status()?, "postmigrate");
    source.qmp("cont", json!({}))?;
    assert_eq!(source.sweep()?.errors, 0);
    Ok(())
}

#[test]
#[ignore = "minutes of waiting for who does not answer: make test-long"]
fn a_destination_that_freezes_is_given_up() -> Result<()> {
    let source = source()?;
    for (step, wires) in
        [("peer.connected", multifd(2, "none")), ("peer.connected", PLAIN), ("peer.last-round", multifd(2, "none"))]
    {
        let mut destination = Qemu::multiboot().incoming().start()?;
        let to = wires.wait_for_a_guest(&destination)?;
        let stalled = Stalled::at(step, wires, &source, &to)?;
        destination.freeze()?;
        // It may take a minute until the last round is there, and two more until the devices are loaded.
        let ended = stalled.go_on()?.wait_for(std::time::Duration::from_secs(300))?;
        assert_runs_on(&source, &ended, &format!("{wires:?}"))?;
        // Thawed, it finds a stream without an end.
        destination.thaw()?;
        assert_never_ran(&mut destination, &format!("{wires:?}"))?;
    }
    Ok(())
}

#[test]
fn ctrl_c_leaves_the_guest_here() -> Result<()> {
    let source = source()?;
    for (step, wires) in [("peer.round", PLAIN), ("peer.round", multifd(2, "zlib")), ("peer.last-round", PLAIN)] {
        let mut destination = Qemu::multiboot().incoming().start()?;
        let to = wires.wait_for_a_guest(&destination)?;
        let stalled = Stalled::at(step, wires, &source, &to)?;
        stalled.moving.signal(Signal::INT)?;
        // The move goes on at once when it may, and would be over before it has heard.
        let heard = |line: &str| line.contains("cancel").then_some(());
        stalled.moving.stderr().wait(Mark::START, "word of Ctrl-C", heard)?;
        let ended = stalled.go_on()?.wait()?;
        assert_eq!(ended.report()?["status"], "cancelled", "{ended}");
        assert_runs_on(&source, &ended, step)?;
        assert_never_ran(&mut destination, step)?;
    }
    Ok(())
}
