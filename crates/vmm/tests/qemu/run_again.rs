//! A guest that was stopped is let run again, whatever else goes wrong.
use std::{
    io, thread,
    time::{Duration, Instant},
};

use serde_json::json;
use transship_guest::{Found, SourceGuest};
use transship_vmm::{VmAddress, settle_abandoned};

use super::lab::{PATIENCE, Qemu};

fn set(qemu: &Qemu, capability: &str, state: bool) {
    let capabilities = json!([{ "capability": capability, "state": state }]);
    qemu.qmp("migrate-set-capabilities", json!({ "capabilities": capabilities }));
}

fn is_on(qemu: &Qemu, capability: &str) -> bool {
    qemu.settings().0.as_array().unwrap().iter().any(|c| c["capability"] == capability && c["state"] == true)
}

/// Does not wait any longer than that: QEMU is still busy with it then.
fn wait_completed(qemu: &Qemu) {
    let begin = Instant::now();
    while qemu.qmp("query-migrate", json!({}))["status"] != "completed" {
        assert!(begin.elapsed() < PATIENCE, "the migration does not complete");
    }
}

/// QEMU refuses the one where the other is on: a setting of the user's that can't be put back.
const SETTING: &str = "xbzrle";
const CONFLICT: &str = "mapped-ram";

#[test]
fn a_setting_that_is_refused_does_not_keep_it_from_running() {
    let qemu = Qemu::start(&[]);
    qemu.wait_booted();
    set(&qemu, SETTING, true);
    qemu.qmp("migrate-set-parameters", json!({ "max-bandwidth": 12345678 }));
    let mut source = qemu.source();
    assert_eq!(source.stop().unwrap(), Found::Running);
    io::copy(&mut source.save_state().unwrap(), &mut io::sink()).unwrap();
    wait_completed(&qemu);
    set(&qemu, CONFLICT, true);
    source.state_saved().unwrap();
    source.resume(true).unwrap();
    source.tidy();
    qemu.wait_counting();
    // All others are as they were, and this one is put back when that is possible.
    assert_eq!(qemu.settings().1["max-bandwidth"], 12345678);
    assert!(!is_on(&qemu, SETTING));
    set(&qemu, CONFLICT, false);
    drop(source);
    assert!(is_on(&qemu, SETTING));
}

#[test]
fn a_setting_that_is_refused_does_not_keep_the_guard_from_letting_it_run() {
    let qemu = Qemu::start(&[]);
    qemu.wait_booted();
    let vm = VmAddress::Qemu(qemu.socket());
    set(&qemu, SETTING, true);
    let mut source = qemu.source();
    let will = source.last_will().unwrap();
    source.stop().unwrap();
    drop(source);
    set(&qemu, SETTING, false);
    set(&qemu, CONFLICT, true);
    settle_abandoned(&vm, will, true).unwrap();
    qemu.wait_counting();
}

/// QEMU refuses `cont` until it is through with a migration, and has no event for that. Here it takes its time: it
/// waits for a word before the device state.
#[test]
fn a_migration_that_is_not_finished_yet_does_not_keep_it_from_running() {
    let qemu = Qemu::start(&[]);
    qemu.wait_booted();
    let mut source = qemu.source();
    assert_eq!(source.stop().unwrap(), Found::Running);
    set(&qemu, "pause-before-switchover", true);
    qemu.qmp("migrate", json!({ "uri": "exec:cat >/dev/null" }));
    let begin = Instant::now();
    while qemu.qmp("query-migrate", json!({}))["status"] != "pre-switchover" {
        assert!(begin.elapsed() < PATIENCE, "the migration does not come to its switchover");
    }
    assert_eq!(qemu.status(), "finish-migrate");
    thread::scope(|scope| {
        scope.spawn(|| {
            // By then QEMU has refused, if not on a busy machine.
            thread::sleep(Duration::from_millis(300));
            qemu.qmp("migrate-continue", json!({ "state": "pre-switchover" }));
        });
        source.resume(true).unwrap();
    });
    qemu.wait_counting();
}
