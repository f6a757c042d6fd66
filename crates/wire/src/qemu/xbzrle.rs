//! Pages that travel as differences from what the destination already has (section 2.3).
use crate::reader::Reader;
use crate::{Error, PAGE_BYTES};

/// Applies a difference to the page as it was sent before. `position` is where the difference is in the stream, for errors.
///
/// # Errors
/// Runs that are empty where they can't be, are longer than the page, or end before their bytes do. The page may have changed by then.
pub fn decode(encoded: &[u8], position: u64, page: &mut [u8; PAGE_BYTES]) -> Result<(), Error> {
    let mut reader = Reader::at(encoded, position);
    let mut at = 0;
    while !reader.rest().is_empty() {
        let kept = run(&mut reader, "unchanged run")?;
        if kept == 0 && at > 0 {
            return Err(reader.invalid("unchanged run", 0, "only the first can be empty"));
        }
        let start = at + kept;
        if start > PAGE_BYTES {
            return Err(reader.invalid("unchanged run", kept as u64, "it ends beyond the page"));
        }
        let count = run(&mut reader, "changed run")?;
        if count == 0 {
            return Err(reader.invalid("changed run", 0, "it is empty"));
        }
        let place = page.get_mut(start..start + count);
        let place = place.ok_or_else(|| reader.invalid("changed run", count as u64, "it ends beyond the page"))?;
        place.copy_from_slice(reader.bytes("changed bytes", count)?);
        at = start + count;
    }
    Ok(())
}

/// A length: ULEB128 of one or two bytes.
fn run(reader: &mut Reader<'_>, field: &'static str) -> Result<usize, Error> {
    let low = reader.u8(field)?;
    if low & 0x80 == 0 {
        return Ok(low.into());
    }
    let high = reader.u8(field)?;
    if high & 0x80 != 0 {
        return Err(reader.invalid(field, high.into(), "a length has two bytes at most"));
    }
    Ok(usize::from(low & 0x7f) | usize::from(high) << 7)
}
