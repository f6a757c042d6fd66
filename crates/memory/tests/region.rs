//! Regions on real files: what is in them, what comes out, what goes in.
use std::{fs::File, io, os::fd::OwnedFd, thread};

use proptest::prelude::*;
use rustix::{fs::OFlags, mount::MountFlags};
use transship_memory::{
    Access, ByteRange, Error, Flaw, PAGE_BYTES, PageCount, PageNumber, PageRange, PageSet, Region, WindowBuffer,
    WindowPages,
};

use crate::common::{
    HUGE, PAGE, contents, file, huge_file, is_read_as_it_is, map, mounts::with_mounts_of_its_own, page_of,
};

fn flaw(result: Result<Region, Error>) -> Option<Flaw> {
    result.err().expect("a refusal").flaw()
}

#[test]
fn what_can_not_be_guest_memory_is_refused() {
    let map = |offset, bytes| Region::map("ram", file(8 * PAGE), ByteRange::sized(offset, bytes), Access::Read);
    assert_eq!(flaw(map(0, 0)), Some(Flaw::Shape));
    assert_eq!(flaw(map(0, PAGE + 1)), Some(Flaw::Shape));
    assert_eq!(flaw(map(512, PAGE)), Some(Flaw::Shape));
    assert_eq!(flaw(map(PAGE, 8 * PAGE)), Some(Flaw::TooShort));
    assert_eq!(flaw(map(PAGE, 0_u64.wrapping_sub(PAGE))), Some(Flaw::Shape));
    assert_eq!(flaw(map(0, 0_u64.wrapping_sub(PAGE))), Some(Flaw::Shape));

    let device = OwnedFd::from(File::open("/dev/zero").unwrap());
    assert_eq!(flaw(Region::map("ram", device, ByteRange::sized(0, PAGE), Access::Read)), Some(Flaw::NotRegular));
    let append = file(PAGE);
    rustix::fs::fcntl_setfl(&append, OFlags::APPEND).unwrap();
    assert_eq!(flaw(Region::map("ram", append, ByteRange::sized(0, PAGE), Access::ReadWrite)), Some(Flaw::Append));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ram");
    std::fs::write(&path, page_of(1)).unwrap();
    let read_only = || OwnedFd::from(File::open(&path).unwrap());
    assert!(matches!(
        Region::map("ram", read_only(), ByteRange::sized(0, PAGE), Access::ReadWrite),
        Err(Error::System { .. })
    ));
    assert!(Region::map("ram", read_only(), ByteRange::sized(0, PAGE), Access::Read).is_ok());
}

#[test]
fn a_region_begins_at_its_offset_in_the_file() {
    let file = file(300 * PAGE);
    let all = map(&file, 300 * PAGE, Access::ReadWrite);
    let part = Region::map("part", file, ByteRange::sized(100 * PAGE, 150 * PAGE), Access::ReadWrite).unwrap();
    assert_eq!((part.name(), part.bytes(), part.pages().get()), ("part", 150 * PAGE, 150));
    assert_eq!(part.backing_page_bytes(), PAGE);

    part.write_pages(WindowPages::new(149, 1), &page_of(7)).unwrap();
    all.write_pages(WindowPages::new(128, 1 << 122 | 1), &[page_of(8), page_of(9)].concat()).unwrap();
    assert_eq!(
        all.data().unwrap().ranges().map(|r| (r.first.get(), r.count.get())).collect::<Vec<_>>(),
        [(128, 1), (249, 2)]
    );
    assert_eq!(
        part.data().unwrap().ranges().map(|r| (r.first.get(), r.count.get())).collect::<Vec<_>>(),
        [(28, 1), (149, 1)]
    );
    part.clear(PageRange::new(28, 1)).unwrap();
    assert_eq!(all.data().unwrap().ranges().map(|r| (r.first.get(), r.count.get())).collect::<Vec<_>>(), [(249, 2)]);
    let mut out = Vec::new();
    all.copy_out(WindowPages::new(249, 0b11), &mut out).unwrap();
    assert!(out == [page_of(7), page_of(9)].concat());
}

#[test]
fn pages_past_the_end_are_errors_everywhere() {
    let region = map(file(200 * PAGE), 200 * PAGE, Access::ReadWrite);
    let out_of_range = |result| matches!(result, Err(Error::OutOfRange { pages, .. }) if pages.get() == 200);
    let mut out = vec![1, 2, 3];
    for (first, bits) in [(128, 1 << 72), (200, 1), (199, 0b10), (u64::MAX, 1), (u64::MAX - 64, u128::MAX)] {
        assert!(out_of_range(region.zero_mask(WindowPages::new(first, bits)).map(drop)), "{first} {bits:#x}");
        assert!(out_of_range(region.copy_out(WindowPages::new(first, bits), &mut out)), "{first} {bits:#x}");
        assert!(out_of_range(
            region.write_pages(WindowPages::new(first, bits), &vec![0; bits.count_ones() as usize * PAGE_BYTES])
        ));
        let mut buffer = WindowBuffer::default();
        assert!(out_of_range(region.read_window(WindowPages::new(first, bits), true, &mut buffer).map(drop)));
    }
    assert_eq!(out, [1, 2, 3]);
    for range in [PageRange::new(199, 2), PageRange::new(201, 0), PageRange::new(u64::MAX, 2)] {
        assert!(out_of_range(region.clear(range)), "{range:?}");
        assert!(out_of_range(region.is_data(range).map(drop)), "{range:?}");
        assert!(out_of_range(region.copy_to(range, &mut [])), "{range:?}");
        region.populate_read(range); // Harmless.
    }
    assert!(region.data().unwrap().is_empty(), "none of this touched the memory");
    assert_eq!(region.zero_mask(WindowPages::new(128, 1 << 71)).unwrap(), 1 << 71, "the last page is none of those");
}

/// A hole in a file on a disk stays one, also when somebody has read it and the kernel keeps the zeros that it made for
/// that.
#[test]
fn what_was_only_read_is_no_data() {
    const PAGES: u64 = 64;
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(PAGES * PAGE).unwrap();
    let region = map(file, PAGES * PAGE, Access::ReadWrite);
    region.write_pages(WindowPages::new(0, 1), &page_of(1)).unwrap();
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    if rustix::fs::fstatfs(region.file().unwrap()).unwrap().f_type == TMPFS_MAGIC {
        return; // there a page that was read is one that holds something
    }
    region.copy_out(WindowPages::new(0, u64::MAX.into()), &mut Vec::new()).unwrap();
    let first: Vec<_> = region.data().unwrap().ranges().map(|range| (range.first.get(), range.count.get())).collect();
    assert_eq!(first, [(0, 1)]);
    assert_eq!(region.data_among(&PageSet::full(PageCount::new(PAGES))).unwrap(), region.data().unwrap());
    assert!(!region.is_data(PageRange::new(0, PAGES)).unwrap());
}

#[test]
fn a_source_is_never_written() {
    let file = file(4 * PAGE);
    let region = map(&file, 4 * PAGE, Access::Read);
    assert_eq!(region.write_pages(WindowPages::new(0, 1), &page_of(1)).unwrap_err().flaw(), Some(Flaw::ReadOnly));
    assert_eq!(region.clear(PageRange::new(0, 1)).unwrap_err().flaw(), Some(Flaw::ReadOnly));
    assert!(region.data().unwrap().is_empty());
}

#[test]
fn bytes_that_are_not_as_many_as_the_pages_are_refused() {
    let region = map(file(4 * PAGE), 4 * PAGE, Access::ReadWrite);
    for len in [0, 4096, 8191, 8193, 12288] {
        let error = region.write_pages(WindowPages::new(0, 0b101), &vec![1; len]).unwrap_err();
        let Error::WrongLength { expected, given, .. } = error else { panic!("{error}") };
        assert_eq!((expected, given), (8192, len));
    }
    assert!(region.data().unwrap().is_empty());
}

#[test]
fn holes_are_told_from_zeros() {
    let region = map(file(1000 * PAGE), 1000 * PAGE, Access::ReadWrite);
    region.write_pages(WindowPages::new(128, 0b111), &vec![0; 3 * PAGE_BYTES]).unwrap();
    region.write_pages(WindowPages::new(999, 1), &page_of(1)).unwrap();
    let mut expected = PageSet::empty(PageCount::new(1000));
    expected.insert(PageRange::new(128, 3));
    expected.insert(PageRange::new(999, 1));
    region.advise_huge();
    region.populate_read(PageRange::new(128, 3));
    assert_eq!(region.data().unwrap(), expected);
    assert_eq!(region.zero_mask(WindowPages::new(128, 0b101)).unwrap(), 0b101);
    assert_eq!(region.zero_mask(WindowPages::new(998, 0b11)).unwrap(), 0b01);
}

/// Runs of data of all lengths between holes, and questions that begin and end anywhere in them.
#[test]
fn only_wanted_pages_are_told_to_be_data() {
    let pages = 6000;
    let region = map(file(pages * PAGE), pages * PAGE, Access::ReadWrite);
    let mut expected = PageSet::empty(PageCount::new(pages));
    let mut at = 3;
    for length in [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 447, 448, 449, 1500] {
        let run = PageRange::new(at, length);
        (run.first.get()..run.end().get())
            .for_each(|page| region.write_pages(WindowPages::new(page, 1), &page_of(page)).unwrap());
        expected.insert(run);
        at = run.end().get() + 1 + length % 5;
    }
    assert_eq!(region.data().unwrap(), expected);
    for (every, count) in [(6000, 6000), (1000, 999), (700, 64), (130, 65), (97, 90), (8, 3), (2, 1)] {
        let mut wanted = PageSet::empty(PageCount::new(pages));
        for first in (0..pages).step_by(every) {
            wanted.insert(PageRange::new(first, count.min(pages - first)));
        }
        let found = region.data_among(&wanted).unwrap();
        wanted.intersect_with(&expected);
        assert_eq!(found, wanted, "{count} of {every}");
    }
    assert!(region.data_among(&PageSet::empty(PageCount::new(pages))).unwrap().is_empty());
}

#[test]
fn a_range_is_data_if_all_of_it_is() {
    for region in [Some(map(file(1024 * PAGE), 1024 * PAGE, Access::ReadWrite)), huge_region()].into_iter().flatten() {
        region.write_pages(WindowPages::new(512, 1 << 3 | 1 << 4), &vec![7; 2 * PAGE_BYTES]).unwrap();
        let data = region.data().unwrap();
        for (first, count) in [(515, 2), (515, 1), (514, 1), (514, 2), (516, 2), (0, 1024), (1023, 1), (512, 512)] {
            let all = (first..first + count).all(|page| data.contains(PageNumber::new(page)));
            assert_eq!(region.is_data(PageRange::new(first, count)).unwrap(), all, "{first} {count}");
        }
        let mut copy = vec![0; 2 * PAGE_BYTES];
        region.copy_to(PageRange::new(515, 2), &mut copy).unwrap();
        assert!(copy == vec![7; 2 * PAGE_BYTES]);
        let mut known = PageSet::empty(PageCount::new(1024));
        assert_eq!(region.new_data(&known).unwrap(), data);
        known.insert(PageRange::new(100, 50));
        known.insert(PageRange::new(514, 2));
        let mut fresh = data.clone();
        fresh.subtract(&known);
        assert_eq!(region.new_data(&known).unwrap(), fresh);
        assert!(region.new_data(&PageSet::full(PageCount::new(1024))).unwrap().is_empty());
        assert_eq!(region.data_among(&PageSet::full(PageCount::new(1024))).unwrap(), data);
        known.intersect_with(&data);
        assert_eq!(region.data_among(&known).unwrap(), known);
        region.clear(PageRange::new(512, 512)).unwrap();
        assert_eq!(region.is_data(PageRange::new(515, 1)).unwrap(), !region.gives_back());
    }
}

/// Two huge pages, where there are some.
fn huge_region() -> Option<Region> {
    Some(map(huge_file(2 * HUGE)?, 2 * HUGE, Access::ReadWrite))
}

/// What a `Vec<u8>` does under the same operations, page for page.
fn follows_its_model(region: &Region, steps: &[(u64, u128, u64, bool)]) -> Result<(), TestCaseError> {
    let pages = region.pages().get();
    let mut model = vec![0_u8; region.bytes() as usize];
    for &(first, bits, seed, clear) in steps {
        let first = first % pages;
        let bits = bits & u128::MAX >> (128 - (pages - first).min(128));
        if clear {
            let count = u64::from(bits.count_ones());
            region.clear(PageRange::new(first, count)).unwrap();
            model[(first * PAGE) as usize..][..(count * PAGE) as usize].fill(0);
            continue;
        }
        let mut bytes = Vec::new();
        for bit in (0..128).filter(|bit| bits >> bit & 1 == 1) {
            // Each third page is zero.
            let page = if (seed + bit) % 3 == 0 { vec![0; PAGE_BYTES] } else { page_of(seed + bit) };
            model[((first + bit) * PAGE) as usize..][..PAGE_BYTES].copy_from_slice(&page);
            bytes.extend(page);
        }
        region.write_pages(WindowPages::new(first, bits), &bytes).unwrap();
        let mut back = Vec::new();
        region.copy_out(WindowPages::new(first, bits), &mut back).unwrap();
        prop_assert!(back == bytes, "what was written comes out");
    }
    let data = region.data().unwrap();
    let page = |number: u64| &model[(number * PAGE) as usize..][..PAGE_BYTES];
    let is_zero = |number: u64| page(number).iter().all(|&byte| byte == 0);
    prop_assert!((0..pages).all(|number| data.contains(PageNumber::new(number)) || is_zero(number)), "holes are zero");
    for first in (0..pages).step_by(128) {
        let all = u128::MAX >> (128 - (pages - first).min(128));
        let zero =
            (0..128).filter(|bit| all >> bit & 1 == 1 && is_zero(first + bit)).fold(0, |mask, bit| mask | 1 << bit);
        prop_assert_eq!(region.zero_mask(WindowPages::new(first, all)).unwrap(), zero);
        let some = 0x5555_aaaa_0000_ffff_1234_5678_9abc_def0 & all;
        prop_assert_eq!(region.zero_mask(WindowPages::new(first, some)).unwrap(), zero & some);
        [all, some, 0].into_iter().for_each(|mask| is_read_as_it_is(region, WindowPages::new(first, mask)));
    }
    prop_assert!(contents(region) == model);
    Ok(())
}

fn steps() -> impl Strategy<Value = Vec<(u64, u128, u64, bool)>> {
    let bits = prop_oneof![any::<u128>(), Just(u128::MAX), Just(1), (0_u32..128).prop_map(|n| u128::MAX >> n)];
    prop::collection::vec((0_u64..5000, bits, 0_u64..1000, any::<bool>()), 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn a_region_is_what_its_model_is(steps in steps(), pages in prop_oneof![Just(1_u64), Just(128), 2_u64..400]) {
        follows_its_model(&map(file(pages * PAGE), pages * PAGE, Access::ReadWrite), &steps)?;
    }
}

/// Steps whose cleared ranges begin and end in huge pages, cover them, or both.
#[test]
fn a_region_of_huge_pages_is_what_its_model_is() {
    let Some(huge) = huge_file(4 * HUGE) else { return };
    let region = map(&huge, 4 * HUGE, Access::ReadWrite);
    assert_eq!(region.backing_page_bytes(), HUGE);
    let write = |first, seed| (first, u128::MAX, seed, false);
    follows_its_model(&region, &[write(0, 1), write(500, 2), write(1024, 3), (510, 0xff, 0, true)]).unwrap();
    region.empty().unwrap();
    assert_eq!(rustix::fs::fstat(&huge).unwrap().st_blocks, 0, "all pages were given back");
    region.write_pages(WindowPages::new(400, u128::MAX), &vec![1; 128 * PAGE_BYTES]).unwrap();
    region.write_pages(WindowPages::new(1500, u128::MAX), &vec![1; 128 * PAGE_BYTES]).unwrap();
    region.clear(PageRange::new(401, 1200)).unwrap();
    let left = |first: u64, count: u64| (first * PAGE) as usize..((first + count) * PAGE) as usize;
    let mut expected = vec![0; (4 * HUGE) as usize];
    expected[left(400, 1)].fill(1);
    expected[left(1601, 27)].fill(1);
    assert!(contents(&region) == expected);
    let expected: Vec<_> = vec![(0, 512), (1536, 512)];
    let data =
        |region: &Region| region.data().unwrap().ranges().map(|r| (r.first.get(), r.count.get())).collect::<Vec<_>>();
    assert_eq!(rustix::fs::fstat(&huge).unwrap().st_blocks as u64 * 512, 4 * HUGE, "a pool gets no page back");
    region.empty().unwrap();
    [100, 1600].into_iter().for_each(|page| region.write_pages(WindowPages::new(page, 1), &page_of(page)).unwrap());
    assert_eq!(data(&region), expected);
    assert_eq!(data(&region), expected, "asking made no page");
    let odd = Region::map("odd", huge, ByteRange::sized(0, HUGE + PAGE), Access::ReadWrite).unwrap();
    assert_eq!(odd.pages(), PageCount::new(513), "a part of a huge page can be the end of a region");
    assert_eq!(data(&odd), [(0, 512)]);
    odd.write_pages(WindowPages::new(512, 1), &page_of(3)).unwrap();
    assert_eq!(data(&odd), [(0, 513)]);
    odd.clear(PageRange::new(0, 513)).unwrap();
    assert_eq!(region.zero_mask(WindowPages::new(384, u128::MAX)).unwrap(), u128::MAX);
}

/// Threads that write all of a region at once, each a part of each window: whole pieces, and every second page.
fn write_from_many_threads(region: &Region) -> Vec<Result<(), Error>> {
    const PARTS: [u128; 4] = [0xffff_ffff << 96, 0x5555_5555 << 64, 0xaaaa_aaaa << 64, (1 << 64) - 1];
    let write = |part: u128| {
        let mut windows = (0..region.pages().get()).step_by(128);
        windows.try_for_each(|first| {
            let pages = (0..128).filter(|bit| part >> bit & 1 == 1);
            let bytes: Vec<u8> = pages.flat_map(|bit| page_of(first + bit)).collect();
            region.write_pages(WindowPages::new(first, part), &bytes)
        })
    };
    thread::scope(|scope| {
        let writing = PARTS.map(|part| scope.spawn(move || write(part)));
        writing.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn many_threads_write_at_once() {
    let region = map(file(8192 * PAGE), 8192 * PAGE, Access::ReadWrite);
    assert!(write_from_many_threads(&region).iter().all(Result::is_ok));
    let expected: Vec<u8> = (0..8192).flat_map(page_of).collect();
    assert!(contents(&region) == expected);
}

/// Some of the threads go through the mapping, where a want of memory is a SIGBUS that nobody survives.
#[test]
fn a_file_system_without_room_is_an_error_for_every_thread() {
    with_mounts_of_its_own(|dir| {
        rustix::mount::mount("none", dir, "tmpfs", MountFlags::empty(), Some(c"size=4m")).unwrap();
        let file = File::options().read(true).write(true).create_new(true).open(dir.join("ram")).unwrap();
        file.set_len(8192 * PAGE).unwrap();
        let region = map(&file, 8192 * PAGE, Access::ReadWrite);
        for failed in write_from_many_threads(&region) {
            let error = failed.unwrap_err();
            let Error::System { source, .. } = &error else { panic!("{error}") };
            assert_eq!(source.kind(), io::ErrorKind::StorageFull, "{error}");
        }
    });
}
