//! What is appended to a file, in order, whether it is encrypted or not.
//!
//! In clear, space on the disk is asked for ahead and in large pieces. A file system that has to find it page by page,
//! while pages are copied to it, takes up to half as long again for them.
use std::os::fd::AsFd;

use rustix::fs::FallocateFlags;
use transship_memory::{ByteRange, WindowRead, Writeback};

use super::target::Target;
use crate::Error;

/// Bytes that are asked for at once.
const STEP: u64 = 64 << 20;

/// Where a file goes on.
#[derive(Debug)]
pub(crate) struct Appending {
    at: u64,
    /// Up to here the file has space; none: the file system finds space as it goes on.
    space: Option<u64>,
    /// There may be space behind the end.
    has_asked: bool,
    writeback: Writeback,
}

impl Appending {
    /// The next bytes stand at `at`, if they are in clear.
    pub(crate) fn at(at: u64) -> Self {
        Self { at, space: Some(at), has_asked: false, writeback: Writeback::default() }
    }

    /// Where the next bytes go.
    pub(crate) fn place(&self) -> u64 {
        self.at
    }

    /// Others have written up to there.
    pub(crate) fn go_on_at(&mut self, at: u64) {
        self.at = at;
    }

    /// So many bytes more are there now. Returns where.
    fn step(&mut self, bytes: u64) -> ByteRange {
        let next = ByteRange::sized(self.at, bytes);
        self.at = next.end;
        next
    }

    /// The space to ask for before these bytes are written, if there is some to ask for.
    fn wanted(&self, next: ByteRange) -> Option<ByteRange> {
        let space = self.space?;
        (next.end > space).then(|| ByteRange { start: space.max(next.start), end: next.end.saturating_add(STEP) })
    }
}

impl Target {
    /// Appends bytes.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn append(&self, bytes: &[u8], to: &mut Appending) -> Result<(), Error> {
        let next = to.step(bytes.len() as u64);
        if let Some(sealed) = &self.sealed {
            return sealed.append(bytes).map_err(|source| self.failed("write", source));
        }
        self.see_to_space(to, next);
        self.write_at(bytes, next.start)?;
        self.begin_writeback(&mut to.writeback, next);
        Ok(())
    }

    /// Appends bytes with pages among them, as [`WindowRead::write_woven`] does. Not to a file that is encrypted: what
    /// goes there is copied anyway.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn append_woven(
        &self,
        read: &WindowRead<'_>,
        (bytes, cuts): (&[u8], &[usize]),
        to: &mut Appending,
    ) -> Result<(), Error> {
        debug_assert!(!self.is_sealed(), "guest memory goes into an encrypted file");
        let next = to.step(bytes.len() as u64 + read.present().bytes());
        self.see_to_space(to, next);
        read.write_woven(self.buffered.as_fd(), next.start, bytes, cuts)
            .map_err(|source| self.failed("write", source))?;
        self.begin_writeback(&mut to.writeback, next);
        Ok(())
    }

    /// Nothing more is appended: gives back the space that is left.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn give_space_back(&self, of: &mut Appending) -> Result<(), Error> {
        if !std::mem::take(&mut of.has_asked) {
            return Ok(());
        }
        of.space = None;
        self.buffered.set_len(of.at).map_err(|source| self.failed("cut", source))
    }

    fn see_to_space(&self, to: &mut Appending, next: ByteRange) {
        let Some(wanted) = to.wanted(next) else { return };
        let how = FallocateFlags::KEEP_SIZE;
        to.has_asked = true;
        let given = rustix::fs::fallocate(&self.buffered, how, wanted.start, wanted.len());
        // A disk that is full says so again when it is written to.
        to.space = given.is_ok().then_some(wanted.end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_is_asked_for_when_it_ends() {
        let mut appending = Appending::at(100);
        let first = appending.step(50);
        assert_eq!(appending.wanted(first), Some(ByteRange { start: 100, end: 150 + STEP }));
        appending.space = Some(150 + STEP);
        let second = appending.step(STEP);
        assert_eq!(appending.wanted(second), None, "there is as much as that");
        let third = appending.step(1);
        assert_eq!(appending.wanted(third), Some(ByteRange { start: 150 + STEP, end: 151 + 2 * STEP }));
        appending.go_on_at(1 << 40);
        let behind = appending.step(1);
        assert_eq!(appending.wanted(behind).map(|range| range.start), Some(1 << 40), "others have written up to there");
        appending.space = None;
        assert_eq!(appending.wanted(behind), None, "it was refused");
    }
}
