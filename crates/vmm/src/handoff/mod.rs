//! VMMs that hand their guest over by themselves: the hand-off protocol (docs/handoff.md).
//!
//! A guest process listens on a unix socket, and transship connects. Requests and answers are lines of JSON; memory
//! files, a userfaultfd and the ends of device state streams travel with them as file descriptors.
//!
//! | role | here |
//! | --- | --- |
//! | transship, the guest leaves | [`HandoffSource`] |
//! | transship, the guest arrives | [`HandoffDestination`] |
//! | the guest process | [`serve`], for VMMs that are written in Rust: they implement [`HandoffGuest`] |

mod client;
mod destination;
mod maps;
mod message;
mod server;
mod source;
mod state_stream;
#[allow(unsafe_code)]
mod userfaultfd;

#[cfg(test)]
mod tests;

pub use client::check;
pub use destination::HandoffDestination;
pub use message::{CheckResult, VERSION};
pub use server::{GuestRegion, GuestState, HandoffGuest, serve};
pub use source::HandoffSource;

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use transship_guest::GuestError;
use transship_memory::{Access, ByteRange, GuestMemory, Keep, PageRange, Region};

use crate::freeze::Freezer;
use client::Connection;
use message::{CheckedDescription, CheckedRegion};

/// Lets a guest run again whose client stopped it and died. The guest takes a moment to notice that death, and turns
/// others away until then.
pub(crate) fn resume_abandoned(path: &Path) -> Result<(), GuestError> {
    let deadline = Instant::now() + client::SHORT;
    loop {
        let resumed = Connection::open(path).and_then(|mut guest| guest.call::<Value>("resume", client::SHORT));
        match resumed {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() > deadline || crate::is_gone(path) => return Err(error),
            Err(_) => thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// Stops a guest that lacks pages for good, or freezes its process. Returns what a person finds.
/// One that runs already stays as it is.
pub(crate) fn start_abandoned(path: &Path) -> Result<(), GuestError> {
    Connection::open(path)?.call::<Value>("start", client::SHORT).map(drop)
}

pub(crate) fn stop_abandoned(path: &Path) -> Result<String, GuestError> {
    let mut guest = Connection::open(path)?;
    let freezer = Freezer::of(guest.pid())?;
    let asked = guest.call::<Value>("stop", client::SHORT).map(drop);
    freezer.unless_stopped(asked)
}

fn map_regions(from: &Connection, guest: CheckedDescription, access: Access) -> Result<GuestMemory, GuestError> {
    let map = |r| map_region(r, access).map_err(|e| from.error(e));
    Ok(GuestMemory::new(guest.regions.into_iter().map(map).collect::<Result<_, _>>()?))
}

/// Memory of a waiting guest that has no hole was allocated beforehand, and is to stay so: nothing else says it.
fn map_region(r: CheckedRegion, access: Access) -> Result<Region, transship_memory::Error> {
    let region = Region::map(&r.entry.name, r.file, ByteRange::sized(r.entry.file_offset, r.entry.bytes), access)?;
    Ok(match access {
        Access::Read => region.lendable(),
        Access::ReadWrite if region.is_data(PageRange::all(region.pages()))? => region.keeping(Keep::All),
        Access::ReadWrite => region,
    })
}
