//! Migration settings that somebody has left in a QEMU.
use std::process::Command;

use crate::ends::move_between;
use serde_json::json;
use transship_lab::{LabError, Qemu, Result};

const CAPABILITY: &str = "x-ignore-shared";

fn is_on(qemu: &Qemu) -> Result<bool> {
    let all = qemu.qmp("query-migrate-capabilities", json!({}))?;
    let mut all = all.as_array().into_iter().flatten();
    Ok(all.any(|one| one["capability"] == CAPABILITY && one["state"] == true))
}

/// A `receive` that is killed at the wrong moment leaves that one on in a QEMU that has not begun to load, and the next
/// one can't know whose it is. Here the test has switched it on.
#[test]
fn one_that_loses_memory_later_is_told_of_and_can_be_switched_off() -> Result<()> {
    let guest = || Qemu::firmware().memory(64);
    let (source, destination) = (guest().start()?, guest().incoming().start()?);
    let on = json!([{ "capability": CAPABILITY, "state": true }]);
    destination.qmp("migrate-set-capabilities", json!({ "capabilities": on }))?;
    let moved = move_between(&source.vm(), &destination.vm(), &[])?;
    assert!(!moved.source.stderr.contains(CAPABILITY), "{}", moved.source);
    let told = moved.destination.stderr.lines().find(|line| line.contains(CAPABILITY));
    let cure = told.and_then(|line| line.split_once("switch it off: "));
    let (_, cure) = cure.ok_or_else(|| LabError(format!("no cure in {}", moved.destination)))?;
    assert!(is_on(&destination)?, "it may be the user's");
    let cured = Command::new("sh").args(["-c", cure]).output()?;
    assert!(cured.status.success() && !is_on(&destination)?, "{cure}: {cured:?}");
    assert_eq!(destination.status()?, "running");
    Ok(())
}
