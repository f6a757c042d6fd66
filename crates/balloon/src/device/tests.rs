//! The queues, driven by hand: well-behaved drivers are tested with real guests, so these are mostly others.
#![allow(clippy::unwrap_used)]
use std::os::unix::fs::FileExt;

use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use vhost_user_backend::VringT;
use vm_memory::{Bytes, FileOffset, GuestAddress};

use super::*;

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 4 * MIB;
const SIZE: u16 = 16;
/// Where the parts of the queue lie.
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;

/// Which queue is which.
const INFLATE: u16 = 0;
const STATISTICS: u16 = 2;
const HINTS: u16 = 3;
const REPORTS: u16 = 4;

/// In the flags of a descriptor.
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// A descriptor as the driver writes it: address, bytes, flags, the next one.
type Descriptor = (u64, u32, u16, u16);

struct Bench {
    device: Device,
    memory: Memory,
    file: std::fs::File,
    ring: VringRwLock,
    published: u16,
}

impl Bench {
    /// A device whose driver has taken all features, with a client.
    fn new() -> Self {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(MEMORY).unwrap();
        let place = FileOffset::new(file.try_clone().unwrap(), 0);
        let ranges = [(GuestAddress(0), MEMORY as usize, Some(place))];
        let memory = Memory::new(GuestMemoryMmap::from_ranges_with_files(ranges).unwrap());
        let ring = VringRwLock::new(memory.clone(), SIZE).unwrap();
        ring.set_queue_size(SIZE);
        ring.set_queue_info(DESCRIPTORS, AVAILABLE, USED).unwrap();
        ring.set_queue_ready(true);
        let device = Device::new().unwrap();
        device.acked_features(Features::offered().0);
        device.update_memory(memory.clone()).unwrap();
        device.attach(Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap())).unwrap();
        Self { device, memory, file, ring, published: 0 }
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        self.memory.memory().write_slice(bytes, GuestAddress(at)).unwrap();
    }

    fn describe(&self, number: u16, (address, bytes, flags, next): Descriptor) {
        let at = DESCRIPTORS + 16 * u64::from(number);
        self.write(at, &address.to_le_bytes());
        self.write(at + 8, &bytes.to_le_bytes());
        self.write(at + 12, &flags.to_le_bytes());
        self.write(at + 14, &next.to_le_bytes());
    }

    /// Makes the chain that begins with this descriptor available.
    fn publish(&mut self, head: u16) {
        self.write(AVAILABLE + 4 + 2 * u64::from(self.published % SIZE), &head.to_le_bytes());
        self.published = self.published.wrapping_add(1);
        self.write(AVAILABLE + 2, &self.published.to_le_bytes());
    }

    /// Has the device work on one buffer of one descriptor.
    fn give(&mut self, queue: u16, descriptor: Descriptor) {
        self.describe(0, descriptor);
        self.publish(0);
        self.work(queue);
        assert_eq!(self.used(), self.published, "it was not given back");
    }

    fn work(&self, queue: u16) {
        self.device.work(queue, &self.ring);
    }

    fn used(&self) -> u16 {
        self.memory.memory().read_obj::<u16>(GuestAddress(USED + 2)).unwrap()
    }

    /// The driver answers with a number.
    fn number(&mut self, number: u32) {
        self.write(0x4000, &number.to_le_bytes());
        self.give(HINTS, (0x4000, 4, 0, 0));
    }

    fn hints(&self) -> Vec<(usize, u64, u64)> {
        let lines = self.device.take_lines().into_iter();
        lines.flat_map(|line| if let Line::Hints { hints, .. } = line { hints } else { Vec::new() }).collect()
    }
}

#[test]
fn hints_count_between_the_id_and_the_end() {
    let mut bench = Bench::new();
    let hint = (MIB, 4096, WRITE, 0);
    bench.give(HINTS, hint);
    let id = bench.device.state().hinting.ask();
    bench.give(HINTS, hint);
    bench.number(id - 1);
    bench.give(HINTS, hint);
    assert_eq!(bench.hints(), [], "none is an answer to this id");
    bench.number(id);
    bench.give(HINTS, hint);
    bench.give(HINTS, (2 * MIB, 8192, WRITE, 0));
    bench.number(0);
    bench.give(HINTS, (3 * MIB, 4096, WRITE, 0));
    assert_eq!(bench.hints(), [(0, MIB, 4096), (0, 2 * MIB, 8192)]);
}

#[test]
fn nonsense_in_the_hint_queue_is_given_back_and_left_out() {
    let mut bench = Bench::new();
    let id = bench.device.state().hinting.ask();
    // Numbers of another size, or from nowhere, are none.
    bench.write(0x4000, &[id.to_le_bytes(); 2].concat());
    for descriptor in [(0x4000, 3, 0, 0), (0x4000, 8, 0, 0), (MEMORY, 4, 0, 0), (u64::MAX - 1, 4, 0, 0)] {
        bench.give(HINTS, descriptor);
        assert_eq!(bench.device.state().hinting.counting(), None);
    }
    bench.number(id);
    for (address, bytes) in [(MEMORY, 4096), (u64::MAX, u32::MAX), (MIB, 0), (MIB + 1, 4096), (MIB, 4095)] {
        bench.give(HINTS, (address, bytes, WRITE, 0));
        assert_eq!(bench.hints(), [], "{bytes} bytes at {address:#x}");
    }
    bench.give(HINTS, (MEMORY - 4096, u32::MAX, WRITE, 0));
    assert_eq!(bench.hints(), [(0, MEMORY - 4096, 4096)]);
}

#[test]
fn a_chain_that_never_ends_does_not_keep_the_device() {
    let mut bench = Bench::new();
    let id = bench.device.state().hinting.ask();
    bench.number(id);
    bench.describe(1, (MIB, 4096, WRITE | NEXT, 1));
    bench.publish(1);
    bench.work(HINTS);
    assert_eq!(bench.used(), bench.published);
    // More buffers than the queue has: nothing can be made of that.
    bench.write(AVAILABLE + 2, &(bench.published + SIZE + 1).to_le_bytes());
    bench.work(HINTS);
    assert_eq!(bench.used(), bench.published);
}

#[test]
fn what_is_given_up_is_gone_unless_it_is_to_be_kept() {
    let mut bench = Bench::new();
    let fill = |bench: &Bench| bench.file.write_all_at(&[7; 4 * 4096], MIB).unwrap();
    let left = |bench: &Bench| {
        let mut bytes = [0; 4 * 4096];
        bench.file.read_exact_at(&mut bytes, MIB).unwrap();
        bytes.chunks(4096).map(|page| page.iter().all(|byte| *byte == 7)).collect::<Vec<_>>()
    };
    let page = (MIB / 4096) as u32;
    // Out of order, twice, one that the guest does not have, and half a number.
    let list: Vec<u8> = [page + 2, page, u32::MAX, page].iter().flat_map(|number| number.to_le_bytes()).collect();
    bench.write(0x4000, &list);

    fill(&bench);
    bench.give(INFLATE, (0x4000, list.len() as u32 - 1, 0, 0));
    assert_eq!(left(&bench), [false, true, false, true]);

    fill(&bench);
    bench.give(REPORTS, (MIB + 4096, 8192, WRITE, 0));
    assert_eq!(left(&bench), [true, false, false, true]);

    fill(&bench);
    bench.device.set_config(12, &[0xaa; 4]).unwrap();
    bench.give(REPORTS, (MIB, 4096, WRITE, 0));
    assert_eq!(left(&bench), [true; 4], "the guest relies on what its free pages hold");

    bench.device.set_config(12, &[0; 4]).unwrap();
    bench.device.keep();
    bench.give(REPORTS, (MIB, 4096, WRITE, 0));
    bench.give(INFLATE, (0x4000, 16, 0, 0));
    assert_eq!(left(&bench), [true; 4]);
}

#[test]
fn a_statistics_buffer_is_kept_until_new_ones_are_wanted() {
    let mut bench = Bench::new();
    let entry = |tag: u16, value: u64| [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat();
    // The last is cut short, and nobody knows the one before.
    let entries = [entry(4, 1000), entry(5, 2000), entry(500, 1), entry(6, 3000)].concat();
    bench.write(0x4000, &entries);
    bench.describe(0, (0x4000, entries.len() as u32 - 1, 0, 0));
    bench.publish(0);
    bench.work(STATISTICS);
    assert_eq!(bench.used(), 0);
    let said = Statistics { free_bytes: Some(1000), total_bytes: Some(2000), ..Statistics::default() };
    assert_eq!(bench.device.statistics(), said);
    assert_eq!(bench.used(), 1);
    bench.publish(0);
    bench.work(STATISTICS);
    bench.device.stop_vring(u32::from(STATISTICS)).unwrap();
    assert_eq!(bench.used(), 2, "QEMU would count it as used when the queue starts again");
}

proptest! {
    /// Whatever a guest puts into its memory: nothing breaks, and nothing outside of it is named.
    #[test]
    fn no_guest_can_confuse_the_device(
        table in prop::collection::vec((0..2 * MEMORY, 0..3 * MIB as u32, 0..8_u16, 0..2 * SIZE), SIZE as usize),
        heads in prop::collection::vec(0..2 * SIZE, 1..8),
        queue in 0..6_u16,
    ) {
        let mut bench = Bench::new();
        let id = bench.device.state().hinting.ask();
        bench.number(id);
        for (number, descriptor) in table.into_iter().enumerate() {
            bench.describe(number as u16, descriptor);
        }
        for head in heads {
            bench.publish(head);
        }
        bench.work(queue);
        for (entry, offset, bytes) in bench.hints() {
            prop_assert!(entry == 0 && bytes > 0 && offset % 4096 == 0 && offset + bytes <= MEMORY);
        }
        prop_assert_eq!(bench.file.metadata().unwrap().len(), MEMORY);
    }
}
