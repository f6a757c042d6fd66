//! One region of guest memory (QEMU: a RAM block), however its VMM holds it.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

use crate::{
    ByteRange, Error, Flaw, Keep, PAGE, PageCount, PageRange, PageSet, Process, private::Private, shared::Shared,
};

/// How a region is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The source: we never write.
    Read,
    /// The destination.
    ReadWrite,
}

/// Memory of a guest: a shared file that is mapped here, or private memory of a process. See the crate's documentation
/// for why nothing here returns a slice. All threads may use it at once.
///
/// Reading a hole makes a page there, in a file at least: call [`Region::data`] first, and read only the pages that it
/// names.
/// A file that is cut short while it is mapped kills this process with SIGBUS, as it does the VMM whose memory it is.
pub struct Region {
    name: String,
    bytes: u64,
    access: Access,
    pub(crate) held: Held,
}

/// Where the memory is.
pub(crate) enum Held {
    Shared(Shared),
    Private(Private),
}

/// Private memory of a process, as its VMM describes it.
pub struct InProcess {
    /// The process.
    pub process: Arc<Process>,
    /// Address of the first page there.
    pub address: u64,
    /// Size of the memory in bytes.
    pub bytes: u64,
    /// Bytes of a page of it: 4096, or those of a huge page.
    pub page_bytes: u64,
    /// The file whose content shows where the process has not written, and where in it the memory begins.
    pub file: Option<(OwnedFd, u64)>,
}

impl Region {
    /// Maps a part of a file.
    ///
    /// # Errors
    /// Not a multiple of the page size, file too short, a file that can't be mapped shared, the system's own.
    pub fn map(name: &str, file: OwnedFd, part: ByteRange, access: Access) -> Result<Self, Error> {
        let held = Held::Shared(Shared::map(name, file, part, access)?);
        Ok(Self { name: name.to_owned(), bytes: part.len(), access, held })
    }

    /// Memory that a process has for itself, by its right to be traced. It is copied by the kernel, and never mapped
    /// here.
    ///
    /// # Errors
    /// Not a multiple of the page size; a file that is no memory.
    pub fn in_process(name: &str, memory: InProcess, access: Access) -> Result<Self, Error> {
        let InProcess { process, address, bytes, page_bytes, file } = memory;
        let whole = |number: u64| number.is_multiple_of(PAGE);
        let fits = address.checked_add(bytes).is_some_and(|end| i64::try_from(end).is_ok());
        if bytes == 0
            || !whole(bytes)
            || !whole(address)
            || !page_bytes.is_power_of_two()
            || !whole(page_bytes)
            || !fits
        {
            let why = format!("{bytes} bytes at address {address:#x} of a process are not pages of {page_bytes}");
            return Err(Error::unusable(name, Flaw::Shape, why));
        }
        let part = |offset| ByteRange::sized(offset, bytes);
        let below = file.map(|(file, offset)| Shared::map(name, file, part(offset), Access::Read)).transpose()?;
        let held = Held::Private(Private { process, address, page_bytes, below, keep: Keep::Nothing });
        Ok(Self { name: name.to_owned(), bytes, access, held })
    }

    /// Name of the region.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Size in bytes, a multiple of [`PAGE`].
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Size in pages of [`PAGE`] bytes.
    pub fn pages(&self) -> PageCount {
        PageCount::within(self.bytes)
    }

    /// Size of the pages that back it (4096, or the size of huge pages).
    pub fn backing_page_bytes(&self) -> u64 {
        match &self.held {
            Held::Shared(shared) => shared.page_bytes(),
            Held::Private(private) => private.page_bytes,
        }
    }

    /// The file that its content is in, or of private memory the one that shows where nothing was written, if there is
    /// any.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        match &self.held {
            Held::Shared(shared) => Some(shared.file()),
            Held::Private(private) => private.file(),
        }
    }

    /// The file that others can map to have this memory, and where in it the memory begins. Private memory has none.
    pub fn shared_file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        match &self.held {
            Held::Shared(shared) => Some((shared.file(), shared.file_offset())),
            Held::Private(_) => None,
        }
    }

    /// The file that private memory shows where its process has not written, and where in it the memory begins.
    pub fn file_below(&self) -> Option<(BorrowedFd<'_>, u64)> {
        match &self.held {
            Held::Shared(_) => None,
            Held::Private(private) => private.file_below(),
        }
    }

    /// Gives private memory back what the file below it holds, wherever its process has written: how many pages those
    /// were. Nothing may write to it meanwhile.
    ///
    /// # Errors
    /// A region without such a file, or mapped for reading; the system's own.
    pub fn revert(&self) -> Result<PageCount, Error> {
        self.check_writable()?;
        let Held::Private(private) = &self.held else {
            return Err(Error::unusable(&self.name, Flaw::Else, "it is not private memory, and shows no file"));
        };
        let Some(below) = &private.below else {
            return Err(Error::unusable(&self.name, Flaw::Else, "its process maps no file"));
        };
        let own = private.own(self.pages()).map_err(|source| self.unknown(source))?;
        if own.is_empty() {
            return Ok(PageCount::ZERO);
        }
        // A hole of the file must not be read: that would make a page of it.
        let data = below.data_among(&own)?;
        let failed = |source| self.failed("write pages", source);
        for window in own.windows() {
            let holes = window.without(data.window(window.first));
            let there = window.without(holes.mask);
            let mut bytes = Vec::new();
            below.copy_out(there, &mut bytes);
            let mut rest = bytes.as_slice();
            for run in there.runs() {
                let (pages, after) = rest.split_at(run.bytes() as usize);
                private.write(run, pages).map_err(failed)?;
                rest = after;
            }
            holes.runs().try_for_each(|run| private.write_zeros(run).map_err(failed))?;
        }
        Ok(own.count())
    }

    /// Whether a process has it for itself.
    pub fn is_private(&self) -> bool {
        matches!(self.held, Held::Private(_))
    }

    /// Says what is to become of memory that holds only zeros.
    #[must_use]
    pub fn keeping(mut self, keep: Keep) -> Self {
        match &mut self.held {
            Held::Shared(shared) => shared.keep = keep,
            Held::Private(private) => private.keep = keep,
        }
        self
    }

    /// Whether zeros can be holes: memory is given back by [`Region::clear`], and a range of holes can be cleared for
    /// nothing.
    pub fn gives_back(&self) -> bool {
        match &self.held {
            Held::Shared(shared) => shared.gives_back(),
            Held::Private(_) => false,
        }
    }

    /// The pages that are not holes: in the backing file (SEEK_DATA, SEEK_HOLE), or of private memory in the page table
    /// of its process. Everything else reads as zero. Where the holes are not to be known these are all pages: on some
    /// file systems, and on a hugetlbfs where this process may not use userfaultfd or has the file open for reading
    /// only.
    ///
    /// While the guest runs, scan the tracker first and ask then: what is written after the answer, the next scan
    /// reports. Holes come back too (free page reporting), and the tracker does not report those: ask again in each
    /// round.
    ///
    /// # Errors
    /// The system's own.
    pub fn data(&self) -> Result<PageSet, Error> {
        match &self.held {
            Held::Shared(shared) => shared.data(),
            Held::Private(private) => {
                let mut data = self.data_below(private)?;
                private.add_data(PageRange::all(self.pages()), &mut data).map_err(|e| self.unknown(e))?;
                Ok(data)
            }
        }
    }

    /// The pages that are [`Region::data`] and not among `known`, which were data before. Only the holes between these
    /// are looked at, so it costs little however much data there is; pages of `known` that are holes now go unnoticed.
    ///
    /// # Errors
    /// The system's own.
    pub fn new_data(&self, known: &PageSet) -> Result<PageSet, Error> {
        match &self.held {
            Held::Shared(shared) => shared.new_data(known),
            Held::Private(_) => {
                let mut data = self.data()?;
                data.subtract(known);
                Ok(data)
            }
        }
    }

    /// The pages of `wanted` that are [`Region::data`]. Where the kernel can be asked so, longer stretches of others
    /// are not looked at: the fewer pages are wanted, the less it costs.
    ///
    /// # Errors
    /// The system's own.
    pub fn data_among(&self, wanted: &PageSet) -> Result<PageSet, Error> {
        match &self.held {
            Held::Shared(shared) => shared.data_among(wanted),
            Held::Private(private) => {
                let mut data = self.data_below(private)?;
                private.add_data_near(wanted, &mut data).map_err(|e| self.unknown(e))?;
                data.intersect_with(wanted);
                Ok(data)
            }
        }
    }

    /// Whether all pages of the range are among [`Region::data`] now, asked without a look at the rest.
    ///
    /// # Errors
    /// OutOfRange, the system's own.
    pub fn is_data(&self, range: PageRange) -> Result<bool, Error> {
        self.check(range)?;
        match &self.held {
            Held::Shared(shared) => shared.is_data(range),
            // What shows there is not looked at.
            Held::Private(Private { below: Some(_), .. }) => Ok(true),
            Held::Private(private) => private.are_there(range).map_err(|e| self.unknown(e)),
        }
    }

    /// What shows where the process has not written.
    pub(crate) fn data_below(&self, private: &Private) -> Result<PageSet, Error> {
        private.below.as_ref().map_or_else(|| Ok(PageSet::empty(self.pages())), Shared::data)
    }

    pub(crate) fn unknown(&self, source: io::Error) -> Error {
        self.failed("find the pages that are there", source)
    }

    /// Maps the present pages of the range before they are read, with one fault for many. In a hole it makes a page as
    /// any other read does: name ranges of [`Region::data`]. Pages that the region does not have are ignored, and so is
    /// private memory.
    pub fn populate_read(&self, range: PageRange) {
        if let (Held::Shared(shared), Ok(())) = (&self.held, self.check(range)) {
            shared.populate_read(range);
        }
    }

    /// Asks for transparent huge pages where the file system can (MADV_HUGEPAGE); harmless elsewhere.
    pub fn advise_huge(&self) {
        if let Held::Shared(shared) = &self.held {
            shared.advise_huge();
        }
    }

    /// # Errors
    /// The region does not have all pages of the range.
    pub(crate) fn check(&self, range: PageRange) -> Result<(), Error> {
        if range.fits(self.pages()) {
            return Ok(());
        }
        let (first, end) = (range.first, range.end());
        Err(Error::OutOfRange { region: self.name.clone(), first, end, pages: self.pages() })
    }

    /// # Errors
    /// The region was mapped for reading.
    pub(crate) fn check_writable(&self) -> Result<(), Error> {
        match self.access {
            Access::ReadWrite => Ok(()),
            Access::Read => {
                Err(Error::unusable(&self.name, Flaw::ReadOnly, "it is mapped for reading only and can't be written"))
            }
        }
    }

    /// Whether it is a file of a hugetlbfs: all of it is on huge pages, and write(2) does nothing there.
    pub fn is_huge_file(&self) -> bool {
        matches!(&self.held, Held::Shared(shared) if shared.is_hugetlb())
    }

    /// Address and length of pages of a mapping that check() has let pass; good as long as the region.
    pub(crate) fn mapped(&self, range: PageRange) -> (*mut u8, usize) {
        match &self.held {
            Held::Shared(shared) => shared.raw(range),
            Held::Private(_) => unreachable!("private memory goes through a buffer"),
        }
    }

    /// What helps, if it is memory that is missing; goes into a message behind the region's name.
    pub(crate) fn cure(&self, why: rustix::io::Errno) -> String {
        match &self.held {
            Held::Shared(shared) => shared.cure(why),
            Held::Private(_) => String::new(),
        }
    }

    pub(crate) fn failed(&self, doing: &str, source: io::Error) -> Error {
        match &self.held {
            Held::Shared(shared) => {
                shared.failed(doing, rustix::io::Errno::from_io_error(&source).unwrap_or(rustix::io::Errno::IO))
            }
            Held::Private(private) => Error::system(
                format!(
                    "{doing} in region {:?} of process {} (it has ended, or there is no memory left for it)",
                    self.name,
                    private.process.pid()
                ),
                source,
            ),
        }
    }
}

/// All regions of a guest, in the adapter's order; the index is the region's number on the wire.
#[derive(Clone)]
pub struct GuestMemory {
    regions: Arc<[Region]>,
}

impl GuestMemory {
    /// The regions of one guest.
    pub fn new(regions: Vec<Region>) -> Self {
        Self { regions: regions.into() }
    }

    /// All regions, in order.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Readies all of it for pages that come, with huge pages where they can be had. Returns, by region, the pages that
    /// may hold something: [`Region::ready`].
    ///
    /// # Errors
    /// As [`Region::ready`].
    pub fn ready(&self) -> Result<Vec<PageSet>, Error> {
        let ready = |region: &Region| {
            let held = region.ready()?;
            region.advise_huge();
            Ok(held)
        };
        self.regions.iter().map(ready).collect()
    }

    /// Makes all of it a hole, but for what processes have for themselves: [`Region::empty`].
    ///
    /// # Errors
    /// As [`Region::empty`]. Those that refuse do so before any memory is touched.
    pub fn empty(&self) -> Result<(), Error> {
        self.check_can_be_empty()?;
        self.regions.iter().try_for_each(Region::empty)
    }

    /// Whether [`GuestMemory::empty`] would refuse. Touches no memory.
    ///
    /// # Errors
    /// It would: what was promised to a region would be lost.
    pub fn check_can_be_empty(&self) -> Result<(), Error> {
        self.regions.iter().try_for_each(Region::check_can_be_empty)
    }

    /// The region of this number.
    pub fn get(&self, region: usize) -> Option<&Region> {
        self.regions.get(region)
    }

    /// Size of all regions in bytes.
    pub fn bytes(&self) -> u64 {
        self.regions.iter().map(Region::bytes).sum()
    }
}
