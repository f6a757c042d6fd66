//! Guests that have converged are kept ready until somebody says that they may go.
use std::time::{Duration, Instant};

use serde_json::Value;
use transship_lab::{
    Accel, LabError, Qemu, QemuBuilder, Result, Scratch, Synthetic, Transship, Workload,
    synthetic::{SyntheticBuilder, SyntheticState},
    transship::TransshipBuilder,
    wait_until,
};

use crate::ends::{assert_whole, number, synthetic_pair};
use crate::peer::{PLAIN, assert_moved, assert_never_ran, assert_nothing_of_ours, assert_runs_on, multifd};
use crate::restoring::{assert_goes_on, restoring};
use crate::steering::{go, status, wait_for, which};

/// It writes some megabytes a second, again and again.
fn guest() -> QemuBuilder {
    Qemu::multiboot_under(Accel::Tcg).workload(Workload { sweep_ms: 1000, rate: 1500, ..Workload::MULTIBOOT })
}

fn small() -> SyntheticBuilder {
    Synthetic::builder().memory("16M").write_rate("20M").hot_set("4M")
}

fn started(guest: QemuBuilder) -> Result<(Qemu, u64)> {
    let guest = guest.start()?;
    guest.ready()?;
    let count = guest.next_count()?.count;
    Ok((guest, count))
}

/// It is held for so long at least.
fn stay(run: &mut Transship, time: Duration) -> Result<()> {
    let since = Instant::now();
    wait_until("time to pass", || match run.process().ended()? {
        Some(status) => Err(LabError(format!("it ended, {status}: {}", run.stderr().tail()))),
        None => Ok(since.elapsed() > time),
    })
}

/// What it costs a guest to be held, and what ended it.
fn assert_held(report: &Value, by: &str) {
    assert_eq!(report["hold"]["released_by"], by, "{report}");
    assert!(number(report, "/hold/ms") > 0.0 && number(report, "/hold/looks") > 0.0, "{report}");
}

/// Longer than the time after which a round is sent whatever was written.
#[test]
fn a_busy_guest_is_kept_ready_until_it_may_go() -> Result<()> {
    let (source, left) = started(guest())?;
    let destination = guest().incoming().start()?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let flags = ["--hold", "--bandwidth", "32MiB", "--downtime", "400ms", "--verify"];
    let mut moving = Transship::moving(&source.vm(), &receive.listening()?).args(flags).start()?;
    let which = which(&moving);
    let state = wait_for(&mut moving, &which, "ready")?;
    assert_eq!(state["phase"], "held", "{state}");
    stay(&mut moving, Duration::from_secs(13))?;
    assert_eq!(source.status()?, "running");
    assert!(source.next_count()?.count > left);
    assert_eq!(destination.status()?, "inmigrate");
    wait_for(&mut moving, &which, "ready")?;
    go(&[&which])?.expect_code(0)?;
    let report = moving.wait()?.expect_code(0)?.report()?;
    assert_held(&report, "go");
    assert!(number(&report, "/hold/ms") > 13_000.0 && number(&report, "/hold/rounds") >= 1.0, "{report}");
    receive.wait()?.expect_code(0)?;
    assert_moved(&source, &destination, left)
}

/// As long as one waits for the disks of other guests.
#[test]
#[ignore = "minutes of a busy guest: make test-long"]
fn a_busy_guest_is_kept_ready_for_minutes() -> Result<()> {
    let (source, mut last) = started(guest())?;
    let left = last;
    let destination = guest().incoming().start()?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let flags = ["--hold", "--bandwidth", "32MiB", "--downtime", "400ms", "--verify"];
    let mut moving = Transship::moving(&source.vm(), &receive.listening()?).args(flags).start()?;
    let which = which(&moving);
    for _ in 0..12 {
        wait_for(&mut moving, &which, "ready")?;
        stay(&mut moving, Duration::from_secs(15))?;
        let count = source.next_count()?;
        assert!(count.count > last && count.errors == 0, "{count:?}");
        assert_eq!((&*source.status()?, &*destination.status()?), ("running", "inmigrate"));
        last = count.count;
    }
    wait_for(&mut moving, &which, "ready")?;
    go(&[&which])?.expect_code(0)?;
    let report = moving.wait()?.expect_code(0)?.report()?;
    assert_held(&report, "go");
    assert!(number(&report, "/hold/ms") > 180_000.0, "{report}");
    receive.wait()?.expect_code(0)?;
    assert_moved(&source, &destination, left)
}

/// With writers that are held back beyond what fits the downtime.
#[test]
#[ignore = "long: make test-long"]
fn a_guest_that_is_paced_is_kept_ready() -> Result<()> {
    let busy = || guest().workload(Workload { mib: 5, rate: 0, sweep_ms: 2000, ..Workload::MULTIBOOT });
    let (source, left) = started(busy())?;
    let destination = busy().incoming().start()?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let flags = ["--hold", "--converge", "pace", "--bandwidth", "4MiB", "--downtime", "250ms", "--verify"];
    let mut moving = Transship::moving(&source.vm(), &receive.listening()?).args(flags).start()?;
    let which = which(&moving);
    wait_for(&mut moving, &which, "ready")?;
    stay(&mut moving, Duration::from_secs(5))?;
    assert_eq!(source.status()?, "running");
    // It may have to converge again at any moment.
    Transship::command(["go", "--early", &which]).run()?.expect_code(0)?;
    let report = moving.wait()?.expect_code(0)?.report()?;
    assert_held(&report, "go");
    receive.wait()?.expect_code(0)?;
    assert_moved(&source, &destination, left)
}

#[test]
#[ignore = "long: make test-long"]
fn a_stock_qemu_waits_for_a_guest_that_is_held() -> Result<()> {
    for wires in [PLAIN, multifd(2, "none")] {
        let (source, left) = started(guest())?;
        let destination = guest().incoming().start()?;
        let to = wires.wait_at_a_port(&destination)?;
        let mut moving = wires.moving(&source, &to).args(["--hold"]).start()?;
        let which = which(&moving);
        wait_for(&mut moving, &which, "ready")?;
        stay(&mut moving, Duration::from_secs(12))?;
        assert_eq!((&*source.status()?, &*destination.status()?), ("running", "inmigrate"));
        go(&[&which])?.expect_code(0)?;
        let report = moving.wait()?.expect_code(0)?.report()?;
        assert_held(&report, "go");
        assert_moved(&source, &destination, left)?;
    }
    Ok(())
}

/// All of them, or none.
#[test]
fn two_guests_go_together() -> Result<()> {
    let folder = Scratch::new()?;
    let (pair, other) = (synthetic_pair(small())?, synthetic_pair(small())?);
    let mut runs = Vec::new();
    for (number, (source, destination)) in [&pair, &other].into_iter().enumerate() {
        let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
        let moving = Transship::moving(&source.vm(), &receive.listening()?).args(["--hold"]);
        // The second one is not ready for now.
        let gate = folder.join("gate");
        let moving = match number {
            0 => moving,
            _ => moving.env("TRANSSHIP_FAIL_POINT", "source.round=stall").env("TRANSSHIP_FAIL_FILE", &gate),
        };
        runs.push((receive, moving.start()?));
    }
    let [(_, first), (_, second)] = &mut runs[..] else { unreachable!() };
    let (one, two) = (which(first), which(second));
    wait_for(first, &one, "ready")?;
    wait_for(second, &two, "not-yet")?;
    let refused = go(&[&one, &two])?.expect_code(1)?;
    assert!(refused.stderr.contains("nothing was released"), "{refused}");
    assert_eq!(status(&one)?.unwrap_or_default()["hold"], "ready");
    let refused = go(&[&two])?.expect_code(1)?;
    assert!(refused.stderr.contains("has not converged"), "{refused}");
    std::fs::remove_file(folder.join("gate"))?;
    wait_for(second, &two, "ready")?;
    go(&[&pair.0.vm(), &other.0.vm()])?.expect_code(0)?;
    for (receive, moving) in runs {
        assert_held(&moving.wait()?.expect_code(0)?.report()?, "go");
        receive.wait()?.expect_code(0)?;
    }
    assert_whole(&pair.1)?;
    assert_whole(&other.1)
}

/// A move of this guest to one that waits for it.
fn held(source: &Synthetic, to: &str, flags: &[&str]) -> TransshipBuilder {
    Transship::moving(&source.vm(), to).args(flags.iter().copied())
}

#[test]
fn a_time_or_a_command_lets_it_go_and_a_command_that_fails_keeps_it_here() -> Result<()> {
    let (source, destination) = synthetic_pair(small())?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let ended = held(&source, &receive.listening()?, &["--hold-until", "sleep 1; exit 7"]).run()?;
    ended.expect_error(1, "command")?;
    receive.wait()?.expect_code(1)?;
    assert_eq!(source.state()?, SyntheticState::Running);

    let folder = Scratch::new()?;
    let notes = folder.join("notes");
    let command = format!("echo $TRANSSHIP_PHASE $TRANSSHIP_COMMAND $TRANSSHIP_VM >> {}; sleep 2", notes.display());
    let mut source = source;
    for (flags, by) in [(["--hold-until", &command], "command"), (["--hold-for", "2s"], "time")] {
        let destination = small().incoming().start()?;
        let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
        let report = held(&source, &receive.listening()?, &flags).run()?.expect_code(0)?.report()?;
        assert_held(&report, by);
        assert!(number(&report, "/hold/ms") >= 2000.0, "{report}");
        receive.wait()?.expect_code(0)?;
        assert_whole(&destination)?;
        if by == "command" {
            let noted = std::fs::read_to_string(&notes)?;
            assert_eq!(noted, format!("held move {}\n", source.vm()));
        }
        source = destination;
    }
    Ok(())
}

/// The command ends with the move that waits for it.
#[test]
fn a_guest_whose_deadline_passes_while_it_is_held_runs_on() -> Result<()> {
    let (source, destination) = synthetic_pair(small())?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let folder = Scratch::new()?;
    let pid = folder.join("pid");
    let command = format!("echo $$ > {}; sleep 600", pid.display());
    let flags = ["--deadline", "4s", "--hold-until", &command];
    let ended = held(&source, &receive.listening()?, &flags).run()?.expect_code(1)?;
    let report = ended.report()?;
    assert_eq!((&report["status"], &report["hold"]["released_by"]), (&"too-late".into(), &Value::Null), "{ended}");
    assert!(number(&report, "/hold/ms") > 0.0, "it was held: {ended}");
    assert_eq!(source.state()?, SyntheticState::Running);
    receive.wait()?.expect_code(1)?;
    let pid = std::fs::read_to_string(&pid)?;
    wait_until("the command to be gone", || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
        Ok(stat.map_or(true, |stat| stat.contains(") Z ")))
    })
}

#[test]
fn a_guest_runs_on_when_whoever_holds_it_is_killed_or_cancelled_or_the_other_end_is() -> Result<()> {
    let (source, _) = started(guest())?;
    for (story, peer_is_qemu) in
        [("killed", false), ("cancelled", false), ("receiver", false), ("killed", true), ("cancelled", true)]
    {
        let mut destination = guest().incoming().start()?;
        let (receive, to) = if peer_is_qemu {
            (None, PLAIN.wait_for_a_guest(&destination)?)
        } else {
            let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
            let to = receive.listening()?;
            (Some(receive), to)
        };
        let moving = if peer_is_qemu { PLAIN.moving(&source, &to) } else { Transship::moving(&source.vm(), &to) };
        let mut moving = moving.args(["--hold"]).start()?;
        let which = which(&moving);
        wait_for(&mut moving, &which, "ready")?;
        let mut receive = receive;
        match story {
            "killed" => moving.kill9(),
            "cancelled" => drop(crate::steering::cancel(&which)?.expect_code(0)?),
            _ => receive.iter_mut().for_each(Transship::kill9),
        }
        let ended = moving.wait()?;
        match story {
            "killed" => {
                source.wait_status("running")?;
                assert_goes_on(&source)?;
                assert_nothing_of_ours(&source)?;
            }
            _ => assert_runs_on(&source, &ended, story)?,
        }
        match receive {
            Some(receive) if story != "receiver" => drop(receive.wait()?.expect_code(1)?),
            Some(_) => {}
            None => assert_never_ran(&mut destination, story)?,
        }
        destination.kill9();
    }
    Ok(())
}

#[test]
fn a_live_save_is_held_until_its_moment() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("guest");
    let (source, _) = started(guest())?;
    let to = path.to_string_lossy().into_owned();
    let save = Transship::command(["save", "--vm", &source.vm(), "--to", &to, "--json", "--hold", "--downtime", "2s"]);
    let mut saving = save.start()?;
    let which = which(&saving);
    let state = wait_for(&mut saving, &which, "ready")?;
    assert_eq!((&state["command"], &state["to"]), (&"save".into(), &to.as_str().into()), "{state}");
    stay(&mut saving, Duration::from_secs(3))?;
    let before = source.next_count()?.count;
    go(&[&which])?.expect_code(0)?;
    assert_held(&saving.wait()?.expect_code(0)?.report()?, "go");
    assert_goes_on(&source)?;
    let destination = guest().incoming().start()?;
    restoring(&destination.vm(), &path).run()?.expect_code(0)?;
    assert!(destination.next_count()?.count >= before, "it is of the moment when it was released");
    assert_goes_on(&destination)
}

#[test]
fn what_cannot_be_held_is_refused() -> Result<()> {
    let (source, destination) = synthetic_pair(small())?;
    let vm = source.vm();
    for (flags, why) in [
        (&["save", "--to", "/x", "--paused", "--hold"][..], "--live"),
        (&["save", "--to", "/x", "--background", "--hold-for", "1s"], "--live"),
        (&["save", "--to", "/x", "--format", "stream", "--hold"], "appended"),
        (&["move", "--to", "unix:/x", "--hold-for", "0s"], "from 1s to 168h"),
    ] {
        let ended = Transship::command([flags, &["--vm", &vm]].concat()).run()?.expect_code(2)?;
        assert!(ended.stderr.contains("--hold") && ended.stderr.contains(why), "{ended}");
    }
    source.call("stop")?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let ended = held(&source, &receive.listening()?, &["--hold"]).run()?.expect_code(1)?;
    assert!(ended.stderr.contains("stands still already"), "{ended}");
    receive.wait()?.expect_code(1)?;
    Ok(())
}
