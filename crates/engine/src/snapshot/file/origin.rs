//! A snapshot that is read: the file that the user named, opened as it has to be.
use std::{
    fmt::Display,
    fs::{File, OpenOptions},
    os::{
        fd::AsFd,
        unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt},
    },
    path::Path,
    sync::Arc,
};

use rustix::fs::OFlags;
use transship_memory::{ByteRange, PAGE, PageBuffer, PageCount, cached_pages};

use super::descriptors::{self, Purpose};
use crate::{
    Error, FileReport, Misfit,
    snapshot::{DirectIo, FilePlace, FileUri, Format, save_image::SaveImage},
    stream::whence::{misfit, wrong},
};

/// Places of a file that are looked for in the page cache.
const LOOKS: u64 = 16;

/// An open snapshot.
#[derive(Clone)]
pub(crate) struct Origin {
    /// For messages.
    pub(crate) name: String,
    /// Through the page cache: a file, or a pipe.
    pub(crate) file: Arc<File>,
    /// The same file past the page cache.
    pub(crate) direct: Option<Arc<File>>,
    /// Why pages do not go past the page cache although it was left to us.
    pub(crate) refused: Option<String>,
    /// Where the snapshot begins.
    pub(crate) offset: u64,
    /// Length of the file; a pipe has none.
    pub(crate) bytes: Option<u64>,
    /// What stands before the stream, if libvirt saved it.
    pub(crate) image: Option<Arc<SaveImage>>,
}

impl Origin {
    /// Opens what `from` names for reading.
    ///
    /// # Errors
    /// It can't be read in that way; the text says what can.
    pub(crate) fn open(from: &FileUri, direct_io: DirectIo) -> Result<Self, Error> {
        let name = shown(from);
        let mut refused = None;
        let (file, direct) = match (&from.place, descriptors::take(&from.place, Purpose::Restore)?) {
            (FilePlace::Path(path), _) => open_path(&name, path, direct_io, &mut refused)?,
            (_, Some(passed)) => (passed.buffered, passed.direct.filter(|_| direct_io != DirectIo::Off)),
            (place, None) => return Err(wrong(&name, format!("{place:?} is not a file"))),
        };
        let passed = !matches!(from.place, FilePlace::Path(_));
        if direct_io == DirectIo::On && direct.is_none() && passed {
            let what = "it was passed without a descriptor that is open with O_DIRECT; pass one of each kind, as \
                        fdset:N,M";
            return Err(misfit(Misfit::DirectIo, &name, what));
        }
        Ok(Self { refused, ..Self::of(name, file, direct, from.offset)? })
    }

    /// A file that is open already, to be read through the page cache.
    ///
    /// # Errors
    /// It is nothing that can be read.
    pub(crate) fn of(name: String, file: File, direct: Option<File>, offset: u64) -> Result<Self, Error> {
        let stat = file.metadata().map_err(|source| Error::Io { what: format!("inspect {name}"), source })?;
        let kind = stat.file_type();
        let bytes = if kind.is_file() {
            Some(stat.len())
        } else if kind.is_dir() {
            return Err(wrong(&name, "it is a directory"));
        } else if kind.is_block_device() {
            return Err(wrong(&name, "it is a block device; copy the snapshot into a file"));
        } else if offset > 0 {
            return Err(wrong(&name, "an offset needs a file; this is a pipe or socket, which has no offsets"));
        } else {
            None
        };
        Ok(Self { name, file: Arc::new(file), direct: direct.map(Arc::new), refused: None, offset, bytes, image: None })
    }

    /// Reads bytes that must be there.
    pub(crate) fn read_exact(&self, what: &str, into: &mut [u8], at: u64) -> Result<(), Error> {
        let failed = |source| Error::Io { what: format!("read {what} from {} at offset {at:#x}", self.name), source };
        self.file.read_exact_at(into, at).map_err(failed)
    }

    /// Makes sure that pages can be read past the page cache if that was wished, by reading one: `at` is where it is.
    /// Some file systems only then say that they can't. Where the wish was only for what is possible, goes on without.
    ///
    /// # Errors
    /// It was wished by all means.
    pub(crate) fn settle_direct_io(&mut self, wish: DirectIo, at: u64) -> Result<(), Error> {
        let Some(direct) = &self.direct else { return Ok(()) };
        match direct.read_at(PageBuffer::new(1).bytes_mut(), at) {
            Ok(_) => Ok(()),
            Err(why) if wish == DirectIo::Auto => {
                self.direct = None;
                self.refused = Some(why.to_string());
                Ok(())
            }
            Err(why) => Err(no_direct(&self.name, why)),
        }
    }

    /// Whether the file is in the page cache, as it is right after it was written: looks in some places.
    pub(crate) fn is_in_page_cache(&self) -> bool {
        let pages = PageCount::within(self.bytes.unwrap_or(0));
        let is_there = |look| {
            let page = ByteRange::sized(pages.get() * look / LOOKS * PAGE, PAGE);
            cached_pages(self.file.as_fd(), page).is_some_and(|cached| !cached.is_zero())
        };
        !pages.is_zero() && (0..LOOKS).all(is_there)
    }

    /// What a report says of the file. `stored`: pages of the guest in it.
    pub(crate) fn report(&self, format: Format, stored: PageCount) -> FileReport {
        FileReport {
            format: self.format(format).to_string(),
            bytes: self.bytes.map_or(0, |bytes| bytes.saturating_sub(self.offset)),
            allocated: self.allocated(),
            direct_io: self.direct.is_some(),
            direct_io_refused: self.refused.clone(),
            pages_stored: stored.get(),
            ..FileReport::default()
        }
    }

    /// What a file is that holds a snapshot in this layout.
    pub(crate) fn format(&self, layout: Format) -> Format {
        match (layout, &self.image) {
            (Format::MappedRam, Some(_)) => Format::LibvirtSparse,
            (Format::Stream, Some(_)) => Format::Libvirt,
            (layout, _) => layout,
        }
    }

    /// Whether the guest ran. `recorded`: what its state says; libvirt stops a domain before it saves it, and keeps
    /// elsewhere whether it ran.
    pub(crate) fn ran(&self, recorded: bool) -> bool {
        self.image.as_ref().map_or(recorded, |image| image.header.ran)
    }

    /// Bytes that the file takes on the disk.
    pub(crate) fn allocated(&self) -> u64 {
        self.file.metadata().map_or(0, |stat| stat.blocks() * 512)
    }

    /// The descriptor that pages are read from.
    pub(crate) fn for_pages(&self) -> &Arc<File> {
        self.direct.as_ref().unwrap_or(&self.file)
    }
}

fn open_path(
    name: &str,
    path: &Path,
    direct_io: DirectIo,
    refused: &mut Option<String>,
) -> Result<(File, Option<File>), Error> {
    let file = File::open(path).map_err(|source| Error::Io { what: format!("open {name}"), source })?;
    let is_file = file.metadata().is_ok_and(|stat| stat.is_file());
    if direct_io == DirectIo::Off || !is_file {
        return Ok((file, None));
    }
    match OpenOptions::new().read(true).custom_flags(OFlags::DIRECT.bits() as i32).open(path) {
        Ok(direct) => {
            check_same(name, &file, &direct)?;
            Ok((file, Some(direct)))
        }
        Err(why) if direct_io == DirectIo::Auto => {
            *refused = Some(why.to_string());
            Ok((file, None))
        }
        Err(why) => Err(no_direct(name, why)),
    }
}

/// The error where direct I/O was asked for and can't be had.
pub(crate) fn no_direct(name: &str, why: impl Display) -> Error {
    let what = format!("its file system does not offer direct I/O ({why}); use --direct-io auto or off");
    misfit(Misfit::DirectIo, name, what)
}

fn check_same(name: &str, one: &File, other: &File) -> Result<(), Error> {
    let identity = |file: &File| file.metadata().map(|stat| (stat.dev(), stat.ino()));
    match (identity(one), identity(other)) {
        (Ok(one), Ok(other)) if one == other => Ok(()),
        (Ok(_), Ok(_)) => Err(wrong(name, "it was replaced while it was opened; try again")),
        (Err(source), _) | (_, Err(source)) => Err(Error::Io { what: format!("inspect {name}"), source }),
    }
}

/// How messages name it: a file as the user did.
fn shown(from: &FileUri) -> String {
    match (&from.place, from.offset) {
        (FilePlace::Path(path), 0) => path.display().to_string(),
        _ => from.to_string(),
    }
}
