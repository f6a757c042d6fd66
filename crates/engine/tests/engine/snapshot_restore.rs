//! What a file holds is what the guest gets; and what is wrong with a file is told before the guest is touched.
#![allow(clippy::unwrap_used)]
use std::{
    fs::{self, File},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::Path,
};

use crate::common::{self, Op, Scripted, Waiting, contents, kind};
use proptest::{collection::vec, prelude::*};
use rustix::fs::{Mode, OFlags};
use transship_engine::{
    Actor, DescriptorFault, DirectIo, Error, FileIo, FilePlace, FileUri, Format, Misfit, Progress, Report,
    RestoreOptions, SaveOptions, SnapshotInfo, Status, Way,
    guest::{DestinationGuest, GuestError},
    inspect, restore_guest, save_guest,
};

const PAGES: [u64; 2] = [300, 1000];

/// On a disk: what is in memory anyway can't refuse direct I/O.
pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

pub(crate) fn options() -> RestoreOptions {
    RestoreOptions { channels: 2, ..RestoreOptions::default() }
}

pub(crate) fn restore(
    guest: &mut dyn DestinationGuest,
    from: &FileUri,
    options: &RestoreOptions,
) -> (Result<(), Error>, Report) {
    let mut report = Report::default();
    let result = restore_guest(guest, from, options, None, &Progress::new(), &mut report);
    (result, report)
}

/// A guest with these pages, each full of its byte, saved.
fn saved(path: &Path, pages: &[(usize, u64, u8)], way: SaveOptions, offset: u64) -> Scripted {
    let mut guest = Scripted::new(&PAGES, vec![]);
    // Its own is so long that thousands of files would take their time.
    guest.state.truncate(5000);
    for &(region, page, byte) in pages {
        common::apply(&guest.memory, &Op::Fill { region, page, byte }, &mut guest.script.lock().unwrap().history);
    }
    let to = FileUri { offset, ..FileUri::path(path) };
    save_guest(&mut guest, None, &to, &way, &Progress::new(), &mut Report::default()).unwrap();
    guest
}

fn pages() -> impl Strategy<Value = Vec<(usize, u64, u8)>> {
    vec((0..2usize, 0..1000u64, prop_oneof![Just(0u8), any::<u8>()]), 0..300)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_guest_gets_what_was_saved(
        pages in pages(),
        format in prop_oneof![2 => Just(Format::MappedRam), 1 => Just(Format::Stream)],
        direct_io in prop_oneof![Just(DirectIo::Auto), Just(DirectIo::Off), Just(DirectIo::On)],
        io in prop_oneof![Just(FileIo::Auto), Just(FileIo::Plain)],
        channels in 1..5u8,
        offset in prop_oneof![Just(0), 1..100_000u64],
        run in prop_oneof![Just(None), Just(Some(false)), Just(Some(true))],
        kind in kind(),
    ) {
        let folder = folder();
        let path = folder.path().join("a");
        let before = saved(&path, &pages, SaveOptions { way: Way::Paused, format, ..SaveOptions::default() }, offset);
        let mut guest = Waiting::with_memory(&PAGES, kind);
        let from = FileUri { offset, ..FileUri::path(&path) };
        let (result, report) = restore(&mut guest, &from, &RestoreOptions { channels, direct_io, io, run, identities: None });
        result.unwrap();
        prop_assert!(guest.has_kept(kind));
        prop_assert!(contents(&guest.memory) == contents(&before.memory));
        prop_assert!(guest.state == before.state);
        prop_assert_eq!(guest.started, Some(run.unwrap_or(true)));
        prop_assert_eq!(report.pages.normal, inspect(&from, None, true).unwrap().blocks.iter().map(|b| b.stored).sum::<u64>());
        let is_direct = report.file.unwrap().direct_io;
        match (direct_io, format) {
            // Where it is in the page cache, it is read from there, and it was written just now.
            (DirectIo::Auto, Format::Stream) => {}
            (wish, _) => prop_assert_eq!(is_direct, wish != DirectIo::Off),
        }
    }

    /// Whatever is done to a file, it is refused and the guest was not touched, or it is restored.
    #[test]
    fn a_mutated_file_is_refused_before_the_guest_is_touched(
        pages in pages(),
        format in prop_oneof![2 => Just(Format::MappedRam), 1 => Just(Format::Stream)],
        mutations in vec((any::<prop::sample::Index>(), 0..6u8, any::<u64>()), 1..4),
    ) {
        let folder = folder();
        let path = folder.path().join("a");
        saved(&path, &pages, SaveOptions { way: Way::Paused, format, ..SaveOptions::default() }, 0);
        let places = structure(&inspect(&FileUri::path(&path), None, true).unwrap());
        let mut bytes = fs::read(&path).unwrap();
        for (index, how, value) in mutations {
            // Where something means something, half of the time.
            let at = if value % 2 == 0 { places[index.index(places.len())] } else { index.index(bytes.len()) };
            mutate(&mut bytes, at, how, value);
        }
        fs::write(&path, &bytes).unwrap();
        let mut guest = Waiting::new(&PAGES);
        let before = contents(&guest.memory);
        let from = FileUri::path(&path);
        let inspected = inspect(&from, None, true);
        let (result, _) = restore(&mut guest, &from, &options());
        if let Err(error) = result {
            prop_assert!(guest.started.is_none());
            prop_assert!(error.to_string().contains(&*path.to_string_lossy()), "{}", error);
            // A stream is read while it is restored.
            prop_assert!(format == Format::Stream || contents(&guest.memory) == before, "{}", error);
        } else {
            prop_assert!(inspected.is_ok(), "what can be restored can be shown: {:?}", inspected.err());
        }
    }
}

/// Places of a file that mean something: its head, and where blocks and device sections begin.
fn structure(info: &SnapshotInfo) -> Vec<usize> {
    let blocks = info.blocks.iter().flat_map(|block| {
        let bitmap = block.bitmap_offset.unwrap_or(0);
        let end = block.pages_offset.map_or(0, |at| at + block.bytes);
        [bitmap.saturating_sub(60)..bitmap + 160, end..end + 60]
    });
    let sections = info.sections.iter().map(|section| section.offset..section.offset + 40);
    let all = blocks.chain(sections).chain([0..100, info.bytes.saturating_sub(200)..info.bytes]);
    all.flatten().filter(|at| *at < info.bytes).map(|at| at as usize).collect()
}

fn mutate(bytes: &mut Vec<u8>, at: usize, how: u8, value: u64) {
    let at = at.min(bytes.len().saturating_sub(1));
    match how {
        0 if !bytes.is_empty() => bytes[at] ^= 1 << (value % 8),
        1 if !bytes.is_empty() => bytes[at] = value as u8,
        2 => bytes.truncate(at),
        3 => bytes.extend(std::iter::repeat_n(value as u8, (value % 5000) as usize)),
        4 => {
            let end = bytes.len().min(at + 8);
            bytes[at..end].copy_from_slice(&value.to_be_bytes()[..end - at]);
        }
        _ => {
            let end = bytes.len().min(at + (value % 64) as usize);
            bytes.drain(at..end);
        }
    }
}

#[test]
fn a_cut_file_is_never_taken_for_a_whole_one() {
    let folder = folder();
    for format in [Format::MappedRam, Format::Stream] {
        let path = folder.path().join("a");
        saved(&path, &[(0, 3, 7), (1, 999, 8)], SaveOptions { way: Way::Paused, format, ..SaveOptions::default() }, 0);
        let info = inspect(&FileUri::path(&path), None, true).unwrap();
        let mut cuts = structure(&info);
        cuts.extend((0..info.bytes as usize).step_by(60_013));
        // From the end on, so that each is the one before, cut again.
        cuts.sort_unstable();
        for cut in cuts.into_iter().rev() {
            fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(cut as u64).unwrap();
            let error = inspect(&FileUri::path(&path), None, true).expect_err("it was cut");
            let mut guest = Waiting::new(&PAGES);
            let (result, report) = restore(&mut guest, &FileUri::path(&path), &options());
            assert!(result.is_err() && guest.started.is_none(), "cut at {cut}: {error}");
            assert_eq!(report.status, Status::Failed);
        }
    }
}

/// Changes bytes of a saved file, and says how it is then refused.
fn refusal(change: impl FnOnce(&File, &SnapshotInfo)) -> String {
    let folder = folder();
    let path = folder.path().join("a");
    let way = SaveOptions { way: Way::Paused, ..SaveOptions::default() };
    saved(&path, &[(0, 3, 7), (1, 999, 8)], way, 0);
    let from = FileUri::path(&path);
    let info = inspect(&from, None, true).unwrap();
    change(&fs::OpenOptions::new().write(true).open(&path).unwrap(), &info);
    let mut guest = Waiting::new(&PAGES);
    let before = contents(&guest.memory);
    let error = restore(&mut guest, &from, &options()).0.expect_err("it is broken");
    assert_eq!(error.actor(), Actor::File, "{error}");
    let error = error.to_string();
    assert!(contents(&guest.memory) == before && guest.started.is_none(), "{error}");
    assert!(error.starts_with(&format!("{}: ", path.display())), "{error}");
    error
}

#[test]
fn what_is_wrong_is_told_by_field_and_offset() {
    // Behind the name and the length.
    let header = |info: &SnapshotInfo, block: usize| {
        let name = format!("\u{7}{}", info.blocks[block].name);
        let bytes = fs::read(&info.file).unwrap();
        bytes.windows(8).position(|bytes| bytes == name.as_bytes()).unwrap() as u64 + 16
    };
    let end = |info: &SnapshotInfo| info.offset + info.bytes;
    let error = refusal(|file, info| file.write_all_at(b"x", end(info)).unwrap());
    assert!(error.contains("the 1 bytes after its end at offset"), "{error}");
    let error = refusal(|file, info| {
        let overlapping = info.blocks[0].bitmap_offset.unwrap();
        file.write_all_at(&overlapping.to_be_bytes(), header(info, 1) + 12).unwrap();
    });
    assert!(error.contains("bitmap offset of \"region1\"") && error.contains("overlaps"), "{error}");
    let error = refusal(|file, info| file.write_all_at(&(1u64 << 40).to_be_bytes(), header(info, 0) + 20).unwrap());
    assert!(error.contains("pages offset of \"region0\"") && error.contains("beyond the end of the file"), "{error}");
    let error =
        refusal(|file, info| file.write_all_at(&[0xff; 8], info.blocks[0].bitmap_offset.unwrap() + 32).unwrap());
    assert!(error.contains("bitmap of \"region0\" at offset") && error.contains("the block has 300 pages"), "{error}");
    let error = refusal(|file, _| file.write_all_at(b"QEVX", 0).unwrap());
    assert!(error.contains("stream magic at offset 0"), "{error}");
    let error = refusal(|file, info| file.set_len(end(info) - 1).unwrap());
    assert!(error.contains("transship/device-state") || error.contains("offset"), "{error}");
}

#[test]
fn a_file_of_another_guest_is_refused() {
    let folder = folder();
    let path = folder.path().join("a");
    saved(&path, &[(0, 3, 7)], SaveOptions { way: Way::Paused, ..SaveOptions::default() }, 0);
    for pages in [&[300, 1001][..], &[300]] {
        let mut guest = Waiting::new(pages);
        let before = contents(&guest.memory);
        let error = restore(&mut guest, &FileUri::path(&path), &options()).0.unwrap_err();
        assert_eq!(error.misfit(), Some(Misfit::Memory), "{error}");
        assert!(contents(&guest.memory) == before);
    }
}

#[test]
fn a_vmm_that_does_not_take_the_state_is_not_started() {
    let folder = folder();
    let path = folder.path().join("a");
    saved(&path, &[(0, 3, 7)], SaveOptions { way: Way::Paused, ..SaveOptions::default() }, 0);
    let mut guest = Waiting { refuses_state: true, ..Waiting::new(&PAGES) };
    let error = restore(&mut guest, &FileUri::path(&path), &options()).0.unwrap_err();
    assert!(matches!(error, Error::Guest(GuestError::Unfit(_))) && guest.started.is_none(), "{error}");
}

#[test]
fn a_cancelled_restore_starts_nothing() {
    let folder = folder();
    let path = folder.path().join("a");
    for format in [Format::MappedRam, Format::Stream] {
        saved(&path, &[(0, 3, 7)], SaveOptions { way: Way::Paused, format, ..SaveOptions::default() }, 0);
        let mut guest = Waiting::new(&PAGES);
        let (progress, mut report) = (Progress::new(), Report::default());
        progress.cancel();
        let result = restore_guest(&mut guest, &FileUri::path(&path), &options(), None, &progress, &mut report);
        assert!(result.is_err() && guest.started.is_none());
        assert_eq!(report.status, Status::Cancelled);
    }
}

/// As if it had come through an exec.
fn passed(path: &Path, flags: OFlags) -> OwnedFd {
    let file = rustix::fs::open(path, flags, Mode::empty()).unwrap();
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
    file
}

#[test]
fn descriptors_that_were_passed_are_read() {
    let folder = folder();
    let path = folder.path().join("a");
    let before =
        saved(&path, &[(0, 3, 7), (1, 999, 8)], SaveOptions { way: Way::Paused, ..SaveOptions::default() }, 5000);
    let (plain, direct) = (passed(&path, OFlags::RDONLY), passed(&path, OFlags::RDONLY | OFlags::DIRECT));
    let both = passed(&path, OFlags::RDWR);
    let (plain_number, direct_number) = (plain.as_raw_fd(), direct.as_raw_fd());
    for (place, direct_io, expected) in [
        (FilePlace::Fd(plain_number), DirectIo::Auto, Ok(false)),
        (FilePlace::Fd(plain_number), DirectIo::On, Err(Misfit::DirectIo)),
        (FilePlace::Fd(direct_number), DirectIo::Auto, Err(Misfit::Descriptor(DescriptorFault::Direct))),
        (FilePlace::Fd(both.as_raw_fd()), DirectIo::Auto, Err(Misfit::Descriptor(DescriptorFault::Mode))),
        (FilePlace::FdSet(direct_number, plain_number), DirectIo::On, Ok(true)),
        (FilePlace::FdSet(plain_number, direct_number), DirectIo::Off, Ok(false)),
    ] {
        let mut guest = Waiting::new(&PAGES);
        let from = FileUri { place: place.clone(), offset: 5000 };
        let (result, report) = restore(&mut guest, &from, &RestoreOptions { direct_io, ..options() });
        match (result, expected) {
            (Ok(()), Ok(direct)) => {
                assert_eq!(report.file.unwrap().direct_io, direct, "{place:?}");
                assert!(contents(&guest.memory) == contents(&before.memory));
            }
            (Err(error), Err(misfit)) => assert_eq!(error.misfit(), Some(misfit), "{place:?}: {error}"),
            (other, _) => panic!("{place:?} with {direct_io:?}: {other:?}"),
        }
    }
}
