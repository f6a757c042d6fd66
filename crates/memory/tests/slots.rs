//! Room that two processes share: filled on one side, emptied on the other.
use std::{io, os::fd::AsFd, sync::Arc};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use transship_memory::{
    Access, ByteRange, InProcess, LentSlots, PAGE, PAGE_BYTES, Process, Region, WindowPages, make_slots,
};

use crate::common::process::Guest;

const PAGES: u64 = 300;
const WINDOW_BYTES: u64 = 128 * PAGE;

fn of_a_file() -> Region {
    let file = memfd_create("slots", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, PAGES * PAGE).unwrap();
    Region::map("ram", file, ByteRange::sized(0, PAGES * PAGE), Access::ReadWrite).unwrap()
}

fn of_a_process(guest: &Guest) -> Region {
    let process = Arc::new(Process::open(std::process::id() as i32, Access::ReadWrite).unwrap());
    let memory = InProcess { process, address: guest.area().address, bytes: guest.bytes, page_bytes: PAGE, file: None };
    Region::in_process("ram", memory, Access::ReadWrite).unwrap()
}

fn bytes_of(region: &Region, pages: WindowPages) -> Vec<u8> {
    let mut bytes = Vec::new();
    region.copy_out(pages, &mut bytes).unwrap();
    bytes.iter().step_by(PAGE_BYTES).copied().collect()
}

#[test]
fn pages_go_from_one_memory_to_another_by_a_slot() {
    let (here, there) = (Guest::private(PAGES * PAGE, false), Guest::private(PAGES * PAGE, false));
    let source = of_a_process(&here);
    let (file, mut rooms) = make_slots(3).unwrap();
    let slots = LentSlots::of(file.as_fd(), 3).unwrap();
    assert_eq!((slots.count(), rooms.len()), (3, 3));
    let wanted = WindowPages::new(128, 0b1111_0110);
    for (into, slot) in [(of_a_process(&there), 2), (of_a_file(), 0)] {
        // The second is found to be zero, and so are the last two.
        let filled: Vec<u8> = [1, 0, 3, 4, 5, 0].map(|byte| vec![byte; PAGE_BYTES]).concat();
        source.write_pages(wanted, &filled).unwrap();
        let present = source.read_window(wanted, true, &mut rooms[slot]).unwrap().present();
        assert_eq!(present.mask, 0b0111_0010);
        into.write_pages(WindowPages::new(128, 0xff), &[9; 8 * PAGE_BYTES]).unwrap();
        slots.write_window(slot, present, &into).unwrap();
        assert_eq!(bytes_of(&into, WindowPages::new(128, 0xff)), [9, 1, 9, 9, 3, 4, 5, 9]);
        let refused = |slot, pages| slots.write_window(slot, pages, &into).unwrap_err().kind();
        assert_eq!(refused(3, present), io::ErrorKind::InvalidInput);
        assert_eq!(refused(0, WindowPages::new(256, 1 << 44)), io::ErrorKind::InvalidInput);
    }
}

/// Who has them lent could not be sure of his mapping otherwise.
#[test]
fn slots_that_could_become_shorter_are_refused() {
    let file = memfd_create("own", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, 2 * WINDOW_BYTES).unwrap();
    let refused = |count| LentSlots::of(file.as_fd(), count).unwrap_err().to_string();
    assert!(refused(2).contains("could be cut short"));
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    assert!(LentSlots::of(file.as_fd(), 2).is_ok());
    assert!(refused(3).contains("too short"));
    let (pipe, _end) = rustix::pipe::pipe().unwrap();
    assert!(LentSlots::of(pipe.as_fd(), 1).unwrap_err().to_string().contains("no file in memory"));
}

/// They are for one writer: whoever has them lent only reads.
#[test]
fn slots_are_written_by_nobody_else() {
    let (file, _rooms) = make_slots(1).unwrap();
    assert_eq!(rustix::io::pwrite(&file, &[1], 0), Err(rustix::io::Errno::PERM));
    assert_eq!(ftruncate(&file, 0), Err(rustix::io::Errno::PERM));
}
