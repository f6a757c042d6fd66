//! A second process beside one that fills a guest, which holds what the guest can't be without: the userfaultfd.
//!
//! When the last holder of a userfaultfd is gone the kernel serves missing pages with zeros, and a guest that saw them
//! would be lost. So whoever fills has a stand-in from before the guest runs. It is told how the filling ended; if it
//! hears nothing, it goes on by itself.
use std::{os::fd::BorrowedFd, thread, time::Duration};

use transship_memory::{Area, Error as MemoryError, Missing, PageNumber};

use crate::guest::GuestError;

/// How long the end of a VMM may go unnoticed by who only holds its userfaultfd.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How the filling ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// All pages are in place, or there is no VMM any more.
    Complete,
    /// Pages can't be brought, and the guest stands still: the userfaultfd is to be held until the VMM has ended.
    Hold,
    /// It is to go on without us.
    GoOn,
}

/// The second process, as the first one sees it.
pub trait StandIn: Send {
    /// Gives it what it needs. Called once, before the VMM loads anything. `charge`: a [`crate::Charge`] in JSON;
    /// `files`: what that names, in its order, which is to be kept open for it.
    ///
    /// # Errors
    /// It can't be had.
    fn arm(&mut self, charge: &str, files: &[BorrowedFd<'_>]) -> Result<(), GuestError>;
    /// Keeps a record for a process that a person starts when nobody is left who could go on: a
    /// [`crate::HandedOver`] in JSON. Called before [`StandIn::settle`]. Where it can't be kept, the move goes on
    /// without it.
    fn note(&mut self, _record: &str) {}
    /// From now on a source may give its guest away, and this process may die before it knows: then the second one is
    /// to wait for the source, which says so once more.
    fn may_be_given(&mut self) {}
    /// There is no way back any more: should this process die from now on, the second one is to go on. (Where that is
    /// so from the start nobody need say so.)
    fn settle(&mut self) {}
    /// A guest that was handed over is about to be let run. Should this process die before [`StandIn::started`], the
    /// second one is to let it run. Called before [`StandIn::settle`].
    fn starts(&mut self) {}
    /// It was let run, or it can't be, which is told by us.
    fn started(&mut self) {}
    /// Tells it how the filling ended. Not told, it takes over when this process ends.
    fn end(&mut self, how: Ending);
}

/// Where the VMM has a part of a region, as a charge names it: number of the region, its first page there, address and
/// length.
pub(crate) type AreaRecord = (usize, u64, u64, u64);

/// The areas in use, for a charge.
pub(crate) fn records_of(missing: &Missing) -> Vec<AreaRecord> {
    let record = |area: Area| (area.region, area.first_page.get(), area.address, area.bytes);
    missing.areas().into_iter().map(record).collect()
}

/// The reverse, for a process that takes over.
pub(crate) fn areas_of(records: &[AreaRecord]) -> Vec<Area> {
    let area = |&(region, first_page, address, bytes): &AreaRecord| {
        let first_page = PageNumber::new(first_page);
        Area { region, first_page, address, bytes }
    };
    records.iter().map(area).collect()
}

/// Returns when there is no VMM any more. A thread that waits for a page goes on waiting.
pub(crate) fn hold(missing: &Missing) {
    loop {
        match missing.next_fault(LOOK_EVERY) {
            Ok(_) => {}
            Err(MemoryError::Gone { .. }) => return,
            // It is held all the same.
            Err(_) => thread::sleep(LOOK_EVERY),
        }
    }
}
