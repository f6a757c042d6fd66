//! One disk on shared storage, and a QEMU on each side that locks it: whoever dies before the guest is handed over, it
//! runs on at the source and can write to its disk.
use crate::sector::{Gate, Move, SharedDisk, cancel, wait_counting};
use rustix::process::Signal;
use serde_json::json;
use transship_lab::{Finished, Proxy, Qemu, QemuBuilder, Result, Scratch, Transship, other_qemu, process, wait_until};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    SourceCommand,
    /// Both at once, so that nobody is left who would let the guest run.
    SourceCommandAndGuard,
    DestinationCommand,
    DestinationQemu,
    Link,
    Cancelled,
    /// Ctrl-C at the destination. Once that has said that it is loaded, the source may hand the guest over.
    ReceiveCancelled,
}

const VICTIMS: [Victim; 7] = [
    Victim::SourceCommand,
    Victim::SourceCommandAndGuard,
    Victim::DestinationCommand,
    Victim::DestinationQemu,
    Victim::Link,
    Victim::Cancelled,
    Victim::ReceiveCancelled,
];

/// The steps between the last bytes of the guest and the hand-over.
const STEPS: [&str; 3] = ["source.state-sent", "destination.loaded", "source.loaded"];

/// A version of QEMU at each end; none: the one that is installed.
#[derive(Debug, Clone, Copy)]
struct Versions {
    source: Option<&'static str>,
    destination: Option<&'static str>,
}

const OLD: Option<&str> = Some("7.2");
const VERSIONS: [Versions; 4] = [
    Versions { source: OLD, destination: OLD },
    Versions { source: None, destination: None },
    Versions { source: OLD, destination: None },
    Versions { source: None, destination: OLD },
];

impl Versions {
    /// Both ends, not started; nothing where a version is missing.
    fn builders(self, disk: &SharedDisk) -> Result<Option<(QemuBuilder, QemuBuilder)>> {
        // A machine that all versions have.
        let builder = |version: Option<&str>| -> Result<_> {
            let builder = disk.guest().machine("pc-q35-7.2");
            match version {
                None => Ok(Some(builder)),
                Some(version) => Ok(other_qemu(version)?.map(|binary| builder.binary(binary))),
            }
        };
        Ok(builder(self.source)?.zip(builder(self.destination)?.map(QemuBuilder::incoming)))
    }
}

/// A move in which `victim` dies at `step`; how the commands at both ends ended.
fn crash(step: &'static str, victim: Victim, from: &Qemu, to: &mut Qemu) -> Result<(Finished, Finished)> {
    let folder = Scratch::new()?;
    let (here, there) = (folder.join("here"), folder.join("there"));
    // It takes connections before the destination listens, and nobody connects before that.
    let proxy = Proxy::start(&here, &there)?;
    let uris = [here, there].map(|path| format!("unix:{}", path.display()));
    let mut moving = Move::over(step, from, to, &[], folder, [&uris[0], &uris[1]])?;
    match victim {
        Victim::SourceCommand => moving.source.kill9(),
        Victim::SourceCommandAndGuard => {
            let guard = process::of_ours(&from.vm(), "guard");
            assert_eq!(guard.len(), 1, "{guard:?}");
            // Held, it can't act before it is ended.
            process::signal(guard[0], Signal::STOP)?;
            moving.source.kill9();
            process::signal(guard[0], Signal::KILL)?;
        }
        Victim::DestinationCommand => {
            moving.destination.kill9();
            // Before that the source may do a step more, and can't know what became of it.
            proxy.wait_until_told();
        }
        Victim::DestinationQemu => {
            to.kill9();
            if step.starts_with("source") {
                // Its side waits for the guest, notices, and says so.
                wait_until("the destination to notice", || Ok(moving.destination.process().ended()?.is_some()))?;
                proxy.wait_until_told();
            }
        }
        Victim::Link => proxy.cut(),
        Victim::Cancelled => cancel(&moving.source)?,
        Victim::ReceiveCancelled => cancel(&moving.destination)?,
    }
    moving.finish()
}

fn cell(versions: Versions, step: &'static str, victim: Victim) -> Result<()> {
    let disk = SharedDisk::new()?;
    let Some((source, destination)) = versions.builders(&disk)? else { return Ok(()) };
    let story = format!("{versions:?}: {victim:?} at {step}");
    let source = disk.booted(source)?;
    let mut destination = destination.start()?;
    let (ended, there) = crash(step, victim, &source, &mut destination)?;
    let story = format!("{story}: {ended}; {there}");
    match victim {
        // It runs where both say that it does.
        Victim::ReceiveCancelled if ended.code() == Some(0) => {
            assert!(step != "destination.loaded" && there.code() == Some(0), "{story}");
            assert!(source.has_given_away()?, "{story}");
            wait_counting(&destination)?;
            return disk.assert_writes(&destination, 0x5b, &story);
        }
        Victim::ReceiveCancelled => {
            assert!(step != "source.loaded", "it was too late: {story}");
            assert_eq!((ended.code(), there.code()), (Some(1), Some(1)), "{story}");
            assert_ne!(destination.status()?, "running", "{story}");
        }
        Victim::SourceCommand => wait_until("the guard to let it run", || Ok(source.status()? == "running"))?,
        Victim::SourceCommandAndGuard => {
            assert_ne!(source.status()?, "running", "{story}");
            assert_ne!(destination.status()?, "running", "{story}");
            // What a person does then.
            source.qmp("cont", json!({}))?;
        }
        _ => assert_eq!(ended.code(), Some(1), "{story}"),
    }
    assert_eq!(source.status()?, "running", "{story}");
    wait_counting(&source)?;
    disk.assert_writes(&source, 0x5a, &story)
}

#[test]
fn the_guest_runs_on_where_the_destination_has_loaded_it() -> Result<()> {
    cell(VERSIONS[0], "source.loaded", Victim::Link)?;
    cell(VERSIONS[0], "source.loaded", Victim::SourceCommand)?;
    cell(VERSIONS[0], "source.loaded", Victim::SourceCommandAndGuard)?;
    cell(VERSIONS[1], "source.state-sent", Victim::SourceCommandAndGuard)?;
    cell(VERSIONS[1], "source.loaded", Victim::DestinationQemu)?;
    cell(VERSIONS[2], "destination.loaded", Victim::DestinationQemu)?;
    cell(VERSIONS[3], "source.loaded", Victim::Cancelled)
}

#[test]
fn the_guest_runs_once_if_its_destination_is_cancelled() -> Result<()> {
    cell(VERSIONS[0], "source.loaded", Victim::ReceiveCancelled)?;
    cell(VERSIONS[1], "destination.loaded", Victim::ReceiveCancelled)?;
    cell(VERSIONS[2], "source.state-sent", Victim::ReceiveCancelled)
}

#[test]
#[ignore = "eighty-four moves: make test-long"]
fn the_guest_runs_on_whoever_dies_whatever_the_versions() -> Result<()> {
    for versions in VERSIONS {
        for step in STEPS {
            VICTIMS.iter().try_for_each(|victim| cell(versions, step, *victim))?;
        }
    }
    Ok(())
}

fn moved(source: &Qemu, destination: &Qemu) -> Result<()> {
    let folder = Scratch::new()?;
    let uri = format!("unix:{}", folder.join("s").display());
    let receive = Transship::receiving(&destination.vm(), &uri).start()?;
    receive.listening()?;
    Transship::moving(&source.vm(), &uri).run()?.expect_code(0)?;
    receive.wait()?.expect_code(0).map(drop)
}

/// Both can write, one after the other.
#[test]
fn the_disk_goes_with_the_guest() -> Result<()> {
    let disk = SharedDisk::new()?;
    for versions in [VERSIONS[0], VERSIONS[1]] {
        let Some((source, destination)) = versions.builders(&disk)? else { continue };
        let (source, destination) = (disk.booted(source)?, destination.start()?);
        disk.assert_writes(&source, 1, "here")?;
        moved(&source, &destination)?;
        wait_counting(&destination)?;
        disk.assert_writes(&destination, 2, "there")?;
    }
    Ok(())
}

/// Somebody has started the loaded guest by hand, so its QEMU has the disk.
#[test]
#[ignore = "long: make test-long"]
fn a_disk_that_the_destination_has_is_named() -> Result<()> {
    let disk = SharedDisk::new()?;
    let source = disk.booted(disk.guest())?;
    let mut destination = disk.guest().incoming().start()?;
    let mut moving = Move::at("source.loaded", &source, &destination, &[])?;
    destination.qmp("cont", json!({}))?;
    destination.qmp("stop", json!({}))?;
    moving.destination.kill9();
    let ended = moving.finish()?.0;
    assert_eq!(ended.code(), Some(3), "{ended}");
    assert!(ended.stderr.contains("end the destination's QEMU first"), "{ended}");
    destination.kill9();
    source.qmp("cont", json!({}))?;
    wait_counting(&source)?;
    disk.assert_writes(&source, 0x33, "by hand")
}

/// A stock QEMU takes its guest back by itself when the other side has loaded it and then fails.
#[test]
fn a_stock_source_runs_on_where_we_have_loaded_its_guest() -> Result<()> {
    let disk = SharedDisk::new()?;
    let Some((source, destination)) = VERSIONS[0].builders(&disk)? else { return Ok(()) };
    let (source, destination) = (disk.booted(source)?, destination.start()?);
    let folder = Scratch::new()?;
    let uri = format!("unix:{}", folder.join("s").display());
    let vm = destination.vm();
    let receiving = Transship::command(["receive", "--peer", "qemu", "--vm", &vm, "--listen", &uri, "--json"]);
    let gate = Gate::new("qemu-receive.loaded")?;
    let mut receive = gate.arm("qemu-receive", receiving).start()?;
    receive.listening()?;
    let on = json!([{ "capability": "return-path", "state": true }]);
    source.qmp("migrate-set-capabilities", json!({ "capabilities": on }))?;
    source.qmp("migrate", json!({ "uri": uri }))?;
    gate.wait(&mut receive)?;
    receive.kill9();
    source.wait_status("running")?;
    wait_counting(&source)?;
    disk.assert_writes(&source, 0x44, "taken back")
}

/// A QEMU whose disks nobody has opened since its guest came would end by an assertion when that is saved.
#[test]
fn a_guest_that_came_stopped_can_be_saved_and_moved_on() -> Result<()> {
    let disk = SharedDisk::new()?;
    for versions in [VERSIONS[0], VERSIONS[1]] {
        let Some((source, destination)) = versions.builders(&disk)? else { continue };
        let source = disk.booted(source)?;
        source.qmp("stop", json!({}))?;
        let (first, second) = (destination.clone().start()?, destination.start()?);
        moved(&source, &first)?;
        assert_eq!(first.status()?, "paused", "{versions:?}");
        drop(source);
        moved(&first, &second)?;
        drop(first);
        second.qmp("cont", json!({}))?;
        wait_counting(&second)?;
        disk.assert_writes(&second, 7, "two moves later")?;
    }
    Ok(())
}
