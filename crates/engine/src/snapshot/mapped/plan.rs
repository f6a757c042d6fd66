//! Where everything that the guest needs is in the file.
use transship_memory::PAGE_BYTES;
use transship_wire::GuestDescription;

use super::pages::Source;
use crate::{
    Error,
    guest::StateFormat,
    snapshot::open::{Snapshot, check_complete},
    stream::{
        fit::{Fit, check_sizes, fit},
        opaque,
    },
};

/// What of the file becomes what of the guest.
pub(crate) struct Plan {
    pub(crate) fit: Fit,
    /// By region.
    pub(crate) sources: Vec<Source>,
    /// Whether the guest ran when it was saved.
    pub(crate) ran: bool,
    /// The device state of a guest that is no QEMU, in the tail.
    pub(crate) opaque: Option<std::ops::Range<usize>>,
}

impl Plan {
    /// # Errors
    /// The file is of another guest, or lacks something.
    pub(crate) fn make(snapshot: &Snapshot, guest: &GuestDescription, format: &StateFormat) -> Result<Self, Error> {
        let name = &snapshot.origin.name;
        check_complete(snapshot)?;
        let fit = fit(name, &snapshot.configuration, &snapshot.blocks, guest, format)?;
        let devices: Vec<_> = fit.devices.iter().map(|&index| &snapshot.blocks[index]).collect();
        check_sizes(name, &devices)?;
        let (ran, opaque) = match format {
            StateFormat::Qemu { .. } => (snapshot.global_state()?.is_none_or(|state| state.runs()), None),
            StateFormat::Opaque => {
                let state = opaque::find(name, &snapshot.tail, snapshot.tail_offset)?;
                (state.ran, Some(state.bytes))
            }
        };
        let source = |&index: &usize| {
            let block = &snapshot.blocks[index];
            let pages_offset = block.geometry().map_or(0, |geometry| geometry.pages_offset);
            Ok(Source { stored: snapshot.stored(block)?, pages_offset })
        };
        let sources = fit.regions.iter().map(source).collect::<Result<_, Error>>()?;
        Ok(Self { fit, sources, ran, opaque })
    }

    /// Pages of the regions that are in the file.
    pub(crate) fn stored_pages(&self) -> u64 {
        self.sources.iter().map(|source| source.stored.count()).sum()
    }

    /// Where a page is.
    pub(crate) fn any_page(&self) -> Option<u64> {
        self.sources.iter().find_map(|source| {
            let first = source.stored.ranges().next()?.first;
            Some(source.pages_offset + first * PAGE_BYTES as u64)
        })
    }
}
