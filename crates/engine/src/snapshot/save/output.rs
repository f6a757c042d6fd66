//! What the two layouts of a file have in common, for the life of a save.
use std::sync::Arc;

use super::writer::Written;
use crate::{
    Error, FileReport, Progress, page_map::PageMap, scan::Pending, snapshot::file::target::Target,
    stream::state::DeviceState,
};

/// Takes pages, round by round, and then all the rest.
pub(crate) trait Output {
    /// By region: pages that the file holds content for. All others are zero.
    fn content(&self) -> &[PageMap];
    /// What the file takes at most once so many bytes of pages are written that are not zero.
    fn needs(&self, page_bytes: u64) -> u64;
    /// Writes what is pending, and returns when the kernel has all of it.
    ///
    /// # Errors
    /// The system's own; cancelled. Nothing more can then be written.
    fn write(&mut self, pending: &[Pending], target: &Target) -> Result<Written, Error>;
    /// Writes everything that is no page of the guest, and makes the file whole.
    ///
    /// # Errors
    /// See [`Target::complete`].
    fn complete(
        &mut self,
        state: &DeviceState,
        target: &mut Target,
        file: &mut FileReport,
        progress: &Arc<Progress>,
    ) -> Result<(), Error>;
    /// Whether the kernel takes requests by io_uring.
    fn is_uring(&self) -> bool {
        false
    }
}
