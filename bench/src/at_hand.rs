//! Memory that the machine has at hand.
use std::{fs::File, io::Write};

use rustix::fs::MemfdFlags;

use crate::machine;

/// Left alone: taking all that is free would push out what is in use.
const LEFT: u64 = 1 << 30;
const PIECE: usize = 1 << 20;

/// Uses so much memory for a moment, so that whoever needs it next finds it there.
///
/// A machine that is virtual itself often gives free memory back to its host within seconds, and getting it again can
/// take three times as long as filling it. Whoever is measured first after a pause would pay for that.
pub(crate) fn have(bytes: u64) -> Result<(), String> {
    let available = machine::available_memory()?.saturating_sub(LEFT);
    let taken = rustix::fs::memfd_create("at-hand", MemfdFlags::CLOEXEC).map(File::from);
    let failed = |error: &dyn std::fmt::Display| format!("can't use {bytes} bytes of memory for a moment: {error}");
    let mut taken = taken.map_err(|error| failed(&error))?;
    let piece = vec![1; PIECE];
    for _ in 0..bytes.min(available) / PIECE as u64 {
        taken.write_all(&piece).map_err(|error| failed(&error))?;
    }
    Ok(())
}
