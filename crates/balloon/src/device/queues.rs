//! What the driver brings: its buffers, queue by queue.
use std::{ops::Deref, sync::atomic::Ordering};

use vhost_user_backend::{VringRwLock, VringT};
use virtio_queue::{DescriptorChain, QueueT};
use vm_memory::{GuestAddressSpace, GuestMemoryMmap};

use super::Device;
use crate::{buffers, features::Queue, message::Statistics};

/// Rings that are remembered: those of dozens of drivers, one after the other.
const MAX_RINGS: usize = 256;

impl Device {
    /// Notes where the rings lie, before anything is written to one. A driver that moves its rings again and again is
    /// no reason to grow.
    pub(super) fn note_rings(&self, rings: &[VringRwLock]) {
        let places: Vec<_> = rings.iter().map(used_ring).collect();
        let mut state = self.state();
        for place in places {
            if !state.rings.contains(&place) && place.0 != 0 && state.rings.len() < MAX_RINGS {
                state.rings.push(place);
            }
        }
    }

    /// Works on all buffers of a queue that are there.
    pub(super) fn work(&self, index: u16, ring: &VringRwLock) {
        let (queue, memory) = {
            let state = self.state();
            (state.features.queue(index), state.memory.clone())
        };
        let (Some(queue), Some(memory)) = (queue, memory) else { return };
        loop {
            let _ = ring.disable_notification();
            let mut any = false;
            while !self.leaving.load(Ordering::Relaxed) {
                let Some(chain) = ring.get_mut().get_queue_mut().pop_descriptor_chain(memory.memory()) else { break };
                any = true;
                self.take(queue, ring, chain);
            }
            if any {
                signal(ring);
            }
            // A driver that promises buffers which can't be had must not keep us here.
            if !matches!((ring.enable_notification(), any), (Ok(true), true)) {
                return;
            }
        }
    }

    fn take<M>(&self, queue: Queue, ring: &VringRwLock, chain: DescriptorChain<M>)
    where
        M: Deref<Target = GuestMemoryMmap> + Clone,
    {
        let head = chain.head_index();
        match queue {
            Queue::Inflate => {
                let ranges = buffers::page_list(chain);
                let state = self.state();
                if !state.keep {
                    ranges.into_iter().for_each(|(from, bytes)| state.discard(from, bytes));
                }
            }
            // The memory is the guest's as soon as it touches it.
            Queue::Deflate => {}
            Queue::Statistics => return self.take_statistics(ring, head, buffers::statistics(chain)),
            Queue::Hints => {
                let memory = chain.memory().clone();
                for descriptor in chain {
                    if let Some(hint) = buffers::hint(&memory, &descriptor) {
                        self.state().hint(hint);
                    }
                }
            }
            Queue::Reports => {
                let state = self.state();
                // The guest relies on what poisoned pages hold.
                if !state.keep && state.poison().unwrap_or(0) == 0 {
                    chain.filter_map(|part| buffers::range(&part)).for_each(|(from, bytes)| state.discard(from, bytes));
                }
            }
        }
        give_back(ring, head);
    }

    /// The driver gets the buffer back when it is to fill it anew.
    fn take_statistics(&self, ring: &VringRwLock, head: u16, statistics: Statistics) {
        let before = {
            let mut state = self.state();
            state.statistics = statistics;
            state.statistics_buffer.replace((ring.clone(), head))
        };
        // A driver that gives two would wait for the first.
        if let Some((ring, head)) = before {
            give_back(&ring, head);
        }
    }
}

/// The guest's address, and the bytes, of the part of a ring that the device writes.
fn used_ring(ring: &VringRwLock) -> (u64, u64) {
    let ring = ring.get_ref();
    let queue = ring.get_queue();
    // Flags and index, an entry of 8 bytes for each buffer, and the number of the event.
    (queue.used_ring(), 4 + 8 * u64::from(queue.size()) + 2)
}

pub(super) fn give_back(ring: &VringRwLock, head: u16) {
    if let Err(error) = ring.add_used(head, 0) {
        tracing::info!(%error, "can't give a buffer back to the driver");
    }
}

pub(super) fn signal(ring: &VringRwLock) {
    if !matches!(ring.needs_notification(), Ok(false))
        && let Err(error) = ring.signal_used_queue()
    {
        tracing::info!(%error, "can't notify the driver of its buffers");
    }
}
