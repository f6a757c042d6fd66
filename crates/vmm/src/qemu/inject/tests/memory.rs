//! Memory that a process is made to give back.
use std::{fs::File, os::unix::fs::FileExt};

use super::{super::give_back, Work, read_byte};

const PAGE: u64 = 4096;
const PAGES: u64 = 16;

/// Fills pages of its own, says where they are, and waits.
pub(super) fn hold_pages() {
    let bytes = (PAGES * PAGE) as usize;
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at a place that the kernel picks, of which all bytes are ours to write.
    let start = unsafe {
        let start = libc::mmap(std::ptr::null_mut(), bytes, prot, flags, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        start.cast::<u8>().write_bytes(7, bytes);
        start
    };
    println!("pages {}", start.addr());
    assert_eq!(read_byte(), b'e');
}

#[test]
fn a_process_gives_back_what_it_is_made_to_and_nothing_else() {
    let mut work = Work::start("memory");
    let start: u64 = work.expect("pages ").parse().unwrap();
    work.wait_in(libc::SYS_read);
    let memory = File::open(format!("/proc/{}/mem", work.pid())).unwrap();
    let pages = || {
        let mut bytes = vec![0; (PAGES * PAGE) as usize];
        memory.read_exact_at(&mut bytes, start).unwrap();
        bytes.chunks(PAGE as usize).map(|page| page.iter().map(|byte| u64::from(*byte)).sum()).collect::<Vec<u64>>()
    };
    let full = 7 * PAGE;
    assert_eq!(pages(), vec![full; PAGES as usize]);
    give_back(work.pid(), work.thread, &[(start + PAGE, 2 * PAGE), (start + 9 * PAGE, PAGE)]).unwrap();
    let expected: Vec<u64> = (0..PAGES).map(|page| if [1, 2, 9].contains(&page) { 0 } else { full }).collect();
    assert_eq!(pages(), expected);
    // The first piece that can't be given back ends it.
    let error = give_back(work.pid(), work.thread, &[(start + 1, PAGE), (start, PAGE)]).unwrap_err().to_string();
    assert!(error.contains("give its memory back") && error.contains("Invalid argument"), "{error}");
    assert_eq!(pages(), expected);
    work.inject(1);
    work.finish();
}
