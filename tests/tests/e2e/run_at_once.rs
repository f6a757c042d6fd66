//! A guest that does something at once where it is let run, so that it does not run any more when somebody looks: it
//! has arrived all the same, or is back.
use crate::sector::{Gate, Move, PANIC, POWER_OFF, SLEEP, SharedDisk, WRITE, cancel, order};
use serde_json::json;
use transship_lab::{Qemu, QemuBuilder, Result, Scratch, Transship, other_qemu, process, wait_until};

/// What a guest does, and what becomes of its QEMU.
#[derive(Debug, Clone, Copy)]
struct Deed {
    command: u8,
    /// Nothing: QEMU ends.
    state: Option<&'static str>,
    flags: &'static [&'static str],
}

const DEEDS: [Deed; 5] = [
    Deed { command: SLEEP, state: Some("suspended"), flags: &[] },
    Deed { command: WRITE, state: Some("io-error"), flags: &[] },
    Deed { command: PANIC, state: Some("guest-panicked"), flags: &["-device", "pvpanic", "-action", "panic=pause"] },
    Deed { command: POWER_OFF, state: Some("shutdown"), flags: &["-no-shutdown"] },
    Deed { command: POWER_OFF, state: None, flags: &[] },
];

const VERSIONS: [Option<&str>; 2] = [None, Some("7.2")];

/// A guest on this disk, which is full if the deed needs that; nothing where the version is missing.
fn guest(disk: &SharedDisk, deed: Deed, version: Option<&str>) -> Result<Option<QemuBuilder>> {
    let builder = if deed.command == WRITE { disk.full() } else { disk.guest() }.args(deed.flags.iter().copied());
    Ok(match version {
        None => Some(builder),
        Some(version) => other_qemu(version)?.map(|binary| builder.binary(binary)),
    })
}

/// All of it, with each version of QEMU that is there.
fn each(check: impl Fn(&SharedDisk, Deed, QemuBuilder) -> Result<()>) -> Result<()> {
    for version in VERSIONS {
        for deed in DEEDS {
            let disk = SharedDisk::new()?;
            if let Some(builder) = guest(&disk, deed, version)? {
                check(&disk, deed, builder)?;
            }
        }
    }
    Ok(())
}

impl Deed {
    /// Waits until the guest has done it.
    fn wait_done(self, guest: &mut Qemu) -> Result<()> {
        match self.state {
            Some(state) => guest.wait_status(state),
            None => wait_until("QEMU to end", || Ok(guest.process().ended()?.is_some())),
        }
    }
}

#[test]
fn at_the_destination_it_has_arrived() -> Result<()> {
    each(|disk, deed, builder| {
        let source = disk.booted(builder.clone())?;
        let mut destination = builder.incoming().start()?;
        let moving = Move::at("destination.loaded", &source, &destination, &[])?;
        order(&destination, deed.command)?;
        let (here, there) = moving.finish()?;
        assert_eq!((here.code(), there.code()), (Some(0), Some(0)), "{deed:?}: {here}; {there}");
        deed.wait_done(&mut destination)?;
        assert!(source.has_given_away()?, "{deed:?}");
        Ok(())
    })
}

#[test]
fn back_at_the_source_it_runs_on() -> Result<()> {
    each(|disk, deed, builder| {
        let mut source = disk.booted(builder.clone())?;
        let destination = builder.incoming().start()?;
        let moving = Move::at("source.loaded", &source, &destination, &[])?;
        order(&source, deed.command)?;
        cancel(&moving.source)?;
        let (here, _) = moving.finish()?;
        assert_eq!(here.code(), Some(1), "{deed:?}: {here}");
        deed.wait_done(&mut source)
    })
}

#[test]
fn a_restored_one_was_restored() -> Result<()> {
    each(|disk, deed, builder| {
        let (source, folder) = (disk.booted(builder.clone())?, Scratch::on_disk()?);
        let file = folder.join("snapshot").display().to_string();
        Transship::command(["save", "--vm", &source.vm(), "--to", &file, "--stay-stopped"]).run()?.expect_code(0)?;
        drop(source);
        let mut destination = builder.incoming().start()?;
        let gate = Gate::new("restore.loaded")?;
        let restore = Transship::command(["restore", "--vm", &destination.vm(), "--from", &file]);
        let mut restore = gate.arm("restore", restore).start()?;
        gate.wait(&mut restore)?;
        order(&destination, deed.command)?;
        gate.open();
        let ended = restore.wait()?;
        assert_eq!(ended.code(), Some(0), "{deed:?}: {ended}");
        deed.wait_done(&mut destination)
    })
}

/// It has run since the command stopped it and was killed: its guard leaves it as it is.
#[test]
fn a_guard_lets_no_guest_run_that_has_run_since() -> Result<()> {
    each(|disk, deed, builder| {
        let (mut source, folder) = (disk.booted(builder)?, Scratch::new()?);
        if deed.state.is_none() {
            return Ok(());
        }
        let to = folder.join("snapshot").display().to_string();
        let gate = Gate::new("save.last-round")?;
        let mut saving =
            gate.arm("save", Transship::command(["save", "--vm", &source.vm(), "--to", &to, "--live"])).start()?;
        gate.wait(&mut saving)?;
        order(&source, deed.command)?;
        source.qmp("cont", json!({}))?;
        deed.wait_done(&mut source)?;
        let stderr = saving.stderr().clone();
        saving.kill9();
        wait_until("the guard to end", || Ok(process::of_ours(&source.vm(), "guard").is_empty()))?;
        assert_eq!(Some(source.status()?.as_str()), deed.state, "{deed:?}: {}", stderr.tail());
        assert!(!stderr.tail().contains("can't"), "{deed:?}: {}", stderr.tail());
        Ok(())
    })
}
