//! Moves and saves of a guest that says which of its memory is free, by transship's balloon. With a stock QEMU 11.1 and
//! Linux's own driver.
#![allow(clippy::unwrap_used)]
use crate::ends::number;
use crate::stock::StockLoad;
use rustix::process::Signal;
use serde_json::{Value, json};
use transship_lab::{
    Balloon, Finished, LabError, Qemu, QemuBuilder, Scratch, Transship, Workload, other_qemu, synthetic::Synthetic,
    transship::TransshipBuilder, wait_until,
};

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 512 * MIB;
/// MiB of old data in the guest's free memory.
const STALE: u64 = 300;

/// A Linux guest in the QEMU that has the device type, connected with the balloon; nothing where there is none.
fn linux(balloon: &Balloon) -> Option<QemuBuilder> {
    let workload = Workload { mib: 32, ..Workload::LINUX };
    Some(balloon.connected(Qemu::linux().binary(other_qemu("11.1").unwrap()?).workload(workload)).memory(512))
}

/// The same with nothing in it but firmware, which has no driver.
fn firmware() -> Option<QemuBuilder> {
    Some(Qemu::firmware().binary(other_qemu("11.1").unwrap()?).memory(64))
}

fn device(bus: &str) -> String {
    let kind =
        "vhost-user-test-device-pci,id=balloon,chardev=balloon,virtio-id=5,num_vqs=5,config_size=16,vq_size=1024";
    format!("{kind},bus={bus}")
}

/// Both ends of a move that is under way.
struct Moving {
    source: Transship,
    destination: Transship,
    folder: Scratch,
}

impl Moving {
    /// Begins a move; `step`: the source waits there until [`Moving::go_on`].
    fn start(source: &Qemu, destination: &Qemu, balloon: &Balloon, flags: &[&str], step: Option<&str>) -> Self {
        let folder = Scratch::new().unwrap();
        let uri = format!("unix:{}", folder.join("move").display());
        let receiving = Transship::receiving(&destination.vm(), &uri).start().unwrap();
        receiving.listening().unwrap();
        let moving = Transship::moving(&source.vm(), &uri).args(["--balloon"]).args([balloon.path()]);
        let moving = armed(moving.args(flags.iter().copied()), &folder, step);
        let mut moving = Self { source: moving.start().unwrap(), destination: receiving, folder };
        if step.is_some() {
            reached(&mut moving.source, &moving.folder);
        }
        moving
    }

    fn go_on(&self) {
        std::fs::remove_file(self.folder.join("gate")).unwrap();
    }

    /// Both have ended, with this code.
    fn ended(self, code: i32) -> Finished {
        let source = self.source.wait().unwrap().expect_code(code).unwrap();
        self.destination.wait().unwrap().expect_code(code).unwrap();
        source
    }
}

fn armed(builder: TransshipBuilder, folder: &Scratch, step: Option<&str>) -> TransshipBuilder {
    let Some(step) = step else { return builder };
    builder.env("TRANSSHIP_FAIL_POINT", format!("{step}=stall")).env("TRANSSHIP_FAIL_FILE", folder.join("gate"))
}

fn reached(command: &mut Transship, folder: &Scratch) {
    let gate = folder.join("gate");
    wait_until("the step", || match command.process().ended()? {
        Some(status) => Err(LabError(format!("it ended early, {status}: {}", command.stderr().tail()))),
        None => Ok(gate.exists()),
    })
    .unwrap();
}

fn has_balloon(guest: &Qemu) -> bool {
    let devices = guest.qmp("qom-list", json!({ "path": "/machine/peripheral" })).unwrap();
    devices.as_array().unwrap().iter().any(|device| device["name"] == "balloon")
}

/// It goes on where it was, with all its pages and its balloon.
fn assert_as_before(guest: &Qemu, balloon: &Balloon) {
    balloon.wait_driver().unwrap();
    assert_eq!(guest.status().unwrap(), "running");
    guest.next_count().unwrap();
    let sweep = guest.sweep().unwrap();
    assert_eq!(sweep.errors, 0, "{}", guest.serial().lines().tail());
    // If it had not got its memory back, there would be none to name.
    wait_until("the guest's free memory", || {
        let mut client = balloon.client()?;
        let bytes: u64 = client.hints()?.iter().map(|(_, _, bytes)| bytes).sum();
        Ok(bytes > STALE / 2 * MIB)
    })
    .unwrap();
}

fn free(report: &Value) -> u64 {
    number(report, "/pages/free") as u64 * 4096
}

#[test]
#[ignore = "long: make test-long"]
fn what_a_guest_can_do_without_is_not_sent() {
    let (here, there) = (Balloon::start().unwrap(), Balloon::start().unwrap());
    let Some(guest) = linux(&here) else { return };
    let source = guest.append(&format!("workload.stale={STALE}")).start().unwrap();
    source.ready().unwrap();
    here.plug(&source).unwrap();
    let waiting = |balloon| linux(balloon).unwrap().incoming().start().unwrap();
    // Hints are worth waiting for behind so thin a link, however slow the guest is.
    let flags = ["--verify", "--bandwidth", "60MB", "--downtime", "5s"];

    // First of all: every two seconds the guest reports some of its old data, which is not in its memory any more then.
    let destination = waiting(&there);
    let report = Moving::start(&source, &destination, &here, &flags, None).ended(0).report().unwrap();
    assert_eq!(report["verified"], true);
    assert!(free(&report) > STALE / 2 * MIB, "{report}");
    assert_eq!(report["rounds"][0]["free"], report["pages"]["free"], "{report}");
    assert!(number(&report, "/bytes/wire") < (MEMORY - STALE / 2 * MIB) as f64, "{report}");
    there.plug(&destination).unwrap();
    assert_as_before(&destination, &there);
    drop(source);

    // Cancelled without its balloon.
    let (source, destination) = (destination, waiting(&here));
    let moving = Moving::start(&source, &destination, &there, &flags, Some("source.unplugged"));
    assert!(!has_balloon(&source));
    moving.source.signal(Signal::INT).unwrap();
    moving.go_on();
    assert_eq!(moving.ended(1).report().unwrap()["status"], "cancelled");
    assert_as_before(&source, &there);

    // Killed while the guest has set its memory aside, and without its balloon.
    for (step, has) in [("source.hinted", true), ("source.unplugged", false)] {
        let mut moving = Moving::start(&source, &destination, &there, &flags, Some(step));
        assert_eq!(has_balloon(&source), has, "{step}");
        moving.source.kill9();
        drop(moving);
        wait_until("the balloon", || Ok(has_balloon(&source))).unwrap();
        assert_as_before(&source, &there);
    }
}

/// Hints end in the middle, since the guest was stopped for a moment.
#[test]
#[ignore = "long: make test-long"]
fn a_move_goes_on_without_hints() {
    let (here, there) = (Balloon::start().unwrap(), Balloon::start().unwrap());
    let Some(guest) = linux(&here) else { return };
    let source = guest.append("workload.stale=200 workload.churn=64").start().unwrap();
    source.ready().unwrap();
    here.plug(&source).unwrap();
    let destination = linux(&there).unwrap().incoming().start().unwrap();
    // It has not named all yet: of a fast link the first are not worth to wait for more.
    let flags = ["--verify", "--downtime", "60s", "--bandwidth", "1TB"];
    let moving = Moving::start(&source, &destination, &here, &flags, Some("source.hinted"));
    source.qmp("stop", json!({})).unwrap();
    source.qmp("cont", json!({})).unwrap();
    moving.go_on();
    let ended = moving.ended(0);
    assert!(ended.stderr.contains("was stopped; going on without its hints"), "{ended}");
    assert_eq!(ended.report().unwrap()["verified"], true);
    assert_eq!(destination.sweep().unwrap().errors, 0, "{}", destination.serial().lines().tail());
}

/// A device whose process is gone can't be unplugged: QEMU 11.1 would not survive it.
#[test]
fn a_guest_whose_balloon_has_died_runs_on() {
    let (mut here, there) = (Balloon::start().unwrap(), Balloon::start().unwrap());
    let Some(guest) = linux(&here) else { return };
    let source = guest.start().unwrap();
    source.ready().unwrap();
    here.plug(&source).unwrap();
    let destination = linux(&there).unwrap().incoming().start().unwrap();
    let moving = Moving::start(&source, &destination, &here, &[], Some("source.tracking"));
    here.command().kill9();
    wait_until("QEMU to see it", || {
        let all = source.qmp("query-chardev", json!({}))?;
        Ok(all.as_array().unwrap().iter().any(is_gone))
    })
    .unwrap();
    moving.go_on();
    let ended = moving.ended(1);
    assert!(ended.stderr.contains("the process of the guest's balloon is gone"), "{ended}");
    assert_eq!(source.sweep().unwrap().errors, 0);
    refused(&source, &["--balloon", &here.path().display().to_string()], "is gone");
    source.next_count().unwrap();
}

fn is_gone(chardev: &Value) -> bool {
    chardev["label"] == "balloon" && chardev["filename"].as_str().unwrap().starts_with("disconnected:")
}

/// Over and over, with the memory of a guest that frees and takes it as fast as it can.
fn it_arrives_whole(kernel: &str) {
    let balloons = [Balloon::start().unwrap(), Balloon::start().unwrap()];
    let Some(guest) = linux(&balloons[0]) else { return };
    let mut source = guest.append(&format!("workload.stale=200 workload.churn=128 {kernel}")).start().unwrap();
    source.ready().unwrap();
    let mut left_out = 0;
    for turn in 0..4 {
        let (here, there) = (&balloons[turn % 2], &balloons[(turn + 1) % 2]);
        here.plug(&source).unwrap();
        let destination = linux(there).unwrap().incoming().start().unwrap();
        // In some moves most hints come while the pages are sent already.
        let bandwidth = if turn % 2 == 0 { "40MB" } else { "8GB" };
        let flags = ["--verify", "--downtime", "60s", "--bandwidth", bandwidth];
        let report = Moving::start(&source, &destination, here, &flags, None).ended(0).report().unwrap();
        assert_eq!(report["verified"], true);
        left_out += free(&report);
        assert_eq!(destination.sweep().unwrap().errors, 0, "{}", destination.serial().lines().tail());
        source = destination;
    }
    assert!(left_out > 100 * MIB, "{left_out}");
}

#[test]
#[ignore = "minutes of an emulated guest: make test-long"]
fn a_guest_that_frees_and_takes_memory_all_the_time_arrives_whole() {
    it_arrives_whole("init_on_alloc=0");
}

#[test]
#[ignore = "minutes of an emulated guest: make test-long"]
fn a_guest_that_clears_what_it_frees_arrives_whole() {
    it_arrives_whole("init_on_alloc=0 init_on_free=1");
}

/// The balloon is there again after each, and the file holds what the guest needs.
#[test]
#[ignore = "minutes of an emulated guest: make test-long"]
fn a_guest_is_saved_without_what_it_can_do_without() {
    let balloon = Balloon::start().unwrap();
    let Some(guest) = linux(&balloon) else { return };
    let source = guest.append(&format!("workload.stale={STALE}")).start().unwrap();
    source.ready().unwrap();
    balloon.plug(&source).unwrap();
    let folder = Scratch::on_disk().unwrap();
    let path = folder.join("snapshot");
    for way in ["--live", "--background", "--paused"] {
        let saving = Transship::command(["save", "--vm", &source.vm(), "--json", way]).args(["--to"]).args([&path]);
        let saved = saving.args(["--balloon"]).args([balloon.path()]).run().unwrap().expect_code(0).unwrap();
        let report = saved.report().unwrap();
        assert_eq!(free(&report) > STALE / 2 * MIB, way == "--live", "{report}");
        assert!(has_balloon(&source));
        assert_as_before(&source, &balloon);
        let other = Balloon::start().unwrap();
        let restored = linux(&other).unwrap().incoming().start().unwrap();
        StockLoad::default().load(&restored, &path).unwrap();
        assert_eq!(restored.sweep().unwrap().errors, 0, "{way}");
    }
}

/// The move names the reason, and the guest runs on.
fn refused(guest: &Qemu, flags: &[&str], why: &str) {
    let folder = Scratch::new().unwrap();
    let to = format!("unix:{}", folder.join("nobody").display());
    let ended = Transship::moving(&guest.vm(), &to).args(flags.iter().copied()).run().unwrap();
    let ended = ended.expect_code(1).unwrap();
    assert!(ended.stderr.contains(why), "{ended}");
    assert_eq!(guest.status().unwrap(), "running");
}

#[test]
fn a_balloon_that_can_not_be_unplugged_or_is_not_named_is_refused() {
    let (balloon, other) = (Balloon::start().unwrap(), Balloon::start().unwrap());
    let Some(qemu) = firmware() else { return };
    let (path, others) = (balloon.path().display().to_string(), other.path().display().to_string());

    let fixed = balloon.connected(qemu.clone()).args(["-device", &device("pcie.0")]).start().unwrap();
    refused(&fixed, &["--balloon", &path], "give it a port of its own");
    drop(fixed);
    let guest = balloon.connected(qemu.clone()).args(["-device", &device("port0")]).start().unwrap();
    refused(&guest, &["--balloon", &others], "no device of this QEMU is connected to it");
    refused(&guest, &[], "--balloon");
    refused(&guest, &["--allow-untracked-writers"], "name its socket with --balloon");
    guest.qmp("stop", json!({})).unwrap();
    let folder = Scratch::new().unwrap();
    let saving = ["save", "--vm", &guest.vm(), "--to", &folder.join("s").display().to_string(), "--balloon", &path];
    let ended = Transship::command(saving).run().unwrap().expect_code(1).unwrap();
    assert!(ended.stderr.contains("a stopped guest can't release it"), "{ended}");
    drop(guest);

    let waiting = balloon.connected(qemu).incoming().args(["-device", &device("port0")]).start().unwrap();
    let to = format!("unix:{}", folder.join("move").display());
    let ended = Transship::receiving(&waiting.vm(), &to).run().unwrap().expect_code(1).unwrap();
    assert!(ended.stderr.contains("can't come with a guest"), "{ended}");

    let synthetic = Synthetic::builder().memory("16M").start().unwrap();
    let ended = Transship::moving(&synthetic.vm(), &to).args(["--balloon", &path]).run().unwrap();
    assert!(ended.expect_code(1).unwrap().stderr.contains("leave out --balloon"));
}

/// Firmware knows no such thing as letting a device go. The guest is never stopped.
#[test]
#[ignore = "it waits for half a minute in vain: make test-long"]
fn a_guest_that_does_not_let_go_of_its_balloon_runs_on() {
    let balloon = Balloon::start().unwrap();
    let Some(qemu) = firmware() else { return };
    let there = Balloon::start().unwrap();
    let source = balloon.connected(qemu.clone()).args(["-device", &device("port0")]).start().unwrap();
    let destination = there.connected(qemu).incoming().start().unwrap();
    let ended = Moving::start(&source, &destination, &balloon, &[], None).ended(1);
    assert!(ended.stderr.contains("has not released a device"), "{ended}");
    assert!(ended.stderr.contains("no guest's driver uses it now; going on without its hints"), "{ended}");
    assert_eq!(source.status().unwrap(), "running");
    assert!(has_balloon(&source));
    // Nobody has stopped it meanwhile.
    let events = source.qmp("query-status", json!({})).unwrap();
    assert_eq!(events["running"], true);
}
