//! Guest memory in a file that is shared with the VMM, mapped into this process.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Mutex,
};

use rustix::{
    fs::{FileType, OFlags, SeekFrom},
    io::Errno,
    mm::Advice,
};

use crate::{
    Access, ByteRange, Error, Flaw, Keep, PAGE, PageCount, PageNumber, PageRange, PageSet, cached, huge_holes,
    mapping::Mapping, pagemap, room,
};

/// How much Linux maps around a read fault, unless it was built or configured otherwise.
pub(crate) const FAULT_AROUND_BYTES: usize = 64 << 10;

/// Pages that cost as much to look at as to ask about what is behind them alone.
const SMALL_GAP: PageCount = PageCount::new(32);

/// A part of a file, mapped shared.
///
/// Reading a hole makes the file system put a page there: call [`Shared::data`] first, and read only the pages that it
/// names. A file that is cut short while it is mapped kills this process with SIGBUS, as it does the VMM whose memory
/// it is.
pub(crate) struct Shared {
    name: String,
    file: OwnedFd,
    file_offset: u64,
    bytes: u64,
    backing: Backing,
    mapping: Mapping,
    pub(crate) keep: Keep,
    /// The file for whoever reads it, and does not write; none: it can't be lent.
    pub(crate) lent: Option<OwnedFd>,
    /// Held while the file is written to.
    pub(crate) writing: Mutex<()>,
}

impl Shared {
    /// Maps a part of a file.
    ///
    /// # Errors
    /// Not a multiple of the page size, file too short, a file that can't be mapped shared, the system's own.
    pub(crate) fn map(name: &str, file: OwnedFd, part: ByteRange, access: Access) -> Result<Self, Error> {
        let backing = Backing::of(name, file.as_fd())?;
        check_shape(name, part, backing)?;
        check_file(name, file.as_fd(), part, access)?;
        let (file_offset, bytes) = (part.start, part.len());
        // Whole backing pages: a hugetlbfs maps nothing else, and unmaps nothing else.
        let len = usize::try_from(bytes.next_multiple_of(backing.page_bytes)).expect("64-bit addresses");
        let mapping = Mapping::new(file.as_fd(), file_offset, len, access == Access::ReadWrite)
            .map_err(|source| Error::system(format!("map {bytes} bytes of region {name:?}"), source))?;
        if backing.tmpfs {
            // Without it, unmapping takes twice as long.
            let _ = mapping.leave_no_mark();
        }
        if access == Access::Read {
            // For `Holes::keep_note`, which says why if there is none.
            let _ = pagemap::own();
        }
        let (name, keep, writing) = (name.to_owned(), Keep::default(), Mutex::new(()));
        Ok(Self { name, file, file_offset, bytes, backing, mapping, keep, lent: None, writing })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn pages(&self) -> PageCount {
        PageCount::within(self.bytes)
    }

    pub(crate) fn page_bytes(&self) -> u64 {
        self.backing.page_bytes
    }

    /// The backing file.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Where in the backing file it begins.
    pub(crate) fn file_offset(&self) -> u64 {
        self.file_offset
    }

    /// The pages that are not holes in the backing file (SEEK_DATA, SEEK_HOLE). Everything else reads as zero. Where
    /// the holes are not to be known these are all pages: on some file systems, and on a hugetlbfs where this process
    /// may not use userfaultfd or has the file open for reading only.
    ///
    /// While the guest runs, scan the tracker first and ask then: what is written after the answer, the next scan
    /// reports. Holes come back too (free page reporting), and the tracker does not report those: ask again in each
    /// round.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn data(&self) -> Result<PageSet, Error> {
        if self.backing.hugetlb { self.huge_data() } else { self.seek_data([PageRange::all(self.pages())]) }
    }

    /// The pages that are [`Shared::data`] and not among `known`, which were data before. Only the holes between these
    /// are looked at, so it costs little however much data there is; pages of `known` that are holes now go unnoticed.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn new_data(&self, known: &PageSet) -> Result<PageSet, Error> {
        let mut data = if self.backing.hugetlb { self.huge_data()? } else { self.seek_data(self.between(known))? };
        data.subtract(known);
        Ok(data)
    }

    /// The pages of `wanted` that are [`Shared::data`]. Where the kernel can be asked so, longer stretches of others
    /// are not looked at: the fewer pages are wanted, the less it costs.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn data_among(&self, wanted: &PageSet) -> Result<PageSet, Error> {
        let first = PageRange::all(PageCount::ONE);
        if self.count_data(first).is_none() {
            let mut data = self.data()?;
            data.intersect_with(wanted);
            return Ok(data);
        }
        let mut data = self.seek_data(wanted.ranges_near(SMALL_GAP))?;
        data.intersect_with(wanted);
        Ok(data)
    }

    /// How many pages of a range that the region has are data; none: the kernel does not say, or the file is on a disk.
    pub(crate) fn count_data(&self, range: PageRange) -> Option<PageCount> {
        if self.is_on_tmpfs() { cached::pages(self.file(), self.part_of_file(range)) } else { None }
    }

    pub(crate) fn is_on_tmpfs(&self) -> bool {
        self.backing.tmpfs
    }

    /// Whether all pages of the range are among [`Shared::data`] now, asked without a look at the rest.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn is_data(&self, range: PageRange) -> Result<bool, Error> {
        let ByteRange { start, end } = self.part_of_file(range);
        if self.backing.hugetlb {
            let unit = self.backing.page_bytes;
            let part = ByteRange { start: start / unit * unit, end: end.next_multiple_of(unit) };
            let Ok(present) = huge_holes::present(self.file(), part, unit) else { return Ok(true) };
            return Ok(present.iter().map(|there| there.len()).sum::<u64>() == part.len());
        }
        if range.count.is_zero() {
            return Ok(true);
        }
        // Searching for the next hole examines all data before it, which may be all there is.
        if self.count_data(range) == Some(range.count) {
            return Ok(true);
        }
        match rustix::fs::seek(&self.file, SeekFrom::Hole(start)) {
            Ok(hole) => Ok(hole >= end),
            // A file system that does not report holes.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(true),
            // Cut short.
            Err(Errno::NXIO) => Ok(false),
            Err(source) => Err(self.failed("find the holes", source)),
        }
    }

    /// The data of a hugetlbfs file. Where holes are not to be known they are made pages here: whoever reads what is
    /// called data must not die of a pool that has no page for it.
    fn huge_data(&self) -> Result<PageSet, Error> {
        let unit = self.backing.page_bytes;
        let part = ByteRange::sized(self.file_offset, self.bytes.next_multiple_of(unit));
        let Ok(present) = huge_holes::present(self.file(), part, unit) else {
            self.make_to_read(PageRange::all(self.pages()))?;
            return Ok(PageSet::full(self.pages()));
        };
        let mut data = PageSet::empty(self.pages());
        for bytes in present {
            data.insert(PageNumber::at(bytes.start).to(PageNumber::at(bytes.end.min(self.bytes))));
        }
        Ok(data)
    }

    /// Maps the present pages of the range before they are read, with one fault for many: the kernel maps the pages
    /// around a read one too. Measured on 4 KiB pages, two threads: 21 GB/s with a scan after it, 18 without this, and
    /// 6 with MADV_POPULATE_READ, whose callers wait for each other. In a hole it makes a page as any other read does:
    /// name ranges of [`Shared::data`]. Pages that the region does not have are ignored.
    pub(crate) fn populate_read(&self, range: PageRange) {
        let (start, len) = self.raw(range);
        for at in (0..len).step_by(FAULT_AROUND_BYTES) {
            // SAFETY: at < len, and raw() gives len bytes of the mapping; volatile, so that the guest may write and the
            // read stays.
            unsafe { start.add(at).read_volatile() };
        }
    }

    /// Asks for transparent huge pages where the file system can (MADV_HUGEPAGE); harmless elsewhere.
    pub(crate) fn advise_huge(&self) {
        self.advise(PageRange::all(self.pages()), Advice::LinuxHugepage);
    }

    fn advise(&self, range: PageRange, advice: Advice) {
        let (start, len) = self.raw(range);
        // SAFETY: raw() gives len bytes of the mapping; the advice does not change what they hold.
        let _ = unsafe { rustix::mm::madvise(start.cast(), len, advice) };
    }

    /// Address and length of pages that check() has let pass; good as long as the region.
    pub(crate) fn raw(&self, range: PageRange) -> (*mut u8, usize) {
        let (offset, len) = (range.first.offset() as usize, range.bytes() as usize);
        (self.mapping.at(offset, len).expect("a range that was checked"), len)
    }

    /// Where the page is in the backing file.
    pub(crate) fn offset_in_file(&self, page: PageNumber) -> u64 {
        self.file_offset + page.offset()
    }

    pub(crate) fn part_of_file(&self, pages: PageRange) -> ByteRange {
        ByteRange { start: self.offset_in_file(pages.first), end: self.offset_in_file(pages.end()) }
    }

    /// Whether write(2) does nothing on the file, as on a hugetlbfs.
    pub(crate) fn is_hugetlb(&self) -> bool {
        self.backing.hugetlb
    }

    /// Whether it is in the system's memory, and on no disk.
    pub(crate) fn is_memory(&self) -> bool {
        self.backing.is_memory()
    }

    /// Whether it is memory of the system's, in its usual pages.
    pub(crate) fn is_of_memory(&self) -> bool {
        self.backing.tmpfs
    }

    /// Whether nobody can find the file by a name.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn is_nameless(&self) -> Result<bool, Error> {
        let stat = rustix::fs::fstat(&self.file).map_err(|source| self.failed("inspect the file", source))?;
        Ok(stat.st_nlink == 0)
    }

    pub(crate) fn failed(&self, doing: &str, source: Errno) -> Error {
        Error::system(format!("{doing} in region {:?}{}", self.name, self.cure(source)), source)
    }

    /// What helps, if it is memory that is missing; goes into a message behind the region's name.
    pub(crate) fn cure(&self, why: Errno) -> String {
        match (why, self.backing.hugetlb) {
            (Errno::NOSPC | Errno::NOMEM, true) => room::cure_of_pool(self.backing.page_bytes),
            (Errno::NOSPC, false) => {
                " (the file system of its memory is full: make it larger, as by mount -o remount,size=, and try again \
                 with a new waiting VM)"
                    .to_owned()
            }
            _ => String::new(),
        }
    }

    /// The size of the file's own pages, in pages of [`PAGE`].
    pub(crate) fn unit_pages(&self) -> PageCount {
        PageCount::within(self.backing.page_bytes)
    }
}

/// What the file system backs memory with.
#[derive(Clone, Copy)]
pub(crate) struct Backing {
    page_bytes: u64,
    hugetlb: bool,
    /// What it has in memory is its data. On a disk a hole that somebody has read is in memory, too.
    tmpfs: bool,
}

impl Backing {
    pub(crate) fn of(name: &str, file: BorrowedFd<'_>) -> Result<Self, Error> {
        const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;
        const TMPFS_MAGIC: u32 = 0x0102_1994;
        let fs = rustix::fs::fstatfs(file)
            .map_err(|source| Error::system(format!("get the file system of region {name:?}"), source))?;
        let hugetlb = fs.f_type as u32 == HUGETLBFS_MAGIC;
        let tmpfs = fs.f_type as u32 == TMPFS_MAGIC;
        let page_bytes = if hugetlb { fs.f_bsize as u64 } else { PAGE };
        Ok(Self { page_bytes, hugetlb, tmpfs })
    }

    /// Whether it is the system's memory, in pages of whatever size, and no disk.
    pub(crate) fn is_memory(self) -> bool {
        self.hugetlb || self.tmpfs
    }
}

fn check_shape(name: &str, part: ByteRange, backing: Backing) -> Result<(), Error> {
    let (file_offset, bytes) = (part.start, part.len());
    if bytes == 0 || !bytes.is_multiple_of(PAGE) {
        return Err(Error::unusable(
            name,
            Flaw::Shape,
            format!("its size of {bytes} bytes is 0 or not a multiple of {PAGE}"),
        ));
    }
    let unit = backing.page_bytes;
    if !file_offset.is_multiple_of(unit) {
        return Err(Error::unusable(
            name,
            Flaw::Shape,
            format!("its offset {file_offset:#x} in the file is not a multiple of {unit}"),
        ));
    }
    let most = u64::try_from(isize::MAX).expect("64-bit addresses");
    if part.end > most - unit {
        let why = format!("{bytes} bytes from offset {file_offset:#x} exceed any file's size");
        return Err(Error::unusable(name, Flaw::Shape, why));
    }
    Ok(())
}

fn check_file(name: &str, file: BorrowedFd<'_>, part: ByteRange, access: Access) -> Result<(), Error> {
    let stat = rustix::fs::fstat(file)
        .map_err(|source| Error::system(format!("get the size of the file of region {name:?}"), source))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Error::unusable(
            name,
            Flaw::NotRegular,
            "its backing is not a regular file; use a file on tmpfs or hugetlbfs",
        ));
    }
    let (end, size) = (part.end, u64::try_from(stat.st_size).unwrap_or(0));
    if end > size {
        return Err(Error::unusable(
            name,
            Flaw::TooShort,
            format!("it ends at byte {end} of its file, which has only {size}"),
        ));
    }
    let flags = rustix::fs::fcntl_getfl(file)
        .map_err(|source| Error::system(format!("get the flags of the file of region {name:?}"), source))?;
    if access == Access::ReadWrite && flags.contains(OFlags::APPEND) {
        return Err(Error::unusable(
            name,
            Flaw::Append,
            "its file is open for appending, so pages can't be written to their places",
        ));
    }
    Ok(())
}
