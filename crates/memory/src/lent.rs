//! Guest memory that another process of this host lends: files that are read, and not mapped.
//!
//! ```text
//!   lender's files ─► copied (pread), zeros left out ─► written into the memory of a waiting VM
//! ```
//!
//! A page goes from one file to the other by one buffer, which stays in its core's cache. Reading a hole makes no page
//! of it. Nothing is mapped: a file that its lender cuts short is an error here, and no SIGBUS.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use rustix::fs::{FileType, Mode, OFlags};

use crate::{
    Error, Flaw, GuestMemory, PAGE, Region, WindowBuffer,
    read::{AT_ONCE, places, read_file},
    receive::Origin,
    region::Held,
    shared::Backing,
    window::WindowPages,
    zero,
};

/// A file that has the memory of a region.
#[derive(Debug)]
pub struct LentFile {
    /// Opened for reading only: whoever has it can't change the memory.
    pub file: OwnedFd,
    /// Byte of it at which the region begins.
    pub offset: u64,
}

impl Region {
    /// From now on it can be lent: its file is opened once more, for reading only. It can't be if it is private memory,
    /// or in a file on a disk, or if this process may not open the file.
    #[must_use]
    pub fn lendable(mut self) -> Self {
        if let Held::Shared(shared) = &mut self.held
            && shared.is_memory()
        {
            // By its descriptor: its path may lead elsewhere by now, or it has none.
            let own = format!("/proc/self/fd/{}", shared.file().as_raw_fd());
            shared.lent = rustix::fs::open(own, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok();
        }
        self
    }

    /// The file of its memory for another process, which can read it and not write to it, and where in it the region
    /// begins. None: it can't be lent, or [`Region::lendable`] was not called.
    pub fn lent(&self) -> Option<(BorrowedFd<'_>, u64)> {
        match &self.held {
            Held::Shared(shared) => Some((shared.lent.as_ref()?.as_fd(), shared.file_offset())),
            Held::Private(_) => None,
        }
    }
}

/// By region: the file that was lent.
#[derive(Debug)]
pub struct Lent(Vec<Option<LentFile>>);

impl Lent {
    /// Files for the regions of `memory`, in their order; none: that region was not lent. Nothing is believed of them.
    ///
    /// # Errors
    /// A file that is not in the system's memory, or is shorter than its region.
    pub fn of(files: Vec<Option<LentFile>>, memory: &GuestMemory) -> Result<Self, Error> {
        let lent = files.iter().zip(memory.regions());
        lent.filter_map(|(file, region)| Some((file.as_ref()?, region)))
            .try_for_each(|(file, region)| file.check(region))?;
        Ok(Self(files))
    }

    /// Whether this region was lent.
    pub fn has(&self, region: usize) -> bool {
        self.file(region).is_some()
    }

    fn file(&self, region: usize) -> Option<&LentFile> {
        self.0.get(region).and_then(Option::as_ref)
    }

    /// Reads the wanted pages of a region, and calls `take` with those that follow each other and their bytes, run by
    /// run. If told so it looks for those that are all zero, and leaves them out: which these are. The lender's guest
    /// may write meanwhile: a page may be called either way, and hold any mix of bytes.
    ///
    /// # Errors
    /// The region was not lent, or its file has become shorter; the system's own; those of `take`.
    pub fn read_window(
        &self,
        region: usize,
        wanted: WindowPages,
        look_for_zeros: bool,
        buffer: &mut WindowBuffer,
        mut take: impl FnMut(WindowPages, &[u8]) -> io::Result<()>,
    ) -> io::Result<u128> {
        let file = self.file(region).ok_or(io::ErrorKind::NotFound)?;
        let mut zero = 0;
        for part in wanted.parts(AT_ONCE) {
            let copied = &mut buffer.room()[..part.bytes() as usize];
            file.read(part, copied)?;
            let found = if look_for_zeros { zero::mask(part, copied) } else { 0 };
            // Left where they are: closing the gaps would move all that is behind the first.
            let present = part.without(found);
            for (run, place) in present.runs().zip(places(part, present)) {
                take(WindowPages::within(run, wanted.first), &copied[place])?;
            }
            zero |= found;
        }
        Ok(zero)
    }

    /// Copies the pages of a region straight into the mapping of `into`: faster where they are there already, since
    /// each is copied once. Zeros are copied, too.
    ///
    /// # Errors
    /// As [`Lent::read_window`], and [`Region::receive_window`].
    pub fn copy_window(&self, region: usize, wanted: WindowPages, into: &Region) -> io::Result<()> {
        let file = self.file(region).ok_or(io::ErrorKind::NotFound)?;
        into.receive_from(Origin::File(file.file.as_fd(), file.offset), wanted)
    }
}

impl LentFile {
    fn check(&self, region: &Region) -> Result<(), Error> {
        let unusable = |flaw, why: String| Err(Error::unusable(region.name(), flaw, why));
        let stat = rustix::fs::fstat(&self.file)
            .map_err(|source| Error::system(format!("inspect the file lent for region {:?}", region.name()), source))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile
            || !Backing::of(region.name(), self.file.as_fd())?.is_memory()
        {
            return unusable(Flaw::NotRegular, "what was lent for it is no file in memory".into());
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let (offset, bytes) = (self.offset, region.bytes());
        if !offset.is_multiple_of(PAGE) || offset.checked_add(bytes).is_none_or(|end| end > size) {
            let why = format!("{bytes} bytes from {offset} on were lent for it, of a file that has {size}");
            return unusable(Flaw::TooShort, why);
        }
        Ok(())
    }

    fn read(&self, wanted: WindowPages, into: &mut [u8]) -> io::Result<()> {
        read_file(self.file.as_fd(), self.offset, wanted, into)
    }
}
