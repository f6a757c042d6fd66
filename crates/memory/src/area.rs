//! Where regions are mapped in another process.

use std::io;

use crate::{ByteRange, Error, Flaw, PAGE, PageCount, PageNumber, PageRange, PageSet};

/// Where (a part of) a region is mapped in the tracked process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Area {
    /// Index into the guest's regions.
    pub region: usize,
    /// First page of the region that this area maps.
    pub first_page: PageNumber,
    /// Address in the tracked process.
    pub address: u64,
    /// Size, a multiple of the page size.
    pub bytes: u64,
}

impl Area {
    /// The pages of the region that it has.
    pub fn range(&self) -> PageRange {
        self.first_page.run(PageCount::within(self.bytes))
    }

    /// Where it is in the tracked process.
    pub fn addresses(&self) -> ByteRange {
        ByteRange::sized(self.address, self.bytes)
    }

    /// What of it these pages of the region are in, part by part.
    pub(crate) fn parts(&self, pages: &PageSet) -> impl Iterator<Item = Self> {
        let (area, own) = (*self, self.range());
        pages.ranges().filter_map(move |range| {
            let (first, end) = (range.first.max(own.first), range.end().min(own.end()));
            let part = first.to(end);
            let address = area.address + (first - own.first).bytes();
            (first < end).then(|| Self { first_page: first, address, bytes: part.bytes(), ..area })
        })
    }

    /// The pages of the region that lie at these addresses.
    pub(crate) fn pages_at(&self, addresses: ByteRange) -> PageRange {
        let ByteRange { start, end } = self.addresses();
        let (start, end) = (addresses.start.clamp(start, end), addresses.end.clamp(start, end));
        let (first, end) = (PageCount::within(start - self.address), PageCount::holding(end - self.address));
        (self.first_page + first).run(end.saturating_sub(first))
    }
}

/// Every page of every region is in an area, and every area in its region: else a write could be missed.
pub(crate) fn check(areas: &[Area], region_pages: &[PageCount]) -> Result<(), Error> {
    check_inside(areas, region_pages)?;
    let mut missing: Vec<PageSet> = region_pages.iter().map(|&pages| PageSet::full(pages)).collect();
    areas.iter().for_each(|area| missing[area.region].remove(area.range()));
    for (region, missing) in missing.iter().enumerate() {
        if let Some(range) = missing.ranges().next() {
            let why = format!("pages {}..{} are not mapped in the process", range.first, range.end());
            return Err(untrackable(region, Flaw::NotMapped, why));
        }
    }
    Ok(())
}

/// Every area is in its region.
pub(crate) fn check_inside(areas: &[Area], region_pages: &[PageCount]) -> Result<(), Error> {
    for area in areas {
        let Some(&pages) = region_pages.get(area.region) else {
            return Err(untrackable(area.region, Flaw::NoRegion, "there is no such region"));
        };
        let whole = |number: u64| number.is_multiple_of(PAGE);
        if area.bytes == 0 || !whole(area.bytes) || !whole(area.address) {
            return Err(untrackable(area.region, Flaw::Shape, format!("{area:x?} does not consist of pages")));
        }
        if area.address.checked_add(area.bytes).is_none() || !area.range().fits(pages) {
            return Err(untrackable(area.region, Flaw::Outside, format!("{area:x?} lies outside its {pages} pages")));
        }
    }
    Ok(())
}

/// Those of one region.
pub(crate) fn of_region(areas: &[Area], region: usize) -> Vec<Area> {
    areas.iter().filter(|area| area.region == region).copied().collect()
}

pub(crate) fn untrackable(region: usize, flaw: Flaw, why: impl Into<String>) -> Error {
    Error::Untrackable { region, flaw, why: why.into() }
}

/// Why an area can't be registered.
pub(crate) fn refused(area: &Area, source: io::Error) -> Error {
    let (flaw, why) = match source.raw_os_error() {
        Some(libc::EBUSY) => (
            Flaw::Taken,
            "another userfaultfd tracks it already: a migration or snapshot tool is at work; let it end".into(),
        ),
        Some(libc::EINVAL | libc::EPERM) => {
            let needed = "shared, writable, whole pages";
            let why = format!(
                "address {:#x} of the process is no memory that the kernel can track: {needed} ({source})",
                area.address
            );
            (Flaw::Else, why)
        }
        Some(libc::ENOMEM | libc::ESRCH) => return Error::Gone { region: area.region, source },
        _ => return Error::system(format!("track writes to region number {}", area.region), source),
    };
    untrackable(area.region, flaw, why)
}

/// Why an area that was tracked can't be scanned.
pub(crate) fn lost(area: &Area, source: io::Error) -> Error {
    match source.raw_os_error() {
        // Gone process or mapping; another mapping in its place, which is not tracked.
        Some(libc::ENOMEM | libc::ESRCH | libc::EINVAL | libc::EPERM | libc::EBUSY) => {
            Error::Gone { region: area.region, source }
        }
        _ => Error::system(format!("scan region number {} for written pages", area.region), source),
    }
}
