//! Memory that a waiting QEMU was promised: what was allocated or reserved for it before its guest comes is still there
//! afterwards, and where memory is short transship says so and does not die of it.
use std::path::Path;

use crate::restoring::{assert_goes_on, restoring};
use crate::stock::StockSave;
use serde_json::json;
use transship_lab::{
    Accel, Finished, HugePool, MemoryMount, Qemu, QemuBuilder, Result, Scratch, Transship, wait_until,
};

/// Of each guest here.
const GUEST_MIB: u64 = 64;
/// Room beside a guest that is too small for a second one.
const REST_MIB: u64 = 32;

fn guest() -> QemuBuilder {
    Qemu::multiboot_under(Accel::Tcg)
}

fn waiting(folder: &Path, name: &str, options: &str) -> Result<QemuBuilder> {
    let own = folder.join(name);
    std::fs::create_dir(&own)?;
    Ok(guest().incoming().memory_folder(own).memory_options(options))
}

/// The ways in which a guest comes to a QEMU that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Move,
    Restore,
    RestoreStream,
    RestoreLazily,
    FromStock,
}

const ALL_WAYS: [Way; 5] = [Way::Move, Way::Restore, Way::RestoreStream, Way::RestoreLazily, Way::FromStock];

/// A guest that runs, and its snapshots.
struct Origin {
    folder: Scratch,
    running: Qemu,
}

impl Origin {
    fn new() -> Result<Self> {
        let (folder, running) = (Scratch::on_disk()?, guest().booted()?);
        for (name, stream) in [("stream", true), ("mapped", false)] {
            StockSave { stream, ..StockSave::default() }.save(&running, &folder.join(name))?;
            running.qmp("cont", json!({}))?;
        }
        let off = json!({ "capabilities": [{ "capability": "mapped-ram", "state": false }] });
        running.qmp("migrate-set-capabilities", off)?;
        Ok(Self { folder, running })
    }

    /// Brings a guest into the QEMU. A source runs again afterwards, as if it were another one.
    fn bring(&self, to: &Qemu, way: Way) -> Result<Finished> {
        let file = |name| restoring(&to.vm(), self.folder.join(name));
        match way {
            Way::Restore => file("mapped").run(),
            Way::RestoreStream => file("stream").run(),
            Way::RestoreLazily => file("mapped").args(["--lazy"]).run(),
            Way::Move => {
                let ended = self.move_to(to)?;
                self.running.qmp("cont", json!({}))?;
                Ok(ended)
            }
            Way::FromStock => {
                let ended = self.send_to(to)?;
                self.running.wait_status("postmigrate")?;
                self.running.qmp("cont", json!({}))?;
                Ok(ended)
            }
        }
    }

    /// Moves the guest that runs. The destination's end.
    fn move_to(&self, to: &Qemu) -> Result<Finished> {
        let receive = Transship::receiving(&to.vm(), "tcp:127.0.0.1:0").start()?;
        let source = Transship::moving(&self.running.vm(), &receive.listening()?).args(["--verify"]).start()?;
        let ended = receive.wait()?;
        source.wait()?;
        Ok(ended)
    }

    /// Has QEMU send the guest that runs by itself. The destination's end.
    fn send_to(&self, to: &Qemu) -> Result<Finished> {
        let listen = ["receive", "--peer", "qemu", "--vm", &to.vm(), "--listen", "tcp:127.0.0.1:0", "--json"];
        let receive = Transship::command(listen).start()?;
        let uri = receive.listening()?;
        self.running.qmp("migrate-set-parameters", json!({ "max-bandwidth": 0 }))?;
        // Without it QEMU gives its guest up when all has left it, whatever becomes of that.
        let on = json!([{ "capability": "return-path", "state": true }]);
        self.running.qmp("migrate-set-capabilities", json!({ "capabilities": on }))?;
        self.running.qmp("migrate", json!({ "uri": uri }))?;
        receive.wait()
    }

    /// As `move_to`, and does something when the destination's memory has been cleared.
    fn move_slowly_to(&self, to: &Qemu, meanwhile: impl FnOnce() -> Result<()>) -> Result<Finished> {
        let folder = Scratch::new()?;
        let gate = folder.join("gate");
        let receive = Transship::receiving(&to.vm(), "tcp:127.0.0.1:0")
            .env("TRANSSHIP_FAIL_POINT", "destination.hello=stall")
            .env("TRANSSHIP_FAIL_FILE", &gate)
            .start()?;
        let source = Transship::moving(&self.running.vm(), &receive.listening()?).args(["--verify"]).start()?;
        wait_until("the memory to be cleared", || Ok(gate.exists()))?;
        meanwhile()?;
        std::fs::remove_file(&gate)?;
        let ended = receive.wait()?;
        source.wait()?;
        Ok(ended)
    }
}

/// A pool that has a guest's memory has not less for it when the guest is there, so that no second one gets in.
fn assert_the_pool_keeps(options: &str) -> Result<()> {
    let origin = Origin::new()?;
    let pool = HugePool::with_mib(GUEST_MIB + REST_MIB)?;
    for way in ALL_WAYS {
        let story = format!("{options}, {way:?}");
        let waits = waiting(pool.path(), &format!("{way:?}"), options)?.start()?;
        let before = pool.state()?;
        assert_eq!(before.to_be_had(), REST_MIB / 2, "{story}");
        origin.bring(&waits, way)?.expect_code(0)?;
        let after = pool.state()?;
        assert_eq!(after.to_be_had(), before.to_be_had(), "{story}: {before:?} {after:?}");
        if options == "prealloc=on" && way != Way::RestoreLazily {
            assert_eq!(after, before, "{story}");
        }
        let second = waiting(pool.path(), &format!("{way:?}-2"), options)?.start();
        assert!(second.is_err(), "{story}: a second one gets in");
        assert_goes_on(&waits)?;
        drop(waits);
        std::fs::remove_file(pool.path().join(format!("{way:?}/mem0")))?;
    }
    Ok(())
}

#[test]
fn preallocated_huge_pages_stay_with_their_guest() -> Result<()> {
    assert_the_pool_keeps("prealloc=on")
}

/// Without `prealloc` QEMU has huge pages reserved, and a page that came and went is one of them.
#[test]
fn reserved_huge_pages_stay_with_their_guest() -> Result<()> {
    assert_the_pool_keeps("prealloc=off")
}

/// There is no time at which a page that was cleared could be somebody else's.
#[test]
fn nobody_gets_huge_pages_while_a_guest_comes() -> Result<()> {
    let origin = Origin::new()?;
    let pool = HugePool::with_mib(GUEST_MIB + REST_MIB)?;
    let waits = waiting(pool.path(), "first", "prealloc=on")?.start()?;
    let mut second = None;
    let ended = origin.move_slowly_to(&waits, || {
        second = Some(waiting(pool.path(), "second", "prealloc=on")?.start());
        Ok(())
    })?;
    assert!(second.is_some_and(|second| second.is_err()), "the second one has memory of the first");
    ended.expect_code(0)?;
    assert_goes_on(&waits)
}

#[test]
fn preallocated_memory_of_a_small_file_system_stays_with_its_guest() -> Result<()> {
    let origin = Origin::new()?;
    let room = MemoryMount::tmpfs(GUEST_MIB + REST_MIB)?;
    for way in ALL_WAYS {
        let waits = waiting(room.path(), &format!("{way:?}"), "prealloc=on")?.start()?;
        let before = room.free_mib()?;
        assert_eq!(before, REST_MIB, "{way:?}");
        let ended = origin.bring(&waits, way)?;
        assert_eq!(room.free_mib()?, before, "{way:?}");
        if way == Way::RestoreLazily {
            // A tmpfs keeps nothing for whom it had.
            let refused = ended.expect_code(1)?;
            assert!(refused.stderr.contains("\"mem0\"") && refused.stderr.contains("leave out --lazy"), "{refused}");
        } else {
            ended.expect_code(0)?;
            assert_goes_on(&waits)?;
        }
        drop(waits);
        std::fs::remove_file(room.path().join(format!("{way:?}/mem0")))?;
    }
    Ok(())
}

/// Memory that nobody promised may be short: then the region and the cure are named, and the guest runs on where it
/// was.
fn assert_shortage_is_told(origin: &Origin, folder: &Path, options: &str, cure: &str) -> Result<()> {
    for way in ALL_WAYS {
        let waits = waiting(folder, &format!("{way:?}"), options)?.start()?;
        let ended = match way {
            Way::Move => origin.move_to(&waits)?,
            Way::FromStock => origin.send_to(&waits)?,
            _ => origin.bring(&waits, way)?,
        };
        assert!(ended.code().is_some_and(|code| code != 0), "{way:?}: {ended}");
        assert!(ended.stderr.contains("\"mem0\"") && ended.stderr.contains(cure), "{way:?}: {ended}");
        if way == Way::RestoreLazily {
            // Before anything ran, or could die of it.
            assert_eq!((ended.code(), waits.status()?.as_str()), (Some(1), "inmigrate"), "{ended}");
        }
        origin.running.wait_status("running")?;
        drop(waits);
        std::fs::remove_file(folder.join(format!("{way:?}/mem0")))?;
    }
    assert_goes_on(&origin.running)
}

#[test]
fn a_pool_that_is_too_small_is_an_error_that_says_so() -> Result<()> {
    let (origin, pool) = (Origin::new()?, HugePool::with_mib(2)?);
    assert_shortage_is_told(&origin, pool.path(), "reserve=off", "nr_hugepages")
}

#[test]
fn a_file_system_that_is_too_small_is_an_error_that_says_so() -> Result<()> {
    let (origin, room) = (Origin::new()?, MemoryMount::tmpfs(1)?);
    assert_shortage_is_told(&origin, room.path(), "prealloc=off", "remount,size=")
}
