//! Which pages of a region are holes, asked again and again.
//!
//! Asking the file system costs a look at every page: 16 ms a GiB, in a moment when the guest stands still. So only
//! pages are looked at of which it matters. In a VM that never gives memory back, all looks but the first can be saved:
//! what was data still is, and new data can only be pages that somebody wrote. The same holds of one that says when it
//! does, until it says so. In others, pages of which a note is kept need not be looked at: they are mapped there as
//! long as they are data.
use std::sync::Arc;

use crate::{
    Error, PageSet, Region,
    given_back::{Note, Noted},
    region::Held,
};

/// Whether pages that hold something may become holes while the VM runs (ballooning, free page reporting). From what
/// is simplest to what is hardest to follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Freeing {
    /// The VM has nothing that could do so.
    Never,
    /// The VM says when it has happened, and the guest does not rely on what such pages hold when it has them back.
    /// Nothing is looked for until it says so: see [`Holes::look_again`].
    Announced,
    /// Ask the file system each time.
    Possible,
}

/// What is known about the holes of one region.
pub struct Holes {
    freeing: Freeing,
    data: Option<PageSet>,
    noted: Option<Arc<Noted>>,
    /// What of it was there when it was looked at last.
    there: Option<PageSet>,
}

impl Holes {
    /// Knows nothing yet.
    pub fn new(freeing: Freeing) -> Self {
        Self { freeing, data: None, noted: None, there: None }
    }

    /// From now on pages that were given back are found also when they are there again: see [`Holes::came_back`].
    /// Nothing is to be done in a VM that never gives memory back, or says so, and of private memory, where the tracker
    /// sees them.
    ///
    /// # Errors
    /// It can't be done: a file on a disk, a kernel before Linux 5.14, or a process that may not use userfaultfd.
    /// Everything else goes on as before.
    pub fn keep_note(&mut self, region: &Region) -> Result<(), Error> {
        if let (Freeing::Possible, Held::Shared(shared)) = (self.freeing, &region.held) {
            self.noted = Some(Arc::new(Noted::of(shared)?));
        }
        Ok(())
    }

    /// Those of `content`, pages that were read earlier, that were given back since: they may be memory of zeros now,
    /// which nobody has written. There may be others among them: the kernel may have put them elsewhere meanwhile.
    /// None if no note is kept.
    ///
    /// # Errors
    /// The system's own.
    pub fn came_back(&mut self, content: &PageSet) -> Result<PageSet, Error> {
        let Some(noted) = &self.noted else { return Ok(PageSet::empty(content.pages())) };
        let mut came_back = content.clone();
        came_back.subtract(self.there.insert(noted.look()?));
        Ok(came_back)
    }

    /// For whoever reads pages that were found by the last look: each is to be noted before.
    pub fn note(&mut self) -> Note {
        // A page that was given back since that look is not noted, and comes back the next time.
        let there = self.there.take();
        self.noted.as_ref().map_or_else(Note::default, |noted| Note::new(Arc::clone(noted), there))
    }

    /// Memory was given back: the next look asks the file system.
    pub fn look_again(&mut self) {
        self.data = None;
    }

    /// The pages of `wanted` that are not holes, and maybe others that are none. In a VM that never gives memory back,
    /// or says so: what was wanted before and is not among them must not have been written since it was. Where note is
    /// kept, pages count as they were when [`Holes::came_back`] was asked.
    ///
    /// # Errors
    /// The system's own.
    pub fn look(&mut self, region: &Region, wanted: &PageSet) -> Result<&PageSet, Error> {
        let known = match self.data.take() {
            Some(mut known) if self.freeing != Freeing::Possible => {
                known.union_with(wanted);
                known
            }
            _ => match &self.there {
                None => region.data_among(wanted)?,
                Some(there) => {
                    let (mut data, mut rest) = (wanted.clone(), wanted.clone());
                    data.intersect_with(there);
                    rest.subtract(there);
                    data.union_with(&region.data_among(&rest)?);
                    data
                }
            },
        };
        Ok(self.data.insert(known))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, ByteRange, PAGE_BYTES, PageCount, PageRange, WindowPages};

    const PAGES: u64 = 512;

    fn region() -> Region {
        let file = rustix::fs::memfd_create("holes", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, PAGES * 4096).unwrap();
        let region = Region::map("holes", file, ByteRange::sized(0, PAGES * 4096), Access::ReadWrite).unwrap();
        write(&region, 0);
        region
    }

    /// Writes 128 pages.
    fn write(region: &Region, first: u64) -> PageSet {
        region.write_pages(WindowPages::new(first, u128::MAX), &vec![7; 128 * PAGE_BYTES]).unwrap();
        let mut written = PageSet::empty(PageCount::new(PAGES));
        written.insert(PageRange::new(first, 128));
        written
    }

    /// What is known of these pages.
    fn data_of(holes: &mut Holes, region: &Region, wanted: &PageSet) -> PageSet {
        let mut data = holes.look(region, wanted).unwrap().clone();
        data.intersect_with(wanted);
        data
    }

    #[test]
    fn pages_that_nobody_asked_for_are_found_when_they_are_written() {
        for freeing in [Freeing::Possible, Freeing::Announced, Freeing::Never] {
            let region = region();
            let mut holes = Holes::new(freeing);
            // Of two pages that hold something one is asked for.
            let (mut first, mut both) = (PageSet::empty(PageCount::new(PAGES)), PageSet::empty(PageCount::new(PAGES)));
            first.insert(PageRange::new(0, 1));
            both.insert(PageRange::new(0, 2));
            assert_eq!(data_of(&mut holes, &region, &first), first);
            assert_eq!(data_of(&mut holes, &region, &both), both, "{freeing:?}");
        }
    }

    #[test]
    fn what_is_known_is_what_the_file_has() {
        for freeing in [Freeing::Possible, Freeing::Announced, Freeing::Never] {
            let region = region();
            let mut holes = Holes::new(freeing);
            assert_eq!(*holes.look(&region, &PageSet::full(PageCount::new(PAGES))).unwrap(), region.data().unwrap());
            let written = write(&region, 256);
            assert_eq!(data_of(&mut holes, &region, &written), written);
            if freeing != Freeing::Never {
                region.clear(PageRange::new(3, 40)).unwrap();
                if freeing == Freeing::Announced {
                    holes.look_again();
                }
                assert_eq!(
                    *holes.look(&region, &PageSet::full(PageCount::new(PAGES))).unwrap(),
                    region.data().unwrap()
                );
            }
        }
    }

    #[test]
    fn a_vm_that_never_frees_or_says_so_is_asked_once() {
        for freeing in [Freeing::Announced, Freeing::Never] {
            let region = region();
            let mut holes = Holes::new(freeing);
            holes.look(&region, &PageSet::full(PageCount::new(PAGES))).unwrap();
            write(&region, 256);
            // Told nothing, it does not see the new pages: so it did not look.
            let none = PageSet::empty(PageCount::new(PAGES));
            assert_eq!(holes.look(&region, &none).unwrap().count(), PageCount::new(128), "{freeing:?}");
        }
    }

    #[test]
    fn pages_that_come_after_another_look_are_found_when_they_are_written() {
        let region = region();
        let mut holes = Holes::new(Freeing::Announced);
        let all = PageSet::full(PageCount::new(PAGES));
        holes.look(&region, &all).unwrap();
        region.clear(PageRange::new(0, 128)).unwrap();
        holes.look_again();
        assert_eq!(holes.look(&region, &all).unwrap().count(), PageCount::ZERO);
        let written = write(&region, 0);
        assert_eq!(data_of(&mut holes, &region, &written), written);
    }
}
