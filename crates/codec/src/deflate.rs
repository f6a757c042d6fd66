//! Raw deflate of one packet, for zlib and QATzip: ISA-L at its levels, zlib's algorithm above them.
use flate2::{Compress, Compression, FlushCompress};
use transship_isal::{Deflater, Ending, Inflater, NoRoom, StoppedAt};

use crate::Fault;

/// A packet's deflater. Nothing carries over from one input to the next.
pub(crate) enum PacketDeflater {
    /// Levels 0 to 3 are ISA-L's own.
    Fast(Deflater),
    /// Levels 4 to 9 are those of zlib.
    Small(Box<Compress>),
}

impl PacketDeflater {
    /// `level` 0 to 9, as [`crate::Method::levels`] has them.
    pub(crate) fn new(level: i32) -> Self {
        let level = level.clamp(0, 9).unsigned_abs();
        if level <= Deflater::LEVEL_MAX {
            Self::Fast(Deflater::new(level))
        } else {
            Self::Small(Box::new(Compress::new(Compression::new(level), false)))
        }
    }

    /// Appends `input`, deflated, to `out`; never longer than [`stored_bytes`].
    pub(crate) fn deflate(&mut self, input: &[u8], out: &mut Vec<u8>, ending: Ending) {
        let before = out.len();
        let room = stored_bytes(input.len());
        let done = match self {
            Self::Fast(deflater) => deflater.deflate(input, out, room, ending),
            Self::Small(compress) => zlib_deflate(compress, input, out, room, ending),
        };
        if done.is_err() {
            out.truncate(before);
            store(input, out, ending);
        }
    }
}

fn zlib_deflate(
    compress: &mut Compress,
    input: &[u8],
    out: &mut Vec<u8>,
    room: usize,
    ending: Ending,
) -> Result<(), NoRoom> {
    compress.reset();
    out.reserve(room);
    let (flush, end) = match ending {
        Ending::SyncFlush => (FlushCompress::Sync, flate2::Status::Ok),
        Ending::Final => (FlushCompress::Finish, flate2::Status::StreamEnd),
    };
    let status = compress.compress_vec(input, out, flush).map_err(|_| NoRoom)?;
    // A full buffer may hide bytes that had no room.
    let fits = compress.total_in() == input.len() as u64 && out.len() < out.capacity();
    if status == end && fits { Ok(()) } else { Err(NoRoom) }
}

/// Longest run that a stored block holds.
const STORED_MAX: usize = 0xffff;

/// Bytes of `length` bytes in stored blocks, each with 5 bytes before it, and a sync flush of 5.
pub(crate) const fn stored_bytes(length: usize) -> usize {
    length + 5 * length.div_ceil(STORED_MAX) + 5
}

/// Appends `input` in stored blocks.
pub(crate) fn store(input: &[u8], out: &mut Vec<u8>, ending: Ending) {
    out.reserve(stored_bytes(input.len()));
    for run in input.chunks(STORED_MAX) {
        let length = u16::try_from(run.len()).expect("chunks of at most STORED_MAX");
        out.push(0);
        out.extend_from_slice(&length.to_le_bytes());
        out.extend_from_slice(&(!length).to_le_bytes());
        out.extend_from_slice(run);
    }
    out.extend_from_slice(&[u8::from(ending == Ending::Final), 0, 0, 0xff, 0xff]);
}

/// Inflates all of `encoded` into all of `pages`, going on in `inflater`'s stream, and requires it to stop at `end`.
pub(crate) fn inflate(inflater: &mut Inflater, encoded: &[u8], pages: &mut [u8], end: StoppedAt) -> Result<(), Fault> {
    let corrupt = |_| Fault::Corrupt { what: "deflate data" };
    let mut step = inflater.inflate(encoded, pages).map_err(corrupt)?;
    let made = step.made;
    if made == pages.len() && (step.unread > 0 || inflater.place() == StoppedAt::Within) {
        // The pages are full; what remains (an end-of-block code, a flush) must make nothing.
        let rest = &encoded[encoded.len() - step.unread..];
        step = inflater.inflate(rest, &mut [0]).map_err(corrupt)?;
        if step.made > 0 {
            return Err(Fault::TooLong);
        }
    }
    match (inflater.place(), end) {
        (StoppedAt::AfterFinal, StoppedAt::BetweenBlocks) => Err(Fault::StreamEnd),
        _ if step.unread > 0 => Err(Fault::Trailing { extra: step.unread }),
        (place, end) if place != end || made < pages.len() => Err(Fault::Truncated { made }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn stored_blocks_inflate(length in 0usize..200_000, last in any::<bool>()) {
            let input: Vec<u8> = (0..length).map(|i| ((i * i) >> 3) as u8).collect();
            let ending = if last { Ending::Final } else { Ending::SyncFlush };
            let end = if last { StoppedAt::AfterFinal } else { StoppedAt::BetweenBlocks };
            let mut out = Vec::new();
            store(&input, &mut out, ending);
            prop_assert_eq!(out.len(), stored_bytes(length));
            let mut output = vec![0; length];
            prop_assert_eq!(inflate(&mut Inflater::new(), &out, &mut output, end), Ok(()));
            prop_assert_eq!(output, input);
        }
    }

    /// Noise must not grow: at every level the result is at most that of stored blocks.
    #[test]
    fn noise_is_stored() {
        let mut state = 1u64;
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .take(128 * 4096)
        .collect();
        for level in 0..10 {
            let mut out = Vec::new();
            PacketDeflater::new(level).deflate(&noise, &mut out, Ending::SyncFlush);
            assert!(out.len() <= stored_bytes(noise.len()), "level {level}: {}", out.len());
            let mut output = vec![0; noise.len()];
            inflate(&mut Inflater::new(), &out, &mut output, StoppedAt::BetweenBlocks).unwrap();
            assert!(output == noise);
        }
    }
}
