//! A stock QEMU migrates to us by itself: into files and into a waiting QEMU. The guests check their memory afterwards.
use std::{fs, path::Path, time::Duration};

use crate::{
    save::assert_goes_on,
    stock::{StockLoad, wait_completed},
};
use serde_json::{Value, json};
use transship_lab::{
    Backend, Disk, Qemu, QemuBuilder, Result, Scratch, Transship, transship::TransshipBuilder, versions::other_qemu,
    wait_until,
};

fn into_file(to: &Path) -> TransshipBuilder {
    let to = to.to_string_lossy();
    Transship::command(["receive", "--peer", "qemu", "--to", &*to, "--listen", "tcp:127.0.0.1:0", "--json"])
}

fn into_guest(vm: &str) -> TransshipBuilder {
    Transship::command(["receive", "--peer", "qemu", "--vm", vm, "--listen", "tcp:127.0.0.1:0", "--json"])
}

/// How a stock QEMU is to send.
#[derive(Debug, Clone, Copy, Default)]
struct StockSend<'a> {
    capabilities: &'a [&'a str],
    multifd: Option<(u8, &'a str)>,
    /// More parameters.
    parameters: &'a [(&'a str, &'a str)],
}

impl StockSend<'_> {
    /// Has it begin.
    fn begin(&self, qemu: &Qemu, uri: &str) -> Result<()> {
        let mut on = self.capabilities.to_vec();
        if let Some((channels, method)) = self.multifd {
            on.push("multifd");
            qemu.qmp("migrate-set-parameters", json!({ "multifd-channels": channels, "multifd-compression": method }))?;
        }
        qemu.qmp("migrate-set-parameters", json!({ "max-bandwidth": 0 }))?;
        for (name, value) in self.parameters {
            qemu.qmp("migrate-set-parameters", json!({ *name: value }))?;
        }
        let capabilities: Vec<Value> = on.iter().map(|name| json!({ "capability": name, "state": true })).collect();
        qemu.qmp("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
        qemu.qmp("migrate", json!({ "uri": uri })).map(drop)
    }
}

/// Waits until its migration is over; gives how.
fn settled(qemu: &Qemu) -> Result<String> {
    let mut status = String::new();
    wait_until("the end of QEMU's migration", || {
        status = qemu.qmp("query-migrate", json!({}))?["status"].as_str().unwrap_or("none").to_owned();
        Ok(["completed", "failed", "cancelled"].contains(&status.as_str()))
    })?;
    Ok(status)
}

/// Receives into a file, which stock QEMU and we load.
fn evacuate(guest: impl Fn() -> QemuBuilder, send: StockSend<'_>, flags: &[&str], story: &str) -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("guest");
    let source = guest().booted()?;
    let receive = into_file(&path).args(flags.iter().copied()).start()?;
    send.begin(&source, &receive.listening()?)?;
    let report = receive.wait()?.expect_code(0)?.report()?;
    assert_eq!(report["status"], "completed", "{story}: {report}");
    assert!(report["pages"]["normal"].as_u64() > Some(1000), "{story}: {report}");
    wait_completed(&source)?;
    drop(source);
    let info = Transship::command(["info", &path.to_string_lossy(), "--check", "--json"]).run()?.expect_code(0)?;
    let info = info.report()?;
    let stream = flags.contains(&"stream");
    assert_eq!(
        (&info["format"], &info["state"]),
        (&json!(if stream { "stream" } else { "mapped-ram" }), &json!("running")),
        "{story}"
    );

    let destination = guest().incoming().start()?;
    StockLoad { stream, ..StockLoad::default() }.load(&destination, &path)?;
    assert_goes_on(&destination, &format!("{story}, loaded by QEMU"))?;
    drop(destination);
    let destination = guest().incoming().start()?;
    Transship::command(["restore", "--vm", &destination.vm(), "--from", &path.to_string_lossy()])
        .run()?
        .expect_code(0)?;
    assert_goes_on(&destination, &format!("{story}, restored"))
}

/// Plain streams, by the guest that boots fast, with and without answers.
#[test]
fn a_plain_stream_becomes_a_file() -> Result<()> {
    plain_streams(&PLAIN_WAYS[..2])
}

#[test]
#[ignore = "minutes of guests: make test-long"]
fn a_plain_stream_becomes_a_file_in_all_ways() -> Result<()> {
    plain_streams(&PLAIN_WAYS[2..])
}

/// The source's capabilities, and our flags.
type PlainWay = (&'static [&'static str], &'static [&'static str]);
const PLAIN_WAYS: [PlainWay; 4] = [
    (&["return-path", "switchover-ack"], &[]),
    (&[], &["--channels", "0"]),
    (&["return-path"], &["--format", "mapped-ram"]),
    (&["return-path"], &["--format", "stream"]),
];

fn plain_streams(ways: &[PlainWay]) -> Result<()> {
    for &(capabilities, flags) in ways {
        let story = format!("{capabilities:?} {flags:?}");
        evacuate(Qemu::multiboot, StockSend { capabilities, ..StockSend::default() }, flags, &story)?;
    }
    Ok(())
}

#[test]
fn channels_become_a_file() -> Result<()> {
    channels_to_files(&CHANNEL_WAYS[..3])
}

#[test]
#[ignore = "minutes of guests: make test-long"]
fn channels_become_a_file_in_all_ways() -> Result<()> {
    channels_to_files(&CHANNEL_WAYS[3..])
}

/// The source's channels and parameters, and our flags.
type ChannelWay = ((u8, &'static str), &'static [(&'static str, &'static str)], &'static [&'static str]);
const CHANNEL_WAYS: [ChannelWay; 5] = [
    ((2, "none"), &[], &[]),
    ((3, "zlib"), &[], &["--format", "stream"]),
    ((2, "zstd"), &[], &["--channels", "2"]),
    ((4, "none"), &[("zero-page-detection", "legacy")], &["--channels", "4"]),
    ((1, "none"), &[("zero-page-detection", "none")], &["--format", "stream"]),
];

fn channels_to_files(ways: &[ChannelWay]) -> Result<()> {
    for &(multifd, parameters, flags) in ways {
        let story = format!("{multifd:?} {parameters:?} {flags:?}");
        let send = StockSend { capabilities: &["return-path"], multifd: Some(multifd), parameters };
        evacuate(Qemu::multiboot, send, flags, &story)?;
    }
    Ok(())
}

/// A busy guest: its pages come again and again.
#[test]
#[ignore = "long: make test-long"]
fn a_linux_guest_is_evacuated() -> Result<()> {
    let send = StockSend { capabilities: &["return-path"], multifd: Some((2, "zstd")), ..StockSend::default() };
    evacuate(Qemu::linux, send, &[], "linux, zstd")?;
    let send = StockSend { capabilities: &["return-path", "xbzrle"], ..StockSend::default() };
    evacuate(Qemu::linux, send, &[], "linux, xbzrle")
}

/// Into a QEMU that waits: it runs there when the source has given it up.
#[test]
fn a_guest_goes_into_a_waiting_qemu() -> Result<()> {
    let ways: [(fn() -> QemuBuilder, StockSend<'_>); 4] = [
        (Qemu::multiboot, StockSend { capabilities: &["return-path"], ..StockSend::default() }),
        (Qemu::multiboot, StockSend::default()),
        (
            Qemu::multiboot,
            StockSend { capabilities: &["return-path"], multifd: Some((2, "zlib")), ..StockSend::default() },
        ),
        (Qemu::linux, StockSend { capabilities: &["return-path"], multifd: Some((4, "none")), ..StockSend::default() }),
    ];
    for (guest, send) in ways {
        let story = format!("{send:?}");
        let source = guest().booted()?;
        let destination = guest().incoming().start()?;
        make_dirty(&destination)?;
        let receive = into_guest(&destination.vm()).start()?;
        send.begin(&source, &receive.listening()?)?;
        let report = receive.wait()?.expect_code(0)?.report()?;
        assert_eq!(report["status"], "completed", "{story}: {report}");
        wait_completed(&source)?;
        assert_eq!(source.status()?, "postmigrate", "{story}");
        assert_goes_on(&destination, &story)?;
    }
    Ok(())
}

/// Fills the memory files of a waiting guest with what must not be seen afterwards.
fn make_dirty(guest: &Qemu) -> Result<()> {
    for file in guest.memory_files() {
        let length = fs::metadata(file)?.len();
        fs::write(file, vec![0xa5; length as usize])?;
    }
    Ok(())
}

/// A guest that stood still does so afterwards.
#[test]
fn a_guest_that_stood_still_is_not_started() -> Result<()> {
    let source = Qemu::multiboot_with_kvm().booted()?;
    source.qmp("stop", json!({}))?;
    let destination = Qemu::multiboot_with_kvm().incoming().start()?;
    let receive = into_guest(&destination.vm()).start()?;
    StockSend { capabilities: &["return-path"], ..StockSend::default() }.begin(&source, &receive.listening()?)?;
    receive.wait()?.expect_code(0)?;
    assert_eq!(destination.status()?, "paused");
    destination.qmp("cont", json!({}))?;
    assert_goes_on(&destination, "once it was told to")
}

/// The user cancels, the file can't be completed, transship is killed: the source runs on, and no file is there that
/// was not before.
#[test]
fn whatever_fails_here_the_source_runs_on() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("guest");
    fs::write(&path, "what was there")?;
    let source = Qemu::linux().booted()?;
    let send = StockSend { capabilities: &["return-path", "events"], ..StockSend::default() };
    for step in ["qemu-receive.tail=error", "save.synced=error", "qemu-receive.tail=kill", "save.synced=kill"] {
        let receive = into_file(&path).env("TRANSSHIP_FAIL_POINT", step).start()?;
        send.begin(&source, &receive.listening()?)?;
        let ended = receive.wait()?;
        assert_eq!(ended.code(), if step.ends_with("kill") { None } else { Some(1) }, "{step}: {ended}");
        assert_eq!(settled(&source)?, "failed", "{step}");
        source.wait_status("running")?;
        assert_eq!(fs::read_to_string(&path)?, "what was there", "{step}");
    }
    let receive = into_file(&path).start()?;
    let listening = receive.listening()?;
    source.qmp("migrate-set-parameters", json!({ "max-bandwidth": 1 << 20 }))?;
    source.qmp("migrate", json!({ "uri": listening }))?;
    source.wait_event("MIGRATION", |data| data["status"] == "active")?;
    receive.signal(rustix::process::Signal::INT)?;
    receive.wait()?.expect_error(1, "cancelled")?;
    assert_eq!(settled(&source)?, "failed");
    source.wait_status("running")?;
    assert_goes_on(&source, "after all that")?;
    // What a killed one has left is removed by the next.
    let receive = into_file(&path).start()?;
    send.begin(&source, &receive.listening()?)?;
    receive.wait()?.expect_code(0)?;
    let names: Vec<_> = fs::read_dir(folder.path())?.flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(names, ["guest"]);
    let destination = Qemu::linux().incoming().start()?;
    StockLoad::default().load(&destination, &path)?;
    assert_goes_on(&destination, "at last")
}

/// A source that hangs is waited for, and goes on; one that dies is told.
#[test]
fn a_source_that_hangs_goes_on_and_one_that_dies_leaves_nothing() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("guest");
    let mut source = Qemu::multiboot().booted()?;
    let destination = Qemu::multiboot().incoming().start()?;
    for dies in [false, true] {
        let receive = match dies {
            false => into_file(&path).start()?,
            true => into_guest(&destination.vm()).start()?,
        };
        let listening = receive.listening()?;
        if dies {
            source = Qemu::multiboot().booted()?;
        }
        let slow = [("return-path", true), ("multifd", true), ("events", true)];
        let capabilities: Vec<Value> =
            slow.iter().map(|(name, state)| json!({ "capability": name, "state": state })).collect();
        source.qmp("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
        source.qmp("migrate-set-parameters", json!({ "max-bandwidth": 4 << 20 }))?;
        source.qmp("migrate", json!({ "uri": listening }))?;
        source.wait_event("MIGRATION", |data| data["status"] == "active")?;
        std::thread::sleep(Duration::from_millis(300));
        if dies {
            source.kill9();
            receive.wait()?.expect_error(1, "peer_left")?;
            assert_eq!(destination.status()?, "inmigrate");
        } else {
            source.freeze()?;
            std::thread::sleep(Duration::from_secs(2));
            source.thaw()?;
            source.qmp("migrate-set-parameters", json!({ "max-bandwidth": 0 }))?;
            receive.wait()?.expect_code(0)?;
            wait_completed(&source)?;
        }
    }
    Ok(())
}

/// QEMUs of other versions, each in one way.
#[test]
fn other_versions_are_received() -> Result<()> {
    other_versions(|way| way == 2)
}

#[test]
#[ignore = "minutes of guests: make test-long"]
fn other_versions_are_received_in_all_ways() -> Result<()> {
    other_versions(|_| true)
}

/// `wanted`: of the ways of a version, by their numbers.
fn other_versions(wanted: fn(usize) -> bool) -> Result<()> {
    // With `compress`, a QEMU 7.2 that emulates its guest sends a wrong page now and then, also to a stock QEMU 7.2.
    let guest = |version: &str, machine: &'static str| -> Result<Option<Box<dyn Fn() -> QemuBuilder>>> {
        Ok(other_qemu(version)?.map(|binary| {
            Box::new(move || Qemu::multiboot_with_kvm().binary(&binary).machine(machine))
                as Box<dyn Fn() -> QemuBuilder>
        }))
    };
    if let Some(guest) = guest("7.2", "pc-q35-7.2")? {
        let ways = [
            (&["return-path"][..], None),
            (&["return-path", "xbzrle"], None),
            (&["return-path", "compress"], None),
            (&["return-path"], Some((2, "none"))),
            (&[], Some((2, "zstd"))),
            (&["return-path"], Some((3, "zlib"))),
        ];
        for (_, (capabilities, multifd)) in ways.into_iter().enumerate().filter(|(way, _)| wanted(*way)) {
            let send = StockSend { capabilities, multifd, ..StockSend::default() };
            old_to_both(&guest, send)?;
        }
    }
    if let Some(guest) = guest("11.1", "q35")? {
        let ways = [None, Some((2, "none")), Some((2, "zstd")), Some((3, "zlib"))];
        for (_, multifd) in ways.into_iter().enumerate().filter(|(way, _)| wanted(*way)) {
            let send = StockSend { capabilities: &["return-path", "switchover-ack"], multifd, ..StockSend::default() };
            evacuate(&guest, send, &[], &format!("11.1 {multifd:?}"))?;
        }
    }
    Ok(())
}

/// 7.2 knows nothing of mapped-ram files: what it has sent is loaded by restore, into it and into a newer one; and goes
/// straight into it.
fn old_to_both(guest: &dyn Fn() -> QemuBuilder, send: StockSend<'_>) -> Result<()> {
    let (folder, story) = (Scratch::on_disk()?, format!("7.2 {send:?}"));
    let path = folder.join("guest");
    let source = guest().booted()?;
    let receive = into_file(&path).start()?;
    send.begin(&source, &receive.listening()?)?;
    receive.wait()?.expect_code(0)?;
    drop(source);
    for guest in [guest(), Qemu::multiboot_with_kvm().machine("pc-q35-7.2")] {
        let destination = guest.incoming().start()?;
        let from = path.to_string_lossy();
        Transship::command(["restore", "--vm", &destination.vm(), "--from", &*from]).run()?.expect_code(0)?;
        assert_goes_on(&destination, &story)?;
    }
    let (source, destination) = (guest().booted()?, guest().incoming().start()?);
    let receive = into_guest(&destination.vm()).start()?;
    send.begin(&source, &receive.listening()?)?;
    receive.wait()?.expect_code(0)?;
    assert_goes_on(&destination, &story)
}

/// Barriers come by sections (machine types up to 8.0, and whoever is told so) or by rounds: pages are neither
/// overtaken nor waited for in vain.
#[test]
#[ignore = "long: make test-long"]
fn barriers_come_by_sections_and_by_rounds() -> Result<()> {
    let send = StockSend { capabilities: &["return-path"], multifd: Some((2, "none")), ..StockSend::default() };
    evacuate(|| Qemu::multiboot().machine("pc-q35-7.2"), send, &[], "by sections, as 7.2 has it")?;
    let told = |how: &'static str| {
        move || Qemu::multiboot().args(["-global", &format!("migration.multifd-flush-after-each-section={how}")])
    };
    evacuate(told("on"), send, &["--channels", "2"], "by sections, as it is told")?;
    evacuate(|| told("off")().machine("pc-q35-7.2"), send, &[], "by rounds, as it is told")
}

/// A source that does not describe its device sections says nothing of their end.
#[test]
fn a_source_without_description_is_received() -> Result<()> {
    let send = StockSend { capabilities: &["return-path"], ..StockSend::default() };
    evacuate(|| Qemu::multiboot().machine("q35,suppress-vmdesc=on"), send, &[], "suppress-vmdesc")
}

/// The disk is full: the source, which is told in time, runs on.
#[test]
fn a_full_disk_leaves_the_guest_at_its_source() -> Result<()> {
    let disk = Disk::new(24, 512)?;
    let path = disk.join("guest");
    let source = Qemu::linux().booted()?;
    let receive = into_file(&path).start()?;
    StockSend { capabilities: &["return-path"], ..StockSend::default() }.begin(&source, &receive.listening()?)?;
    let ended = receive.wait()?.expect_code(1)?;
    assert!(ended.stderr.contains("No space left") && ended.stderr.contains("it needs up to"), "{ended}");
    assert_eq!(settled(&source)?, "failed");
    source.wait_status("running")?;
    assert_goes_on(&source, "after the disk was full")?;
    assert!(!path.exists());
    Ok(())
}

/// A transship that sends as if to a stock QEMU is received like one: a live guest goes into a file on another host, or
/// into a QEMU there.
#[test]
#[ignore = "long: make test-long"]
fn a_transship_that_takes_us_for_a_qemu_is_received() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("guest");
    for (channels, compress) in [("0", "none"), ("3", "zstd")] {
        let story = format!("{channels} channels, {compress}");
        let source = Qemu::multiboot().booted()?;
        let receive = into_file(&path).start()?;
        let flags = ["--peer", "qemu", "--channels", channels, "--compress", compress];
        Transship::moving(&source.vm(), &receive.listening()?).args(flags).run()?.expect_code(0)?;
        receive.wait()?.expect_code(0)?;
        let destination = Qemu::multiboot().incoming().start()?;
        StockLoad::default().load(&destination, &path)?;
        assert_goes_on(&destination, &story)?;
        drop(destination);

        let source = Qemu::multiboot().booted()?;
        let destination = Qemu::multiboot().incoming().start()?;
        make_dirty(&destination)?;
        let receive = into_guest(&destination.vm()).start()?;
        Transship::moving(&source.vm(), &receive.listening()?).args(flags).run()?.expect_code(0)?;
        receive.wait()?.expect_code(0)?;
        assert_goes_on(&destination, &story)?;
        assert_eq!(source.status()?, "postmigrate");
    }
    Ok(())
}

/// Memory that is not shared, which we could not attach to: it comes by itself. Two memories, and devices with memory
/// of their own.
#[test]
#[ignore = "long: make test-long"]
fn a_guest_that_could_not_be_attached_to_is_received() -> Result<()> {
    let guest =
        || Qemu::multiboot().backends(2).args(["-device", "VGA", "-uuid", "12345678-9abc-def0-1122-334455667788"]);
    for (multifd, capabilities) in
        [(None, &["return-path"][..]), (Some((3, "zlib")), &["return-path", "validate-uuid"])]
    {
        let send = StockSend { capabilities, multifd, ..StockSend::default() };
        let (folder, story) = (Scratch::on_disk()?, format!("{send:?}"));
        let path = folder.join("guest");
        let source = guest().backend(Backend::Ram).booted()?;
        let receive = into_file(&path).start()?;
        send.begin(&source, &receive.listening()?)?;
        receive.wait()?.expect_code(0)?;
        drop(source);
        let destination = guest().incoming().start()?;
        make_dirty(&destination)?;
        let from = path.to_string_lossy();
        Transship::command(["restore", "--vm", &destination.vm(), "--from", &*from]).run()?.expect_code(0)?;
        assert_goes_on(&destination, &format!("{story}, restored"))?;
        drop(destination);

        let source = guest().backend(Backend::Ram).booted()?;
        let destination = guest().incoming().start()?;
        make_dirty(&destination)?;
        let receive = into_guest(&destination.vm()).start()?;
        send.begin(&source, &receive.listening()?)?;
        receive.wait()?.expect_code(0)?;
        assert_goes_on(&destination, &story)?;
    }
    Ok(())
}
