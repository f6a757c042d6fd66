//! Whoever dies at whatever step: at most one side runs, nothing is lost that was not in the party that died, and the
//! next attempt on the same source succeeds. Checked on the guests themselves, not on our own words.
use serde_json::{Value, json};
use transship_lab::{
    Accel, Finished, LabError, Proxy, Qemu, Result, Scratch, Synthetic, Transship, synthetic::SyntheticState,
    wait_until,
};

/// A guest of either kind, alive or dead.
enum Guest {
    Synthetic(Box<Synthetic>),
    Qemu(Box<Qemu>),
}

impl Guest {
    fn vm(&self) -> String {
        match self {
            Self::Synthetic(guest) => guest.vm(),
            Self::Qemu(guest) => guest.vm(),
        }
    }

    fn is_alive(&mut self) -> Result<bool> {
        let process = match self {
            Self::Synthetic(guest) => guest.process(),
            Self::Qemu(guest) => guest.process(),
        };
        Ok(process.ended()?.is_none())
    }

    fn kill9(&mut self) {
        match self {
            Self::Synthetic(guest) => guest.process().kill9(),
            Self::Qemu(guest) => guest.kill9(),
        }
    }

    /// Dead guests don't run. A guard may be talking to the guest for a moment, which then has no ear for us.
    fn is_running(&mut self) -> Result<bool> {
        let mut running = Ok(false);
        wait_until("the guest to answer", || {
            if !self.is_alive()? {
                running = Ok(false);
                return Ok(true);
            }
            running = match self {
                Self::Synthetic(guest) => guest.state().map(|state| state == SyntheticState::Running),
                Self::Qemu(guest) => guest.status().map(|status| status == "running"),
            };
            Ok(running.is_ok())
        })?;
        running
    }

    /// What the messages tell a person to do.
    fn resume_by_hand(&self) -> Result<()> {
        match self {
            Self::Synthetic(guest) => guest.call("resume").map(drop),
            Self::Qemu(guest) => guest.qmp("cont", json!({})).map(drop),
        }
    }

    fn start_by_hand(&self) -> Result<()> {
        match self {
            Self::Synthetic(guest) => guest.call("start").map(drop),
            Self::Qemu(guest) => guest.qmp("cont", json!({})).map(drop),
        }
    }

    /// It runs, and every page is what it was last.
    fn assert_whole(&mut self, story: &str) -> Result<()> {
        assert!(self.is_running()?, "{story}: it does not run");
        let wrong = match self {
            Self::Synthetic(guest) => guest.check()?.wrong,
            Self::Qemu(guest) => {
                guest.next_count()?;
                guest.sweep()?.errors
            }
        };
        assert_eq!(wrong, 0, "{story}: stale pages");
        Ok(())
    }

    /// What a VMM is set to do when it migrates by itself.
    fn settings(&self) -> Result<Value> {
        match self {
            Self::Synthetic(_) => Ok(Value::Null),
            Self::Qemu(guest) => {
                let asked = ["query-migrate-capabilities", "query-migrate-parameters"];
                asked.iter().map(|what| guest.qmp(what, json!({}))).collect()
            }
        }
    }

    /// Nothing of ours is left in it.
    fn assert_clean(&mut self, story: &str) -> Result<()> {
        let pid = match self {
            Self::Synthetic(guest) => guest.pid(),
            Self::Qemu(guest) => guest.pid(),
        };
        let ours = transship_lab::process::open_files(pid)?;
        assert!(!ours.iter().any(|file| file.contains("userfaultfd")), "{story}: {ours:?}");
        Ok(())
    }
}

/// Makes pairs of guests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lab {
    Synthetic,
    /// The same, over encrypted connections.
    Sealed,
    /// The same, held for a moment before it is stopped.
    Held,
    Qemu,
}

impl Lab {
    fn source(self) -> Result<Guest> {
        match self {
            Self::Synthetic | Self::Sealed | Self::Held => {
                let guest = Synthetic::builder().memory("16M").write_rate("10M").hot_set("1M").start()?;
                Ok(Guest::Synthetic(Box::new(guest)))
            }
            Self::Qemu => {
                let guest = Qemu::multiboot_under(Accel::Tcg).booted()?;
                Ok(Guest::Qemu(Box::new(guest)))
            }
        }
    }

    fn destination(self) -> Result<Guest> {
        match self {
            Self::Synthetic | Self::Sealed | Self::Held => {
                Ok(Guest::Synthetic(Box::new(Synthetic::builder().memory("16M").incoming().start()?)))
            }
            Self::Qemu => Ok(Guest::Qemu(Box::new(Qemu::multiboot_under(Accel::Tcg).incoming().start()?))),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Victim {
    SourceCommand,
    DestinationCommand,
    SourceGuest,
    DestinationGuest,
    Link,
}

const VICTIMS: [Victim; 5] =
    [Victim::SourceCommand, Victim::DestinationCommand, Victim::SourceGuest, Victim::DestinationGuest, Victim::Link];

/// The steps, in order; the side that stalls there is the first word.
const STEPS: [&str; 15] = [
    "source.hello",
    "destination.hello",
    "source.tracking",
    "source.round-sent",
    "destination.round",
    "source.round",
    HELD,
    "source.stopped",
    "source.last-round",
    "source.state-sent",
    "destination.loaded",
    "source.loaded",
    "source.go-sent",
    "destination.go",
    "destination.started",
];

/// Only a guest that is held comes to this step.
const HELD: &str = "source.ready";
/// From this step on the guest is the destination's.
const GIVEN_UP: &str = "source.go-sent";
/// From this step on the source's guest stands still.
const STOPPED: &str = "source.stopped";
/// From this step on the source may have all of the guest, also of its device state.
const SAVED: &str = "source.last-round";

fn from(step: &str, bound: &str) -> bool {
    let index = |name: &str| STEPS.iter().position(|step| *step == name).expect("a step of the list");
    index(step) >= index(bound)
}

/// How both ends came out.
struct Ends {
    source: Finished,
    destination: Finished,
}

/// Runs a move in which `victim` dies at `step`.
fn crash(lab: Lab, from: &mut Guest, to: &mut Guest, step: &str, victim: Victim) -> Result<Ends> {
    let folder = Scratch::new()?;
    let gate = folder.join("gate");
    let arm = |builder: transship_lab::transship::TransshipBuilder, side: &str| match step.starts_with(side) {
        true => builder.env("TRANSSHIP_FAIL_POINT", format!("{step}=stall")).env("TRANSSHIP_FAIL_FILE", &gate),
        false => builder,
    };
    let uri = format!("unix:{}", folder.join("there").display());
    let lifetime: &[&str] = if lab == Lab::Sealed { &["--token-lifetime", "10m"] } else { &[] };
    let receiving = Transship::receiving(&to.vm(), &uri).args(lifetime.iter().copied());
    let mut destination = arm(receiving, "destination").start()?;
    destination.listening()?;
    let proxy = Proxy::start(&folder.join("here"), &folder.join("there"))?;
    let uri = format!("unix:{}", folder.join("here").display());
    let moving = Transship::moving(&from.vm(), &uri).args(["--channels", "2", "--downtime", "5s"]);
    let held: &[&str] = if lab == Lab::Held { &["--hold-for", "1s"] } else { &[] };
    let moving = moving.args(held.iter().copied());
    let token = if lab == Lab::Sealed { vec!["--token".to_owned(), destination.token()?] } else { Vec::new() };
    let mut source = arm(moving.args(token), "source").start()?;
    wait_until(step, || {
        if let Some(status) = source.process().ended()? {
            return Err(LabError(format!("ended before {step}, {status}: {}", source.stderr().tail())));
        }
        Ok(gate.exists())
    })?;
    match victim {
        Victim::SourceCommand => source.kill9(),
        Victim::DestinationCommand => {
            destination.kill9();
            // Before that the source may do a step more, and can't know what became of it.
            proxy.wait_until_told();
        }
        Victim::SourceGuest => from.kill9(),
        Victim::DestinationGuest => {
            to.kill9();
            if ["source.state-sent", "source.loaded"].contains(&step) {
                // Its side waits for the guest, notices, and says so.
                wait_until("the destination to notice", || Ok(destination.process().ended()?.is_some()))?;
                proxy.wait_until_told();
            }
        }
        Victim::Link => {
            proxy.wait_in_use();
            proxy.cut();
        }
    }
    // It may be gone with the process that waits for its removal.
    let _ = std::fs::remove_file(&gate);
    Ok(Ends { source: source.wait()?, destination: destination.wait()? })
}

/// One cell of the matrix, with all that the design promises about it.
fn cell(lab: Lab, step: &str, victim: Victim) -> Result<()> {
    let story = format!("{victim:?} dies at {step} ({lab:?})");
    let (mut source, mut destination) = (lab.source()?, lab.destination()?);
    let settings = destination.settings()?;
    let ends = crash(lab, &mut source, &mut destination, step, victim)?;
    let story = format!("{story}\n--- source {}\n--- destination {}", ends.source, ends.destination);
    let (runs_here, runs_there) = (source.is_running()?, destination.is_running()?);
    assert!(!(runs_here && runs_there), "{story}: it runs on both sides");
    if source.is_alive()? {
        source.assert_clean(&story)?;
    }
    if from(step, GIVEN_UP) {
        given_up(&mut source, &mut destination, runs_there, victim, &ends, &story)?;
        if destination.is_alive()? {
            assert_eq!(destination.settings()?, settings, "{story}: settings of ours are left");
        }
        Ok(())
    } else {
        not_given_up(lab, &mut source, &mut destination, runs_here, runs_there, step, victim, &ends, &story)
    }
}

/// The source does not run it again, and the destination runs it or can.
fn given_up(
    source: &mut Guest,
    destination: &mut Guest,
    runs_there: bool,
    victim: Victim,
    ends: &Ends,
    story: &str,
) -> Result<()> {
    assert!(!source.is_running()?, "{story}: the source took it back");
    if victim != Victim::SourceCommand {
        // Without the destination's word nobody can tell from here; with it all is well.
        assert!(matches!(ends.source.code(), Some(0 | 3)), "{story}");
        assert!(ends.source.code() == Some(0) || ends.source.stderr.contains("resume it here"), "{story}");
    }
    if victim == Victim::DestinationGuest {
        // It died with its guest. The source's is whole, and the message says how to resume it.
        source.resume_by_hand()?;
        return source.assert_whole(story);
    }
    if !runs_there {
        assert!(victim != Victim::SourceCommand && victim != Victim::SourceGuest, "{story}: nobody runs it");
        destination.start_by_hand()?;
    }
    destination.assert_whole(story)
}

/// The destination does not run it, the source does, and the next attempt works.
#[allow(clippy::too_many_arguments, reason = "what is known about one cell")]
fn not_given_up(
    lab: Lab,
    source: &mut Guest,
    destination: &mut Guest,
    runs_here: bool,
    runs_there: bool,
    step: &str,
    victim: Victim,
    ends: &Ends,
    story: &str,
) -> Result<()> {
    if victim == Victim::SourceGuest {
        // What had not been saved yet died with it. Once all of it was, it may live on there.
        assert!(!runs_there || from(step, SAVED), "{story}: half a guest runs");
        return if runs_there { destination.assert_whole(story) } else { Ok(()) };
    }
    assert!(!runs_there, "{story}: it runs there and was never given up");
    if victim == Victim::SourceCommand && from(step, STOPPED) {
        wait_until("the guard to let it run", || source.is_running())?;
    } else {
        assert!(runs_here, "{story}: the source does not run on");
    }
    if victim != Victim::SourceCommand {
        assert_eq!(ends.source.code(), Some(1), "{story}");
    }
    if victim != Victim::DestinationCommand {
        assert_eq!(ends.destination.code(), Some(1), "{story}");
    }
    source.assert_whole(story)?;
    again(lab, source)
}

/// A second attempt on the same source, to a fresh destination.
fn again(lab: Lab, source: &mut Guest) -> Result<()> {
    let mut destination = lab.destination()?;
    let folder = Scratch::new()?;
    let uri = format!("unix:{}", folder.join("s").display());
    let receive = Transship::receiving(&destination.vm(), &uri).start()?;
    receive.listening()?;
    Transship::moving(&source.vm(), &uri).args(["--verify"]).run()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert!(!source.is_running()?);
    destination.assert_whole("the second attempt")
}

fn every_step(lab: Lab, victim: Victim) -> Result<()> {
    let run = |step: &&str| cell(lab, step, victim).map_err(|e| LabError(format!("{victim:?} dies at {step}: {e:?}")));
    STEPS.iter().filter(|step| **step != HELD || lab == Lab::Held).try_for_each(run)
}

#[test]
fn the_source_command_dies() -> Result<()> {
    every_step(Lab::Synthetic, Victim::SourceCommand)
}

#[test]
fn the_destination_command_dies() -> Result<()> {
    every_step(Lab::Synthetic, Victim::DestinationCommand)
}

#[test]
fn the_source_guest_dies() -> Result<()> {
    every_step(Lab::Synthetic, Victim::SourceGuest)
}

#[test]
fn the_destination_guest_dies() -> Result<()> {
    every_step(Lab::Synthetic, Victim::DestinationGuest)
}

#[test]
fn the_link_dies() -> Result<()> {
    every_step(Lab::Synthetic, Victim::Link)
}

/// With a token, what one side has written is not yet what it has put on the wire.
#[test]
fn the_link_or_the_destination_dies_in_a_move_with_a_token() -> Result<()> {
    every_step(Lab::Sealed, Victim::Link)?;
    every_step(Lab::Sealed, Victim::DestinationCommand)
}

/// A hold changes nothing about what holds before it and after it.
#[test]
#[ignore = "long: make test-long"]
fn the_link_or_the_source_command_dies_in_a_move_that_is_held() -> Result<()> {
    every_step(Lab::Held, Victim::Link)?;
    every_step(Lab::Held, Victim::SourceCommand)
}

#[test]
fn others_die_while_a_guest_is_held() -> Result<()> {
    VICTIMS.iter().try_for_each(|victim| cell(Lab::Held, HELD, *victim))
}

/// The steps in which QEMU itself is in another state.
#[test]
fn with_qemu_while_the_guest_runs() -> Result<()> {
    VICTIMS.iter().try_for_each(|victim| cell(Lab::Qemu, "source.round", *victim))
}

#[test]
fn with_qemu_while_the_guest_stands_still() -> Result<()> {
    VICTIMS.iter().try_for_each(|victim| cell(Lab::Qemu, "source.stopped", *victim))
}

#[test]
fn with_qemu_when_the_device_state_was_sent() -> Result<()> {
    VICTIMS.iter().try_for_each(|victim| cell(Lab::Qemu, "source.loaded", *victim))
}

#[test]
fn with_qemu_when_the_guest_was_given_up() -> Result<()> {
    VICTIMS.iter().try_for_each(|victim| cell(Lab::Qemu, "destination.go", *victim))
}
