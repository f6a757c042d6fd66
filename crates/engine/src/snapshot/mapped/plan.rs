//! Where everything that the guest needs is in the file.
use transship_memory::PageCount;
use transship_wire::GuestDescription;

use super::pages::Source;
use crate::{
    Error,
    guest::StateFormat,
    snapshot::{
        file::origin::Origin,
        image::opened::Image,
        open::{Snapshot, check_complete},
    },
    stream::{
        fit::{Fit, check_sizes, fit},
        opaque,
        whence::wrong,
    },
};

/// What of the file becomes what of the guest.
pub(crate) struct RestorePlan {
    pub(crate) fit: Fit,
    /// By region.
    pub(crate) sources: Vec<Source>,
    /// Whether the guest ran when it was saved.
    pub(crate) ran: bool,
    /// The device state of a guest that is no QEMU, in the tail.
    pub(crate) opaque: Option<std::ops::Range<usize>>,
}

impl RestorePlan {
    /// # Errors
    /// The file is of another guest, or lacks something.
    pub(crate) fn make(snapshot: &Snapshot, guest: &GuestDescription, format: &StateFormat) -> Result<Self, Error> {
        let name = &snapshot.origin.name;
        check_complete(snapshot)?;
        let fit = fit(name, &snapshot.configuration, &snapshot.blocks, guest, format)?;
        let devices: Vec<_> = fit.devices.iter().map(|&index| &snapshot.blocks[index]).collect();
        check_sizes(name, &devices)?;
        let (ran, opaque) = state(snapshot, name, format)?;
        let source = |&index: &usize| {
            let block = &snapshot.blocks[index];
            let pages_offset = block.geometry().map_or(0, |geometry| geometry.pages_offset);
            Ok(Source { stored: snapshot.stored(block)?, pages_offset })
        };
        let sources = fit.regions.iter().map(source).collect::<Result<_, Error>>()?;
        Ok(Self { fit, sources, ran, opaque })
    }

    /// The same of an image; by region, the file that its pages are in.
    ///
    /// # Errors
    /// As [`RestorePlan::make`].
    pub(crate) fn of_image(
        image: &Image,
        guest: &GuestDescription,
        format: &StateFormat,
    ) -> Result<(Self, Vec<Origin>), Error> {
        let (name, snapshot) = (&image.name, &image.snapshot);
        let fit = fit(name, &snapshot.configuration, &snapshot.blocks, guest, format)?;
        let devices: Vec<_> = fit.devices.iter().map(|&index| &snapshot.blocks[index]).collect();
        check_sizes(name, &devices)?;
        let mut files = image.sources()?;
        let mut sources = Vec::new();
        let mut origins = Vec::new();
        for index in &fit.regions {
            let Some((stored, origin)) = files.remove(index) else {
                let what =
                    format!("it has {:?} as memory of a device, not of the guest", &*snapshot.blocks[*index].name);
                return Err(wrong(name, what));
            };
            sources.push(Source { stored, pages_offset: 0 });
            origins.push(origin);
        }
        if let Some(index) = files.keys().next() {
            let what = format!("the waiting guest lacks its memory {:?}", &*snapshot.blocks[*index].name);
            return Err(wrong(name, what));
        }
        let (ran, opaque) = state(snapshot, name, format)?;
        Ok((Self { fit, sources, ran, opaque }, origins))
    }

    /// Pages of the regions that are in the file.
    pub(crate) fn stored_pages(&self) -> PageCount {
        self.sources.iter().map(|source| source.stored.count()).sum()
    }

    /// Where a page is.
    pub(crate) fn any_page(&self) -> Option<u64> {
        self.sources.iter().find_map(|source| {
            let first = source.stored.ranges().next()?.first;
            Some(source.pages_offset + first.offset())
        })
    }
}

/// Whether the guest ran, and where in the tail the state of one is that is no QEMU.
fn state(
    snapshot: &Snapshot,
    name: &str,
    format: &StateFormat,
) -> Result<(bool, Option<std::ops::Range<usize>>), Error> {
    Ok(match format {
        StateFormat::Qemu { .. } => {
            let recorded = snapshot.global_state()?.is_none_or(|state| state.runs());
            (snapshot.origin.ran(recorded), None)
        }
        StateFormat::Opaque => {
            let state = opaque::find(name, &snapshot.tail, snapshot.tail_offset)?;
            (state.ran, Some(state.bytes))
        }
    })
}
