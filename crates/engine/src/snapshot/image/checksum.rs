//! A checksum of a file with holes: the same whether zeros are holes or not.
//!
//! The file is cut into pieces of 1 MiB. Of each piece that is not all zeros there is its number (8 bytes, little
//! endian) and the BLAKE3 hash of its bytes; the checksum is the BLAKE3 hash of these, ascending.
use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
};

use rustix::{fs::SeekFrom, io::Errno};
use transship_memory::{ByteRange, PageBuffer, PageCount};

use crate::Progress;

const PIECE: u64 = 1 << 20;
const PIECE_PAGES: PageCount = PageCount::within(PIECE);

/// The checksum of a file's first `bytes`, as hexadecimal digits.
///
/// # Errors
/// The system's own; a file that is shorter; cancelled (`Interrupted`).
pub(super) fn of(file: &File, bytes: u64, progress: &Progress) -> io::Result<String> {
    let next = AtomicU64::new(0);
    let work = || -> io::Result<Vec<(u64, [u8; 32])>> {
        let (mut found, mut buffer) = (Vec::new(), PageBuffer::new(PIECE_PAGES.index()));
        loop {
            let number = next.fetch_add(1, Relaxed);
            let begin = number.saturating_mul(PIECE);
            if begin >= bytes {
                return Ok(found);
            }
            if progress.is_cancelled() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let length = PIECE.min(bytes - begin);
            if !has_data(file, ByteRange::sized(begin, length))? {
                continue;
            }
            let piece = &mut buffer.bytes_mut()[..length as usize];
            file.read_exact_at(piece, begin)?;
            if piece.iter().any(|byte| *byte != 0) {
                found.push((number, blake3::hash(piece).into()));
            }
        }
    };
    let mut found = thread::scope(|scope| {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_fold(Vec::new(), |mut all, worker| {
            all.extend(worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
            Ok::<_, io::Error>(all)
        })
    })?;
    found.sort_unstable_by_key(|(number, _)| *number);
    let mut whole = blake3::Hasher::new();
    for (number, hash) in found {
        whole.update(&number.to_le_bytes());
        whole.update(&hash);
    }
    Ok(whole.finalize().to_hex().to_string())
}

/// Whether something in a part of the file is no hole. Threads that ask at once do not disturb each other: nobody uses
/// the place that a file is at.
fn has_data(file: &File, part: ByteRange) -> io::Result<bool> {
    match rustix::fs::seek(file, SeekFrom::Data(part.start)) {
        Ok(data) => Ok(data < part.end),
        Err(Errno::NXIO) => Ok(false),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn sum(bytes: u64, written: &[(u64, &[u8])]) -> String {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        written.iter().for_each(|(at, what)| file.write_all_at(what, *at).unwrap());
        of(&file, bytes, &Progress::new()).unwrap()
    }

    #[test]
    fn zeros_are_holes_and_everything_else_counts_with_its_place() {
        let bytes = 5 * PIECE + 4096;
        let plain = sum(bytes, &[(2 * PIECE + 5, b"x")]);
        assert_eq!(plain, sum(bytes, &[(2 * PIECE + 5, b"x"), (3 * PIECE, &[0; 4096])]));
        for other in
            [(2 * PIECE + 5, &b"y"[..]), (2 * PIECE + 6, b"x"), (3 * PIECE + 5, b"x"), (5 * PIECE + 4095, b"x")]
        {
            assert_ne!(plain, sum(bytes, &[other]), "{other:?}");
        }
        let last = sum(bytes, &[(5 * PIECE + 4095, b"x")]);
        assert_ne!(sum(bytes, &[]), last);
    }
}
