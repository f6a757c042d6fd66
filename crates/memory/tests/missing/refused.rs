//! What is refused, and what goes wrong.
use rustix::{
    fs::{Mode, OFlags},
    mount::MountFlags,
};
use transship_memory::{Area, Error, Flaw, Missing, PageCount, PageNumber, PageRange};

use super::{missing, pages_of, word_of};
use crate::common::{
    PAGE, counts, file,
    mounts::with_mounts_of_its_own,
    page_of,
    process::{Faults, Guest, userfaultfd},
};

#[test]
fn what_does_not_fit_is_refused() {
    let guest = Guest::map(file(16 * PAGE), 16 * PAGE);
    let missing = missing(&guest);
    assert!(matches!(
        missing.fill(0, PageNumber::FIRST, &[1; 4097]),
        Err(Error::WrongLength { expected: 4096, given: 4097, .. })
    ));
    assert!(
        matches!(missing.fill(0, PageNumber::new(15), &pages_of(0..2)), Err(Error::OutOfRange { pages, .. }) if pages.get() == 16)
    );
    assert!(
        matches!(missing.fill_zero(0, PageRange::new(u64::MAX, 2)), Err(Error::OutOfRange { pages, .. }) if pages.get() == 16)
    );
    assert!(
        matches!(missing.release(0, PageRange::new(0, 17)), Err(Error::OutOfRange { pages, .. }) if pages.get() == 16)
    );
    assert!(matches!(missing.wake(1, PageRange::new(0, 1)), Err(Error::Untrackable { region: 1, .. })));
    assert_eq!(missing.fill(0, PageNumber::new(16), &[]).unwrap(), PageCount::ZERO);
    let new = |areas: &[Area], pages: &[u64]| {
        Missing::new(userfaultfd(Faults::User).unwrap(), areas.to_vec(), &counts(pages)).err().unwrap().flaw()
    };
    assert_eq!(new(&[guest.area()], &[17]), Some(Flaw::NotMapped));
    assert_eq!(new(&[guest.area()], &[16]), Some(Flaw::Taken));
}

#[test]
fn a_full_file_system_is_an_error() {
    with_mounts_of_its_own(|dir| {
        rustix::mount::mount("none", dir, "tmpfs", MountFlags::empty(), Some(c"size=256k")).unwrap();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let file = rustix::fs::open(dir.join("ram"), flags, Mode::from_raw_mode(0o600)).unwrap();
        rustix::fs::ftruncate(&file, 1024 * PAGE).unwrap();
        let guest = Guest::map(&file, 1024 * PAGE);
        let missing = missing(&guest);
        for fill in [&|| missing.fill(0, PageNumber::FIRST, &pages_of(0..1024)), &|| {
            missing.fill_zero(0, PageRange::new(0, 1024))
        }] as [&dyn Fn() -> Result<PageCount, Error>; 2]
        {
            let error = fill().unwrap_err().to_string();
            assert!(error.contains("no memory is left, or the file system of the memory's file is full"), "{error}");
        }
        // What was put is there.
        assert_eq!(guest.read(3), word_of(3));
        rustix::fs::fallocate(
            &file,
            rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE,
            0,
            8 * PAGE,
        )
        .unwrap();
        assert_eq!(missing.fill(0, PageNumber::new(3), &page_of(33)).unwrap(), PageCount::ONE);
        assert_eq!(guest.read(3), word_of(33));
        // The mapping ends with its file system, which ends with this thread.
        missing.release(0, PageRange::new(0, 1024)).unwrap();
    });
}
