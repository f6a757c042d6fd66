//! The same without PAGEMAP_SCAN: an entry of 8 bytes for each page, in /proc/PID/pagemap. Whether a page is protected
//! is in it since Linux 5.14.
use std::{io, os::fd::BorrowedFd};

use rustix::io::Errno;

use super::{Found, Look};
use crate::{ByteRange, PAGE};

const ENTRY_BYTES: usize = 8;
/// Entries that are read at once: those of 2 MiB.
const ENTRIES: usize = 512;

const PROTECTED: u64 = 1 << 57;
const THERE: u64 = 1 << 63 | 1 << 62;
/// It shows a file, or is anonymous memory that is shared.
const OF_A_FILE: u64 = 1 << 61;

/// As [`super::scan`]. That a page is the page of zeros is not known.
pub(super) fn look(
    pagemap: BorrowedFd<'_>,
    look: Look,
    ByteRange { start, end }: ByteRange,
    found: &mut [Found],
) -> io::Result<(usize, u64)> {
    let mut room = [[0; ENTRY_BYTES]; ENTRIES];
    let (mut count, mut at) = (0, start / PAGE * PAGE);
    while at < end {
        let wanted = (end.div_ceil(PAGE) - at / PAGE).min(ENTRIES as u64) as usize;
        let bytes = room[..wanted].as_flattened_mut();
        let read = match rustix::io::pread(pagemap, bytes, at / PAGE * ENTRY_BYTES as u64) {
            Err(Errno::INTR) => continue,
            read => read?,
        };
        // The file of a process that has ended is empty.
        if read < ENTRY_BYTES {
            return Err(Errno::SRCH.into());
        }
        for entry in &room[..read / ENTRY_BYTES] {
            if is_wanted(look, u64::from_ne_bytes(*entry)) {
                if count > 0 && found[count - 1].end == at {
                    found[count - 1].end = (at + PAGE).min(end);
                } else if let Some(next) = found.get_mut(count) {
                    *next = Found::new(ByteRange { start: at.max(start), end: (at + PAGE).min(end) });
                    count += 1;
                } else {
                    return Ok((count, at));
                }
            }
            at += PAGE;
        }
    }
    Ok((count, end))
}

fn is_wanted(look: Look, entry: u64) -> bool {
    let (protected, there) = (entry & PROTECTED != 0, entry & THERE != 0);
    match look {
        Look::Unprotected => !protected,
        Look::UnprotectedAndThere => !protected && there,
        Look::There => there,
        Look::NotThere => !there,
        Look::Own => there && entry & OF_A_FILE == 0,
        // Nothing is tracked anew by reading.
        Look::Written | Look::WrittenAndThere => unreachable!("only PAGEMAP_SCAN can"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{fs::File, os::fd::AsFd};

    use super::*;
    use crate::pagemap::{By, scan};

    /// Both ways to ask about this process, whose memory is of all kinds. What is wanted here is not what its other
    /// threads change meanwhile: a mapping that nobody uses but for this.
    #[test]
    fn entries_tell_what_a_scan_tells() {
        let file = rustix::fs::memfd_create("entries", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 2000 * PAGE).unwrap();
        let mapping = crate::mapping::Mapping::new(file.as_fd(), 0, 2000 * PAGE as usize, true).unwrap();
        let start = mapping.at(0, 1).unwrap().addr() as u64;
        let memory = File::options().write(true).open("/proc/self/mem").unwrap();
        for page in [0, 1, 2, 7, 511, 512, 513, 1999] {
            rustix::io::pwrite(&memory, &[1], start + page * PAGE).unwrap();
        }
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let spans = [(0, 2000, 64), (1, 513, 64), (0, 2000, 2), (3, 7, 1)];
        for ((first, end, room), look) in
            spans.into_iter().flat_map(|span| [(span, Look::There), (span, Look::NotThere)])
        {
            let mut answers = [By::Scan, By::Entries].map(|by| {
                let mut found = vec![Found::default(); room];
                let span = ByteRange { start: start + first * PAGE, end: start + end * PAGE };
                let (count, _) = scan(pagemap.as_fd(), look, by, span, &mut found).unwrap();
                found[..count].iter().map(Found::addresses).collect::<Vec<_>>()
            });
            answers[0].truncate(room);
            assert_eq!(answers[0], answers[1], "{look:?} in {first}..{end} with room for {room}");
            assert_eq!(answers[1].is_empty(), first == 3 && look == Look::There);
        }
    }
}
