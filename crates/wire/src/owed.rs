//! What post-copy says: which pages are still owed, which one is waited for, and that one.
use crate::Error;
use crate::guest::{MAX_REGION_BYTES, MAX_REGIONS, PAGE_BYTES};
use crate::packet::PAGES_PER_PACKET;
use crate::reader::{Reader, Writer};

/// The most windows that one `Owed` names.
pub const MAX_OWED_WINDOWS: usize = 8192;
/// The most pages that one `Page` carries.
pub const MAX_PAGES_AT_ONCE: usize = 32;

/// Bytes of one window in an `Owed`.
const WINDOW_BYTES: usize = 8 + 16;
/// No region has a page of this number or above.
const PAGES_END: u64 = MAX_REGION_BYTES / PAGE_BYTES as u64;

/// What an `Owed` may measure: a region and a count, and at least one window.
pub(crate) const OWED_BYTES: std::ops::RangeInclusive<usize> = 4 + WINDOW_BYTES..=4 + MAX_OWED_WINDOWS * WINDOW_BYTES;
/// What a `Page` may measure: a region, a place, a count and whether they are zero, and the pages unless they are.
pub(crate) const PAGE_SIZES: std::ops::RangeInclusive<usize> = PAGE_FIXED..=PAGE_FIXED + MAX_PAGES_AT_ONCE * PAGE_BYTES;
const PAGE_FIXED: usize = 2 + 8 + 1 + 1;

/// Some of the 128 pages from `first` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwedWindow {
    /// A multiple of 128.
    pub first: u64,
    /// Bit i: the page `first + i`. Not 0.
    pub pages: u128,
}

/// Pages of a region that run on from the first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pages {
    /// Index of the region in the Hello.
    pub region: u16,
    /// The first of them.
    pub first: u64,
    /// How many: 1 to [`MAX_PAGES_AT_ONCE`].
    pub count: u8,
    /// All of them, one after the other; empty: they read as zero.
    pub bytes: Vec<u8>,
}

pub(crate) fn write_owed(writer: &mut Writer, region: u16, windows: &[OwedWindow]) {
    // A count that does not fit becomes the largest, which the other side refuses.
    let count = u16::try_from(windows.len()).unwrap_or(u16::MAX);
    writer.put(region.to_le_bytes()).put(count.to_le_bytes());
    for window in windows {
        writer.put(window.first.to_le_bytes()).put(window.pages.to_le_bytes());
    }
}

pub(crate) fn read_owed(reader: &mut Reader<'_>) -> Result<(u16, Vec<OwedWindow>), Error> {
    let region = read_region(reader, "Owed region")?;
    let count = reader.u16("Owed count")?;
    if !(1..=MAX_OWED_WINDOWS).contains(&usize::from(count)) {
        return Err(reader.invalid("Owed count", count.into(), "1 to 8192 windows"));
    }
    let mut windows = Vec::with_capacity(count.into());
    let mut from = 0;
    for _ in 0..count {
        let first = reader.u64("Owed first")?;
        if !first.is_multiple_of(PAGES_PER_PACKET) || first >= PAGES_END {
            return Err(reader.invalid("Owed first", first, "not a multiple of 128 below 2^44"));
        }
        if first < from {
            return Err(reader.invalid("Owed first", first, "windows ascend"));
        }
        from = first + PAGES_PER_PACKET;
        let pages = reader.u128("Owed pages")?;
        if pages == 0 {
            return Err(reader.invalid("Owed pages", 0, "a window has at least one page"));
        }
        windows.push(OwedWindow { first, pages });
    }
    Ok((region, windows))
}

pub(crate) fn write_place(writer: &mut Writer, region: u16, page: u64) {
    writer.put(region.to_le_bytes()).put(page.to_le_bytes());
}

pub(crate) fn read_want(reader: &mut Reader<'_>) -> Result<(u16, u64), Error> {
    let region = read_region(reader, "Want region")?;
    let page = reader.u64("Want page")?;
    if page >= PAGES_END {
        return Err(reader.invalid("Want page", page, "no region has this page"));
    }
    Ok((region, page))
}

pub(crate) fn write_pages(writer: &mut Writer, pages: &Pages) {
    write_place(writer, pages.region, pages.first);
    writer.put([pages.count, u8::from(!pages.bytes.is_empty())]);
    writer.0.extend_from_slice(&pages.bytes);
}

pub(crate) fn read_pages(reader: &mut Reader<'_>) -> Result<Pages, Error> {
    let region = read_region(reader, "Page region")?;
    let first = reader.u64("Page first")?;
    if first >= PAGES_END {
        return Err(reader.invalid("Page first", first, "no region has this page"));
    }
    let count = reader.u8("Page count")?;
    if !(1..=MAX_PAGES_AT_ONCE).contains(&usize::from(count)) {
        return Err(reader.invalid("Page count", count.into(), "1 to 32 pages travel at once"));
    }
    if u64::from(count) > PAGES_END - first {
        return Err(reader.invalid("Page count", count.into(), "the pages end beyond any region"));
    }
    let bytes = match reader.u8("Page content")? {
        0 => 0,
        1 => usize::from(count) * PAGE_BYTES,
        content => return Err(reader.invalid("Page content", content.into(), "neither zero (0) nor contents (1)")),
    };
    let bytes = reader.bytes("Page bytes", bytes)?.to_vec();
    Ok(Pages { region, first, count, bytes })
}

fn read_region(reader: &mut Reader<'_>, field: &'static str) -> Result<u16, Error> {
    let region = reader.u16(field)?;
    if usize::from(region) >= MAX_REGIONS {
        return Err(reader.invalid(field, region.into(), "a guest has at most 1024 regions"));
    }
    Ok(region)
}
