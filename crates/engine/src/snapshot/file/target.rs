//! The file of a snapshot while it is made, and what becomes of it.
//!
//! A file that is named is made under one other name beside it, `.NAME.transship-part`, and takes its place when it is
//! complete and on the disk. The save that makes it holds a lock on it: a second save to the same name is refused
//! meanwhile, and a file without a lock was left by a save that died, and is removed. A file that comes as a descriptor
//! is made in place: its first bytes, without which nobody takes it for a snapshot, are written when everything else is
//! on the disk.
//!
//! An image is a folder of several files, which are numbered: 0 is the one that says what the others are. The folder is
//! made under such a name, too.
use std::{
    ffi::OsString,
    fs::File,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{FileExt, MetadataExt},
    },
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use crossbeam_channel::bounded;
use rustix::{
    fs::{AtFlags, FallocateFlags},
    io::Errno,
};
use transship_memory::{ByteRange, Error as MemoryError, GuestMemory, PAGE_BYTES, Writeback};

use super::{
    descriptors::{self, Passed, Purpose},
    filesystem,
    folder::Folder,
    opening::check_not_memory,
    pace::FilePace,
    sealed::Sealed,
};
use crate::{
    Error, Progress,
    snapshot::{DirectIo, FilePlace, FileUri},
};

/// Requests of one thread that the disk has at the same time, where that is possible. Each is up to 1 MiB.
pub(crate) const DEPTH: u16 = 16;
/// How often a wait checks whether the user has cancelled.
const TICK: Duration = Duration::from_millis(50);

/// A file that is being made. Dropped before [`Target::complete`] it leaves things as they were; what was passed as a
/// descriptor is cut back to what comes before the snapshot.
pub(crate) struct Target {
    /// As the user named it.
    pub(crate) uri: FileUri,
    pub(super) buffered: File,
    pub(super) direct: Option<File>,
    /// The files of a folder from number 1 on.
    more: RwLock<Vec<Part>>,
    /// Why pages go through the page cache although it was left to us.
    pub(super) refused: Option<String>,
    pub(crate) place: TargetKind,
    pub(crate) completed: AtomicBool,
    /// The most that is thought to be written, for messages.
    needed: AtomicU64,
    /// What another program wants before the snapshot.
    before: Vec<u8>,
    /// What is appended is encrypted.
    pub(super) sealed: Option<Arc<Sealed>>,
    /// How fast pages may be written.
    pub(crate) pace: Arc<FilePace>,
}

pub(crate) enum TargetKind {
    Named(Named),
    Passed,
    Folder(Folder),
}

/// One of several files.
struct Part {
    buffered: File,
    direct: Option<File>,
}

/// A name, and the one that the file has until then.
pub(crate) struct Named {
    pub(super) folder: OwnedFd,
    pub(super) name: OsString,
    pub(super) temporary: OsString,
}

impl Target {
    /// Makes the file, empty but for what comes before the snapshot. `memory` is that of the guest that is to be saved,
    /// so that a file of it is not taken for the target.
    ///
    /// # Errors
    /// Another save makes this file now; what can't be written, replaced or opened as it was asked for.
    pub(crate) fn create(uri: &FileUri, direct_io: DirectIo, memory: &GuestMemory) -> Result<Self, Error> {
        Self::create_in(descriptors::take(&uri.place, Purpose::Save)?, uri, direct_io, memory)
    }

    /// The same with what was taken before of what was passed. Until now that is as it was.
    ///
    /// # Errors
    /// As [`Target::create`].
    pub(crate) fn create_in(
        passed: Option<Passed>,
        uri: &FileUri,
        direct_io: DirectIo,
        memory: &GuestMemory,
    ) -> Result<Self, Error> {
        let mut target = match (&uri.place, passed) {
            (_, Some(passed)) => {
                check_not_memory(uri, &passed.buffered, memory)?;
                Self::new(uri, passed.buffered, passed.direct, TargetKind::Passed)
            }
            (FilePlace::Path(path), None) => Self::named(uri, path, memory)?,
            (_, None) => return Err(Error::file(format!("{uri} names no file"))),
        };
        target.set_length(0)?;
        target.open_direct(direct_io, memory)?;
        Ok(target)
    }

    pub(super) fn new(uri: &FileUri, buffered: File, direct: Option<File>, place: TargetKind) -> Self {
        let (uri, needed) = (uri.clone(), AtomicU64::new(0));
        let (more, completed) = (RwLock::default(), AtomicBool::new(false));
        Self {
            uri,
            buffered,
            direct,
            more,
            refused: None,
            place,
            completed,
            needed,
            before: Vec::new(),
            sealed: None,
            pace: Arc::default(),
        }
    }

    /// Makes the folder of an image, with the first of its files. Pages go past the page cache only if that is asked
    /// for by name: whoever uses the image reads it through the page cache.
    ///
    /// # Errors
    /// Another save makes it now, the name is taken, or what the system says.
    pub(crate) fn create_folder(uri: &FileUri, direct_io: DirectIo, first: &str) -> Result<Self, Error> {
        let folder = Folder::make(uri)?;
        let file = folder.make_file(uri, first)?;
        let mut target = Self::new(uri, file, None, TargetKind::Folder(folder));
        if direct_io == DirectIo::On {
            target.open_direct(direct_io, &GuestMemory::new(Vec::new()))?;
        }
        Ok(target)
    }

    /// One more file of the folder, of so many bytes, all holes; its number.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn add_file(&self, name: &str, bytes: u64) -> Result<usize, Error> {
        let TargetKind::Folder(folder) = &self.place else {
            return Err(Error::file(format!("{} is one file", self.uri)));
        };
        let buffered = folder.make_file(&self.uri, name)?;
        buffered.set_len(bytes).map_err(|source| self.failed("make", source))?;
        let opened = self.is_direct().then(|| folder.open_direct(name)).transpose();
        let direct = opened.map_err(|why| Error::file(format!("{}: {why}", self.uri)))?;
        let mut more = self.more.write().unwrap_or_else(PoisonError::into_inner);
        more.push(Part { buffered, direct });
        Ok(more.len())
    }

    /// What `act` makes of a file through the page cache, and of the same past it.
    fn with<T>(&self, number: usize, act: impl FnOnce(&File, Option<&File>) -> T) -> T {
        if number == 0 {
            return act(&self.buffered, self.direct.as_ref());
        }
        let more = self.more.read().unwrap_or_else(PoisonError::into_inner);
        let part = &more[number - 1];
        act(&part.buffered, part.direct.as_ref())
    }

    /// How many files there are.
    pub(crate) fn files(&self) -> usize {
        self.more.read().unwrap_or_else(PoisonError::into_inner).len() + 1
    }

    /// Puts bytes before the snapshot, of which nothing may have been written yet. Until it is complete, the first of
    /// them are `partial`.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn put_before(&mut self, bytes: Vec<u8>, partial: &[u8]) -> Result<(), Error> {
        self.write_at(&bytes, self.uri.offset)?;
        self.write_at(partial, self.uri.offset)?;
        self.before = bytes;
        Ok(())
    }

    /// Changes what was put before the snapshot; it has the same length.
    pub(crate) fn change_before(&mut self, bytes: Vec<u8>) {
        debug_assert_eq!(bytes.len(), self.before.len());
        self.before = bytes;
    }

    /// Where the snapshot begins.
    pub(crate) fn offset(&self) -> u64 {
        self.uri.offset + self.before.len() as u64
    }

    /// Whether pages go past the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// Why they don't although it was left to us.
    pub(crate) fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// A descriptor of a file for whole pages at places that are multiples of their size.
    pub(crate) fn page_descriptor(&self, file: usize) -> Result<OwnedFd, Error> {
        self.with(file, |buffered, direct| self.descriptor_of(direct.unwrap_or(buffered)))
    }

    /// A descriptor of a file through the page cache.
    pub(crate) fn cached_descriptor(&self, file: usize) -> Result<OwnedFd, Error> {
        self.with(file, |buffered, _| self.descriptor_of(buffered))
    }

    fn descriptor_of(&self, file: &File) -> Result<OwnedFd, Error> {
        file.try_clone().map(OwnedFd::from).map_err(|source| self.failed("write", source))
    }

    /// From now on the snapshot is thought to take up to so many bytes.
    pub(crate) fn expect(&self, bytes: u64) {
        self.needed.store(bytes, Relaxed);
    }

    /// Makes the file as long as this, with holes where nothing is written, so that writers do not have to extend it
    /// one after the other.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn set_length(&self, bytes: u64) -> Result<(), Error> {
        self.buffered.set_len(self.uri.offset.max(bytes)).map_err(|source| self.failed("make", source))
    }

    /// Writes bytes at a place.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn write_at(&self, bytes: &[u8], at: u64) -> Result<(), Error> {
        self.buffered.write_all_at(bytes, at).map_err(|source| self.failed("write", source))
    }

    /// These bytes were written, as part of what is written in order.
    pub(super) fn begin_writeback(&self, writeback: &mut Writeback, written: ByteRange) {
        writeback.wrote(self.buffered.as_fd(), written);
    }

    /// Reads what was written at a place of a file.
    ///
    /// # Errors
    /// The system's own; a descriptor that was passed for writing only.
    pub(crate) fn read_at(&self, file: usize, bytes: &mut [u8], at: u64) -> Result<(), Error> {
        self.with(file, |buffered, _| buffered.read_exact_at(bytes, at)).map_err(|source| {
            match rustix::io::Errno::from_io_error(&source) {
                Some(Errno::BADF) => Error::file(format!(
                    "{} was passed for writing only, but pages that arrive as differences (xbzrle) must be read again; \
                 turn xbzrle off, or name the file",
                    self.uri
                )),
                _ => self.failed("read", source),
            }
        })
    }

    /// Gives the disk space of whole pages back, where the file system can.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn punch(&self, file: usize, pages: ByteRange) -> Result<(), Error> {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match self.with(file, |buffered, _| rustix::fs::fallocate(buffered, how, pages.start, pages.len())) {
            Ok(()) => Ok(()),
            // What is there then is not read by anybody, unless all of the file is memory.
            Err(Errno::OPNOTSUPP) if file == 0 => Ok(()),
            Err(Errno::OPNOTSUPP) => self.write_zeros(file, pages),
            Err(errno) => Err(self.failed("free pages of", errno.into())),
        }
    }

    fn write_zeros(&self, file: usize, pages: ByteRange) -> Result<(), Error> {
        (pages.start..pages.end).step_by(PAGE_BYTES).try_for_each(|at| {
            self.with(file, |buffered, _| buffered.write_all_at(&[0; PAGE_BYTES], at))
                .map_err(|source| self.failed("write", source))
        })
    }

    /// Waits until what was written is on the disk. If the user cancels meanwhile, the file is cut short, so that there
    /// is less to wait for.
    ///
    /// # Errors
    /// The system's own; cancelled.
    pub(crate) fn sync(&self, progress: &Progress) -> Result<(), Error> {
        (0..self.files()).try_for_each(|file| self.sync_file(file, progress))
    }

    fn sync_file(&self, file: usize, progress: &Progress) -> Result<(), Error> {
        let file = File::from(self.cached_descriptor(file)?);
        let (done, waiting) = bounded(1);
        let spawned = thread::Builder::new().name("sync".into()).spawn(move || {
            let _ = done.send(file.sync_all());
        });
        spawned.map_err(|source| Error::Io { what: "start a thread".into(), source })?;
        loop {
            match waiting.recv_timeout(TICK) {
                Ok(result) => return result.map_err(|source| self.failed("sync", source)),
                Err(_) if progress.is_cancelled() => {
                    let _ = self.buffered.set_len(self.uri.offset);
                    return Err(Error::CANCELLED);
                }
                Err(_) => {}
            }
        }
    }

    /// Bytes of the file from the snapshot's start on, and bytes that it has on the disk.
    pub(crate) fn size(&self) -> Result<(u64, u64), Error> {
        let (mut bytes, mut allocated) = (0, 0);
        for file in 0..self.files() {
            let meta = self.with(file, |buffered, _| buffered.metadata());
            let meta = meta.map_err(|source| self.failed("inspect", source))?;
            bytes += meta.len().saturating_sub(self.uri.offset);
            allocated += meta.blocks() * 512;
        }
        Ok((bytes, allocated))
    }

    /// Everything but `head`, which belongs at the snapshot's start, was written: makes the file whole, and durably so.
    ///
    /// # Errors
    /// Up to its new name, the system's own: nothing has changed. After that: it's there, and may be gone after a power
    /// cut.
    pub(crate) fn complete(&self, head: &[u8], progress: &Progress) -> Result<(), Error> {
        let at = self.uri.offset;
        let head = &[self.before.as_slice(), &self.end_appended(head)?].concat();
        match &self.place {
            TargetKind::Named(named) => {
                self.write_at(head, at)?;
                self.sync(progress)?;
                crate::fail_point::reach("save.synced")?;
                if progress.is_cancelled() {
                    return Err(Error::CANCELLED);
                }
                let folder = &named.folder;
                rustix::fs::renameat(folder, &named.temporary, folder, &named.name)
                    .map_err(|errno| self.failed("rename the new file to", errno.into()))?;
                self.completed.store(true, Relaxed);
                crate::fail_point::reach("save.renamed")?;
                rustix::fs::fsync(folder).map_err(|errno| Error::Io {
                    what: format!("sync the folder of {} (complete, but it may be gone after a power cut)", self.uri),
                    source: errno.into(),
                })
            }
            TargetKind::Folder(_) => Err(Error::file(format!("{} is an image, and is completed otherwise", self.uri))),
            TargetKind::Passed => {
                self.sync(progress)?;
                crate::fail_point::reach("save.synced")?;
                self.write_at(head, at)?;
                self.sync(progress)?;
                self.completed.store(true, Relaxed);
                Ok(())
            }
        }
    }

    /// What to say of a failure of the system.
    pub(crate) fn failed(&self, doing: &str, source: io::Error) -> Error {
        let full = matches!(
            source.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
        );
        let mut what = format!("{doing} {}", self.uri);
        if full {
            let written = self.size().map_or(0, |(_, allocated)| allocated);
            let room = filesystem::available_bytes(&self.buffered).unwrap_or(0).saturating_add(written);
            what = format!(
                "{what} (it needs up to {:.1} MB; the {} has {:.1} MB for it; nothing was replaced)",
                self.needed.load(Relaxed) as f64 / 1e6,
                filesystem::name(&self.buffered),
                room as f64 / 1e6
            );
        }
        Error::Io { what, source }
    }

    /// The same for what the writers of pages say.
    pub(crate) fn failed_pages(&self, error: MemoryError) -> Error {
        match error {
            MemoryError::System { source, .. } => self.failed("write", source),
            other => Error::Memory(other),
        }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if self.completed.load(Relaxed) {
            return;
        }
        // Nobody need wait for pages on their way to a file that goes.
        let _ = self.buffered.set_len(self.uri.offset);
        match &self.place {
            TargetKind::Named(named) => drop(rustix::fs::unlinkat(&named.folder, &named.temporary, AtFlags::empty())),
            TargetKind::Folder(folder) => folder.remove(),
            TargetKind::Passed => {}
        }
    }
}
