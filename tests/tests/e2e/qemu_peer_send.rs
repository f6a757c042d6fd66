//! Guests move to a stock QEMU that waits with `-incoming`, and are asked there whether every page is theirs.
use std::{fs, io::Write};

use crate::ends::number;
use crate::peer::{PLAIN, Wires, assert_moved, assert_never_ran, assert_never_ran_or_hangs, assert_runs_on, multifd};
use serde_json::{Value, json};
use transship_lab::{Backend, Balloon, LabError, Qemu, QemuBuilder, Result, Scratch, Workload, other_qemu};

/// Starts a guest, moves it, and asks it.
fn goes_over(from: QemuBuilder, to: QemuBuilder, wires: Wires) -> Result<Value> {
    let source = from.booted()?;
    let destination = to.incoming().start()?;
    let left = source.next_count()?.count;
    let report = wires.move_over(&source, &destination)?;
    assert_moved(&source, &destination, left)?;
    Ok(report)
}

#[test]
fn a_guest_goes_over_one_connection() -> Result<()> {
    for backend in [Backend::SharedFile, Backend::Ram, Backend::Memfd] {
        let report = goes_over(Qemu::multiboot_with_kvm(), Qemu::multiboot_with_kvm().backend(backend), PLAIN)?;
        assert!(number(&report, "/pages/normal") > 1000.0 && number(&report, "/downtime_ms") > 0.0, "{report}");
        assert!(number(&report, "/bytes/wire") > 4096.0 * number(&report, "/pages/normal"), "{report}");
    }
    Ok(())
}

#[test]
fn a_guest_goes_over_channels() -> Result<()> {
    for channels in [1, 2, 4] {
        goes_over(Qemu::multiboot(), Qemu::multiboot().backend(Backend::Ram), multifd(channels, "none"))?;
    }
    Ok(())
}

#[test]
fn a_guest_goes_over_channels_that_compress() -> Result<()> {
    for compress in ["zlib", "zstd"] {
        let report = goes_over(Qemu::multiboot(), Qemu::multiboot(), multifd(2, compress))?;
        let (given, made) = (number(&report, "/bytes/encoder_in"), number(&report, "/bytes/encoder_out"));
        assert!(made > 0.0 && made < given, "{report}");
    }
    Ok(())
}

/// Pages that find all encoders busy are stored in the form of the method, among others that are compressed.
#[test]
fn a_guest_goes_past_busy_encoders() -> Result<()> {
    for (compress, slowly) in [("zlib", "zlib:9"), ("zstd", "zstd:15")] {
        let source = Qemu::multiboot().booted()?;
        let destination = Qemu::multiboot().incoming().start()?;
        let to = multifd(2, compress).wait_for_a_guest(&destination)?;
        let left = source.next_count()?.count;
        let moving = multifd(2, slowly).moving(&source, &to).args(["--encoders", "1", "--when-busy", "raw"]);
        let report = moving.run()?.expect_code(0)?.report()?;
        assert_moved(&source, &destination, left)?;
        let (stored, encoded) = (number(&report, "/pages/raw_busy"), number(&report, "/bytes/encoder_in"));
        assert!(stored > 0.0 && encoded > 0.0, "{report}");
    }
    Ok(())
}

/// Over a link that is so slow that rounds take time, and pages change while they travel.
#[test]
#[ignore = "long: make test-long"]
fn a_guest_that_writes_goes_over_a_slow_link() -> Result<()> {
    let workload = Workload { mib: 8, rate: 400, hot_mib: Some(2), ..Workload::MULTIBOOT };
    for wires in [PLAIN, multifd(2, "none")] {
        let source = Qemu::multiboot().workload(workload).booted()?;
        let destination = Qemu::multiboot().workload(workload).incoming().start()?;
        let to = wires.wait_at_a_port(&destination)?;
        let left = source.next_count()?.count;
        let flags = ["--bandwidth", "4MiB", "--downtime", "1s"];
        let report = wires.moving(&source, &to).args(flags).run()?.expect_code(0)?.report()?;
        assert!(report["rounds"].as_array().is_some_and(|rounds| rounds.len() >= 2), "{report}");
        assert!(number(&report, "/pages/resent") > 0.0, "nothing changed while it travelled: {report}");
        assert_moved(&source, &destination, left)?;
    }
    Ok(())
}

#[test]
#[ignore = "long: make test-long"]
fn a_guest_that_outruns_the_link_gets_a_verdict() -> Result<()> {
    // While it checks all its pages it writes none, and where KVM has to emulate that takes seconds.
    let workload = Workload { mib: 16, rate: 0, sweep_ms: 120_000, ..Workload::MULTIBOOT };
    let source = Qemu::multiboot().workload(workload).booted()?;
    // Its first check is between the first count and the second.
    source.next_count()?;
    source.next_count()?;
    let mut destination = Qemu::multiboot().workload(workload).incoming().start()?;
    let to = PLAIN.wait_for_a_guest(&destination)?;
    let flags = ["--bandwidth", "4MiB", "--downtime", "1ms", "--max-rounds", "2"];
    let ended = PLAIN.moving(&source, &to).args(flags).run()?;
    assert_eq!(ended.report()?["status"], "not-converging", "{ended}");
    assert_runs_on(&source, &ended, "it does not converge")?;
    assert_never_ran(&mut destination, "it does not converge")
}

/// A stock destination compares the UUID on every channel.
#[test]
fn a_guest_with_a_uuid_goes_over() -> Result<()> {
    let guest = || Qemu::multiboot().args(["-uuid", "00112233-4455-6677-8899-aabbccddeeff"]);
    goes_over(guest(), guest(), multifd(2, "none")).map(drop)
}

/// The end of the device state is found without its description, and a destination that waits for one gets one.
#[test]
fn a_machine_that_does_not_describe_its_state_goes_over() -> Result<()> {
    let silent = || Qemu::multiboot().machine("q35,suppress-vmdesc=on");
    goes_over(silent(), silent(), PLAIN)?;
    goes_over(silent(), Qemu::multiboot(), PLAIN)?;
    goes_over(Qemu::multiboot(), silent(), PLAIN).map(drop)
}

/// It is known before anybody is asked, let alone stopped.
#[test]
fn a_machine_with_virtio_mem_is_refused() -> Result<()> {
    let folder = Scratch::new()?;
    let more = format!("memory-backend-file,id=more,size=128M,share=on,mem-path={}", folder.join("more").display());
    let device = "virtio-mem-pci,memdev=more,requested-size=0";
    let source = Qemu::multiboot().args(["-m", "maxmem=1G", "-object", &more, "-device", device]).booted()?;
    let ended = PLAIN.moving(&source, "unix:/nowhere/incoming").run()?;
    assert!(ended.stderr.contains("virtio-mem"), "{ended}");
    assert_runs_on(&source, &ended, "virtio-mem")
}

/// Free memory with old data in it is left out, and the device that says so is unplugged before the guest is stopped; a
/// stock QEMU has none.
#[test]
#[ignore = "long: make test-long"]
fn what_a_guest_can_do_without_is_not_sent() -> Result<()> {
    let Some(qemu) = other_qemu("11.1")? else { return Ok(()) };
    let (here, there) = (Balloon::start()?, Balloon::start()?);
    let workload = Workload { mib: 32, ..Workload::LINUX };
    let guest = |balloon: &Balloon| balloon.connected(Qemu::linux().binary(&qemu).workload(workload)).memory(512);
    for wires in [PLAIN, multifd(2, "none")] {
        let source = guest(&here).append("workload.stale=300").booted()?;
        here.plug(&source)?;
        let destination = guest(&there).incoming().start()?;
        let to = wires.wait_for_a_guest(&destination)?;
        let flags = ["--bandwidth", "60MB", "--downtime", "5s", "--balloon", &here.path().display().to_string()];
        // It fails without the device, and has it again.
        let failing = wires.moving(&source, &to).args(flags).env("TRANSSHIP_FAIL_POINT", "peer.unplugged=error");
        assert_runs_on(&source, &failing.run()?, "unplugged")?;
        here.wait_driver()?;

        let destination = guest(&there).incoming().start()?;
        let to = wires.wait_for_a_guest(&destination)?;
        let left = source.next_count()?.count;
        let report = wires.moving(&source, &to).args(flags).run()?.expect_code(0)?.report()?;
        // How much it names in time depends on how busy the machine is.
        assert!(number(&report, "/pages/free") > 0.0, "{report}");
        assert_moved(&source, &destination, left)?;
    }
    Ok(())
}

/// Two regions, and pages that change while they travel.
#[test]
fn a_guest_on_two_numa_nodes_goes_over() -> Result<()> {
    let guest = || Qemu::multiboot().backends(2);
    goes_over(guest(), guest(), PLAIN)?;
    goes_over(guest(), guest(), multifd(2, "zstd"))?;
    Ok(())
}

/// Its kernel, page tables, page cache: not only the workload's own pages have to be right.
#[test]
#[ignore = "long: make test-long"]
fn a_linux_guest_goes_over() -> Result<()> {
    for wires in [PLAIN, multifd(2, "none"), multifd(2, "zlib")] {
        goes_over(Qemu::linux(), Qemu::linux().backend(Backend::Ram), wires)?;
    }
    Ok(())
}

/// Up to machine type 8.0 each section ends with a barrier, later each round; from 9.0 on zero pages are in packets.
/// Whoever gets one of these wrong hangs the destination, or has it run with memory missing.
#[test]
#[ignore = "long: make test-long"]
fn barriers_and_zeros_are_those_of_the_machine_type() -> Result<()> {
    for machine in ["pc-q35-7.2", "pc-q35-8.0", "pc-q35-8.1", "pc-q35-9.0", "pc-i440fx-7.2"] {
        let guest = || Qemu::multiboot().machine(machine);
        goes_over(guest(), guest().backend(Backend::Ram), multifd(2, "none"))
            .map_err(|e| LabError(format!("{machine}: {e}")))?;
    }
    Ok(())
}

/// From an older one, and to and from newer ones, each in another way.
#[test]
fn guests_go_between_versions() -> Result<()> {
    between_versions(|pairing, way| matches!((pairing, way), (1, 1) | (3, 3) | (4, 0)))
}

#[test]
#[ignore = "minutes of guests: make test-long"]
fn guests_go_between_versions_in_all_ways() -> Result<()> {
    between_versions(|_, _| true)
}

/// `wanted`: of a pairing and a way to send, by their numbers.
fn between_versions(wanted: fn(usize, usize) -> bool) -> Result<()> {
    let (Some(old), Some(new)) = (other_qemu("7.2")?, other_qemu("11.1")?) else { return Ok(()) };
    let here = || Qemu::multiboot().machine("pc-q35-7.2");
    let (old, new) = (|| here().binary(&old), || here().binary(&new));
    for (way, wires) in [PLAIN, multifd(2, "none"), multifd(2, "zlib"), multifd(2, "zstd")].into_iter().enumerate() {
        let pairings = [
            ("7.2 to 7.2", old(), old()),
            ("7.2 to 10.0", old(), here()),
            ("7.2 to 11.1", old(), new()),
            ("10.0 to 7.2", here(), old()),
            ("10.0 to 11.1", here().machine("pc-q35-10.0"), new().machine("pc-q35-10.0")),
            ("11.1 to 10.0", new().machine("pc-q35-10.0"), here().machine("pc-q35-10.0")),
            ("11.1 to 11.1", new().machine("q35"), new().machine("q35")),
        ];
        for (_, (story, from, to)) in pairings.into_iter().enumerate().filter(|(pairing, _)| wanted(*pairing, way)) {
            goes_over(from, to, wires).map_err(|error| LabError(format!("{story}, {wires:?}: {error}")))?;
        }
    }
    Ok(())
}

#[test]
fn a_paused_guest_arrives_paused() -> Result<()> {
    for wires in [PLAIN, multifd(2, "none")] {
        let source = Qemu::multiboot().booted()?;
        source.qmp("stop", json!({}))?;
        let destination = Qemu::multiboot().incoming().start()?;
        let report = wires.move_over(&source, &destination)?;
        assert_eq!(number(&report, "/downtime_ms"), 0.0);
        assert_eq!(destination.status()?, "paused");
        destination.qmp("cont", json!({}))?;
        assert_eq!(destination.sweep()?.errors, 0);
    }
    Ok(())
}

/// There by QEMU's protocol, and back: nothing of the first move may hinder the second.
#[test]
fn a_guest_goes_there_and_back() -> Result<()> {
    let here = Qemu::multiboot().booted()?;
    let there = Qemu::multiboot().incoming().start()?;
    PLAIN.move_over(&here, &there)?;
    drop(here);
    let here = Qemu::multiboot().incoming().start()?;
    let left = there.next_count()?.count;
    multifd(2, "zstd").move_over(&there, &here)?;
    assert_moved(&there, &here, left)
}

/// A memory file that an earlier guest has left behind. ZERO records clear it; zero pages in packets do not.
#[test]
#[ignore = "long: make test-long"]
fn old_content_of_the_destination_is_cleared_where_that_was_promised() -> Result<()> {
    let main = ["--zero-pages", "main"].as_slice();
    for (wires, flags) in [(PLAIN, [].as_slice()), (multifd(2, "none"), main), (multifd(2, "zstd"), main)] {
        let source = Qemu::multiboot().booted()?;
        let folder = Scratch::new()?;
        let written = fs::File::create(folder.join("mem0")).and_then(|mut file| file.write_all(&vec![0xaa; 64 << 20]));
        written?;
        let destination = Qemu::multiboot().memory_folder(folder.path()).incoming().start()?;
        let to = wires.wait_for_a_guest(&destination)?;
        let left = source.next_count()?.count;
        wires.moving(&source, &to).args(flags.iter().copied()).run()?.expect_code(0)?;
        assert_moved(&source, &destination, left)?;
        let memory = fs::read(folder.join("mem0"))?;
        let stale = memory.chunks(4096).filter(|page| page.iter().all(|&byte| byte == 0xaa)).count();
        assert_eq!(stale, 0, "{wires:?}: pages that hold what was there before");
    }
    Ok(())
}

/// What the two do not have in common is found while the guest runs, and it runs on.
#[test]
fn a_destination_that_does_not_fit_refuses_and_the_guest_runs_on() -> Result<()> {
    let workload = Workload { rate: 50, ..Workload::MULTIBOOT };
    let source = Qemu::multiboot().workload(workload).booted()?;
    let uuid = ["-uuid", "00112233-4455-6677-8899-aabbccddeeff"];
    for (story, destination, theirs, ours, why) in [
        ("machine", Qemu::multiboot().machine("pc"), PLAIN, PLAIN, "closed the connection"),
        ("memory", Qemu::multiboot().memory(128), PLAIN, PLAIN, "gave up"),
        ("machine, channels", Qemu::multiboot().machine("pc"), multifd(2, "none"), multifd(2, "none"), ""),
        ("fewer channels", Qemu::multiboot(), multifd(1, "none"), multifd(3, "none"), "channel"),
        ("no channels", Qemu::multiboot(), PLAIN, multifd(2, "none"), "multifd"),
        ("compression", Qemu::multiboot(), multifd(2, "zlib"), multifd(2, "zstd"), "channel"),
        ("uuid", Qemu::multiboot().args(uuid), multifd(2, "none"), multifd(2, "none"), ""),
    ] {
        let mut destination = destination.incoming().start()?;
        let to = theirs.wait_for_a_guest(&destination)?;
        let ended = ours.moving(&source, &to).run()?;
        assert_runs_on(&source, &ended, story)?;
        assert!(ended.stderr.contains(why), "{story}: {ended}");
        match theirs == PLAIN {
            true => assert_never_ran(&mut destination, story)?,
            false => assert_never_ran_or_hangs(&mut destination, story),
        }
    }
    let destination = Qemu::multiboot().workload(workload).incoming().start()?;
    let left = source.next_count()?.count;
    PLAIN.move_over(&source, &destination)?;
    assert_moved(&source, &destination, left)
}

/// It still waits for the others when the move gives up.
#[test]
#[ignore = "long: make test-long"]
fn a_destination_that_waits_for_more_is_given_up() -> Result<()> {
    let source = Qemu::multiboot().workload(Workload { rate: 50, ..Workload::MULTIBOOT }).booted()?;
    for (story, theirs, ours, why) in [
        ("more channels", multifd(4, "none"), multifd(2, "none"), "`multifd-channels` 2"),
        ("only channels", multifd(2, "none"), PLAIN, "`multifd` off"),
    ] {
        let destination = Qemu::multiboot().incoming().start()?;
        let ended = ours.moving(&source, &theirs.wait_for_a_guest(&destination)?).run()?;
        assert_runs_on(&source, &ended, story)?;
        assert!(ended.stderr.contains(why), "{story}: {ended}");
        assert_eq!(destination.status()?, "inmigrate", "{story}");
    }
    Ok(())
}
