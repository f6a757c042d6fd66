//! What follows the memory: the device sections, and nothing behind them.
use transship_wire::qemu::{GlobalState, Tail};

use super::whence::Whence;
use crate::{Error, Rule};

/// Behind each device section, and behind all of them.
const FOOTER_BYTES: usize = 5;
const EOF_BYTES: usize = 1;

/// # Errors
/// The device sections can't be walked, or are not all there, or something follows them.
pub(crate) fn check_tail(whence: &Whence, bytes: &[u8], base: u64) -> Result<Tail, Error> {
    let parsed = Tail::parse(bytes, base).map_err(|error| whence.bad(error))?;
    let end = if parsed.is_walked() || parsed.end < bytes.len() {
        parsed.end
    } else if bytes.len() == EOF_BYTES {
        return Ok(parsed);
    } else {
        // Nothing says where each section ends. But the last one is known, and what follows it.
        let last = GlobalState::find(bytes, base).map_err(|error| whence.bad(error))?;
        let Some(last) = last else {
            let what = format!(
                "the device sections from offset {base:#x} on are neither described nor complete: they were cut short or damaged"
            );
            return Err(whence.broke(Rule::Count, what + whence.cure()));
        };
        last.body().end + FOOTER_BYTES + EOF_BYTES
    };
    let extra = bytes.len() - end;
    if extra > 0 {
        let end = base + end as u64;
        let what = format!("the {extra} bytes after its end at offset {end:#x} don't belong to it, or are damaged");
        return Err(whence.broke(Rule::Turn, what + whence.cure()));
    }
    Ok(parsed)
}
