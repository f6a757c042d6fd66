//! Memory that the machine has at hand.
use std::{
    fs::File,
    io::{self, Write},
    thread,
};

use rustix::fs::MemfdFlags;

use crate::machine;

/// Left alone: taking all that is free would push out what is in use.
const LEFT: u64 = 1 << 30;
const PIECE: usize = 1 << 20;

/// Uses so much memory for a moment, so that whoever needs it next finds it there.
///
/// A machine that is virtual itself often gives free memory back to its host within seconds, and getting it again can
/// take three times as long as filling it. Whoever is measured first after a pause would pay for that.
///
/// By a thread on each core, as getting it takes much longer than anything else before a move.
pub(crate) fn have(bytes: u64) -> Result<(), String> {
    let available = machine::available_memory()?.saturating_sub(LEFT);
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let pieces = (bytes.min(available) / PIECE as u64).div_ceil(threads as u64);
    thread::scope(|scope| {
        let takers: Vec<_> = (0..threads).map(|_| scope.spawn(move || take(pieces))).collect();
        let taken = takers.into_iter().map(|taker| taker.join().unwrap_or_else(|_| Err(io::Error::other("panicked"))));
        // Each keeps its own until all have theirs: what one gave back another would take.
        taken.collect::<Result<Vec<File>, _>>()
    })
    .map(drop)
    .map_err(|error| format!("can't use {bytes} bytes of memory for a moment: {error}"))
}

fn take(pieces: u64) -> io::Result<File> {
    let mut taken = File::from(rustix::fs::memfd_create("at-hand", MemfdFlags::CLOEXEC)?);
    let piece = vec![1; PIECE];
    (0..pieces).try_for_each(|_| taken.write_all(&piece))?;
    Ok(taken)
}
