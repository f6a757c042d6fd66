//! Memory that is lent: read by its file from elsewhere, and written by nobody who has it so.
use std::{io, os::fd::OwnedFd};

use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create},
    io::{dup, pwrite},
};
use transship_memory::{
    Access, ByteRange, GuestMemory, Lent, LentFile, PAGE, PAGE_BYTES, PageCount, Region, WindowBuffer, WindowPages,
};

const PAGES: u64 = 300;
/// Where it begins in its file.
const OFFSET: u64 = 2 * PAGE;

/// A region that can be lent, and a part of a larger file.
fn region() -> Region {
    let file = memfd_create("lent", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, OFFSET + PAGES * PAGE).unwrap();
    let part = ByteRange::sized(OFFSET, PAGES * PAGE);
    Region::map("ram", file, part, Access::ReadWrite).unwrap().lendable()
}

fn borrowed(region: &Region) -> LentFile {
    let (file, offset) = region.lent().unwrap();
    LentFile { file: dup(file).unwrap(), offset }
}

fn lent(region: Region) -> Lent {
    Lent::of(vec![Some(borrowed(&region))], &GuestMemory::new(vec![region])).unwrap()
}

fn fill(region: &Region, first: u64, pages: u128, byte: u8) {
    let window = WindowPages::new(first, pages);
    region.write_pages(window, &vec![byte; window.bytes() as usize]).unwrap();
}

/// The pages that are taken with their first bytes, and those that are zero.
fn read(lent: &Lent, wanted: WindowPages, look: bool) -> (Vec<(u128, Vec<u8>)>, u128) {
    let mut taken = Vec::new();
    let zero = lent.read_window(0, wanted, look, &mut WindowBuffer::default(), |pages, bytes| {
        assert_eq!((pages.first, pages.bytes()), (wanted.first, bytes.len() as u64));
        taken.push((pages.mask, bytes.iter().step_by(PAGE_BYTES).copied().collect()));
        Ok(())
    });
    (taken, zero.unwrap())
}

#[test]
fn pages_are_read_where_they_are_and_zeros_are_left_out() {
    let region = region();
    fill(&region, 128, 0b1101_0010, 7);
    fill(&region, 128, 0b0011_0000, 9);
    fill(&region, 128, 0b0000_0010, 0);
    let lent = lent(region);
    let wanted = WindowPages::new(128, 0b0111_0111);
    assert_eq!(read(&lent, wanted, true), (vec![(0b0111_0000, vec![9, 9, 7])], 0b0000_0111));
    assert_eq!(read(&lent, wanted, false), (vec![(0b0111, vec![0; 3]), (0b0111_0000, vec![9, 9, 7])], 0));
    let apart = WindowPages::new(128, 0b1001_0000);
    assert_eq!(read(&lent, apart, true), (vec![(0b0001_0000, vec![9]), (0b1000_0000, vec![7])], 0));
}

/// The mapping would make a page there.
#[test]
fn a_hole_that_is_read_stays_one() {
    let region = region();
    fill(&region, 0, 1, 7);
    let file = borrowed(&region);
    let memory = GuestMemory::new(vec![region]);
    let lent = Lent::of(vec![Some(file)], &memory).unwrap();
    assert_eq!(read(&lent, WindowPages::new(0, u128::MAX), true), (vec![(1, vec![7])], u128::MAX - 1));
    assert_eq!(memory.regions()[0].data().unwrap().count(), PageCount::ONE);
}

/// Zeros as well, and no page beside those that are wanted.
#[test]
fn pages_are_copied_into_a_mapping() {
    let region = region();
    fill(&region, 128, 0b1101_0010, 7);
    let lent = lent(region);
    let into = self::region();
    fill(&into, 128, 0b1111_1111, 9);
    lent.copy_window(0, WindowPages::new(128, 0b0101_0110), &into).unwrap();
    let mut bytes = Vec::new();
    into.copy_out(WindowPages::new(128, 0b1111_1111), &mut bytes).unwrap();
    assert_eq!(bytes.iter().step_by(PAGE_BYTES).copied().collect::<Vec<_>>(), [9, 7, 0, 9, 7, 9, 7, 9]);
    let behind = lent.copy_window(0, WindowPages::new(256, 1 << 44), &into).unwrap_err();
    assert_eq!(behind.kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn who_has_it_lent_can_not_write_to_it() {
    let file = borrowed(&region());
    assert_eq!(pwrite(&file.file, &[1], 0), Err(rustix::io::Errno::BADF));
    assert_eq!(file.offset, OFFSET);
}

#[test]
fn what_is_no_memory_or_too_short_is_refused() {
    let refused = |file: OwnedFd, offset| {
        let memory = GuestMemory::new(vec![region()]);
        Lent::of(vec![Some(LentFile { file, offset })], &memory).unwrap_err().to_string()
    };
    let size = |bytes| {
        let file = memfd_create("other", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, bytes).unwrap();
        file
    };
    assert!(refused(size(PAGES * PAGE - 1), 0).contains("were lent for it, of a file that has 1228799"));
    assert!(refused(size(PAGES * PAGE), PAGE).contains("bytes from 4096 on"));
    assert!(refused(size(2 * PAGES * PAGE), 1).contains("bytes from 1 on"));
    assert!(refused(size(PAGES * PAGE), u64::MAX - 4095).contains("were lent"));
    let (pipe, _end) = rustix::pipe::pipe().unwrap();
    assert!(refused(pipe, 0).contains("no file in memory"));
    let on_disk = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    on_disk.set_len(PAGES * PAGE).unwrap();
    assert!(refused(on_disk.into(), 0).contains("no file in memory"));
}

#[test]
fn a_file_on_a_disk_and_a_region_that_was_not_made_for_it_are_not_lent() {
    let on_disk = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    on_disk.set_len(PAGE).unwrap();
    let part = ByteRange::sized(0, PAGE);
    let region = Region::map("ram", on_disk.into(), part, Access::Read).unwrap().lendable();
    assert!(region.lent().is_none());
    let file = memfd_create("kept", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, PAGE).unwrap();
    assert!(Region::map("ram", file, part, Access::Read).unwrap().lent().is_none());
}

#[test]
fn what_is_cut_short_afterwards_is_an_error() {
    let file = memfd_create("cut", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, PAGES * PAGE).unwrap();
    let theirs = LentFile { file: dup(&file).unwrap(), offset: 0 };
    let lent = Lent::of(vec![Some(theirs)], &GuestMemory::new(vec![region()])).unwrap();
    ftruncate(&file, PAGE / 2).unwrap();
    let read = |region| {
        let wanted = WindowPages::new(0, 1);
        lent.read_window(region, wanted, true, &mut WindowBuffer::default(), |_, _| Ok(())).unwrap_err().kind()
    };
    assert_eq!((read(0), read(1)), (io::ErrorKind::UnexpectedEof, io::ErrorKind::NotFound));
}
