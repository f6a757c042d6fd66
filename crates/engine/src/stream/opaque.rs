//! The device state of a guest that is no QEMU: one section of the file, whose contents only its VMM knows.
use std::ops::Range;

use transship_wire::qemu::{GlobalState, Tail};

use super::{
    state::OPAQUE_SECTION as SECTION,
    whence::{damaged, wrong},
};
use crate::Error;

/// Its length comes first in it.
const LENGTH_BYTES: usize = 8;

/// Where it is in the tail, and whether the guest ran.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Opaque {
    pub(crate) bytes: Range<usize>,
    pub(crate) ran: bool,
}

/// Finds it in the device sections `tail`, which begin at `base` of the file.
///
/// # Errors
/// It is not there, or not what its length says.
pub(crate) fn find(file: &str, tail: &[u8], base: u64) -> Result<Opaque, Error> {
    let sections = Tail::parse(tail, base).map_err(|error| damaged(file, error))?;
    let Some(section) = sections.section(SECTION) else {
        let what = format!(
            "it has no section {SECTION:?}: the waiting guest accepts only what transship has saved from one like it"
        );
        return Err(wrong(file, what));
    };
    let body = &tail[section.body.clone()];
    let length = body.first_chunk().map(|length| u64::from_be_bytes(*length));
    let rest = (body.len() as u64).checked_sub(LENGTH_BYTES as u64);
    if length.is_none() || length != rest {
        let at = base + section.body.start as u64;
        let what = format!(
            "length of section {SECTION:?} at offset {at:#x}: it is not what the section has; use another copy"
        );
        return Err(wrong(file, what));
    }
    let state = GlobalState::find(tail, base).map_err(|error| damaged(file, error))?;
    let bytes = section.body.start + LENGTH_BYTES..section.body.end;
    Ok(Opaque { bytes, ran: state.is_none_or(|state| state.runs()) })
}
