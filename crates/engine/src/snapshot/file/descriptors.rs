//! Descriptors that a manager has opened for us and passed by their numbers.
//!
//! The rules are those by which a stock QEMU picks descriptors of an fdset, so that a manager need not tell the two
//! apart: the access mode is exactly the one that is needed, and there is one descriptor with O_DIRECT for the pages,
//! if they go past the page cache, and one without for everything else.
use std::{fs, fs::File, os::fd::OwnedFd};

use rustix::{
    fs::{FileType, OFlags},
    process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open},
};

use crate::{
    DescriptorFault::{self, Direct, Mode, NotPassed, NotRegular, OtherFile},
    Error, Misfit,
    snapshot::FilePlace,
};

/// What is done with the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Save,
    Restore,
}

/// Our own copies of what was passed.
pub(crate) struct Passed {
    pub(crate) buffered: File,
    pub(crate) direct: Option<File>,
}

/// Takes copies of the descriptors that `place` names; none if it is a path.
///
/// # Errors
/// The one that is wrong, and how it must be opened.
pub(crate) fn take(place: &FilePlace, purpose: Purpose) -> Result<Option<Passed>, Error> {
    match *place {
        FilePlace::Path(_) => Ok(None),
        FilePlace::Fd(number) => {
            let Checked { file, direct, .. } = check(number, purpose)?;
            if direct {
                let why = "is open with O_DIRECT, which the parts between the pages can't use; also pass one without \
                           it, as fdset:N,M";
                return Err(wrong(Direct, number, why));
            }
            Ok(Some(Passed { buffered: file, direct: None }))
        }
        FilePlace::FdSet(one, other) => pair(check(one, purpose)?, check(other, purpose)?).map(Some),
    }
}

fn pair(one: Checked, other: Checked) -> Result<Passed, Error> {
    if let Some(pipe) = [&one, &other].into_iter().find(|checked| checked.pipe) {
        return Err(wrong(NotRegular, pipe.number, "is not a regular file"));
    }
    if one.id != other.id {
        return Err(wrong(
            OtherFile,
            other.number,
            format!("is another file than descriptor {}; open the same file twice", one.number),
        ));
    }
    let (direct, buffered) = match (one.direct, other.direct) {
        (true, false) => (one, other),
        (false, true) => (other, one),
        (true, true) => {
            return Err(wrong(
                Direct,
                other.number,
                "is open with O_DIRECT like the first; one must be open without it",
            ));
        }
        (false, false) => {
            return Err(wrong(
                Direct,
                other.number,
                "is open without O_DIRECT like the first; open one of them with it",
            ));
        }
    };
    Ok(Passed { buffered: buffered.file, direct: Some(direct.file) })
}

struct Checked {
    number: i32,
    file: File,
    direct: bool,
    /// No regular file.
    pipe: bool,
    /// Device and inode.
    id: (u64, u64),
}

fn check(number: i32, purpose: Purpose) -> Result<Checked, Error> {
    let flags = flags_of(number).ok_or_else(|| wrong(NotPassed, number, "was not passed to this process"))?;
    // What was passed came through an exec, which closes all that has this flag; what we have opened ourselves has it.
    if flags.contains(OFlags::CLOEXEC) {
        return Err(wrong(NotPassed, number, "belongs to transship itself, and was not passed to it"));
    }
    let (mode, name) = match purpose {
        Purpose::Save => (OFlags::WRONLY, "for writing only (O_WRONLY)"),
        Purpose::Restore => (OFlags::RDONLY, "for reading only (O_RDONLY)"),
    };
    if flags & OFlags::ACCMODE != mode || flags.contains(OFlags::PATH) {
        return Err(wrong(Mode, number, format!("must be open {name}; it is {}", mode_name(flags))));
    }
    if flags.contains(OFlags::APPEND) {
        return Err(wrong(
            Mode,
            number,
            "is open for appending (O_APPEND), so pages can't be written to their places; open it without",
        ));
    }
    let failed =
        |source: rustix::io::Errno| Error::Io { what: format!("use descriptor {number}"), source: source.into() };
    let file: OwnedFd = pidfd_open(getpid(), PidfdFlags::empty())
        .and_then(|us| pidfd_getfd(us, number, PidfdGetfdFlags::empty()))
        .map_err(failed)?;
    let stat = rustix::fs::fstat(&file).map_err(failed)?;
    let pipe = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => false,
        // A plain stream can be read from anywhere.
        FileType::Fifo | FileType::Socket | FileType::CharacterDevice if purpose == Purpose::Restore => true,
        _ => return Err(wrong(NotRegular, number, "is not a regular file")),
    };
    let direct = flags.contains(OFlags::DIRECT);
    Ok(Checked { number, file: file.into(), direct, pipe, id: (stat.st_dev, stat.st_ino) })
}

fn wrong(fault: DescriptorFault, number: i32, why: impl std::fmt::Display) -> Error {
    Misfit::Descriptor(fault).file(format!("descriptor {number} {why}"))
}

fn mode_name(flags: OFlags) -> &'static str {
    match flags & OFlags::ACCMODE {
        _ if flags.contains(OFlags::PATH) => "open as a path only",
        OFlags::WRONLY => "open for writing only",
        OFlags::RDWR => "open for reading and writing",
        _ => "open for reading only",
    }
}

/// The flags of a descriptor of this process, as the kernel shows them.
fn flags_of(number: i32) -> Option<OFlags> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{number}")).ok()?;
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"))?;
    u32::from_str_radix(flags.trim(), 8).ok().map(OFlags::from_bits_retain)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::fd::AsRawFd;

    use rustix::{fs::Mode, io::FdFlags};

    use super::*;

    struct Lab(tempfile::TempDir);

    impl Lab {
        fn new() -> Self {
            Self(tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap())
        }

        /// As if it had come through an exec.
        fn open(&self, name: &str, flags: OFlags) -> OwnedFd {
            let path = self.0.path().join(name);
            let file = rustix::fs::open(path, flags | OFlags::CREATE, Mode::from_raw_mode(0o600)).unwrap();
            rustix::io::fcntl_setfd(&file, FdFlags::empty()).unwrap();
            file
        }
    }

    fn set_of(one: &impl AsRawFd, other: &impl AsRawFd) -> FilePlace {
        FilePlace::FdSet(one.as_raw_fd(), other.as_raw_fd())
    }

    fn fault(place: FilePlace, purpose: Purpose) -> DescriptorFault {
        match take(&place, purpose) {
            Ok(_) => panic!("{place:?} was taken for {purpose:?}"),
            Err(Error::File { what: Misfit::Descriptor(fault), .. }) => fault,
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn one_descriptor_has_exactly_the_right_mode() {
        let lab = Lab::new();
        let (read, write, both) = (OFlags::RDONLY, OFlags::WRONLY, OFlags::RDWR);
        for (flags, purpose, ok) in [
            (read, Purpose::Save, false),
            (write, Purpose::Save, true),
            (both, Purpose::Save, false),
            (read, Purpose::Restore, true),
            (write, Purpose::Restore, false),
            (both, Purpose::Restore, false),
            (write | OFlags::APPEND, Purpose::Save, false),
        ] {
            let file = lab.open("a", flags);
            let place = FilePlace::Fd(file.as_raw_fd());
            match ok {
                true => assert!(take(&place, purpose).unwrap().unwrap().direct.is_none()),
                false => assert_eq!(fault(place, purpose), Mode, "{flags:?} for {purpose:?}"),
            }
        }
        let direct = lab.open("a", write | OFlags::DIRECT);
        assert_eq!(fault(FilePlace::Fd(direct.as_raw_fd()), Purpose::Save), Direct);
    }

    #[test]
    fn a_set_has_one_of_each() {
        let lab = Lab::new();
        let (plain, direct) = (lab.open("a", OFlags::WRONLY), lab.open("a", OFlags::WRONLY | OFlags::DIRECT));
        let other = lab.open("b", OFlags::WRONLY | OFlags::DIRECT);
        let again = lab.open("a", OFlags::WRONLY | OFlags::DIRECT);
        let set = |one: &OwnedFd, other: &OwnedFd| FilePlace::FdSet(one.as_raw_fd(), other.as_raw_fd());
        for place in [set(&plain, &direct), set(&direct, &plain)] {
            let passed = take(&place, Purpose::Save).unwrap().unwrap();
            let is_direct = |file: &File| rustix::fs::fcntl_getfl(file).unwrap().contains(OFlags::DIRECT);
            assert_eq!((is_direct(&passed.buffered), is_direct(&passed.direct.unwrap())), (false, true));
        }
        assert_eq!(fault(set(&plain, &other), Purpose::Save), OtherFile);
        assert_eq!(fault(set(&direct, &again), Purpose::Save), Direct);
        let second = lab.open("a", OFlags::WRONLY);
        assert_eq!(fault(set(&plain, &second), Purpose::Save), Direct);
        let readable = lab.open("a", OFlags::RDWR | OFlags::DIRECT);
        assert_eq!(fault(set(&plain, &readable), Purpose::Save), Mode);
    }

    #[test]
    fn the_text_names_the_descriptor_and_how_it_must_be_open() {
        let lab = Lab::new();
        let plain = lab.open("a", OFlags::WRONLY);
        let readable = lab.open("a", OFlags::RDWR | OFlags::DIRECT);
        let why = take(&set_of(&plain, &readable), Purpose::Save).err().unwrap().to_string();
        assert!(why.contains(&format!("descriptor {} must be open for writing only", readable.as_raw_fd())), "{why}");
    }

    #[test]
    fn what_was_not_passed_is_not_taken() {
        let lab = Lab::new();
        assert_eq!(fault(FilePlace::Fd(9_999_999), Purpose::Save), NotPassed);
        let ours = lab.open("a", OFlags::WRONLY | OFlags::CLOEXEC);
        rustix::io::fcntl_setfd(&ours, FdFlags::CLOEXEC).unwrap();
        assert_eq!(fault(FilePlace::Fd(ours.as_raw_fd()), Purpose::Save), NotPassed);
        let (other, end) = std::io::pipe().unwrap();
        rustix::io::fcntl_setfd(&end, FdFlags::empty()).unwrap();
        rustix::io::fcntl_setfd(&other, FdFlags::empty()).unwrap();
        assert_eq!(fault(FilePlace::Fd(end.as_raw_fd()), Purpose::Save), NotRegular);
        // A stream may come through one.
        assert!(take(&FilePlace::Fd(other.as_raw_fd()), Purpose::Restore).is_ok());
        let file = lab.open("a", OFlags::RDONLY);
        assert_eq!(fault(set_of(&other, &file), Purpose::Restore), NotRegular);
    }
}
