//! Inflate with the history of earlier calls.
use crate::ffi;
use std::ptr::NonNull;

/// The bytes are no deflate data, or refer to bytes before the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Corrupt;

/// How far one call came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// Bytes of the input that were not taken.
    pub unread: usize,
    /// Bytes of output that were written.
    pub made: usize,
}

/// Where in the deflate data the last call stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoppedAt {
    /// On a byte boundary between two blocks, with nothing held back.
    BetweenBlocks,
    /// After the final block.
    AfterFinal,
    /// Inside a block or a header, or with output that had no room.
    Within,
}

/// A raw inflater: one deflate stream, fed in pieces.
#[derive(Debug)]
pub struct Inflater(NonNull<ffi::Inflater>);

// SAFETY: the C object is plain memory that only this handle points to; ISA-L keeps no thread-local state.
unsafe impl Send for Inflater {}

impl Default for Inflater {
    fn default() -> Self {
        Self::new()
    }
}

impl Inflater {
    /// An inflater at the beginning of a stream.
    ///
    /// # Panics
    /// Without memory, as `Vec` does.
    #[must_use]
    pub fn new() -> Self {
        // SAFETY: the function has no preconditions and returns NULL or a fresh object.
        let object = unsafe { ffi::ts_inflater_new() };
        Self(NonNull::new(object).expect("memory for an ISA-L inflater"))
    }

    /// Forgets everything: the next byte begins a stream.
    pub fn reset(&mut self) {
        // SAFETY: the object is ours alone (&mut) and alive until drop.
        unsafe { ffi::ts_inflater_reset(self.0.as_ptr()) }
    }

    /// Inflates from `input` into `output` until one of them ends.
    ///
    /// # Errors
    /// Bad data; the stream can't be continued.
    ///
    /// # Panics
    /// When a slice is 4 GiB or longer.
    pub fn inflate(&mut self, input: &[u8], output: &mut [u8]) -> Result<Step, Corrupt> {
        let input_len = u32::try_from(input.len()).expect("packets are far below 4 GiB");
        let output_len = u32::try_from(output.len()).expect("packets are far below 4 GiB");
        let (mut unread, mut made) = (0, 0);
        // SAFETY: pointers and lengths describe a readable and a writable slice that do not overlap (& and &mut); the
        // object is ours alone and keeps none of the pointers (the shim clears them).
        let verdict = unsafe {
            ffi::ts_inflate(
                self.0.as_ptr(),
                input.as_ptr(),
                input_len,
                output.as_mut_ptr(),
                output_len,
                &raw mut unread,
                &raw mut made,
            )
        };
        if verdict < 0 {
            return Err(Corrupt);
        }
        Ok(Step { unread: unread as usize, made: made as usize })
    }

    /// Where the last call stopped.
    #[must_use]
    pub fn place(&self) -> StoppedAt {
        // SAFETY: the object is alive until drop.
        match unsafe { ffi::ts_inflater_place(self.0.as_ptr()) } {
            0 => StoppedAt::BetweenBlocks,
            1 => StoppedAt::AfterFinal,
            _ => StoppedAt::Within,
        }
    }
}

impl Drop for Inflater {
    fn drop(&mut self) {
        // SAFETY: the object came from ts_inflater_new and is freed once, here.
        unsafe { ffi::ts_inflater_free(self.0.as_ptr()) }
    }
}
