//! What is not memory of a guest, saved by one QEMU and loaded by another: all that is left of a move that has no page
//! to send, and of a restore that has none to read.
use std::{
    fs,
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::Path,
    time::Instant,
};

use serde::Serialize;
use serde_json::json;
use transship_lab::{Qemu, Scratch};

use super::{TRIES, cores};
use crate::{
    content::{Content, SourceMemory},
    pair::{Recipe, text},
    rows::Limit,
    units::millis,
};

/// Milliseconds, at best.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct StateAlone {
    saved_ms: f64,
    loaded_ms: f64,
}

impl StateAlone {
    /// Of a guest with so much memory that has only firmware, and stands still, in QEMUs of this program.
    pub(crate) fn of_firmware(peer: &str, base: &Path, bytes: u64) -> Result<Self, String> {
        let home = Scratch::within(base).map_err(text)?;
        let memory = SourceMemory::create(&home.join("mem0"), bytes, Content::Untouched)?;
        let recipe = Recipe::new(peer, base);
        let worst = Self { saved_ms: f64::INFINITY, loaded_ms: f64::INFINITY };
        (0..TRIES).try_fold(worst, |best, _| {
            let Self { saved_ms, loaded_ms } = Self::once(&recipe, &memory)?;
            Ok(Self { saved_ms: best.saved_ms.min(saved_ms), loaded_ms: best.loaded_ms.min(loaded_ms) })
        })
    }

    fn once(recipe: &Recipe<'_>, memory: &SourceMemory) -> Result<Self, String> {
        let folder = Scratch::within(recipe.base).map_err(text)?;
        let source = recipe.source(memory)?;
        let (destination, mut ear) = waiting(recipe, folder.path(), memory.bytes())?;
        let state = source.folder().join("state");
        let begin = Instant::now();
        source.qmp("xen-save-devices-state", json!({ "filename": state, "live": true })).map_err(text)?;
        let saved_ms = millis(begin.elapsed());
        let bytes = fs::read(&state).map_err(|error| format!("{}: {error}", state.display()))?;
        let begin = Instant::now();
        ear.write_all(&bytes).and_then(|()| ear.shutdown(Shutdown::Write)).map_err(text)?;
        // It hangs up when it has loaded, or has failed, and then it is gone.
        ear.read_to_end(&mut Vec::new()).map_err(text)?;
        let loaded_ms = millis(begin.elapsed());
        destination.qmp("query-status", json!({})).map_err(text)?;
        Ok(Self { saved_ms, loaded_ms })
    }

    /// What a save is not quicker than.
    pub(crate) fn saved(self) -> Limit {
        Limit { what: "the state saved".into(), value: self.saved_ms }
    }

    /// What a restore of so many guests at once is not quicker than.
    pub(crate) fn restored(self, guests: u32) -> Limit {
        let rounds = (f64::from(guests) / cores() as f64).max(1.0);
        Limit { what: "the state loaded".into(), value: self.loaded_ms * rounds }
    }

    /// What a move is not quicker than.
    pub(crate) fn moved(self) -> Limit {
        Limit { what: "the state saved and loaded".into(), value: self.saved_ms + self.loaded_ms }
    }
}

/// A QEMU that waits, with memory in this folder, and the socket from which it loads whatever comes.
pub(crate) fn waiting(recipe: &Recipe<'_>, folder: &Path, bytes: u64) -> Result<(Qemu, UnixStream), String> {
    // What QEMU saves alone does not begin with what its settings are.
    let qemu = recipe.waiting(folder, bytes)?.args(["-global", "migration.send-configuration=off"]);
    let qemu = qemu.start().map_err(text)?;
    let path = qemu.folder().join("state");
    qemu.qmp("migrate-incoming", json!({ "uri": format!("unix:{}", path.display()) })).map_err(text)?;
    let ear = UnixStream::connect(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok((qemu, ear))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_guests_than_processors_load_one_after_the_other() {
        let state = StateAlone { saved_ms: 1.0, loaded_ms: 2.0 };
        let cores = cores() as u32;
        assert_eq!([1, cores, 4 * cores].map(|guests| state.restored(guests).value), [2.0, 2.0, 8.0]);
        assert_eq!((state.saved().value, state.moved().value), (1.0, 3.0));
    }
}
