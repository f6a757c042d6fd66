//! An image that is read: its parts, and that they belong together.
use std::{
    collections::HashMap,
    fs::File,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use transship_memory::{PageCount, PageNumber, PageRange, PageSet};
use transship_wire::qemu::{Block, Mapped};

use super::{
    MANIFEST, checksum,
    manifest::{Manifest, Pinned, VERSION},
};
use crate::{
    Error, Progress,
    snapshot::{
        file::origin::Origin,
        open::{Opened, Snapshot, read},
    },
    stream::{
        tail::check_tail,
        whence::{Whence, wrong},
    },
};

/// Longer than a manifest of the most regions and disks.
const MANIFEST_BYTES_MAX: u64 = 4 << 20;
const REMADE: &str = "make the image anew (save, or convert from another copy)";

/// An open image.
pub(crate) struct Image {
    /// As the user named it.
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
    pub(crate) manifest: Manifest,
    /// Everything but guest memory, whose blocks it lists.
    pub(crate) snapshot: Snapshot,
    /// By region of the manifest: number of its block in the snapshot, and its file.
    pub(crate) memory: Vec<(usize, Origin)>,
    state: File,
    /// By region: its pages that are no holes, once they were asked for.
    stored: Vec<OnceLock<PageSet>>,
}

impl Image {
    /// Opens the image in a folder and checks that its parts fit each other. Pages are not looked at.
    ///
    /// # Errors
    /// It is none; a file of it is missing, or of another size.
    pub(crate) fn open(name: &str, folder: &Path) -> Result<Self, Error> {
        let manifest = manifest(name, folder)?;
        let state = open_file(name, folder, &manifest.state)?;
        let shared = state.try_clone().map_err(|source| Error::Io { what: format!("open {name}"), source })?;
        let origin = Origin::of(format!("{name}/{}", manifest.state.file), shared, None, 0)?;
        let Opened::Mapped(snapshot) = read(origin, None)? else {
            return Err(damaged(name, "its state is not a mapped-ram file"));
        };
        let mut memory = Vec::new();
        for region in &manifest.memory {
            let is_it = |block: &Block| *block.name == *region.region && block.mapped == Some(Mapped::Ignored);
            let block = snapshot
                .blocks
                .iter()
                .position(is_it)
                .filter(|index| snapshot.blocks[*index].used_bytes == region.pinned.bytes);
            let Some(block) = block else {
                return Err(damaged(name, &format!("its state and its manifest differ in memory {:?}", region.region)));
            };
            let file = open_file(name, folder, &region.pinned)?;
            memory.push((block, Origin::of(format!("{name}/{}", region.pinned.file), file, None, 0)?));
        }
        let left_out = snapshot.blocks.iter().filter(|block| block.mapped == Some(Mapped::Ignored)).count();
        if left_out != memory.len() || memory.is_empty() {
            return Err(damaged(name, "its state lists other memory than its manifest"));
        }
        if let Some(why) = &snapshot.refusal {
            return Err(wrong(name, why));
        }
        check_tail(&Whence::File(snapshot.origin.name.clone()), &snapshot.tail, snapshot.tail_offset)?;
        let stored = memory.iter().map(|_| OnceLock::new()).collect();
        let (name, folder) = (name.to_owned(), folder.to_owned());
        Ok(Self { name, folder, manifest, snapshot: *snapshot, memory, state, stored })
    }

    fn files(&self) -> impl Iterator<Item = (&File, &Pinned)> {
        let memory = self.memory.iter().zip(&self.manifest.memory);
        let memory = memory.map(|((_, origin), region)| (&*origin.file, &region.pinned));
        memory.chain([(&self.state, &self.manifest.state)])
    }

    /// That no file has changed since the image was complete, as far as its size, time and number show. Clones run from
    /// these very files.
    ///
    /// # Errors
    /// Which one has, and how.
    pub(crate) fn check_pinned(&self) -> Result<(), Error> {
        for (file, pinned) in self.files() {
            let failed = |source| Error::Io { what: format!("inspect {}/{}", self.name, pinned.file), source };
            if let Some(why) = pinned.changed(file).map_err(failed)? {
                let what = format!("{why}; clones can't run from it: {REMADE}");
                return Err(wrong(&format!("{}/{}", self.name, pinned.file), what));
            }
        }
        Ok(())
    }

    /// That all bytes are those that the image was completed with.
    ///
    /// # Errors
    /// Which file has others; the system's own.
    pub(crate) fn check_bytes(&self, progress: &Progress) -> Result<(), Error> {
        for (file, pinned) in self.files() {
            let place = format!("{}/{}", self.name, pinned.file);
            let found = checksum::of(file, pinned.bytes, progress)
                .map_err(|source| Error::Io { what: format!("read {place}"), source })?;
            if found != pinned.checksum {
                return Err(wrong(
                    &place,
                    format!("its checksum is not that of the manifest: it was changed; {REMADE}"),
                ));
            }
        }
        Ok(())
    }

    /// By number of the block: its pages that are no holes, and its file.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn sources(&self) -> Result<HashMap<usize, (PageSet, Origin)>, Error> {
        let regions = self.memory.iter().enumerate();
        regions.map(|(region, (block, origin))| Ok((*block, (self.stored(region)?, origin.clone())))).collect()
    }

    /// The pages of a region that are no holes.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn stored(&self, region: usize) -> Result<PageSet, Error> {
        let (block, origin) = &self.memory[region];
        if let Some(known) = self.stored[region].get() {
            return Ok(known.clone());
        }
        let pages = self.snapshot.blocks[*block].pages();
        let found = data(&origin.file, PageCount::new(pages));
        let found = found.map_err(|source| Error::Io { what: format!("inspect {}", origin.name), source })?;
        Ok(self.stored[region].get_or_init(|| found).clone())
    }
}

/// The first `pages` pages of a file, as far as they are no holes. There may be more behind them.
///
/// # Errors
/// The system's own.
pub(crate) fn data(file: &File, pages: PageCount) -> std::io::Result<PageSet> {
    use rustix::{fs::SeekFrom, io::Errno};
    let (mut set, mut at, end) = (PageSet::empty(pages), 0, PageRange::all(pages).end());
    while at < end.offset() {
        let begin = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(begin) if begin < end.offset() => begin,
            Ok(_) | Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let hole = rustix::fs::seek(file, SeekFrom::Hole(begin))?;
        set.insert(PageNumber::at(begin).to(PageNumber::behind(hole).min(end)));
        at = hole.max(begin + 1);
    }
    Ok(set)
}

fn manifest(name: &str, folder: &Path) -> Result<Manifest, Error> {
    let path = folder.join(MANIFEST);
    let is_there = std::fs::metadata(&path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => {
            let what = format!("it is a folder without {MANIFEST}, so no complete image; make one: save --format raw");
            wrong(name, what)
        }
        _ => Error::Io { what: format!("open {name}/{MANIFEST}"), source },
    })?;
    if is_there.len() > MANIFEST_BYTES_MAX {
        return Err(damaged(name, "its manifest is longer than any"));
    }
    let text = std::fs::read(&path).map_err(|source| Error::Io { what: format!("read {name}/{MANIFEST}"), source })?;
    let version = serde_json::from_slice::<serde_json::Value>(&text).ok().and_then(|value| value["version"].as_u64());
    match version {
        Some(version) if version == u64::from(VERSION) => {}
        Some(version) => {
            let what =
                format!("it has version {version}, and only {VERSION} is known; use the transship that has made it");
            return Err(wrong(name, what));
        }
        None => return Err(damaged(name, "its manifest has no version")),
    }
    serde_json::from_slice(&text).map_err(|error| damaged(name, &format!("its manifest: {error}")))
}

/// Opens a file of the image, which is nowhere else.
fn open_file(name: &str, folder: &Path, pinned: &Pinned) -> Result<File, Error> {
    if pinned.file.contains('/') || pinned.file.starts_with('.') || pinned.file.is_empty() {
        return Err(damaged(name, &format!("its manifest names the file {:?}", pinned.file)));
    }
    let path = folder.join(&pinned.file);
    let failed = |source| Error::Io { what: format!("open {name}/{}", pinned.file), source };
    let file = File::open(&path).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    if !meta.is_file() || meta.len() != pinned.bytes {
        let (is, was) = (meta.len(), pinned.bytes);
        let what =
            format!("it has {is} bytes, and had {was} when the image was complete: it was cut or changed; {REMADE}");
        return Err(wrong(&format!("{name}/{}", pinned.file), what));
    }
    Ok(file)
}

fn damaged(name: &str, what: &str) -> Error {
    wrong(name, format!("{what}; {REMADE}"))
}
