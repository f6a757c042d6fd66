//! Pages that travel as differences from what the destination already has (section 2.3).
use crate::reader::Reader;
use crate::{Error, PAGE_BYTES};

/// Applies a difference to the page as it was sent before. `position` is where the difference is in the stream, for
/// errors.
///
/// # Errors
/// Runs that are empty where they can't be, are longer than the page, or end before their bytes do. The page may have
/// changed by then.
pub fn decode(encoded: &[u8], position: u64, page: &mut [u8; PAGE_BYTES]) -> Result<(), Error> {
    let mut reader = Reader::at(encoded, position);
    let mut at = 0;
    while !reader.rest().is_empty() {
        let (kept, offset) = run(&mut reader, "unchanged run")?;
        let invalid = |why| Error::Invalid { field: "unchanged run", offset, value: kept as u64, why };
        if kept == 0 && at > 0 {
            return Err(invalid("only the first can be empty"));
        }
        let start = at + kept;
        if start > PAGE_BYTES {
            return Err(invalid("it ends beyond the page"));
        }
        let (count, offset) = run(&mut reader, "changed run")?;
        let invalid = |why| Error::Invalid { field: "changed run", offset, value: count as u64, why };
        if count == 0 {
            return Err(invalid("it is empty"));
        }
        let place = page.get_mut(start..start + count).ok_or_else(|| invalid("it ends beyond the page"))?;
        place.copy_from_slice(reader.bytes("changed bytes", count)?);
        at = start + count;
    }
    Ok(())
}

/// A length, ULEB128 of one or two bytes, and where it begins.
fn run(reader: &mut Reader<'_>, field: &'static str) -> Result<(usize, usize), Error> {
    let low = reader.u8(field)?;
    let offset = reader.field_start();
    if low & 0x80 == 0 {
        return Ok((low.into(), offset));
    }
    let high = reader.u8(field)?;
    if high & 0x80 != 0 {
        let why = "a length has two bytes at most";
        return Err(Error::Invalid { field, offset, value: high.into(), why });
    }
    Ok((usize::from(low & 0x7f) | usize::from(high) << 7, offset))
}
