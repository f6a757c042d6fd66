//! A move by QEMU's own migration, in one of its ways.
use std::{cell::Cell, time::Duration};

use serde_json::{Value, json};
use transship_lab::Accel;

use super::{Way, results::Run};
use crate::{
    pair::{GuestKind, Pair, Recipe, text},
    results::QemuRun,
    stock,
};

/// Places in the ring by which KVM tells of written pages; a power of two.
const RING_PLACES: u32 = 4096;

/// Starts the guest as the way needs it, or says why it can't be had.
pub(super) fn recipe_for<'a>(way: Way, recipe: &Recipe<'a>) -> Result<Recipe<'a>, String> {
    match (way, recipe.kind) {
        (Way::DirtyLimit, GuestKind::Small(Accel::Kvm)) => Ok(Recipe { ring_places: Some(RING_PLACES), ..*recipe }),
        (Way::DirtyLimit, _) => Err("QEMU limits the dirty rate of processors that KVM runs, and of no others".into()),
        _ => Ok(*recipe),
    }
}

/// What it came to, of several lines.
pub(super) fn last_line(text: &str) -> String {
    text.lines().last().unwrap_or_default().trim().to_owned()
}

fn capabilities(way: Way) -> &'static [&'static str] {
    match way {
        Way::DirtyLimit => &["events", "multifd", "dirty-limit"],
        Way::QemuPostcopy => &["events", "postcopy-ram"],
        Way::QemuPreempt => &["events", "postcopy-ram", "postcopy-preempt"],
        _ => &["events", "multifd", "auto-converge"],
    }
}

/// Tells both what they need to know before. `limit`: bytes a second, where the link has none of its own.
pub(super) fn prepare(pair: &Pair<'_>, way: Way, channels: u8, limit: Option<u64>) -> Result<(), String> {
    let on = |name: &&str| json!({ "capability": name, "state": true });
    let capabilities: Vec<Value> = capabilities(way).iter().map(on).collect();
    let mut parameters = json!({ "max-bandwidth": limit.unwrap_or(stock::BANDWIDTH) });
    if capabilities.iter().any(|capability| capability["capability"] == "multifd") {
        parameters["multifd-channels"] = channels.into();
    } else if let Some(limit) = limit {
        parameters["max-postcopy-bandwidth"] = limit.into();
    }
    for qemu in [&pair.destination, &pair.source] {
        qemu.qmp("migrate-set-capabilities", json!({ "capabilities": capabilities })).map_err(text)?;
        qemu.qmp("migrate-set-parameters", parameters.clone()).map_err(text)?;
    }
    Ok(())
}

/// The guest runs at the destination after the first pass over its memory, as `virsh migrate --postcopy-after-precopy`
/// has it. How often QEMU has searched for written pages does not tell: version 11 does so twice before that.
fn first_pass_is_over(info: &Value) -> bool {
    let number = |name| info["ram"][name].as_u64().unwrap_or(0);
    (number("normal") + number("duplicate")) * number("page-size") >= number("total").max(1)
}

/// Moves the guest, or tries to.
pub(super) fn moved(pair: &Pair<'_>, way: Way, patience: Duration) -> Result<Run, String> {
    let begun = Cell::new(false);
    let look = |info: &Value| {
        let is_due = matches!(way, Way::QemuPostcopy | Way::QemuPreempt) && info["status"] == "active";
        if is_due && first_pass_is_over(info) && !begun.replace(true) {
            pair.source.qmp("migrate-start-postcopy", json!({})).map_err(text)?;
        }
        Ok(())
    };
    let (ran, info) = stock::follow(pair, patience, look)?;
    let number = |path: &str| stock::number(&info, path);
    let status = if ran.is_some() { "completed".to_owned() } else { format!("no end in {} s", patience.as_secs()) };
    let ran = ran.unwrap_or(QemuRun {
        ms: number("/total-time")?,
        wire_bytes: number("/ram/transferred")? as u64,
        ..QemuRun::default()
    });
    Ok(Run { status, ms: ran.ms, downtime_ms: ran.downtime_ms, wire_bytes: ran.wire_bytes, ..Run::default() })
}
