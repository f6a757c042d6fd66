//! The second process beside a lazy restore: it holds the file as well, and goes on bringing pages itself.
use std::{fs::File, os::fd::OwnedFd, sync::Arc, thread};

use serde::{Deserialize, Serialize};
use transship_memory::{Area, Claims, Missing, PageCount, PageNumber};

use super::from_file::{FromFile, URGENT_THREADS};
use crate::{
    Error, Progress,
    filling::{
        EndOnDrop, Event, check_units,
        stand_in::{AreaRecord, areas_of, hold, records_of},
    },
    snapshot::{
        Format,
        file::origin::Origin,
        image::opened::data,
        mapped::pages::Source,
        open::{Opened, Snapshot, read},
    },
    stream::whence::wrong,
};

/// What a stand-in is told, beside the files: the userfaultfd first, then which pages were brought, then the snapshot
/// file, then perhaps the same past the page cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakeOver {
    /// The snapshot's name, for messages.
    pub name: String,
    /// Where in its file it begins.
    pub offset: u64,
    /// Threads that read.
    pub channels: u8,
    /// By region: the name of its block in the snapshot.
    pub blocks: Vec<String>,
    /// Where the VMM has the regions: number of the region, its first page there, address and length.
    pub areas: Vec<AreaRecord>,
    /// What `DestinationGuest::last_will` said.
    pub will: String,
    /// The file is the memory of the one region itself.
    pub raw: bool,
}

impl TakeOver {
    /// `origin`: the file that has the pages; another one than the snapshot's is the memory itself.
    pub(super) fn of(
        snapshot: &Snapshot,
        origin: &Origin,
        regions: &[usize],
        missing: &Missing,
        channels: u8,
        will: String,
    ) -> Self {
        let block = |&index: &usize| snapshot.blocks[index].name.to_string();
        Self {
            name: origin.name.clone(),
            offset: origin.offset,
            raw: !Arc::ptr_eq(&origin.file, &snapshot.origin.file),
            channels,
            blocks: regions.iter().map(block).collect(),
            areas: records_of(missing),
            will,
        }
    }

    /// A [`crate::Charge`], in JSON.
    pub(super) fn charge(&self) -> String {
        serde_json::json!({ "file": self }).to_string()
    }

    pub(super) fn format(&self) -> Format {
        if self.raw { Format::Raw } else { Format::MappedRam }
    }

    /// Takes over a restore whose process has ended, with all its threads: brings all pages of the file, those that
    /// somebody waits for first.
    ///
    /// On success all are in place, or the VMM has ended. On failure some are missing for good; `failed` is then called
    /// with the reason, and is to see to it that nobody runs. After that this returns only when the VMM has ended.
    ///
    /// # Errors
    /// What `failed` was called with.
    pub fn run(&self, files: Vec<OwnedFd>, failed: impl FnOnce(&Error)) -> Result<(), Error> {
        let mut files = files.into_iter();
        let uffd = files.next();
        let held = uffd.as_ref().and_then(|uffd| uffd.try_clone().ok());
        let missing = match self.missing(uffd) {
            Ok(missing) => missing,
            Err(error) => {
                failed(&error);
                // Not before nobody runs.
                drop(held);
                return Err(error);
            }
        };
        drop(held);
        match self.rest(&missing, files) {
            Ok(Rest { origin, sources, claims }) => {
                fill(&FromFile::new(&origin, sources, missing, claims), self.channels, failed)
            }
            Err(error) => {
                failed(&error);
                hold(&missing);
                Err(error)
            }
        }
    }

    /// Holds a userfaultfd until its VMM has ended.
    ///
    /// # Errors
    /// It is none, or is not in use where it should be.
    pub fn hold(&self, files: Vec<OwnedFd>) -> Result<(), Error> {
        // The file is needed no more.
        let uffd = files.into_iter().next();
        hold(&self.missing(uffd)?);
        Ok(())
    }

    fn missing(&self, uffd: Option<OwnedFd>) -> Result<Missing, Error> {
        let uffd = uffd.ok_or_else(|| wrong(&self.name, "the stand-in got no userfaultfd"))?;
        let areas = areas_of(&self.areas);
        let pages = pages_of(&areas, self.blocks.len());
        Ok(Missing::taken_over(uffd, areas, &pages)?)
    }

    /// What the dead process had, and what it has brought.
    fn rest(&self, missing: &Missing, mut files: impl Iterator<Item = OwnedFd>) -> Result<Rest, Error> {
        let claims =
            files.next().ok_or_else(|| wrong(&self.name, "the stand-in was not told which pages were brought"))?;
        let pages = pages_of(&missing.areas(), self.blocks.len());
        let (origin, sources) = self.sources(files, &pages)?;
        self.check(missing, &pages, &sources)?;
        Ok(Rest { origin, sources, claims: Claims::taken_over(claims, &pages)? })
    }

    fn check(&self, missing: &Missing, pages: &[PageCount], sources: &[Source]) -> Result<(), Error> {
        let found: Vec<PageCount> = sources.iter().map(|source| source.stored.pages()).collect();
        if pages != found {
            return Err(wrong(&self.name, "it was replaced by another file"));
        }
        check_units(missing, sources.len())
    }

    fn sources(
        &self,
        mut files: impl Iterator<Item = OwnedFd>,
        pages: &[PageCount],
    ) -> Result<(Origin, Vec<Source>), Error> {
        let file = files.next().ok_or_else(|| wrong(&self.name, "the stand-in did not get the file"))?;
        let direct = files.next().map(File::from);
        let origin = Origin::of(self.name.clone(), file.into(), direct, self.offset)?;
        if let (true, [pages]) = (self.raw, pages) {
            let failed = |source| Error::Io { what: format!("inspect {}", self.name), source };
            let stored = data(&origin.file, *pages).map_err(failed)?;
            return Ok((origin, vec![Source { stored, pages_offset: 0 }]));
        }
        let Opened::Mapped(snapshot) = read(origin, None)? else {
            return Err(wrong(&self.name, "it is not a mapped-ram file"));
        };
        let source = |name: &String| {
            let block = snapshot.blocks.iter().find(|block| *block.name == **name);
            let block = block.ok_or_else(|| wrong(&self.name, format_args!("it has no memory {name:?}")))?;
            let pages_offset = block.geometry().map_or(0, |geometry| geometry.pages_offset);
            Ok(Source { stored: snapshot.stored(block)?, pages_offset })
        };
        let sources = self.blocks.iter().map(source).collect::<Result<_, Error>>()?;
        Ok((snapshot.origin.clone(), sources))
    }
}

/// What there is to go on with.
struct Rest {
    origin: Origin,
    sources: Vec<Source>,
    claims: Claims,
}

/// As many pages as the areas have.
fn pages_of(areas: &[Area], regions: usize) -> Vec<PageCount> {
    let mut pages = vec![PageCount::ZERO; regions];
    for area in areas {
        if let Some(pages) = pages.get_mut(area.region) {
            *pages = area.range().end().since(PageNumber::FIRST).max(*pages);
        }
    }
    pages
}

/// Brings everything.
fn fill(filling: &FromFile, channels: u8, failed: impl FnOnce(&Error)) -> Result<(), Error> {
    let progress = Progress::default();
    // Faults that were reported to the dead process, and that it did not serve, are not reported again. (Whoever is not
    // woken now is when the page comes.)
    let _ = filling.wake_all();
    thread::scope(|scope| {
        let _ended = EndOnDrop(filling);
        (0..URGENT_THREADS).for_each(|_| drop(scope.spawn(|| filling.urgent())));
        (0..channels).for_each(|_| drop(scope.spawn(|| filling.background(&progress))));
        match filling.events().recv() {
            Ok(Event::Failed(error)) => {
                // The pages that can be read are still brought: the VMM may need them to stop its guest.
                failed(&error);
                Err(error)
            }
            Ok(Event::Complete | Event::Gone) | Err(_) => Ok(()),
        }
    })
    .inspect_err(|_| hold(filling.missing()))?;
    // Without it the same happens when the last holder ends.
    let _ = filling.release_all();
    Ok(())
}
