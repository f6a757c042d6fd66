//! A guest's blackout where nothing but two QEMUs is waited for: they have the same memory, so no page is sent, and
//! nobody asks anything. Whoever moves a guest from outside is not quicker than that.
use std::{fs, io::Write, time::Instant};

use serde_json::json;
use transship_lab::beats::{Heard, heard, wait_for_beats};

use super::BEATS_BESIDE;
use crate::{
    content::SourceMemory,
    limits::state,
    pair::{Recipe, text},
    units::millis,
};

/// The guest's silence in ms. Its QEMU saves what is not memory, and the other one loads it as soon as it is saved.
pub(super) fn once(recipe: &Recipe<'_>, memory: &SourceMemory) -> Result<f64, String> {
    let source = recipe.source(memory)?;
    let home = memory.path().parent().ok_or("guest memory without a folder")?;
    let (destination, mut ear) = state::waiting(recipe, home, memory.bytes())?;
    let state = source.folder().join("state");
    // The last beat before the stop counts: it comes at once.
    let since = Instant::now();
    wait_for_beats(&source, BEATS_BESIDE).map_err(text)?;
    let save = json!({ "filename": state, "live": true });
    source.qmp_together(&[("stop", json!({})), ("xen-save-devices-state", save)]).map_err(text)?;
    let saved = fs::read(&state).map_err(|error| format!("{}: {error}", state.display()))?;
    ear.write_all(&saved).map_err(text)?;
    drop(ear);
    wait_for_beats(&destination, BEATS_BESIDE).map_err(text)?;
    let Heard { silence, .. } = heard(&source, &destination, since).map_err(text)?;
    let swept = destination.sweep().map_err(text)?;
    match swept.errors {
        0 => Ok(millis(silence)),
        errors => Err(format!("{errors} of {} pages are not what the guest has written", swept.pages)),
    }
}
