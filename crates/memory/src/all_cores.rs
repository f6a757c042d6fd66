//! Work on memory that all cores do together.
use std::{
    num::NonZero,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    thread,
};

use crate::Error;

/// Has as many threads as there are cores take one piece after the other, this thread among them. Each begins with
/// something of its own. The threads are called `name`.
///
/// # Errors
/// Of any thread. Some of the work may be done all the same.
pub(crate) fn work<P: Sync, S>(
    name: &str,
    pieces: &[P],
    begin: impl Fn() -> S + Sync,
    act: impl Fn(&mut S, &P) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut own = begin();
        // Relaxed: it only deals numbers out.
        while let Some(piece) = pieces.get(next.fetch_add(1, Relaxed)) {
            act(&mut own, piece).inspect_err(|_| next.store(pieces.len(), Relaxed))?;
        }
        Ok(())
    };
    let helpers = if pieces.len() < 2 { 0 } else { cores().min(pieces.len()) - 1 };
    thread::scope(|scope| {
        // Where no thread can be had the work is done by those that are there.
        let helpers: Vec<_> = (0..helpers)
            .map_while(|_| thread::Builder::new().name(name.into()).spawn_scoped(scope, work).ok())
            .collect();
        let ours = work();
        let results =
            helpers.into_iter().map(|helper| helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        results.fold(ours, Result::and)
    })
}

fn cores() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}
