//! A digest of all guest memory, to compare both sides while the guest stands still.
//!
//! The same memory gives the same digest, whether a zero page is a hole on one side and allocated on the other: pages
//! that read as zero are left out, the others are hashed with their place.
use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use transship_memory::{GuestMemory, PageCount, PageRange, PageSet, Region, WINDOW_PAGES, WindowBuffer};

use crate::Error;

/// Pages that are hashed as one unit of work: 4 MiB.
const CHUNK_PAGES: PageCount = PageCount::new(1024);

type Hash = [u8; 32];

/// Digest of the memory of a guest that stands still, by as many threads as there are cores. `dead`, by region, where
/// there are any: pages that count as zero, whatever they hold.
pub(crate) fn digest(memory: &GuestMemory, dead: &[PageSet]) -> Result<Hash, Error> {
    let mut data = memory.regions().iter().map(Region::data).collect::<Result<Vec<_>, _>>()?;
    for (data, dead) in data.iter_mut().zip(dead) {
        data.subtract(dead);
    }
    let chunks: Vec<Chunk<'_>> = (0..).zip(memory.regions().iter().zip(&data)).flat_map(chunks_of).collect();
    let next = AtomicUsize::new(0);
    let work = || -> Result<Vec<(usize, Hash)>, Error> {
        let mut done = Vec::new();
        let mut buffer = WindowBuffer::default();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(chunk) = chunks.get(index) else { return Ok(done) };
            if let Some(hash) = chunk.hash(&mut buffer)? {
                done.push((index, hash));
            }
        }
    };
    let mut hashes = thread::scope(|scope| {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_fold(Vec::new(), |mut all, worker| {
            all.extend(worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
            Ok::<_, Error>(all)
        })
    })?;
    hashes.sort_unstable_by_key(|(index, _)| *index);
    let mut whole = blake3::Hasher::new();
    for (_, hash) in &hashes {
        whole.update(hash);
    }
    Ok(whole.finalize().into())
}

struct Chunk<'a> {
    number: u64,
    region: &'a Region,
    data: &'a PageSet,
    range: PageRange,
}

fn chunks_of<'a>((number, (region, data)): (u64, (&'a Region, &'a PageSet))) -> impl Iterator<Item = Chunk<'a>> {
    PageRange::all(region.pages()).parts(CHUNK_PAGES).map(move |range| Chunk { number, region, data, range })
}

impl Chunk<'_> {
    /// None if every page of it reads as zero.
    fn hash(&self, buffer: &mut WindowBuffer) -> Result<Option<Hash>, Error> {
        let mut hasher = blake3::Hasher::new();
        let mut any = false;
        for PageRange { first, .. } in self.range.parts(WINDOW_PAGES) {
            let data = first.masked(self.data.window(first));
            if data.is_empty() {
                continue;
            }
            let read = self.region.read_window(data, true, buffer)?;
            let pages = read.present();
            if pages.is_empty() {
                continue;
            }
            any = true;
            for place in [self.number, first.get()] {
                hasher.update(&place.to_le_bytes());
            }
            hasher.update(&pages.mask.to_le_bytes());
            hasher.update(read.into_bytes());
        }
        Ok(any.then(|| hasher.finalize().into()))
    }
}
