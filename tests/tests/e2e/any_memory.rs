//! Guests whose memory is what their QEMU was started with, at either end: private memory, memfds, files, each with
//! each. Their own checks say whether all of it came.
use serde_json::json;

use crate::peer::{PLAIN, assert_moved, assert_nothing_of_ours, multifd};
use crate::restoring::{assert_goes_on, restoring};
use transship_lab::{
    Backend, HugePool, LabError, Qemu, QemuBuilder, Result, Scratch, Transship, other_qemu, wait_until,
};

const ALL: [Backend; 7] = [
    Backend::Default,
    Backend::Ram,
    Backend::SharedRam,
    Backend::Memfd,
    Backend::PrivateMemfd,
    Backend::PrivateFile,
    Backend::SharedFile,
];

fn guest(backend: Backend) -> QemuBuilder {
    Qemu::multiboot().backend(backend).named_as_by_default()
}

/// QEMU's default, with memory that KVM writes, too.
fn with_kvm() -> QemuBuilder {
    Qemu::multiboot_with_kvm().backend(Backend::Default).named_as_by_default()
}

/// Moves the guest, which checks that it arrived whole. The source's report.
fn moved(from: &Qemu, to: &Qemu, flags: &[&str]) -> Result<serde_json::Value> {
    let receive = Transship::receiving(&to.vm(), "tcp:127.0.0.1:0").start()?;
    let uri = receive.listening()?;
    let source = Transship::moving(&from.vm(), &uri).args(["--verify"]).args(flags.iter().copied()).run()?;
    let report = source.expect_code(0)?.report()?;
    receive.wait()?.expect_code(0)?;
    assert_goes_on(to)?;
    Ok(report)
}

#[test]
fn memory_of_any_kind_goes_to_memory_of_any_kind() -> Result<()> {
    for kind in ALL {
        // It goes to the default, and comes from it.
        for (from, to) in [(kind, Backend::Default), (Backend::Default, kind)] {
            let source = guest(from).booted()?;
            let destination = guest(to).incoming().start()?;
            moved(&source, &destination, &[]).map_err(|e| LabError(format!("{from:?} to {to:?}: {e}")))?;
        }
    }
    Ok(())
}

/// A real kernel, moved there and back, encoded and not, under load.
#[test]
#[ignore = "long: make test-long"]
fn a_linux_guest_of_qemus_default_goes_there_and_back() -> Result<()> {
    let linux = || Qemu::linux().backend(Backend::Default);
    let mut here = linux().booted()?;
    for flags in [&["--channels", "2"][..], &["--compress", "zstd"], &["--compress", "lz4", "--when-busy", "raw"]] {
        let there = linux().incoming().start()?;
        moved(&here, &there, flags)?;
        here = there;
    }
    Ok(())
}

/// A QEMU that does not say where its memory is, at either end.
#[test]
#[ignore = "long: make test-long"]
fn private_memory_of_an_old_qemu_goes_there_and_back() -> Result<()> {
    let Some(old) = other_qemu("7.2")? else { return Ok(()) };
    // A machine that both know, with a ROM of each of two cards, and tables that are as large as a ROM.
    let devices = ["-device", "VGA", "-device", "virtio-net-pci", "-device", "virtio-net-pci"];
    let of = |backend| guest(backend).machine("pc-q35-7.2").args(devices);
    for kind in [Backend::Default, Backend::Memfd, Backend::PrivateMemfd] {
        let (first, second) = (of(kind).binary(&old).booted()?, of(Backend::Default).incoming().start()?);
        moved(&first, &second, &[])?;
        let third = of(kind).binary(&old).incoming().start()?;
        moved(&second, &third, &[])?;
    }
    Ok(())
}

/// It is saved, too, and its snapshot is one that it loads itself, as a stream.
#[test]
#[ignore = "long: make test-long"]
fn private_memory_of_an_old_qemu_is_saved_and_restored() -> Result<()> {
    let Some(old) = other_qemu("7.2")? else { return Ok(()) };
    let of = || guest(Backend::Default).binary(&old).machine("pc-q35-7.2").args(["-device", "VGA"]);
    let (folder, source) = (Scratch::on_disk()?, of().booted()?);
    for way in ["--paused", "--live", "--background"] {
        let path = folder.join(way);
        let to = path.to_string_lossy();
        Transship::command(["save", way, "--vm", &source.vm(), "--to", &*to]).run()?.expect_code(0)?;
        assert_goes_on(&source)?;
        let destination = of().incoming().start()?;
        restoring(&destination.vm(), &path).run()?.expect_code(0)?;
        assert_goes_on(&destination)?;
    }
    Ok(())
}

/// Two cards whose ROMs are not the same, but as large: which is which nobody can tell.
#[test]
fn memory_of_an_old_qemu_that_can_not_be_told_apart_is_refused_with_the_cure() -> Result<()> {
    let Some(old) = other_qemu("7.2")? else { return Ok(()) };
    let folder = Scratch::on_disk()?;
    let roms = ["one", "two"].map(|name| folder.join(name));
    for (fill, rom) in (1..).zip(&roms) {
        std::fs::write(rom, [&[0x55, 0xaa, 8][..], &[fill; 4093]].concat())?;
    }
    let cards = roms.iter().map(|rom| format!("virtio-net-pci,romfile={}", rom.display()));
    let cards: Vec<String> = cards.flat_map(|card| ["-device".to_owned(), card]).collect();
    let here = Qemu::firmware().memory(64).binary(&old).backend(Backend::Default).args(cards).start()?;
    let refused = Transship::moving(&here.vm(), "tcp:127.0.0.1:1").run()?.expect_code(1)?.to_string();
    for part in ["QEMU 7.2 does not say where", "virtio-net-pci.rom", "use QEMU 8.2 or newer"] {
        assert!(refused.contains(part), "{part:?} is not in {refused}");
    }
    Ok(())
}

/// Saved in each way and restored by transship, or loaded by QEMU itself. The guest that was saved goes on, too.
#[test]
fn private_memory_is_saved_and_restored() -> Result<()> {
    let folder = Scratch::on_disk()?;
    for (way, direct) in
        [("--paused", "--direct-io=off"), ("--live", "--direct-io=on"), ("--background", "--direct-io=auto")]
    {
        let path = folder.join(way);
        let to = path.to_string_lossy();
        let source = with_kvm().booted()?;
        let save = ["save", way, "--vm", &source.vm(), "--to", &*to, direct, "--json"];
        Transship::command(save).run()?.expect_code(0)?;
        assert_goes_on(&source)?;
        for flags in [&[][..], &[direct]] {
            let destination = with_kvm().incoming().start()?;
            restoring(&destination.vm(), &path).args(flags.iter().copied()).run()?.expect_code(0)?;
            assert_goes_on(&destination)?;
        }
        let stock = with_kvm().incoming().start()?;
        let mapped = json!({ "capabilities": [{ "capability": "mapped-ram", "state": true }] });
        stock.qmp("migrate-set-capabilities", mapped)?;
        stock.qmp("migrate-incoming", json!({ "uri": format!("file:{to}") }))?;
        stock.wait_status("running")?;
        assert_goes_on(&stock)?;
        std::fs::remove_file(&path)?;
    }
    Ok(())
}

/// A stock QEMU stands at the other end.
#[test]
fn private_memory_goes_to_and_comes_from_a_stock_qemu() -> Result<()> {
    for wires in [PLAIN, multifd(2, "zstd")] {
        let source = guest(Backend::Default).start()?;
        let destination = guest(Backend::Default).incoming().start()?;
        source.ready()?;
        let left = source.next_count()?.count;
        wires.move_over(&source, &destination)?;
        assert_moved(&source, &destination, left)?;
    }
    let (source, destination) = (guest(Backend::Default).booted()?, guest(Backend::Default).incoming().start()?);
    let listen = ["receive", "--peer", "qemu", "--vm", &destination.vm(), "--listen", "tcp:127.0.0.1:0", "--json"];
    let receive = Transship::command(listen).start()?;
    let uri = receive.listening()?;
    source.qmp("migrate-set-parameters", json!({ "max-bandwidth": 0 }))?;
    source.qmp("migrate", json!({ "uri": uri }))?;
    receive.wait()?.expect_code(0)?;
    assert_goes_on(&destination)
}

/// Whoever dies, the guest runs where it was, and nothing of ours is left in its QEMU.
#[test]
fn a_guest_of_private_memory_outlives_those_who_move_it() -> Result<()> {
    for point in ["source.stopped=kill", "source.state-sent=kill", "destination.loaded=kill"] {
        let source = guest(Backend::Default).booted()?;
        let destination = guest(Backend::Default).incoming().start()?;
        let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0");
        let receive = receive.env("TRANSSHIP_FAIL_POINT", point).start()?;
        let moving = Transship::moving(&source.vm(), &receive.listening()?).env("TRANSSHIP_FAIL_POINT", point);
        let ended = moving.run()?;
        assert_ne!(ended.code(), Some(0), "{point}: {ended}");
        source.wait_status("running")?;
        assert_goes_on(&source)?;
        assert_nothing_of_ours(&source)?;
        assert_ne!(destination.status()?, "running", "{point}");
    }
    Ok(())
}

/// A disk past the page cache is waited for, goes along, and stays with a guest that is not taken.
#[test]
fn a_guest_with_a_direct_disk_goes_on_and_back_whole() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let image = folder.join("disk");
    std::fs::File::create(&image).and_then(|file| file.set_len(1 << 20))?;
    let drive = format!("file={},format=raw,if=none,id=disk,cache=none", image.display());
    let with_disk = || with_kvm().args(["-drive", &drive, "-device", "virtio-blk-pci,drive=disk"]);
    let (source, first) = (with_disk().booted()?, with_disk().incoming().start()?);
    // One that stands still and is not taken has them again.
    source.qmp("stop", json!({}))?;
    let receive = Transship::receiving(&first.vm(), "tcp:127.0.0.1:0").start()?;
    let failing =
        Transship::moving(&source.vm(), &receive.listening()?).env("TRANSSHIP_FAIL_POINT", "source.state-sent=error");
    assert_ne!(failing.run()?.code(), Some(0));
    drop(receive);
    let nodes = source.qmp("query-named-block-nodes", json!({ "flat": true }))?;
    assert!(nodes.as_array().is_some_and(|nodes| nodes.iter().all(|node| node["active"] == true)), "{nodes}");
    source.qmp("cont", json!({}))?;
    drop(first);
    let first = with_disk().incoming().start()?;
    let report = moved(&source, &first, &[])?;
    assert!(report["drains"]["count"].as_u64() > Some(0), "{report}");
    // Where its guest came to it is like any other.
    let second = with_disk().incoming().start()?;
    moved(&first, &second, &[]).map(drop)
}

/// A guest that is only saved has its disks all the while: nobody else is to have them.
#[test]
fn a_guest_that_is_saved_keeps_its_disks() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let image = folder.join("disk");
    std::fs::File::create(&image).and_then(|file| file.set_len(1 << 20))?;
    let drive = format!("file={},format=raw,if=none,id=disk", image.display());
    let source = guest(Backend::Default).args(["-drive", &drive, "-device", "virtio-blk-pci,drive=disk"]).booted()?;
    for way in ["--live", "--background", "--paused"] {
        let (path, gate) = (folder.join(way), folder.join("gate"));
        let to = path.to_string_lossy();
        let save = Transship::command(["save", way, "--vm", &source.vm(), "--to", &*to]);
        let save = save.env("TRANSSHIP_FAIL_POINT", "save.state=stall").env("TRANSSHIP_FAIL_FILE", &gate).start()?;
        wait_until("the device state to be saved", || Ok(gate.exists()))?;
        let nodes = source.qmp("query-named-block-nodes", json!({ "flat": true }))?;
        assert!(
            nodes.as_array().is_some_and(|nodes| nodes.iter().all(|node| node["active"] == true)),
            "{way}: {nodes}"
        );
        std::fs::remove_file(&gate)?;
        save.wait()?.expect_code(0)?;
        assert_goes_on(&source)?;
    }
    Ok(())
}

/// QEMU itself does not know that its guest has gone.
#[test]
fn a_guest_that_was_given_away_is_not_taken_once_more() -> Result<()> {
    let (source, mut first) = (guest(Backend::Default).booted()?, guest(Backend::Default).incoming().start()?);
    moved(&source, &first, &[])?;
    let folder = Scratch::on_disk()?;
    let to = folder.join("guest").display().to_string();
    for again in [
        Transship::moving(&source.vm(), "unix:/nobody/listens/here"),
        Transship::command(["save", "--paused", "--vm", &source.vm(), "--to", &to]),
    ] {
        let refused = again.run()?.expect_code(1)?.to_string();
        assert!(refused.contains("has given its guest away") && refused.contains("cont"), "{refused}");
    }
    // Somebody who knows that it is nowhere else has it back, and it can go again.
    first.kill9();
    source.qmp("cont", json!({}))?;
    assert_goes_on(&source)?;
    let second = guest(Backend::Default).incoming().start()?;
    moved(&source, &second, &[])?;
    let refused = Transship::moving(&source.vm(), "unix:/nobody/listens/here").run()?.expect_code(1)?.to_string();
    assert!(refused.contains("has given its guest away"), "{refused}");
    Ok(())
}

/// Two NUMA nodes, each with memory of its own, go to files and back.
#[test]
fn memory_in_several_private_parts_goes_there_and_back() -> Result<()> {
    let nodes = |backend| Qemu::multiboot().backend(backend).backends(2);
    let mut here = nodes(Backend::Ram).booted()?;
    for to in [Backend::SharedFile, Backend::Ram, Backend::Memfd, Backend::PrivateMemfd, Backend::Ram] {
        let there = nodes(to).incoming().start()?;
        moved(&here, &there, &[]).map_err(|e| LabError(format!("to {to:?}: {e}")))?;
        here = there;
    }
    Ok(())
}

/// Huge pages that QEMU has for itself: a page that was never touched must not be made by looking at it.
#[test]
fn private_huge_pages_go_there_and_back_and_take_no_more_than_they_need() -> Result<()> {
    let pool = HugePool::with_mib(160)?;
    let huge = |backend| guest(backend).memory_options("hugetlb=on,hugetlbsize=2M");
    let source = huge(Backend::PrivateMemfd).booted()?;
    let used = |pool: &HugePool| pool.state().map(|state| state.free);
    let free_before = used(&pool)?;
    let destination = huge(Backend::PrivateMemfd).incoming().start()?;
    moved(&source, &destination, &[])?;
    drop(source);
    let back = guest(Backend::Default).incoming().start()?;
    moved(&destination, &back, &[])?;
    drop(destination);
    assert!(used(&pool)? >= free_before, "all of it is given back");
    Ok(())
}

/// As libvirt starts QEMU.
#[test]
fn a_guest_in_qemus_own_sandbox_goes_on() -> Result<()> {
    let sandbox = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
    let sandboxed = || guest(Backend::Default).args(["-sandbox", sandbox]);
    let (source, destination) = (sandboxed().booted()?, sandboxed().incoming().start()?);
    moved(&source, &destination, &[]).map(drop)
}

/// How fast it writes is seen, too.
#[test]
fn a_guest_of_private_memory_is_watched() -> Result<()> {
    let source = guest(Backend::Default).booted()?;
    let watched = Transship::command(["watch", "--vm", &source.vm(), "--count", "3", "--interval", "200ms", "--json"])
        .run()?
        .expect_code(0)?;
    let (count, sweep) = (source.next_count()?, source.sweep()?);
    assert_eq!((count.errors, sweep.errors), (0, 0), "{watched}");
    assert_nothing_of_ours(&source)
}
