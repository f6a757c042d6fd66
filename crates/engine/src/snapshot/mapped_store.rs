//! A mapped-ram file whose pages come from a stream: each goes to its place, in any order and as often as it likes.
use std::sync::{
    Arc, Mutex, MutexGuard, RwLock,
    atomic::{
        AtomicBool, AtomicUsize,
        Ordering::{AcqRel, Acquire, Relaxed},
    },
};

use transship_memory::{FileIo, PAGE_BYTES, PageRange, Turns};
use transship_wire::qemu::{Block, Configuration, bitmap_bytes};

use super::{
    content::Content,
    layout::{Around, Layout},
    mapped_writer::MappedWriter,
    state::DeviceState,
    store::{FileStore, PageWriter, Store},
    target::Target,
};
use crate::{Error, FileReport, Progress};

const PAGE: u64 = PAGE_BYTES as u64;
/// All blocks together; no file is longer.
const MAX_BYTES: u64 = 1 << 60;

/// The file and what it holds.
pub(crate) struct MappedStore {
    pub(super) target: Target,
    configuration: Configuration,
    ram_section: u32,
    /// By block. Only the main stream's reader writes, when it comes to a list.
    blocks: RwLock<Blocks>,
    around: Mutex<Beside>,
    /// How the kernel is asked, and whether that is io_uring.
    pub(super) io: FileIo,
    is_uring: AtomicBool,
    /// Of the writers through the page cache.
    pub(super) turns: Turns,
    /// Writers with something that is not known to be in the file. One that is given up leaves it counted: what it had may be missing. Its last
    /// change by a writer goes before the look at it in `complete`.
    unfinished: AtomicUsize,
}

struct Blocks {
    layout: Layout,
    list: Vec<Place>,
}

/// Where a block's pages are, and which.
pub(super) struct Place {
    pages_offset: u64,
    bytes: u64,
    pages: Mutex<Pages>,
}

#[derive(Default)]
struct Pages {
    /// The file's bitmap.
    content: Content,
    /// All that were ever written.
    written: Content,
}

/// What is no page.
#[derive(Default)]
struct Beside {
    early: Vec<u8>,
    switchover: bool,
}

impl MappedStore {
    /// A file of a machine as `configuration` describes it. `ram_section`: the number that no section behind the memory has.
    /// `io`: how the kernel is asked to write pages.
    pub(crate) fn begin(target: Target, configuration: &Configuration, ram_section: u32, io: FileIo) -> Self {
        let layout = Layout::new(target.offset(), &[]);
        let blocks = RwLock::new(Blocks { layout, list: Vec::new() });
        Self {
            target,
            configuration: configuration.clone(),
            ram_section,
            blocks,
            around: Mutex::default(),
            io,
            is_uring: AtomicBool::new(false),
            turns: Turns::default(),
            unfinished: AtomicUsize::new(0),
        }
    }

    pub(super) fn with<T>(&self, block: usize, act: impl FnOnce(&Place) -> T) -> T {
        let blocks = self.blocks.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        act(&blocks.list[block])
    }
}

impl MappedStore {
    /// A writer asks the kernel by io_uring, or not.
    pub(super) fn note_io(&self, is_uring: bool) {
        self.is_uring.store(is_uring, Relaxed);
    }

    pub(super) fn begin_unfinished(&self) {
        self.unfinished.fetch_add(1, AcqRel);
    }

    pub(super) fn end_unfinished(&self) {
        self.unfinished.fetch_sub(1, AcqRel);
    }

    /// What a page is; everything that was stored of it is in the file, through the page cache or past it.
    pub(super) fn read_page(&self, block: usize, page: u64, into: &mut [u8; PAGE_BYTES]) -> Result<(), Error> {
        self.with(block, |place| {
            if place.pages().content.contains(page) {
                return self.target.read_at(into, place.byte_of(page));
            }
            into.fill(0);
            Ok(())
        })
    }
}

impl Place {
    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Where in the file a page is.
    pub(super) fn byte_of(&self, page: u64) -> u64 {
        self.pages_offset + page * PAGE
    }

    pub(super) fn note_content(&self, range: PageRange) {
        let mut known = self.pages();
        known.content.insert(range);
        known.written.insert(range);
    }

    pub(super) fn note_zero(&self, range: PageRange) {
        self.pages().content.remove(range);
    }
}

impl Store for MappedStore {
    fn list(&self, blocks: &[Block]) -> Result<(), Error> {
        let mut known = self.blocks.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        for block in blocks {
            if known.layout.end().saturating_add(block.used_bytes) > MAX_BYTES {
                return Err(Error::File(format!("blocks up to {:?} are longer than any file", &*block.name)));
            }
            let pages_offset = known.layout.push(&block.name, block.used_bytes);
            known.list.push(Place { pages_offset, bytes: block.used_bytes, pages: Mutex::default() });
        }
        let end = known.layout.end();
        self.target.expect(end - self.target.offset());
        self.target.set_length(end)
    }

    fn writer(self: Arc<Self>) -> Result<Box<dyn PageWriter>, Error> {
        Ok(Box::new(MappedWriter::new(self)?))
    }

    fn early(&self, bytes: &[u8]) -> Result<(), Error> {
        self.beside().early.extend_from_slice(bytes);
        Ok(())
    }

    fn switchover(&self) {
        self.beside().switchover = true;
    }

    fn last(&self) {}
}

impl MappedStore {
    fn beside(&self) -> MutexGuard<'_, Beside> {
        self.around.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl FileStore for MappedStore {
    fn complete(&self, tail: &[u8], file: &mut FileReport, progress: &Progress) -> Result<(), Error> {
        if self.unfinished.load(Acquire) != 0 {
            return Err(Error::File(
                "pages are on their way to a file that is to be complete: a bug of transship".into(),
            ));
        }
        file.direct_io = self.target.is_direct();
        file.direct_io_refused = self.target.refused().map(str::to_owned);
        file.io_uring = self.is_uring.load(Relaxed);
        let Beside { early, switchover } = std::mem::take(&mut *self.beside());
        let state = DeviceState {
            configuration: self.configuration.clone(),
            ram_section: self.ram_section,
            blocks: Vec::new(),
            early,
            switchover_start: switchover,
            tail: tail.to_vec(),
        };
        let blocks = self.blocks.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let Around { pieces, .. } = blocks.layout.around(&state)?;
        for (place, at) in blocks.list.iter().zip(blocks.layout.bitmaps()) {
            let known = place.pages();
            file.pages_stored += known.content.count();
            for (offset, bytes) in known.content.bitmap(bitmap_bytes(place.bytes)) {
                self.target.write_at(&bytes, at + offset)?;
            }
            for range in known.written.without(&known.content) {
                if progress.is_cancelled() {
                    return Err(Error::Cancelled);
                }
                self.target.punch(place.pages_offset + range.first * PAGE, range.bytes())?;
                file.pages_freed += range.count;
            }
        }
        let (head, rest) = pieces.split_first().ok_or_else(|| Error::File("an empty snapshot".into()))?;
        rest.iter().try_for_each(|piece| self.target.write_at(&piece.bytes, piece.position))?;
        self.target.complete(&head.bytes, progress)?;
        (file.bytes, file.allocated) = self.target.size()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::FileExt;

    use proptest::{collection::vec, prelude::*};
    use transship_memory::{FileQueue, GuestMemory};
    use transship_wire::qemu::Name;

    use super::*;
    use crate::snapshot::{DirectIo, FileUri};

    /// More than a room has, and not a multiple of anything.
    const PAGES: [u64; 2] = [700, 333];

    #[derive(Debug, Clone)]
    enum Op {
        /// Pages of this, all different.
        Store {
            block: usize,
            first: u64,
            count: u64,
            seed: u8,
        },
        Clear {
            block: usize,
            first: u64,
            count: u64,
        },
        /// Of a page, one byte.
        Patch {
            block: usize,
            page: u64,
            at: u8,
            byte: u8,
        },
        /// A barrier: from now on each of the two writers brings what the other has brought before.
        Swap,
    }

    fn op() -> impl Strategy<Value = Op> {
        let count = || prop_oneof![3 => 1..4u64, 1 => 1..300u64];
        let place = || (0..2usize, 0..PAGES[0], count());
        prop_oneof![
            8 => (place(), 1..255u8).prop_map(|((block, first, count), seed)| Op::Store { block, first, count, seed }),
            3 => place().prop_map(|(block, first, count)| Op::Clear { block, first, count }),
            1 => (0..2usize, 0..PAGES[0], 1..128u8, any::<u8>())
                .prop_map(|(block, page, at, byte)| Op::Patch { block, page, at, byte }),
            2 => Just(Op::Swap),
        ]
    }

    /// The range, cut where the block ends.
    fn within(block: usize, first: u64, count: u64) -> PageRange {
        let first = first % PAGES[block];
        PageRange::new(first, count.min(PAGES[block] - first))
    }

    fn page_of(seed: u8, page: u64) -> [u8; PAGE_BYTES] {
        let mut bytes = [seed; PAGE_BYTES];
        bytes[8..16].copy_from_slice(&page.to_le_bytes());
        bytes
    }

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    fn store(target: Target, io: FileIo) -> Arc<MappedStore> {
        let store = MappedStore::begin(target, &Configuration::new(name("pc-q35-10.0")), 7, io);
        let block = |(number, pages): (usize, u64)| Block {
            name: name(&format!("mem{number}")),
            used_bytes: pages * PAGE,
            gpa: None,
            mapped: None,
        };
        store.list(&PAGES.into_iter().enumerate().map(block).collect::<Vec<_>>()).unwrap();
        Arc::new(store)
    }

    fn apply(op: &Op, epoch: &mut usize, writers: &mut [Box<dyn PageWriter>; 2], model: &mut [Vec<u8>; 2]) {
        match *op {
            Op::Swap => {
                writers.iter_mut().for_each(|writer| writer.finish().unwrap());
                *epoch += 1;
            }
            Op::Store { block, first, count, seed } => {
                let (range, writer) = (within(block, first, count), &mut writers[(block + *epoch) % 2]);
                // One page of room is left out, as pages that turn out to be zero are.
                let room = writer.room(range.count as usize + 1).unwrap();
                for page in 0..range.count {
                    let bytes = page_of(seed, range.first + page);
                    room[(page as usize + 1) * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(&bytes);
                    model[block][((range.first + page) * PAGE) as usize..][..PAGE_BYTES].copy_from_slice(&bytes);
                }
                writer.store(1, block, range).unwrap();
            }
            Op::Clear { block, first, count } => {
                let range = within(block, first, count);
                writers[(block + *epoch) % 2].clear(block, range).unwrap();
                model[block][(range.first * PAGE) as usize..][..range.bytes() as usize].fill(0);
            }
            Op::Patch { block, page, at, byte } => {
                let page = page % PAGES[block];
                // So many bytes as they were, and one that is new.
                writers[(block + *epoch) % 2].patch(block, page * PAGE, &[at, 1, byte]).unwrap();
                model[block][page as usize * PAGE_BYTES + usize::from(at)] = byte;
            }
        }
    }

    /// What the file says that the memory is.
    fn read_back(store: &MappedStore, file: &std::fs::File) -> Vec<Vec<u8>> {
        let blocks = store.blocks.read().unwrap();
        let places = blocks.list.iter().zip(blocks.layout.bitmaps());
        places
            .map(|(place, bitmap_offset)| {
                let mut bitmap = vec![0; bitmap_bytes(place.bytes) as usize];
                file.read_exact_at(&mut bitmap, bitmap_offset).unwrap();
                let mut memory = vec![0; place.bytes as usize];
                for (page, bytes) in memory.chunks_mut(PAGE_BYTES).enumerate() {
                    if bitmap[page / 8] >> (page % 8) & 1 == 1 {
                        file.read_exact_at(bytes, place.byte_of(page as u64)).unwrap();
                    }
                }
                memory
            })
            .collect()
    }

    fn has_uring() -> bool {
        let file = tempfile::tempfile().unwrap().into();
        FileQueue::new(GuestMemory::new(Vec::new()), file, 1, FileIo::Uring).is_ok()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever came over whatever, in any way of writing: what came last is in the file.
        #[test]
        fn a_file_holds_what_was_brought_last(
            ops in vec(op(), 1..120),
            direct_io in prop_oneof![2 => Just(DirectIo::Auto), 1 => Just(DirectIo::Off)],
            io in prop_oneof![Just(FileIo::Auto), Just(FileIo::Plain), Just(FileIo::Uring)],
        ) {
            let io = if io == FileIo::Uring && !has_uring() { FileIo::Auto } else { io };
            // A disk on most machines.
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("file");
            let target = Target::create(&FileUri::path(&path), direct_io, &GuestMemory::new(Vec::new())).unwrap();
            let store = store(target, io);
            let mut writers = [0, 1].map(|_| Arc::clone(&store).writer().unwrap());
            let mut model = PAGES.map(|pages| vec![0; (pages * PAGE) as usize]);
            let mut epoch = 0;
            for op in &ops {
                apply(op, &mut epoch, &mut writers, &mut model);
            }
            writers.iter_mut().for_each(|writer| writer.finish().unwrap());
            let mut report = FileReport::default();
            store.complete(b"devices", &mut report, &Progress::new()).unwrap();
            let file = std::fs::File::open(&path).unwrap();
            for (block, (is, expected)) in read_back(&store, &file).into_iter().zip(&model).enumerate() {
                let page = is.chunks(PAGE_BYTES).zip(expected.chunks(PAGE_BYTES)).position(|(is, expected)| is != expected);
                prop_assert_eq!(page, None, "of block {}", block);
            }
        }
    }

    /// Somebody gave up with pages on their way: whether they came to the file, and what the disk said, nobody knows.
    #[test]
    fn no_file_is_complete_with_pages_that_nobody_has_waited_for() {
        for given_up in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let uri = FileUri::path(folder.path().join("file"));
            let target = Target::create(&uri, DirectIo::Auto, &GuestMemory::new(Vec::new())).unwrap();
            let store = store(target, FileIo::Auto);
            let mut writer = Some(Arc::clone(&store).writer().unwrap());
            let bringing = writer.as_mut().unwrap();
            bringing.room(1).unwrap().fill(1);
            bringing.store(0, 0, PageRange::new(3, 1)).unwrap();
            if given_up {
                writer = None;
            }
            let complete = || store.complete(b"", &mut FileReport::default(), &Progress::new());
            assert!(complete().unwrap_err().to_string().contains("on their way"));
            if let Some(writer) = &mut writer {
                writer.finish().unwrap();
                complete().unwrap();
            }
        }
    }
}
