//! Memory that is brought when it is touched, against the real kernel: a thread that touches a page sees what was
//! filled, and none waits for ever.
//!
//! The guest is this process, through a mapping of its own, or a child where it has to die.
//!
//! - `waiting`: one page; `guests`: all of them, while threads read and write; `holders`: who brings them dies
//! - `once`: what was brought and given back is not brought again, whoever dies
//! - `dropped`: what was there, is dropped and brought again
//! - `private`: memory that its process has for itself
//! - `refused`: what can't be; `processes`: regions, and another process
mod dropped;
mod guests;
mod holders;
mod once;
mod private;
mod processes;
mod refused;
mod waiting;

use std::time::Duration;

use transship_memory::{Fault, Missing, PageCount, PageNumber, Region};

use crate::common::{
    page_of,
    process::{Faults, Guest, once_free, userfaultfd},
};

/// Longer than anything takes on a machine that does anything at all.
pub(crate) const LONG: Duration = Duration::from_secs(120);
pub(crate) const NONE: Duration = Duration::ZERO;

pub(crate) fn missing(guest: &Guest) -> Missing {
    let pages = [PageCount::new(guest.pages())];
    once_free(|| Missing::new(userfaultfd(Faults::User).unwrap(), vec![guest.area()], &pages))
}

pub(crate) fn fault(page: u64) -> Option<Fault> {
    Some(Fault { region: 0, page: PageNumber::new(page) })
}

/// The first word of the page of this number.
pub(crate) fn word_of(number: u64) -> u64 {
    u64::from_ne_bytes(page_of(number)[..8].try_into().unwrap())
}

pub(crate) fn pages_of(numbers: std::ops::Range<u64>) -> Vec<u8> {
    numbers.flat_map(page_of).collect()
}

/// The pages that the file has.
pub(crate) fn there(region: &Region) -> Vec<(u64, u64)> {
    region.data().unwrap().ranges().map(|range| (range.first.get(), range.count.get())).collect()
}
