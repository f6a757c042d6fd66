//! Device state that leaves it to us when the guest runs.
use transship_wire::qemu::{GlobalState, Record, RunState, Step, StreamReader};

use crate::{Error, guest::GuestError};

/// Changes the whole device state of a QEMU so that no QEMU runs the guest by itself when it has loaded it. A guest
/// that would not run anyway arrives as what it was: paused, stopped by an I/O error, ….
///
/// # Errors
/// It is no such stream.
pub(crate) fn keep_from_running(state: &mut [u8]) -> Result<(), Error> {
    let strange = |error: &dyn std::fmt::Display| {
        Error::Guest(GuestError::vmm(format!("can't read the device state that the VMM has written: {error}")))
    };
    let mut reader = StreamReader::new();
    let mut at = 0;
    loop {
        match reader.next(&state[at..]).map_err(|error| strange(&error))? {
            Step::More { .. } => return Err(strange(&reader.cut_short(&state[at..]))),
            Step::Done { record: Record::Tail, .. } => break,
            Step::Done { used, .. } => at += used,
        }
    }
    let tail = &mut state[at..];
    if let Some(mut global) = GlobalState::find(tail, at as u64).map_err(|error| strange(&error))?
        && global.runs()
    {
        global.patch(tail, RunState::Paused);
    }
    Ok(())
}
