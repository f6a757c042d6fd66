//! A scan for written pages by all cores: it looks at the entry of every page, and makes those that are missing.
use std::{
    os::fd::BorrowedFd,
    sync::{Mutex, PoisonError},
};

use crate::{
    Area, ByteRange, Error, Flaw, PageSet, all_cores,
    area::{lost, untrackable},
    pagemap::{self, By, Found, Look},
};

/// What a thread takes at once. A multiple of a huge page: the kernel protects no part of one.
const PIECE_BYTES: u64 = 64 << 20;
/// Stretches that one call of the kernel reports.
const FOUND: usize = 4096;

/// A part of an area.
struct Piece {
    area: Area,
    addresses: ByteRange,
}

/// The area, cut where addresses are multiples of [`PIECE_BYTES`].
fn pieces(area: &Area) -> impl Iterator<Item = Piece> + use<> {
    let area = *area;
    let ByteRange { start, end } = area.addresses();
    (start / PIECE_BYTES..end.div_ceil(PIECE_BYTES)).map(move |number| {
        let behind = number.saturating_add(1).saturating_mul(PIECE_BYTES);
        let addresses = ByteRange { start: (number * PIECE_BYTES).max(start), end: behind.min(end) };
        Piece { area, addresses }
    })
}

/// Adds the pages of the areas that were written, all of one region, and has them tracked anew.
///
/// # Errors
/// Of any thread. Some of the areas may be tracked anew all the same, without word of what was written there.
pub(crate) fn sweep(
    pagemap: BorrowedFd<'_>,
    how: (Look, By),
    areas: &[Area],
    written: &mut PageSet,
) -> Result<(), Error> {
    if areas.iter().map(|area| area.bytes).sum::<u64>() <= PIECE_BYTES {
        return look_over(pagemap, how, areas, written);
    }
    let pieces: Vec<_> = areas.iter().flat_map(pieces).collect();
    let written = Mutex::new(written);
    let begin = || vec![Found::default(); FOUND];
    all_cores::work("scan", &pieces, begin, |found, piece| scan(pagemap, how, piece, found, &written))
}

/// The same by this thread alone, for little memory or a look that nobody waits for.
///
/// # Errors
/// As [`sweep`].
pub(crate) fn look_over(
    pagemap: BorrowedFd<'_>,
    how: (Look, By),
    areas: &[Area],
    written: &mut PageSet,
) -> Result<(), Error> {
    let (mut found, written) = (vec![Found::default(); FOUND], Mutex::new(written));
    areas.iter().flat_map(pieces).try_for_each(|piece| scan(pagemap, how, &piece, &mut found, &written))
}

fn scan(
    pagemap: BorrowedFd<'_>,
    (look, by): (Look, By),
    piece: &Piece,
    found: &mut [Found],
    written: &Mutex<&mut PageSet>,
) -> Result<(), Error> {
    let Piece { area, addresses: ByteRange { start, end } } = *piece;
    let mut at = start;
    while at < end {
        let rest = ByteRange { start: at, end };
        let (count, next) = pagemap::scan(pagemap, look, by, rest, found).map_err(|source| lost(&area, source))?;
        if count > 0 {
            // One that panicked has reported nothing of this.
            let mut written = written.lock().unwrap_or_else(PoisonError::into_inner);
            found[..count].iter().for_each(|found| written.insert(area.pages_at(found.addresses())));
        }
        if next <= at {
            return Err(untrackable(area.region, Flaw::Else, format!("the scan does not go on from address {at:#x}")));
        }
        at = next;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PageNumber;

    #[test]
    fn an_area_is_cut_at_round_addresses() {
        let cut = |address, bytes| {
            let pieces = pieces(&Area { region: 0, first_page: PageNumber::FIRST, address, bytes });
            pieces.map(|piece| (piece.addresses.start, piece.addresses.end)).collect::<Vec<_>>()
        };
        let (page, whole) = (4096, PIECE_BYTES);
        assert_eq!(cut(whole, whole), [(whole, 2 * whole)]);
        assert_eq!(cut(page, whole), [(page, whole), (whole, whole + page)]);
        assert_eq!(cut(whole - page, page), [(whole - page, whole)]);
        let long = cut(3 * whole + page, 2 * whole);
        assert_eq!(long, [(3 * whole + page, 4 * whole), (4 * whole, 5 * whole), (5 * whole, 5 * whole + page)]);
        assert_eq!(cut(u64::MAX - 2 * page + 1, page), [(u64::MAX - 2 * page + 1, u64::MAX - page + 1)]);
    }
}
