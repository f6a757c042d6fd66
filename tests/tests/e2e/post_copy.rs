//! Guests that run at the destination before all their pages are there, whatever happens meanwhile.
use std::{thread, time::Duration};

use serde_json::{Value, json};
use transship_lab::{
    Accel, Backend, LabError, Proxy, Qemu, QemuBuilder, Result, Scratch, SlowLink, Transship, Workload,
    transship::TransshipBuilder, wait_until,
};

use crate::ends::{Moved, move_with, number};
use crate::middle::Middle;
use crate::peer::{assert_moved, assert_nothing_of_ours, assert_runs_on};
use crate::restoring::lazy::stand_ins;

const POSTCOPY: [&str; 4] = ["--converge", "postcopy", "--channels", "2"];
const AT_ONCE: [&str; 6] = ["--converge", "postcopy", "--channels", "2", "--postcopy-after", "0"];

/// A receiver that takes a guest before its pages.
pub(crate) fn receiving(vm: &str, listen: &str) -> TransshipBuilder {
    Transship::receiving(vm, listen).args(["--postcopy"])
}

fn move_between(source: &str, destination: &str, flags: &[&str]) -> Result<Moved> {
    move_with(source, destination, flags, &["--postcopy"])
}

/// It writes all its pages as fast as it can, and never checks less than all of them.
pub(crate) fn busy(mib: u32) -> QemuBuilder {
    let workload = Workload { mib, rate: 0, sweep_ms: 2000, ..Workload::MULTIBOOT };
    Qemu::multiboot_under(Accel::Tcg).workload(workload)
}

/// It runs, and how many pages it has written.
pub(crate) fn running(guest: QemuBuilder) -> Result<(Qemu, u64)> {
    let guest = guest.start()?;
    guest.ready()?;
    let count = guest.next_count()?.count;
    Ok((guest, count))
}

/// What both reports must say: the guest went before its pages, all of which followed.
fn assert_followed(source: &Value, destination: &Value) {
    for report in [source, destination] {
        assert_eq!(report["status"], "completed", "{report}");
        assert!(number(report, "/postcopy/owed") > 0.0, "{report}");
    }
    let came = number(destination, "/postcopy/by_fault") + number(destination, "/postcopy/by_push");
    let owed = number(destination, "/postcopy/owed");
    assert_eq!(number(source, "/postcopy/owed"), owed, "{source} {destination}");
    assert!(came <= owed, "a page was put twice: {destination}");
    assert!(number(destination, "/postcopy/faults") > 0.0, "nobody ever waited: {destination}");
}

/// Nobody stands by any more, and nothing of ours is in its VMM.
pub(crate) fn assert_alone(guest: &Qemu) -> Result<()> {
    assert_nothing_of_ours(guest)?;
    wait_until("the second process to end", || Ok(stand_ins(guest)?.is_empty()))
}

#[test]
fn a_guest_runs_before_its_pages_are_there() -> Result<()> {
    // So slowly that it touches pages before they are there.
    for (guest, slow) in [(Qemu::multiboot as fn() -> QemuBuilder, "1MiB"), (Qemu::linux, "16MiB")] {
        let (source, left) = running(guest())?;
        let destination = guest().incoming().start()?;
        let moved = move_between(&source.vm(), &destination.vm(), &[&AT_ONCE[..], &["--bandwidth", slow]].concat())?;
        let (ours, theirs) = (moved.source.report()?, moved.destination.report()?);
        assert_followed(&ours, &theirs);
        assert_eq!(ours["rounds"].as_array().map(Vec::len), Some(0), "{ours}");
        assert_moved(&source, &destination, left)?;
        assert_alone(&destination)?;
    }
    Ok(())
}

/// Encoded as the move is; what was sent in the rounds and written since is dropped there first.
#[test]
fn a_guest_that_never_converges_is_followed_by_its_pages() -> Result<()> {
    for compress in ["none", "zstd"] {
        let (source, left) = running(busy(24))?;
        let destination = busy(24).incoming().start()?;
        let slow = ["--bandwidth", "8MiB", "--downtime", "50ms", "--compress", compress, "--postcopy-after", "1"];
        let moved = move_between(&source.vm(), &destination.vm(), &[&POSTCOPY[..], &slow].concat())?;
        let (ours, theirs) = (moved.source.report()?, moved.destination.report()?);
        assert_followed(&ours, &theirs);
        assert_eq!(ours["rounds"].as_array().map(Vec::len), Some(1), "{ours}");
        if compress == "zstd" {
            assert!(number(&ours, "/bytes/encoder_in") > number(&ours, "/bytes/encoder_out"), "{ours}");
        }
        assert_moved(&source, &destination, left)?;
        assert_alone(&destination)?;
    }
    Ok(())
}

/// What would converge anyway is moved as always.
#[test]
fn a_guest_that_converges_needs_no_post_copy() -> Result<()> {
    let (source, left) = running(Qemu::multiboot())?;
    let destination = Qemu::multiboot().incoming().start()?;
    let flags = [&POSTCOPY[..], &["--downtime", "5s"]].concat();
    let moved = move_between(&source.vm(), &destination.vm(), &flags)?;
    assert!(moved.source.report()?.get("postcopy").is_none());
    assert_moved(&source, &destination, left)
}

/// A guest that was stopped is not let run, and one that is handed over with a token is encrypted to its last page.
#[test]
fn pages_that_follow_are_encrypted_as_all_others() -> Result<()> {
    let (source, left) = running(Qemu::multiboot_with_kvm())?;
    let destination = Qemu::multiboot_with_kvm().incoming().start()?;
    let receiving = receiving(&destination.vm(), "tcp:127.0.0.1:0").args(["--token-lifetime", "10m"]);
    let receive = receiving.start()?;
    let token = receive.token()?;
    let moving = Transship::moving(&source.vm(), &receive.listening()?).args(AT_ONCE).args(["--token", &token]);
    let moving = moving.args(["--bandwidth", "1MiB"]); // so that it touches pages before they are there
    let ours = moving.run()?.expect_code(0)?.report()?;
    assert_followed(&ours, &receive.wait()?.expect_code(0)?.report()?);
    assert_moved(&source, &destination, left)?;
    assert_alone(&destination)
}

#[test]
fn pages_follow_over_a_slow_link() -> Result<()> {
    let link = SlowLink::new(100)?;
    let guest = || busy(64);
    let (source, left) = running(guest())?;
    let destination = guest().incoming().start()?;
    let receiving = Transship::command([
        "receive",
        "--vm",
        &destination.vm(),
        "--listen",
        "tcp:0.0.0.0:0",
        "--insecure",
        "--postcopy",
        "--json",
    ]);
    let receive = receiving.prefix(&link.destination()).start()?;
    let port = receive.listening()?.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    let to = link.destination_uri(port.ok_or_else(|| LabError("no port".into()))?);
    let moving = Transship::command(["move", "--vm", &source.vm(), "--to", &to, "--insecure", "--json"]);
    let ours = moving.prefix(&link.source()).args(AT_ONCE).run()?.expect_code(0)?.report()?;
    let theirs = receive.wait()?.expect_code(0)?.report()?;
    eprintln!("{}", theirs["postcopy"]);
    assert_followed(&ours, &theirs);
    assert_moved(&source, &destination, left)
}

/// A move under way through a proxy that can be cut.
struct Cut {
    folder: Scratch,
    source: Transship,
    destination: Transship,
    proxy: Option<Proxy>,
    links: u32,
}

impl Cut {
    fn start(from: &Qemu, to: &Qemu, flags: &[&str]) -> Result<Self> {
        let folder = Scratch::new()?;
        let there = format!("unix:{}", folder.join("there").display());
        let destination = receiving(&to.vm(), &there).start()?;
        destination.listening()?;
        let proxy = Some(Proxy::start(&folder.join("here"), &folder.join("there"))?);
        let here = format!("unix:{}", folder.join("here").display());
        let source = Transship::moving(&from.vm(), &here).args(flags.iter().copied()).start()?;
        Ok(Self { folder, source, destination, proxy, links: 0 })
    }

    /// Breaks all connections, and refuses others for a while.
    fn cut(&mut self) -> Result<()> {
        self.proxy = None;
        let here = self.folder.join("here");
        std::fs::remove_file(&here)?;
        self.links += 1;
        Ok(())
    }

    fn mend(&mut self) -> Result<()> {
        self.proxy = Some(Proxy::start(&self.folder.join("here"), &self.folder.join("there"))?);
        Ok(())
    }
}

const BREAKS: u64 = 20;

/// The guest runs on where it has its pages, and waits where it has not, until the link is back.
#[test]
#[ignore = "long: make test-long"]
fn a_link_that_breaks_twenty_times_is_made_again_each_time() -> Result<()> {
    // So slowly that it is cut in the middle each time: it touches few pages, and what it waits for is not held up.
    let slow = || busy(16).workload(Workload { mib: 16, rate: 50, ..Workload::MULTIBOOT });
    let (source, left) = running(slow())?;
    let destination = slow().incoming().start()?;
    let flags = [&AT_ONCE[..], &["--bandwidth", "1MiB"]].concat();
    let mut moving = Cut::start(&source, &destination, &flags)?;
    destination.wait_status("running")?;
    for cut in 0..BREAKS {
        thread::sleep(Duration::from_millis(100 + 20 * cut));
        let said = moving.source.stderr().clone();
        let mark = said.mark();
        moving.cut()?;
        said.wait(mark, "the word that the link is broken", |line| line.contains("is broken").then_some(()))?;
        assert_eq!(destination.status()?, "running");
        moving.mend()?;
        said.wait(mark, "the word that the link is back", |line| line.contains("is back;").then_some(()))?;
    }
    let Cut { source: ours, destination: theirs, .. } = moving;
    let (ours, theirs) = (ours.wait()?.expect_code(0)?.report()?, theirs.wait()?.expect_code(0)?.report()?);
    assert_followed(&ours, &theirs);
    assert!(number(&ours, "/postcopy/reconnects") >= BREAKS as f64, "{ours}");
    assert_moved(&source, &destination, left)?;
    assert_alone(&destination)
}

/// Fails, or kills, at a step.
fn armed(builder: TransshipBuilder, step: &str, action: &str) -> TransshipBuilder {
    builder.env("TRANSSHIP_FAIL_POINT", format!("{step}={action}"))
}

/// Whatever fails before the guest is given up: it runs on at the source, and never at the destination.
#[test]
fn a_failure_before_the_guest_is_given_up_leaves_it_where_it_is() -> Result<()> {
    let (source, _) = running(Qemu::multiboot())?;
    let steps = [
        "source.owed",
        "source.line",
        "source.state-sent",
        "source.loaded",
        "destination.dropped",
        "destination.missing",
        "destination.line",
        "destination.loaded",
    ];
    for step in steps {
        it_stays_if_this_fails((&source, Qemu::multiboot), &AT_ONCE, step)?;
    }
    let sweep = source.sweep()?;
    assert_eq!(sweep.errors, 0, "{sweep:?}");
    Ok(())
}

/// Once by an error, and once because its process is killed.
fn it_stays_if_this_fails((source, like): (&Qemu, fn() -> QemuBuilder), flags: &[&str], step: &str) -> Result<()> {
    for action in ["error", "kill"] {
        let story = format!("{step}={action}");
        let destination = like().incoming().start()?;
        let receiving = receiving(&destination.vm(), "tcp:127.0.0.1:0");
        let is_source = step.starts_with("source");
        let receive = if is_source { receiving } else { armed(receiving, step, action) }.start()?;
        let moving = Transship::moving(&source.vm(), &receive.listening()?).args(flags.iter().copied());
        let ended = if is_source { armed(moving, step, action) } else { moving }.run()?;
        if is_source && action == "kill" {
            source.wait_status("running")?;
            assert_eq!(source.next_count()?.errors, 0, "{story}");
        } else {
            assert_runs_on(source, &ended, &story)?;
        }
        let received = receive.wait()?;
        assert_ne!(received.code(), Some(0), "{story}: {received}");
        // It hears that the other one has ended, whatever it waits for.
        assert!(!received.stderr.contains(" within "), "{story}: {received}");
        assert_ne!(destination.status()?, "running", "{story}: it runs twice");
    }
    Ok(())
}

/// Dropping takes longer than all the rest of a hand-over.
#[test]
fn what_a_guest_will_be_owed_is_dropped_there_while_it_runs_here() -> Result<()> {
    let like = || busy(24);
    let (source, left) = running(like())?;
    let slow = ["--bandwidth", "32MiB", "--downtime", "20ms", "--postcopy-after", "1"];
    let flags = [&POSTCOPY[..], &slow].concat();
    for step in ["source.stale", "destination.stale"] {
        it_stays_if_this_fails((&source, like), &flags, step)?;
    }
    let (destination, folder) = (like().incoming().start()?, Scratch::new()?);
    let gate = folder.join("gate");
    let receiving = armed(receiving(&destination.vm(), "tcp:127.0.0.1:0"), "destination.stale", "stall");
    let receive = receiving.env("TRANSSHIP_FAIL_FILE", &gate).start()?;
    let moving = Transship::moving(&source.vm(), &receive.listening()?).args(flags).start()?;
    wait_until("the pages to be dropped", || Ok(gate.exists()))?;
    assert_eq!(source.status()?, "running");
    source.next_count()?;
    std::fs::remove_file(&gate)?;
    let (ours, theirs) = (moving.wait()?.expect_code(0)?.report()?, receive.wait()?.expect_code(0)?.report()?);
    assert_followed(&ours, &theirs);
    assert_moved(&source, &destination, left)?;
    assert_alone(&destination)
}

/// So slowly that whoever is killed is so in the middle.
pub(crate) fn slowly(flags: &[&'static str]) -> Vec<&'static str> {
    [&AT_ONCE[..], &["--bandwidth", "2MiB"], flags].concat()
}

/// The receiver dies between the word that the guest is its own and its start: the second process starts it, and does
/// not say so before.
#[test]
fn a_guest_is_started_though_its_receiver_is_killed_right_before() -> Result<()> {
    let (source, left) = running(busy(16))?;
    let destination = busy(16).incoming().start()?;
    let folder = Scratch::new()?;
    let there = format!("unix:{}", folder.join("there").display());
    let receive = armed(receiving(&destination.vm(), &there), "destination.go", "kill").start()?;
    receive.listening()?;
    let moved = Transship::moving(&source.vm(), &there).args(AT_ONCE).run()?.expect_code(0)?;
    assert_eq!(receive.wait()?.code(), None, "{moved}");
    destination.wait_status("running")?;
    assert_moved(&source, &destination, left)?;
    assert_alone(&destination)
}

/// The receiver dies between the source's word that the guest is given away and hearing it: the source says it again
/// to the second process, which lets the guest run.
#[test]
fn a_guest_is_started_though_its_receiver_never_heard_that_it_was_given_away() -> Result<()> {
    let (source, left) = running(busy(16))?;
    let destination = busy(16).incoming().start()?;
    let folder = Scratch::new()?;
    let (there, [deaf, sent]) = (format!("unix:{}", folder.join("there").display()), ["deaf", "sent"]);
    let gated = |builder: TransshipBuilder, step, gate: &str| {
        armed(builder, step, "stall").env("TRANSSHIP_FAIL_FILE", folder.join(gate))
    };
    let mut receive = gated(receiving(&destination.vm(), &there), "destination.confirmed", deaf).start()?;
    receive.listening()?;
    let moving = gated(Transship::moving(&source.vm(), &there).args(AT_ONCE), "source.go-sent", sent).start()?;
    wait_until("the word", || Ok([deaf, sent].iter().all(|gate| folder.join(gate).exists())))?;
    receive.kill9();
    std::fs::remove_file(folder.join(sent))?;
    moving.wait()?.expect_code(0)?;
    assert_moved(&source, &destination, left)?;
    assert_alone(&destination)
}

/// Only the control connection breaks, and the word with it that the guest is given away. The supply line stands, but
/// the source dials another one, which begins with that word.
#[test]
fn a_guest_is_started_though_the_word_that_it_was_given_away_is_lost() -> Result<()> {
    let (source, left) = running(busy(16))?;
    let destination = busy(16).incoming().start()?;
    let folder = Scratch::new()?;
    let [near, far, gate] = ["near", "far", "gate"].map(|name| folder.join(name));
    let receive = receiving(&destination.vm(), &format!("unix:{}", far.display())).start()?;
    receive.listening()?;
    let middle = Middle::start(&near, &far, None)?;
    let moving = Transship::moving(&source.vm(), &format!("unix:{}", near.display())).args(AT_ONCE);
    let moving = armed(moving, "source.loaded", "stall").env("TRANSSHIP_FAIL_FILE", &gate).start()?;
    wait_until("the guest to be loaded", || Ok(gate.exists()))?;
    middle.lose_the_next_word();
    std::fs::remove_file(&gate)?;
    moving.wait()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert_moved(&source, &destination, left)?;
    assert_alone(&destination)
}

/// Nobody dials any more, so the second process of a receiver that died when all was said ends by itself.
#[test]
fn a_receiver_that_is_killed_when_all_is_there_leaves_nobody_behind() -> Result<()> {
    let (source, left) = running(busy(16))?;
    let destination = busy(16).incoming().start()?;
    let receive = armed(receiving(&destination.vm(), "tcp:127.0.0.1:0"), "destination.farewell", "kill").start()?;
    Transship::moving(&source.vm(), &receive.listening()?).args(AT_ONCE).run()?.expect_code(0)?;
    assert_eq!(receive.wait()?.code(), None);
    assert_moved(&source, &destination, left)?;
    // It may wait for a call for ten seconds: no reason for the guest to keep a processor busy.
    destination.qmp("stop", json!({}))?;
    assert_alone(&destination)
}

/// Pages that only its VMM had are gone with that: the guest is stopped before it sees zeros, and both commands end.
#[test]
fn a_guest_whose_source_took_its_pages_along_is_stopped() -> Result<()> {
    let (mut source, _) = running(busy(16).backend(Backend::Ram))?;
    let mut destination = busy(16).incoming().start()?;
    let receive = receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let moving = Transship::moving(&source.vm(), &receive.listening()?).args(slowly(&[])).start()?;
    destination.wait_status("running")?;
    source.kill9();
    let moved = moving.wait()?.expect_code(3)?;
    assert!(moved.stderr.contains("can't be read any more"), "{moved}");
    let received = receive.wait()?.expect_code(3)?;
    assert!(received.stderr.contains("can't be read at the source any more"), "{received}");
    assert!(received.stderr.contains("start the guest anew from its disks"), "{received}");
    // It may not even answer: one of its own threads may wait for a page.
    assert_eq!(stand_ins(&destination)?.len(), 1, "somebody must hold what makes it wait");
    destination.kill9();
    wait_until("the second process to end", || Ok(stand_ins(&destination)?.is_empty()))
}

/// The guest is lost with its VMM, as without a move: both commands say so, and end.
#[test]
fn a_destination_that_dies_is_waited_for_no_longer() -> Result<()> {
    let (source, _) = running(busy(16))?;
    let mut destination = busy(16).incoming().start()?;
    let receive = receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let moving = Transship::moving(&source.vm(), &receive.listening()?).args(slowly(&[])).start()?;
    destination.wait_status("running")?;
    destination.kill9();
    let received = receive.wait()?.expect_code(1)?;
    assert!(received.stderr.contains("the VMM has ended"), "{received}");
    let moved = moving.wait()?.expect_code(3)?;
    assert!(moved.stderr.contains("the VMM has ended"), "{moved}");
    assert_ne!(source.status()?, "running");
    assert_alone(&source)
}

/// The guard lets the guest run again, and the second process, which was to go on after that, does not.
#[test]
fn a_move_that_is_killed_before_the_guest_is_given_up_leaves_nobody_behind() -> Result<()> {
    let (source, _) = running(Qemu::multiboot())?;
    let destination = Qemu::multiboot().incoming().start()?;
    let receive = receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let moving = Transship::moving(&source.vm(), &receive.listening()?).args(AT_ONCE);
    assert_eq!(armed(moving, "source.loaded", "kill").run()?.code(), None);
    receive.wait()?.expect_code(1)?;
    source.wait_status("running")?;
    assert_alone(&source)?;
    assert_alone(&destination)?;
    assert_ne!(destination.status()?, "running");
    assert_eq!(source.sweep()?.errors, 0);
    Ok(())
}

/// A VMM that loads a guest waits for a page, and the source that would bring it is gone. The guest was not given up
/// and can't be any more, so this page may be anything: nobody waits for it, and the guest runs at the source.
#[test]
fn a_load_that_waits_for_a_page_ends_with_its_source() -> Result<()> {
    let folder = Scratch::new()?;
    let disk = folder.join("disk");
    let made = std::fs::File::create(&disk).and_then(|file| file.set_len(1 << 20));
    made?;
    // Loading such a disk looks into the guest's memory, if the firmware has begun to use it.
    let drive = format!("file={},format=raw,file.locking=off,if=none,id=disk", disk.display());
    let guest = || Qemu::firmware().memory(64).args(["-drive", &drive, "-device", "virtio-blk-pci,drive=disk"]);
    let source = guest().start()?;
    wait_until("the firmware to read the disk", || {
        let stats = source.qmp("query-blockstats", serde_json::json!({}))?;
        Ok(stats.pointer("/0/stats/rd_operations").and_then(Value::as_u64) > Some(0))
    })?;
    let destination = guest().incoming().start()?;
    let receive = receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let moving = Transship::moving(&source.vm(), &receive.listening()?).args(AT_ONCE);
    assert_eq!(armed(moving, "source.state-sent", "kill").run()?.code(), None);
    let received = receive.wait()?.expect_code(1)?;
    assert!(received.stderr.contains("has closed"), "{received}");
    assert_ne!(destination.status()?, "running");
    source.wait_status("running")?;
    assert_alone(&source)?;
    assert_alone(&destination)
}

#[test]
fn what_can_not_be_is_refused_before_anything_is_touched() -> Result<()> {
    let (source, _) = running(Qemu::multiboot())?;
    for (flags, why) in [
        (&["--verify"][..], "--verify"),
        (&["--balloon", "/nowhere"], "--balloon"),
        (&["--hold"], "--hold"),
        (&["--peer", "qemu"], "--converge postcopy"),
    ] {
        let refused = Transship::moving(&source.vm(), "tcp:127.0.0.1:1").args(AT_ONCE).args(flags.iter().copied());
        let refused = refused.run()?.expect_code(2)?;
        assert!(refused.stderr.contains(why), "{refused}");
    }
    let after = Transship::moving(&source.vm(), "tcp:127.0.0.1:1").args(["--postcopy-after", "1"]).run()?;
    assert!(after.expect_code(2)?.stderr.contains("--postcopy-after"));
    // One that keeps no rights for it.
    let destination = Qemu::multiboot().incoming().start()?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let refused = Transship::moving(&source.vm(), &receive.listening()?).args(AT_ONCE).run()?;
    assert_runs_on(&source, &refused, "a receiver without --postcopy")?;
    assert!(refused.stderr.contains("start it with --postcopy"), "{refused}");
    receive.wait()?.expect_code(1)?;
    // Private memory can't be dropped from here.
    let destination = Qemu::multiboot().backend(Backend::Ram).incoming().start()?;
    let receive = receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let refused = Transship::moving(&source.vm(), &receive.listening()?).args(AT_ONCE).run()?;
    assert_runs_on(&source, &refused, "private memory")?;
    assert!(refused.stderr.contains("leave out --converge postcopy"), "{refused}");
    receive.wait()?.expect_code(1).map(drop)
}
