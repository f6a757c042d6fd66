//! Guests of every kind, moved while they run, and asked on the other side whether every page is theirs.
use crate::ends::{assert_whole, in_the_middle, move_between, number, synthetic_pair};
use rustix::process::Signal;
use serde_json::Value;
use transship_lab::{
    Backend, Qemu, QemuBuilder, Result, Scratch, SlowLink, Synthetic, Transship, Workload, lines::Mark,
    synthetic::SyntheticState,
};

#[test]
fn a_writing_synthetic_guest_arrives_whole() -> Result<()> {
    let sent = &["--no-lending"][..];
    for (content, zero_pages, channels, lending) in [
        ("random", "channels", "1", sent),
        ("mixed", "main", "3", &[]),
        ("zero", "off", "2", sent),
        ("mixed", "channels", "4", sent),
        ("mixed", "channels", "1", &[]),
        ("zero", "off", "2", &[]),
    ] {
        let guest = Synthetic::builder().memory("64M").touched("60%").content(content).write_rate("20M").hot_set("4M");
        let (source, destination) = synthetic_pair(guest)?;
        let flags = [&["--verify", "--channels", channels, "--zero-pages", zero_pages][..], lending].concat();
        let moved = move_between(&source.vm(), &destination.vm(), &flags)?;
        let report = moved.source.report()?;
        assert_eq!(report["status"], "completed");
        assert_eq!(report["verified"], true);
        assert!(number(&report, "/pages/hole") > 0.2 * 16384.0, "a share was never touched: {report}");
        if content == "zero" && zero_pages == "off" {
            assert_eq!(number(&report, "/rounds/0/zero"), 0.0);
        } else if content == "mixed" {
            assert!(number(&report, "/pages/zero") > 0.0, "{report}");
        }
        let (pages, lent) = (4096.0 * number(&report, "/pages/normal"), number(&report, "/bytes/lent"));
        assert_eq!(lent, if lending.is_empty() { pages } else { 0.0 });
        assert!(number(&report, "/bytes/wire") >= pages - lent);
        assert_eq!(moved.destination.report()?["status"], "completed");
        assert_whole(&destination)?;
        assert_eq!(source.state()?, SyntheticState::Stopped, "it must not run on both sides");
    }
    Ok(())
}

#[test]
fn tcp_and_many_regions_and_255_channels_work() -> Result<()> {
    let guest = Synthetic::builder().memory("64M").set("--regions", "4").write_rate("10M").hot_set("2M");
    let (source, destination) = synthetic_pair(guest)?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let to = receive.listening()?;
    Transship::moving(&source.vm(), &to).args(["--verify", "--channels", "255"]).run()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert_whole(&destination)
}

/// A workload that would notice one stale page: it checks each page that it writes, and all pages when it is told to.
#[test]
fn a_linux_guest_goes_on_where_it_was() -> Result<()> {
    let source = Qemu::linux().booted()?;
    let destination = Qemu::linux().incoming().start()?;
    let files_before = source.open_files()?.len();
    let before = source.next_count()?;
    let moved = move_between(&source.vm(), &destination.vm(), &["--verify", "--channels", "2"])?;
    let report = moved.source.report()?;
    assert_eq!(report["verified"], true);
    assert!(number(&report, "/downtime_ms") > 0.0);
    assert_eq!(destination.status()?, "running");
    assert_ne!(source.status()?, "running", "it must not run on both sides");
    let after = destination.next_count()?;
    assert!(after.count > before.count, "{before:?} {after:?}");
    let sweep = destination.sweep()?;
    assert_eq!((sweep.errors, after.errors), (0, 0), "{sweep:?}");
    // Nothing of ours remains in the source.
    assert_eq!(source.open_files()?.iter().filter(|file| file.contains("userfaultfd")).count(), 0);
    assert!(source.open_files()?.len() <= files_before, "{:?}", source.open_files()?);
    assert!(!source.is_traced()?);
    Ok(())
}

/// Over a link so slow that rounds take time, pages change while they travel, and are sent again.
#[test]
#[ignore = "long: make test-long"]
fn a_linux_guest_moves_over_a_slow_link() -> Result<()> {
    let link = SlowLink::new(400)?;
    let workload = Workload { rate: 1500, hot_mib: Some(8), ..Workload::LINUX };
    let source = Qemu::linux().workload(workload).booted()?;
    let destination = Qemu::linux().workload(workload).incoming().start()?;
    let receive =
        Transship::receiving(&destination.vm(), &link.destination_uri(0)).prefix(&link.destination()).start()?;
    let to = receive.listening()?;
    let flags = ["--verify", "--channels", "3", "--downtime", "2s"];
    let moved = Transship::moving(&source.vm(), &to).prefix(&link.source()).args(flags).run()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    let report = moved.report()?;
    assert_eq!(report["verified"], true);
    assert!(number(&report, "/pages/resent") > 0.0, "nothing changed while it travelled: {report}");
    assert!(report["rounds"].as_array().is_some_and(|rounds| rounds.len() >= 2));
    let sweep = destination.sweep()?;
    assert_eq!(sweep.errors, 0, "{sweep:?}");
    Ok(())
}

/// Writes of a KVM guest go through another page table than QEMU's own; they must be seen all the same.
#[test]
fn a_guest_on_two_numa_nodes_goes_on_where_it_was() -> Result<()> {
    let source = Qemu::multiboot().backends(2).booted()?;
    let destination = Qemu::multiboot().backends(2).incoming().start()?;
    let before = source.next_count()?;
    move_between(&source.vm(), &destination.vm(), &["--verify"])?;
    let after = destination.next_count()?;
    assert!(after.count > before.count && after.errors == 0, "{before:?} {after:?}");
    assert_eq!(destination.sweep()?.errors, 0);
    Ok(())
}

/// What the destination can't read itself, or is not to, is sent.
#[test]
fn memory_is_lent_on_one_host_unless_something_is_against_it() -> Result<()> {
    type Kind = fn(QemuBuilder) -> QemuBuilder;
    let moves: [(&[&str], Kind, bool); 7] = [
        (&[], |guest| guest, true),
        (&["--compress", "auto", "--channels", "1"], |guest| guest.backends(2), true),
        (&["--no-lending"], |guest| guest, false),
        (&["--bandwidth", "1GB"], |guest| guest, false),
        (&["--compress", "zstd"], |guest| guest, false),
        (&[], |guest| guest.backend(Backend::Ram), true),
        (&["--channels", "64"], |guest| guest.backend(Backend::Ram), false),
    ];
    for (flags, kind, is_lent) in moves {
        let source = kind(Qemu::multiboot()).booted()?;
        let destination = kind(Qemu::multiboot()).incoming().start()?;
        let moved = move_between(&source.vm(), &destination.vm(), &[&["--verify"][..], flags].concat())?;
        let (report, theirs) = (moved.source.report()?, moved.destination.report()?);
        let pages = 4096.0 * number(&report, "/pages/normal");
        let lent = if is_lent { pages } else { 0.0 };
        assert_eq!(
            (number(&report, "/bytes/lent"), number(&theirs, "/bytes/lent")),
            (lent, lent),
            "{flags:?}: {report}"
        );
        assert!(!is_lent || number(&report, "/bytes/wire") < pages / 2.0, "{report}");
        assert_eq!(report["verified"], true);
        assert_eq!(destination.sweep()?.errors, 0, "{flags:?}");
    }
    Ok(())
}

/// There, and back again: nothing of the first move may hinder the second.
#[test]
fn a_guest_moves_there_and_back() -> Result<()> {
    let here = Qemu::multiboot_with_kvm().booted()?;
    let there = Qemu::multiboot_with_kvm().incoming().start()?;
    move_between(&here.vm(), &there.vm(), &["--verify"])?;
    drop(here);
    let here = Qemu::multiboot_with_kvm().incoming().start()?;
    move_between(&there.vm(), &here.vm(), &["--verify"])?;
    assert_eq!(here.sweep()?.errors, 0);
    Ok(())
}

#[test]
fn a_paused_guest_stays_paused() -> Result<()> {
    let source = Qemu::multiboot().booted()?;
    source.qmp("stop", Value::Object(serde_json::Map::new()))?;
    let destination = Qemu::multiboot().incoming().start()?;
    move_between(&source.vm(), &destination.vm(), &["--verify"])?;
    assert_eq!(destination.status()?, "paused");
    destination.qmp("cont", Value::Object(serde_json::Map::new()))?;
    assert_eq!(destination.sweep()?.errors, 0);
    Ok(())
}

/// Ctrl-C in the middle: the source runs on with nothing of ours in it, and the next attempt works.
#[test]
fn ctrl_c_cancels_cleanly() -> Result<()> {
    let source = Qemu::multiboot().booted()?;
    let destination = Qemu::multiboot().incoming().start()?;
    let folder = Scratch::new()?;
    let receive = Transship::receiving(&destination.vm(), &format!("unix:{}", folder.join("s").display())).start()?;
    let moving = in_the_middle(Transship::moving(&source.vm(), &receive.listening()?), &folder)?;
    moving.signal(Signal::INT)?;
    std::fs::remove_file(folder.join("gate"))?;
    let ended = moving.wait()?.expect_error(1, "cancelled")?;
    assert_eq!(ended.report()?["status"], "cancelled");
    assert!(receive.wait()?.expect_code(1)?.stderr.contains("cancelled"), "the source tells why");
    assert_eq!(source.status()?, "running");
    source.next_count()?;
    assert_eq!(source.open_files()?.iter().filter(|file| file.contains("userfaultfd")).count(), 0);
    assert!(!source.is_traced()?);

    let destination = Qemu::multiboot().incoming().start()?;
    move_between(&source.vm(), &destination.vm(), &["--verify"])?;
    assert_eq!(destination.sweep()?.errors, 0);
    Ok(())
}

/// Channels that keep a bandwidth wait for seconds, each for its turn. The receiver does not have to wait for them to
/// hear why they end.
#[test]
fn a_slow_move_that_is_cancelled_tells_the_other_side_why() -> Result<()> {
    let (source, destination) = synthetic_pair(Synthetic::builder().memory("64M").content("random"))?;
    let folder = Scratch::new()?;
    let receive = Transship::receiving(&destination.vm(), &format!("unix:{}", folder.join("s").display())).start()?;
    let flags = ["--bandwidth", "1M", "--channels", "16"];
    let moving = Transship::moving(&source.vm(), &receive.listening()?).args(flags).start()?;
    moving.stderr().wait(Mark::START, "the first round", |line| line.contains("round 1").then_some(()))?;
    moving.signal(Signal::INT)?;
    moving.wait()?.expect_error(1, "cancelled")?;
    receive.wait()?.expect_error(1, "refused")?;
    assert_eq!(source.state()?, SyntheticState::Running);
    Ok(())
}

/// The guest rewrites more than the link carries: a verdict with numbers, and it runs on.
#[test]
fn a_guest_that_outruns_the_link_gets_a_verdict() -> Result<()> {
    let guest = Synthetic::builder().memory("64M").write_rate("200M").hot_set("32M");
    let (source, destination) = synthetic_pair(guest)?;
    let folder = Scratch::new()?;
    let receive = Transship::receiving(&destination.vm(), &format!("unix:{}", folder.join("s").display())).start()?;
    let flags = ["--bandwidth", "32MiB", "--downtime", "10ms", "--max-rounds", "3"];
    let ended = Transship::moving(&source.vm(), &receive.listening()?).args(flags).run()?.expect_code(1)?;
    let report = ended.report()?;
    assert_eq!(report["status"], "not-converging");
    assert!(ended.stderr.contains("MB/s") && ended.stderr.contains("--downtime"), "{ended}");
    receive.wait()?.expect_code(1)?;
    assert_eq!(source.state()?, SyntheticState::Running);
    assert_eq!(source.check()?.wrong, 0);
    Ok(())
}

/// Guests that do not fit each other are refused before the destination's memory is touched.
#[test]
fn guests_that_do_not_fit_are_refused() -> Result<()> {
    let source = Qemu::multiboot().booted()?;
    for (destination, kind) in
        [(Qemu::multiboot().memory(128), "other_memory"), (Qemu::multiboot().machine("pc"), "other_machine")]
    {
        let destination = destination.incoming().start()?;
        let folder = Scratch::new()?;
        let receive =
            Transship::receiving(&destination.vm(), &format!("unix:{}", folder.join("s").display())).start()?;
        Transship::moving(&source.vm(), &receive.listening()?).run()?.expect_error(1, "refused")?;
        receive.wait()?.expect_error(1, kind)?;
        assert_eq!(source.status()?, "running");
    }
    Ok(())
}
