//! What the driver puts into the queues. All of it is the guest's to choose.
use std::{io::Read, ops::Deref};

use virtio_queue::{DescriptorChain, desc::split::Descriptor};
use vm_memory::{Bytes, GuestMemoryMmap};

use crate::{config::BALLOON_PAGE_BYTES, message::Statistics};

/// Linux names 256 pages at a time.
const MAX_LIST_BYTES: u64 = 64 << 10;
/// Linux has 16 numbers or less.
const MAX_STATISTICS_BYTES: u64 = 10 * 64;

/// The ranges (address, bytes) that a list of page numbers stands for, neighbours joined.
pub(crate) fn page_list<M>(chain: DescriptorChain<M>) -> Vec<(u64, u64)>
where
    M: Deref<Target = GuestMemoryMmap> + Clone,
{
    let bytes = readable(chain, MAX_LIST_BYTES);
    let mut pages: Vec<_> = bytes.as_chunks().0.iter().map(|&number| u32::from_le_bytes(number)).collect();
    pages.sort_unstable();
    pages.dedup();
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for page in pages {
        let from = u64::from(page) * BALLOON_PAGE_BYTES;
        match ranges.last_mut() {
            Some((first, bytes)) if *first + *bytes == from => *bytes += BALLOON_PAGE_BYTES,
            _ => ranges.push((from, BALLOON_PAGE_BYTES)),
        }
    }
    ranges
}

/// The numbers of a statistics buffer: tags of 16 bits, values of 64.
pub(crate) fn statistics<M>(chain: DescriptorChain<M>) -> Statistics
where
    M: Deref<Target = GuestMemoryMmap> + Clone,
{
    let bytes = readable(chain, MAX_STATISTICS_BYTES);
    let mut statistics = Statistics::default();
    for entry in bytes.as_chunks::<10>().0 {
        let [t0, t1, value @ ..] = *entry;
        statistics.set(u16::from_le_bytes([t0, t1]), u64::from_le_bytes(value));
    }
    statistics
}

/// What one descriptor of the hint queue says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hint {
    /// A command id, or that it is over.
    Number(u32),
    /// Memory that is free.
    Range {
        /// The guest's address.
        from: u64,
        bytes: u64,
    },
}

/// Reads a descriptor of the hint queue; nothing if it makes no sense.
pub(crate) fn hint(memory: &GuestMemoryMmap, descriptor: &Descriptor) -> Option<Hint> {
    if let Some((from, bytes)) = range(descriptor) {
        return Some(Hint::Range { from, bytes });
    }
    let mut number = [0; 4];
    if descriptor.len() as usize != number.len() {
        return None;
    }
    memory.read_slice(&mut number, descriptor.addr()).ok()?;
    Some(Hint::Number(u32::from_le_bytes(number)))
}

/// The memory (address, bytes) that a descriptor lends to the device.
pub(crate) fn range(descriptor: &Descriptor) -> Option<(u64, u64)> {
    descriptor.is_write_only().then(|| (descriptor.addr().0, descriptor.len().into()))
}

fn readable<M>(chain: DescriptorChain<M>, most: u64) -> Vec<u8>
where
    M: Deref<Target = GuestMemoryMmap> + Clone,
{
    let memory = chain.memory().clone();
    let mut bytes = Vec::new();
    let read = chain.reader(&memory).map(|reader| reader.take(most).read_to_end(&mut bytes));
    if !matches!(read, Ok(Ok(_))) {
        tracing::debug!("can't read a buffer of the driver");
        bytes.clear();
    }
    bytes
}
