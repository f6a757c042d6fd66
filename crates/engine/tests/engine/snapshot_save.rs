//! Whatever a guest writes, zeroes and frees while it is saved, the file holds what it held when it was stopped.
#![allow(clippy::unwrap_used)]
use std::{
    fs::{self, File},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::{FileExt, MetadataExt, PermissionsExt},
    },
    path::Path,
    time::Duration,
};

use crate::common::{
    self, Op, Scripted, contents, kind,
    ops::{late, life, op},
    snapshot::Snapshot,
};
use proptest::{collection::vec, prelude::*};
use rustix::fs::{Mode, OFlags};
use transship_engine::{
    DirectIo, Error, FilePlace, FileUri, Format, Misfit, Progress, Report, SaveOptions, Status, Then, Way,
    guest::GuestError, save_guest,
};
use transship_memory::{ByteRange, Freeing, PAGE_BYTES, PageCount, PageRange, WindowPages};

/// Small enough to be quick, with a last window that is not whole.
const PAGES: [u64; 2] = [300, 1000];

/// On a disk: what is in memory anyway can't refuse direct I/O.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Rounds go on until nothing is left, so that the whole script is done before the stop.
fn patient() -> SaveOptions {
    SaveOptions { downtime: Duration::from_nanos(1), max_rounds: 1000, channels: 2, ..SaveOptions::default() }
}

fn save(guest: &mut Scripted, to: &FileUri, options: &SaveOptions) -> (Result<(), Error>, Report) {
    let mut report = Report::default();
    let result = save_guest(guest, None, to, options, &Progress::new(), &mut report);
    (result, report)
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_file_holds_what_the_guest_held(
        before in vec(op(), 0..300),
        life in life(40),
        late in late(),
        channels in 1..5u8,
        way in prop_oneof![3 => Just(Way::Live), 1 => Just(Way::Paused)],
        then in prop_oneof![Just(Then::Resume), Just(Then::StayStopped)],
        format in prop_oneof![
            3 => Just(Format::MappedRam), 1 => Just(Format::Stream), 1 => Just(Format::Raw), 1 => Just(Format::Libvirt),
            1 => Just(Format::LibvirtSparse),
        ],
        direct_io in prop_oneof![Just(DirectIo::Auto), Just(DirectIo::Off)],
        offset in prop_oneof![Just(0), 1..100_000u64],
        kind in kind(),
        freeing in prop_oneof![Just(Freeing::Possible), Just(Freeing::Announced)],
    ) {
        let folder = folder();
        let mut guest = Scripted { freeing, ..Scripted::living(&PAGES, life).with_memory(kind) };
        // Nobody looks twice at a guest that stood from the beginning.
        guest.script.lock().unwrap().late = if way == Way::Live { late } else { vec![] };
        for op in &before {
            common::apply(&guest.memory, op, &mut guest.script.lock().unwrap().history);
        }
        let path = folder.path().join("a");
        // Only a file of a stream can begin somewhere in another one.
        let offset = if matches!(format, Format::MappedRam | Format::Stream) { offset } else { 0 };
        let uri = FileUri { offset, ..FileUri::path(&path) };
        let options = SaveOptions { way, then, channels, direct_io, format, ..patient() };
        let (result, report) = save(&mut guest, &uri, &options);
        result.unwrap();
        let snapshot = match format {
            Format::Raw => Snapshot::read_folder(&path),
            Format::Libvirt | Format::LibvirtSparse => Snapshot::read_image(&path),
            _ => Snapshot::read(&path, offset),
        };
        let script = guest.script.lock().unwrap();
        prop_assert_eq!(match freeing {
            Freeing::Announced => script.history.wrong_for_a_balloon(&guest.memory, &snapshot.memory),
            _ => script.history.wrong(&guest.memory, &snapshot.memory),
        }, vec![]);
        drop(script);
        prop_assert!(snapshot.opaque() == guest.state);
        prop_assert_eq!(guest.script.lock().unwrap().resumed, Some(then == Then::Resume));
        let file = report.file.unwrap();
        prop_assert_eq!(file.pages_stored, snapshot.stored);
        prop_assert_eq!(names(folder.path()), ["a"]);
    }
}

fn fill(region: usize, page: u64, byte: u8) -> Op {
    Op::Fill { region, page, byte }
}

/// A guest with something in its memory, and what it does after each scan.
fn guest(before: &[Op], lists: Vec<Vec<Op>>) -> Scripted {
    let guest = Scripted::new(&PAGES, lists);
    for op in before {
        common::apply(&guest.memory, op, &mut guest.script.lock().unwrap().history);
    }
    guest
}

#[test]
fn pages_are_counted_and_stale_ones_take_no_disk() {
    let folder = folder();
    let path = folder.path().join("a");
    let full: Vec<Op> = (0..1000).map(|page| fill(1, page, 7)).collect();
    // After the first round was written 900 of the pages are zeroed, or freed.
    let zeroed: Vec<Op> = (0..100).map(|page| fill(1, page, 0)).collect();
    let mut guest = guest(&full, vec![vec![], [zeroed, vec![Op::Free { region: 1, first: 100, count: 800 }]].concat()]);
    let (result, report) = save(&mut guest, &FileUri::path(&path), &patient());
    result.unwrap();
    let file = report.file.unwrap();
    assert_eq!((file.pages_stored, file.pages_freed), (100, 900), "{:?}", report.pages);
    assert_eq!((report.pages.normal, report.pages.zero), (1000, 100));
    // The device state of 2.8 MB is in the file, and the memory with holes from one MiB to the next.
    let allocated = fs::metadata(&path).unwrap().blocks() * 512;
    assert!(allocated < 100 * 4096 + 3_500_000, "{allocated}");
    assert_eq!(file.allocated, allocated);
    assert!(Snapshot::read(&path, 0).memory == contents(&guest.memory));
}

/// The second list is done when the last region is scanned, and the other one has been looked at.
#[test]
fn what_is_given_back_after_the_look_stays_given_back() {
    for (freeing, format) in [
        (Freeing::Possible, Format::MappedRam),
        (Freeing::Possible, Format::Stream),
        (Freeing::Announced, Format::MappedRam),
        (Freeing::Announced, Format::Stream),
    ] {
        let (folder, gone) = (folder(), PageRange::new(130, 100));
        let all = |byte| (0..250).map(|page| fill(0, page, byte)).collect::<Vec<_>>();
        let free = Op::Free { region: 0, first: gone.first.get(), count: gone.count.get() };
        let mut guest = Scripted { freeing, ..guest(&all(7), vec![all(8), vec![free]]) };
        let path = folder.path().join("snapshot");
        let (result, report) =
            save(&mut guest, &FileUri::path(&path), &SaveOptions { way: Way::Live, format, ..patient() });
        result.unwrap();
        assert_eq!((report.pages.normal, report.pages.zero), (250 + 150, 100), "{format}");
        let region = &guest.memory.regions()[0];
        assert!(gone.iter().all(|page| !region.is_data(page.run(PageCount::ONE)).unwrap()), "{format}");
    }
}

#[test]
fn a_guest_that_stood_still_stands_still_in_the_file_and_out_of_it() {
    let folder = folder();
    for (way, format) in [(Way::Live, Format::MappedRam), (Way::Paused, Format::Stream)] {
        let path = folder.path().join("a");
        let mut guest = guest(&[fill(0, 3, 7)], vec![]);
        guest.script.lock().unwrap().stopped = true;
        let (result, report) = save(&mut guest, &FileUri::path(&path), &SaveOptions { way, format, ..patient() });
        result.unwrap();
        let snapshot = Snapshot::read(&path, 0);
        assert!(!snapshot.runs() && snapshot.memory == contents(&guest.memory));
        assert_eq!(guest.script.lock().unwrap().resumed, Some(false));
        assert_eq!((report.downtime_ms, report.status), (0.0, Status::Completed));
    }
}

/// It fails as it is to.
fn fails(guest: &mut Scripted, to: &FileUri, options: &SaveOptions, is_it: impl Fn(&Error) -> bool) -> Report {
    let (result, report) = save(guest, to, options);
    let error = result.expect_err("it can't be saved");
    assert!(is_it(&error), "{error}");
    report
}

fn misfit(misfit: Misfit) -> impl Fn(&Error) -> bool {
    move |error| error.misfit() == Some(misfit)
}

/// It says that it can't save its state.
fn is_the_guests(error: &Error) -> bool {
    matches!(error, Error::Guest(GuestError::Unfit(_)))
}

fn is_not_found(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound)
}

#[test]
fn a_failure_leaves_the_guest_running_and_the_old_file_whole() {
    let folder = folder();
    let path = folder.path().join("a");
    fs::write(&path, b"old").unwrap();
    for format in [Format::MappedRam, Format::Stream] {
        for (way, then) in [(Way::Live, Then::Resume), (Way::Paused, Then::StayStopped)] {
            let mut guest = Scripted { broken_state: true, ..guest(&[fill(0, 3, 7)], vec![]) };
            let options = SaveOptions { way, then, format, ..patient() };
            let report = fails(&mut guest, &FileUri::path(&path), &options, is_the_guests);
            assert_eq!(guest.script.lock().unwrap().resumed, Some(true));
            assert_eq!(report.status, Status::Failed);
            assert_eq!((names(folder.path()), fs::read(&path).unwrap()), (vec!["a".to_owned()], b"old".to_vec()));
            // And the next attempt works.
            guest.broken_state = false;
            *guest.script.lock().unwrap() = Scripted::new(&PAGES, vec![]).script.lock().unwrap().renewed();
            save(&mut guest, &FileUri::path(folder.path().join("b")), &options).0.unwrap();
            fs::remove_file(folder.path().join("b")).unwrap();
        }
    }
}

/// A guest that cancels its own save, in the round that begins with its last list.
#[test]
fn a_cancelled_save_leaves_nothing() {
    let folder = folder();
    let path = folder.path().join("a");
    fs::write(&path, b"old").unwrap();
    for format in [Format::MappedRam, Format::Stream] {
        let mut guest = guest(&[fill(0, 3, 7)], vec![vec![fill(0, 4, 7)]; 5]);
        let progress = Progress::new();
        progress.cancel();
        let options = SaveOptions { format, ..patient() };
        let mut report = Report::default();
        let error = save_guest(&mut guest, None, &FileUri::path(&path), &options, &progress, &mut report).unwrap_err();
        assert!(matches!(error, Error::Cancelled(_)), "{error}");
        assert_eq!(report.status, Status::Cancelled);
        assert_eq!((names(folder.path()), fs::read(&path).unwrap()), (vec!["a".to_owned()], b"old".to_vec()));
        assert!(!guest.script.lock().unwrap().stopped, "it need not stand still to be left alone");
    }
}

#[test]
fn a_guest_that_outruns_the_disk_gets_a_verdict() {
    let folder = folder();
    let busy: Vec<Op> = (0..1000).map(|page| fill(1, page, 7)).collect();
    let mut guest = guest(&busy, vec![busy.clone(); 40]);
    let options = SaveOptions { max_rounds: 4, ..patient() };
    let report = fails(&mut guest, &FileUri::path(folder.path().join("a")), &options, |error| {
        matches!(error, Error::NotConverging(_))
    });
    assert_eq!((report.status, report.rounds.len()), (Status::NotConverging, 4));
    assert!(!guest.script.lock().unwrap().stopped);
    assert!(names(folder.path()).is_empty());
}

#[test]
fn a_second_save_to_the_same_name_is_refused_and_what_a_dead_one_left_is_removed() {
    let folder = folder();
    let path = folder.path().join("a");
    let part = folder.path().join(".a.transship-part");
    let left = File::create(&part).unwrap();
    left.write_all_at(&[1; 10_000_000], 0).unwrap();
    rustix::fs::flock(&left, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let mut guest = guest(&[fill(0, 3, 7)], vec![]);
    fails(&mut guest, &FileUri::path(&path), &patient(), misfit(Misfit::Busy));
    assert_eq!(names(folder.path()), [".a.transship-part"]);
    // Its lock goes with it.
    drop(left);
    save(&mut guest, &FileUri::path(&path), &patient()).0.unwrap();
    assert_eq!(names(folder.path()), ["a"]);
    assert!(Snapshot::read(&path, 0).memory == contents(&guest.memory));
}

#[test]
fn the_file_that_is_replaced_keeps_its_mode_its_head_and_the_link_to_it() {
    let folder = folder();
    let (path, link) = (folder.path().join("a"), folder.path().join("link"));
    fs::write(&path, [b"head".as_slice(), &[9; 3_000_000]].concat()).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::symlink("a", &link).unwrap();
    let mut guest = guest(&[fill(0, 3, 7)], vec![]);
    let uri = FileUri { offset: 2_000_000, ..FileUri::path(&link) };
    save(&mut guest, &uri, &patient()).0.unwrap();
    let bytes = fs::read(&path).unwrap();
    assert!(bytes.starts_with(b"head") && bytes[4..2_000_000].iter().all(|&byte| byte == 9));
    assert_eq!(bytes[2_000_000..2_000_004], *b"QEVM");
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(Snapshot::read(&path, 2_000_000).memory == contents(&guest.memory));
    assert_eq!(names(folder.path()), ["a", "link"]);
    // A new one is nobody else's business.
    let new = folder.path().join("new");
    save(&mut guest, &FileUri::path(&new), &patient()).0.unwrap();
    assert_eq!(fs::metadata(&new).unwrap().mode() & 0o7777, 0o600);
}

#[test]
fn what_is_no_file_is_refused() {
    let folder = folder();
    let mut guest = guest(&[fill(0, 3, 7)], vec![]);
    std::os::unix::fs::symlink("nowhere", folder.path().join("dangling")).unwrap();
    fails(&mut guest, &FileUri::path(folder.path().join(".")), &patient(), misfit(Misfit::NotRegular));
    for name in ["no/such/folder", "dangling"] {
        fails(&mut guest, &FileUri::path(folder.path().join(name)), &patient(), is_not_found);
    }
    assert_eq!(names(folder.path()), ["dangling"]);
}

/// As a manager would: opened by somebody else, and known by their numbers only.
fn passed(path: &Path, flags: OFlags) -> OwnedFd {
    let file = rustix::fs::open(path, flags | OFlags::CREATE, Mode::from_raw_mode(0o600)).unwrap();
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
    file
}

#[test]
fn passed_descriptors_are_written_in_place() {
    let folder = folder();
    let path = folder.path().join("a");
    let (plain, direct) = (passed(&path, OFlags::WRONLY), passed(&path, OFlags::WRONLY | OFlags::DIRECT));
    for (place, direct_io, is_direct) in [
        (FilePlace::FdSet(plain.as_raw_fd(), direct.as_raw_fd()), DirectIo::On, true),
        (FilePlace::FdSet(direct.as_raw_fd(), plain.as_raw_fd()), DirectIo::Off, false),
        (FilePlace::Fd(plain.as_raw_fd()), DirectIo::Auto, false),
    ] {
        fs::write(&path, [[5; 5000], [6; 5000]].concat()).unwrap();
        let mut guest = guest(&[fill(0, 3, 7), fill(1, 999, 8)], vec![vec![fill(0, 4, 7)]]);
        let uri = FileUri { place, offset: 5000 };
        let (result, report) = save(&mut guest, &uri, &SaveOptions { direct_io, ..patient() });
        result.unwrap();
        assert_eq!(report.file.unwrap().direct_io, is_direct);
        assert!(fs::read(&path).unwrap()[..5000] == [5; 5000]);
        assert!(Snapshot::read(&path, 5000).memory == contents(&guest.memory));
        // A save that fails leaves what was before the snapshot.
        let mut guest = Scripted { broken_state: true, ..guest };
        *guest.script.lock().unwrap() = Scripted::new(&PAGES, vec![]).script.lock().unwrap().renewed();
        fails(&mut guest, &uri, &SaveOptions { direct_io, ..patient() }, is_the_guests);
        assert!(fs::read(&path).unwrap() == [5; 5000]);
    }
    let uri = FileUri { place: FilePlace::Fd(plain.as_raw_fd()), offset: 0 };
    let options = SaveOptions { direct_io: DirectIo::On, ..patient() };
    fails(&mut guest(&[], vec![]), &uri, &options, misfit(Misfit::DirectIo));
}

#[test]
fn the_memory_of_the_guest_is_no_target() {
    let folder = folder();
    let path = folder.path().join("memory");
    let file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
    file.set_len(1 << 20).unwrap();
    let region = transship_memory::Region::map(
        "ram",
        file.into(),
        ByteRange::sized(0, 1 << 20),
        transship_memory::Access::ReadWrite,
    )
    .unwrap();
    region.write_pages(WindowPages::new(0, 1), &[7; PAGE_BYTES]).unwrap();
    let mut guest = Scripted::new(&[256], vec![]);
    guest.memory = transship_memory::GuestMemory::new(vec![region]);
    let descriptor = passed(&path, OFlags::WRONLY);
    for uri in [FileUri { place: FilePlace::Fd(descriptor.as_raw_fd()), offset: 0 }, FileUri::path(&path)] {
        fails(&mut guest, &uri, &patient(), misfit(Misfit::OwnMemory));
    }
    assert_eq!(names(folder.path()), ["memory"]);
    assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
    assert_eq!(fs::read(&path).unwrap()[..PAGE_BYTES], [7; PAGE_BYTES]);
}
