//! Deflating a whole input at once, and its checksum.
use std::ptr::NonNull;

use crate::ffi;

/// How a deflated input ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// An empty stored block (`00 00 ff ff`) on a byte boundary; more may follow.
    SyncFlush,
    /// The last block is marked final.
    Final,
}

/// The output did not fit, or ISA-L refused the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoRoom;

/// Raw deflate of whole inputs, each without history.
#[derive(Debug)]
pub struct Deflater(NonNull<ffi::Deflater>);

// SAFETY: the C object is plain memory that only this handle points to; ISA-L keeps no thread-local state.
unsafe impl Send for Deflater {}

impl Deflater {
    /// The highest level; 0 is the fastest.
    pub const LEVEL_MAX: u32 = 3;

    /// A compressor of `level` 0 to 3.
    ///
    /// # Panics
    /// On a level above [`Self::LEVEL_MAX`], and without memory, as `Vec` does.
    #[must_use]
    pub fn new(level: u32) -> Self {
        assert!(level <= Self::LEVEL_MAX, "ISA-L has levels 0 to 3, not {level}");
        // SAFETY: the function takes any level and returns NULL or a fresh object.
        let object = unsafe { ffi::ts_deflater_new(level) };
        Self(NonNull::new(object).expect("memory for an ISA-L compressor"))
    }

    /// Appends `input`, deflated, to `out`, in at most `room` bytes.
    ///
    /// # Errors
    /// The deflated bytes need more than `room`; `out` is as before.
    pub fn deflate(&mut self, input: &[u8], out: &mut Vec<u8>, room: usize, ending: Ending) -> Result<(), NoRoom> {
        // One byte more than asked: the shim treats a full buffer as one that was too small.
        let capacity = u32::try_from(room).map_err(|_| NoRoom)?.checked_add(1).ok_or(NoRoom)?;
        let length = u32::try_from(input.len()).map_err(|_| NoRoom)?;
        out.reserve(capacity as usize);
        let end = out.spare_capacity_mut().as_mut_ptr().cast();
        let finish = i32::from(ending == Ending::Final);
        // SAFETY: `input` is `length` readable bytes; `reserve` made `capacity` bytes writable at `end`; the object
        // is ours alone (&mut) and alive until drop.
        let written = unsafe { ffi::ts_deflate(self.0.as_ptr(), input.as_ptr(), length, end, capacity, finish) };
        let written = usize::try_from(written).map_err(|_| NoRoom)?;
        assert!(written < capacity as usize, "ISA-L wrote {written} of {capacity} bytes");
        // SAFETY: ISA-L initialised the first `written` bytes of the spare capacity, fewer than were reserved.
        unsafe { out.set_len(out.len() + written) };
        Ok(())
    }
}

impl Drop for Deflater {
    fn drop(&mut self) {
        // SAFETY: the object came from ts_deflater_new and is freed once, here.
        unsafe { ffi::ts_deflater_free(self.0.as_ptr()) }
    }
}

/// CRC-32 of gzip over `bytes`, continuing from `seed` (0 at the beginning).
#[must_use]
pub fn crc32(seed: u32, bytes: &[u8]) -> u32 {
    // SAFETY: pointer and length describe one readable slice.
    unsafe { ffi::ts_crc32(seed, bytes.as_ptr(), bytes.len() as u64) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Inflater, Step, StoppedAt};

    #[test]
    fn the_crc_is_that_of_gzip() {
        assert_eq!(crc32(0, b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32(crc32(0, b"1234"), b"56789"), 0xcbf4_3926);
    }

    #[test]
    fn too_little_room_leaves_the_output_as_it_was() {
        let input: Vec<u8> = (0..9000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let mut out = b"before".to_vec();
        for room in [0, 1, 10, 1000] {
            assert_eq!(Deflater::new(1).deflate(&input, &mut out, room, Ending::SyncFlush), Err(NoRoom));
            assert_eq!(out, b"before");
        }
    }

    #[test]
    fn exactly_enough_room_is_enough() {
        let input = vec![7; 5000];
        let mut deflater = Deflater::new(1);
        let (mut wide, mut tight) = (Vec::new(), Vec::new());
        deflater.deflate(&input, &mut wide, 6000, Ending::SyncFlush).unwrap();
        deflater.deflate(&input, &mut tight, wide.len(), Ending::SyncFlush).unwrap();
        assert_eq!(wide, tight);
        assert_eq!(deflater.deflate(&input, &mut Vec::new(), wide.len() - 1, Ending::SyncFlush), Err(NoRoom));
    }

    proptest! {
        #[test]
        fn what_was_deflated_inflates(
            input in proptest::collection::vec(0u8..9, 1..70_000),
            level in 0u32..4,
            last in any::<bool>(),
        ) {
            let ending = if last { Ending::Final } else { Ending::SyncFlush };
            let mut packed = Vec::new();
            Deflater::new(level).deflate(&input, &mut packed, input.len() * 2 + 400, ending).unwrap();
            prop_assert_eq!(packed.ends_with(&[0, 0, 0xff, 0xff]), !last);
            let mut output = vec![0; input.len()];
            let mut inflater = Inflater::new();
            let step = inflater.inflate(&packed, &mut output).unwrap();
            prop_assert_eq!(step, Step { unread: 0, made: input.len() });
            prop_assert_eq!(inflater.place(), if last { StoppedAt::AfterFinal } else { StoppedAt::BetweenBlocks });
            prop_assert_eq!(output, input);
        }
    }
}
