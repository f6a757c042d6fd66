//! Guests that write faster than the link carries: they get a verdict, or their writers are held until the rest is
//! small.
use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use transship_lab::{
    Accel, LabError, Qemu, QemuBuilder, Result, Scratch, Synthetic, Transship, Workload, kvm_works, lacks,
    transship::TransshipBuilder, wait_until,
};

use crate::ends::{Moved, assert_whole, move_between, number, synthetic_pair};
use crate::peer::{PLAIN, assert_moved, assert_nothing_of_ours, assert_runs_on, multifd};
use crate::restoring::{assert_goes_on, restoring};

const PACE: [&str; 2] = ["--converge", "pace"];
/// The busy guest writes all its pages again in every round, on a machine that has much else to do, too.
const SLOW: [&str; 4] = ["--bandwidth", "4MiB", "--downtime", "250ms"];

/// It writes all its pages as fast as it can. An emulated processor writes faster than one of KVM's that is emulated in
/// its turn.
fn busy() -> QemuBuilder {
    let workload = Workload { mib: 5, rate: 0, sweep_ms: 2000, ..Workload::MULTIBOOT };
    Qemu::multiboot_under(Accel::Tcg).workload(workload)
}

/// And how many pages it has written.
fn writing(guest: QemuBuilder) -> Result<(Qemu, u64)> {
    let guest = guest.booted()?;
    let count = guest.next_count()?.count;
    Ok((guest, count))
}

/// A rate for `--bandwidth`: this part of what the guest writes, which depends on what else the machine does.
fn too_slow_for(guest: &Qemu, share: f64) -> Result<String> {
    let (begin, first) = (Instant::now(), guest.next_count()?.count);
    let mut count = first;
    while begin.elapsed() < Duration::from_secs(2) {
        count = guest.next_count()?.count;
    }
    let writes = (count - first) as f64 * 4096.0 / begin.elapsed().as_secs_f64();
    Ok(format!("{}B/s", (writes / share).clamp(f64::from(1 << 20), f64::from(16 << 20)) as u64))
}

/// Of each round, for how long writers were held.
fn held_ms(report: &Value) -> Vec<f64> {
    let rounds = report["rounds"].as_array().into_iter().flatten();
    rounds.map(|round| number(round, "/held_ms")).collect()
}

/// Writers were held, in the rounds that the report says, and not in the first.
fn assert_held(report: &Value) {
    let rounds = held_ms(report);
    let together = number(report, "/tracker/held_ms");
    assert!(number(report, "/tracker/held") > 0.0 && together > 0.0, "{report}");
    assert_eq!(rounds[0], 0.0, "{report}");
    assert!((rounds.iter().sum::<f64>() - together).abs() < 1.0, "{report}");
}

/// A run that waits at a step.
struct Stalled {
    folder: Scratch,
    /// It has waited since then at least.
    since: Instant,
}

fn stalled(builder: TransshipBuilder, step: &str) -> Result<(Transship, Stalled)> {
    let folder = Scratch::new()?;
    let gate = folder.join("gate");
    let armed = builder.env("TRANSSHIP_FAIL_POINT", format!("{step}=stall")).env("TRANSSHIP_FAIL_FILE", &gate);
    let mut run = armed.start()?;
    wait_until("it to come to the step", || match run.process().ended()? {
        Some(status) => Err(LabError(format!("it ended early, {status}: {}", run.stderr().tail()))),
        None => Ok(gate.exists()),
    })?;
    Ok((run, Stalled { folder, since: Instant::now() }))
}

impl Stalled {
    fn go_on(self) -> Result<()> {
        Ok(std::fs::remove_file(self.folder.join("gate"))?)
    }
}

#[test]
fn a_guest_that_never_converges_does_so_when_its_writers_are_held() -> Result<()> {
    let (source, _) = writing(busy())?;
    let destination = busy().incoming().start()?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let flags = [&SLOW[..], &["--max-rounds", "4"]].concat();
    let ended = Transship::moving(&source.vm(), &receive.listening()?).args(flags).run()?;
    assert_eq!(ended.report()?["status"], "not-converging", "{ended}");
    assert!(ended.stderr.contains("Repeat the command with --converge pace"), "{ended}");
    receive.wait()?.expect_code(1)?;
    assert_runs_on(&source, &ended, "its writers were not to be held")?;

    let left = source.next_count()?.count;
    let destination = busy().incoming().start()?;
    let flags = [&SLOW[..], &PACE, &["--verify"]].concat();
    let report = move_between(&source.vm(), &destination.vm(), &flags)?.source.report()?;
    assert_held(&report);
    assert_moved(&source, &destination, left)
}

/// The same with processors that KVM runs, and that are so slow where KVM is emulated in its turn that the link may be
/// fast enough for them.
#[test]
#[ignore = "long: make test-long"]
fn processors_that_kvm_runs_are_held() -> Result<()> {
    if !kvm_works() {
        lacks("KVM");
        return Ok(());
    }
    let workload = Workload { mib: 2, rate: 0, sweep_ms: 6000, ..Workload::MULTIBOOT };
    let guest = || Qemu::multiboot_under(Accel::Kvm).workload(workload);
    let (source, _) = writing(guest())?;
    // While it checks all its pages it writes none, which takes it long.
    source.sweep()?;
    let left = source.next_count()?.count;
    let destination = guest().incoming().start()?;
    let flags = [&PACE[..], &["--bandwidth", "1MiB", "--downtime", "500ms", "--verify"]].concat();
    let report = move_between(&source.vm(), &destination.vm(), &flags)?.source.report()?;
    let carries = f64::from(1 << 20) / 4096.0;
    // What is written a little slower than it is carried fits in the end by itself.
    if number(&report, "/rounds/0/dirty_pages_per_s") > carries * 1.2 {
        assert_held(&report);
    }
    assert_moved(&source, &destination, left)
}

#[test]
fn a_guest_that_writes_little_is_never_held() -> Result<()> {
    let guest =
        || Qemu::multiboot_under(Accel::Tcg).workload(Workload { sweep_ms: 500, rate: 200, ..Workload::MULTIBOOT });
    let (source, left) = writing(guest())?;
    let destination = guest().incoming().start()?;
    let flags = [&SLOW[..], &PACE].concat();
    let report = move_between(&source.vm(), &destination.vm(), &flags)?.source.report()?;
    assert!(number(&report, "/tracker/waits") > 0.0, "it wrote: {report}");
    assert_eq!((number(&report, "/tracker/held"), number(&report, "/tracker/held_ms")), (0.0, 0.0), "{report}");
    assert!(held_ms(&report).iter().all(|held| *held == 0.0), "{report}");
    assert_moved(&source, &destination, left)
}

/// More threads than the machine has processors, and each is held by itself.
#[test]
fn several_writers_are_held() -> Result<()> {
    let guest = Synthetic::builder().memory("64M").write_rate("max").hot_set("8M").set("--threads", "3");
    let (source, destination) = synthetic_pair(guest)?;
    let flags = [&PACE[..], &["--bandwidth", "16MiB", "--downtime", "250ms", "--verify"]].concat();
    let Moved { source, .. } = move_between(&source.vm(), &destination.vm(), &flags)?;
    assert_held(&source.report()?);
    assert_whole(&destination)
}

#[test]
#[ignore = "long: make test-long"]
fn a_stock_qemu_receives_a_guest_whose_writers_are_held() -> Result<()> {
    for wires in [PLAIN, multifd(2, "none")] {
        let (source, left) = writing(busy())?;
        let destination = busy().incoming().start()?;
        let to = wires.wait_for_a_guest(&destination)?;
        let flags = [&SLOW[..], &PACE].concat();
        let report = wires.moving(&source, &to).args(flags).run()?.expect_code(0)?.report()?;
        assert_held(&report);
        assert_moved(&source, &destination, left)?;
    }
    Ok(())
}

/// Moves the guest, and asks its QEMU meanwhile: the report, and how long each round of questions took.
fn move_and_ask(source: &Qemu, destination: &Qemu, flags: &[&str]) -> Result<(Value, Vec<Duration>)> {
    let is_over = AtomicBool::new(false);
    let (moved, answers) = thread::scope(|scope| {
        let asking = scope.spawn(|| -> Result<Vec<Duration>> {
            let mut answers = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                let asked = Instant::now();
                for command in ["query-status", "query-cpus-fast", "query-block"] {
                    source.qmp(command, json!({}))?;
                }
                answers.push(asked.elapsed());
            }
            Ok(answers)
        });
        let moved = move_between(&source.vm(), &destination.vm(), flags);
        is_over.store(true, Ordering::Relaxed);
        (moved, asking.join().unwrap_or_else(|_| Err(LabError("the asking thread panicked".into()))))
    });
    Ok((moved?.source.report()?, answers?))
}

/// Linux, with its devices: QEMU's main loop answers while the processors are held. A machine that has much else to do
/// may be late now and then, and may let the guest write so much less than it has just written that nobody is held.
#[test]
#[ignore = "long: make test-long"]
fn a_qemu_whose_processors_are_held_answers() -> Result<()> {
    let guest = || Qemu::linux().workload(Workload { mib: 8, rate: 0, ..Workload::LINUX });
    let (mut source, _) = writing(guest())?;
    for share in [2.0, 8.0, 32.0] {
        let too_slow = too_slow_for(&source, share)?;
        let left = source.next_count()?.count;
        let destination = guest().incoming().start()?;
        let flags = [&PACE[..], &["--bandwidth", &too_slow, "--downtime", "250ms"]].concat();
        let (report, mut answers) = move_and_ask(&source, &destination, &flags)?;
        assert_moved(&source, &destination, left)?;
        if number(&report, "/tracker/held") == 0.0 {
            source = destination;
            continue;
        }
        assert_held(&report);
        answers.sort();
        let (median, most) = (answers[answers.len() / 2], answers[answers.len() * 99 / 100]);
        eprintln!("{} answers, {median:?} at the median, 99 % within {most:?}", answers.len());
        assert!(median < Duration::from_millis(100), "{median:?}");
        return Ok(());
    }
    Err(LabError("it was never held, over links of 1/32 of what it writes".into()))
}

/// Whether the disk is slower than the guest is up to the machine.
#[test]
fn a_live_save_of_a_guest_whose_writers_may_be_held_is_whole() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("guest");
    let guest = || busy().workload(Workload { mib: 48, rate: 0, sweep_ms: 4000, ..Workload::MULTIBOOT });
    let (source, _) = writing(guest())?;
    let to = path.to_string_lossy();
    let save = Transship::command(["save", "--live", "--vm", &source.vm(), "--to", &*to, "--json"]).args(PACE);
    let report = save.args(["--downtime", "100ms"]).run()?.expect_code(0)?.report()?;
    assert_eq!(report["tracker"]["name"], "sync", "{report}");
    assert_goes_on(&source)?;
    assert_nothing_of_ours(&source)?;
    let destination = guest().incoming().start()?;
    restoring(&destination.vm(), &path).run()?.expect_code(0)?;
    assert_goes_on(&destination)
}

/// Nobody is left to let writers go, and they go on all the same.
#[test]
fn writers_go_on_when_the_one_who_holds_them_is_killed_or_interrupted() -> Result<()> {
    let (source, _) = writing(busy())?;
    for ends_it in [rustix::process::Signal::KILL, rustix::process::Signal::INT] {
        let destination = busy().incoming().start()?;
        let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
        let flags = [&SLOW[..], &PACE].concat();
        // Lines of text: they say when writers are held.
        let moving = Transship::command(["move", "--vm", &source.vm(), "--to", &receive.listening()?]).args(flags);
        let moving = moving.start()?;
        wait_until("writers to be held", || {
            Ok(moving.stderr().all().iter().any(|line| line.contains("writers held")))
        })?;
        moving.signal(ends_it)?;
        moving.wait()?;
        source.wait_status("running")?;
        assert_goes_on(&source)?;
        assert_nothing_of_ours(&source)?;
    }
    Ok(())
}

/// The guest is lost with its VMM, as without a move; the commands say so, and end.
#[test]
fn a_move_whose_writers_are_held_ends_with_its_vmm() -> Result<()> {
    for held in [false, true] {
        let (mut source, _) = writing(busy())?;
        let destination = busy().incoming().start()?;
        let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
        let flags = [&SLOW[..], &PACE].concat();
        let moving = Transship::command(["move", "--vm", &source.vm(), "--to", &receive.listening()?]).args(flags);
        let moving = moving.start()?;
        let sign = if held { "writers held" } else { "round 1" };
        wait_until(sign, || Ok(moving.stderr().all().iter().any(|line| line.contains(sign))))?;
        source.kill9();
        moving.wait()?.expect_code(1)?;
        receive.wait()?.expect_code(1)?;
    }
    Ok(())
}

/// What can't be had is refused before the guest is touched.
#[test]
fn what_cannot_be_held_is_refused() -> Result<()> {
    let source = Qemu::multiboot_with_kvm().booted()?;
    let vm = source.vm();
    for (flags, why) in [
        (&["move", "--to", "unix:/x", "--tracker", "async"][..], "leave out --tracker async"),
        (&["save", "--to", "/x", "--paused"], "--live"),
        (&["save", "--to", "/x", "--background"], "--live"),
    ] {
        let ended = Transship::command([flags, &["--vm", &vm], &PACE].concat()).run()?.expect_code(2)?;
        assert!(ended.stderr.contains("--converge pace") && ended.stderr.contains(why), "{ended}");
    }
    Ok(())
}

/// The link needs longer for its memory than there is time.
#[test]
fn a_move_that_takes_too_long_ends_by_its_deadline_and_the_guest_runs_on() -> Result<()> {
    let (source, _) = writing(busy())?;
    for converge in ["never", "pace"] {
        let destination = busy().incoming().start()?;
        let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
        let flags = ["--bandwidth", "1MiB", "--deadline", "3s", "--converge", converge];
        let ended = Transship::moving(&source.vm(), &receive.listening()?).args(flags).run()?;
        assert_eq!(ended.report()?["status"], "too-late", "{ended}");
        assert!(ended.stderr.contains("deadline") && ended.stderr.contains("in round 1"), "{ended}");
        assert_runs_on(&source, &ended, "its time was over")?;
        receive.wait()?.expect_code(1)?;
    }
    Ok(())
}

/// Its deadline passes while the guest stands still, before it is given up: it is taken back.
#[test]
fn a_deadline_holds_until_the_guest_is_given_up() -> Result<()> {
    let (source, left) = writing(busy())?;
    let destination = busy().incoming().start()?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let moving = Transship::moving(&source.vm(), &receive.listening()?).args(["--deadline", "3s"]);
    let (moving, stalled) = stalled(moving, "source.loaded")?;
    wait_until("the deadline", || Ok(stalled.since.elapsed() > Duration::from_secs(3)))?;
    stalled.go_on()?;
    let ended = moving.wait()?;
    assert_eq!(ended.report()?["status"], "too-late", "{ended}");
    assert_runs_on(&source, &ended, "its time was over")?;
    receive.wait()?.expect_code(1)?;
    assert!(source.next_count()?.count > left);
    Ok(())
}

#[test]
fn a_longer_downtime_is_taken_rather_than_that_the_move_is_given_up() -> Result<()> {
    let (source, left) = writing(busy())?;
    let destination = busy().incoming().start()?;
    let flags = [&SLOW[..], &["--max-rounds", "2", "--max-downtime", "30s"]].concat();
    let report = move_between(&source.vm(), &destination.vm(), &flags)?.source.report()?;
    assert_eq!(report["rounds"].as_array().map(Vec::len), Some(3), "two, and what was left: {report}");
    assert_moved(&source, &destination, left)
}

#[test]
fn a_save_that_takes_too_long_ends_by_its_deadline_and_leaves_nothing() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let (source, _) = writing(busy())?;
    for (way, step) in [("--live", "save.round"), ("--paused", "save.last-round")] {
        let path = folder.join("guest").to_string_lossy().into_owned();
        let save = Transship::command(["save", way, "--vm", &source.vm(), "--to", &path, "--json", "--deadline", "3s"]);
        let (saving, stalled) = stalled(save, step)?;
        wait_until("the deadline", || Ok(stalled.since.elapsed() > Duration::from_secs(3)))?;
        stalled.go_on()?;
        let ended = saving.wait()?;
        assert_eq!(ended.report()?["status"], "too-late", "{way}: {ended}");
        assert_runs_on(&source, &ended, way)?;
        let left = std::fs::read_dir(folder.path())?.count();
        assert_eq!(left, 0, "{way}");
    }
    Ok(())
}
