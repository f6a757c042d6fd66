//! What lies where in a mapped-ram file: no byte of it may mean two things (section 4.4).
use std::ops::Range;

use super::Block;
use crate::Error;

/// The parts of a file that are known so far, and how long it is.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    parts: Vec<Part>,
    /// Where the stream began.
    base: u64,
    /// Where the stream began, or went on behind pages.
    run: u64,
    /// Length of the file, where it is known.
    pub(super) file_bytes: Option<u64>,
}

/// What its field points to; the block that it belongs to, and where that block's entry begins.
#[derive(Debug, Clone)]
struct Part {
    range: Range<u64>,
    field: &'static str,
    block: String,
    entry: u64,
}

const STREAM: &str = "list of blocks";
const BITMAP: &str = "bitmap offset";
const PAGES: &str = "pages offset";

impl Layout {
    /// The layout of a file in which the stream begins at `base`.
    pub(super) fn new(base: u64) -> Self {
        Layout { parts: Vec::new(), base, run: base, file_bytes: None }
    }

    /// Adds what the entry at `entry` announces, and says where the stream goes on.
    ///
    /// # Errors
    /// Bitmap and pages are not behind the entry, are not in the file, or overlap what is there already. When this is
    /// the last block, all that follows is the stream's, so nothing may reach into that either. After an error nothing
    /// is added.
    pub(super) fn add(&mut self, block: &Block, entry: Range<u64>, last: bool) -> Result<u64, Error> {
        let part = |range, field| Part { range, field, block: block.name.to_string(), entry: entry.start };
        let mut new = Vec::new();
        let mut run = self.run;
        if let Some(geometry) = block.geometry() {
            let pages = geometry.pages(block.used_bytes);
            run = pages.end;
            new.push(part(self.run..entry.end, STREAM));
            new.push(part(geometry.bitmap(block.used_bytes), BITMAP));
            new.push(part(pages, PAGES));
            if geometry.pages_offset < entry.end {
                return Err(new[2].wrong("the pages begin before the entry that announces them ends"));
            }
        }
        for at in 0..new.len() {
            self.check(&new[at], &new[..at])?;
        }
        if last && let Some(part) = self.parts.iter().chain(&new).find(|part| part.range.end > run) {
            return Err(part.wrong("it overlaps the rest of the stream"));
        }
        self.parts.append(&mut new);
        self.run = run;
        Ok(if block.geometry().is_some() { run } else { entry.end })
    }

    fn check(&self, part: &Part, beside: &[Part]) -> Result<(), Error> {
        if self.file_bytes.is_some_and(|end| part.range.end > end) {
            return Err(part.wrong("it ends beyond the end of the file: the file was cut short, or it is another file"));
        }
        if part.range.start < self.base {
            return Err(part.wrong("it lies before the stream, in bytes that do not belong to it"));
        }
        let range = &part.range;
        let overlap = |other: &&Part| range.start < other.range.end && other.range.start < range.end;
        match self.parts.iter().chain(beside).find(overlap) {
            // The list is where it has to be; the other is what was placed wrongly.
            Some(other) if part.field == STREAM => Err(other.wrong("it overlaps the list of blocks")),
            Some(_) => Err(part.wrong("it overlaps another part of the file")),
            None => Ok(()),
        }
    }
}

impl Part {
    fn wrong(&self, why: &'static str) -> Error {
        let offset = usize::try_from(self.entry).unwrap_or(usize::MAX);
        Error::Named { field: self.field, name: self.block.clone(), offset, value: self.range.start, why }
    }
}
