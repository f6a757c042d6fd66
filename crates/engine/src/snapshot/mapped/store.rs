//! A mapped-ram file, or an image, whose pages come from a stream: each goes to its place, in any order and as often as
//! it likes.
use std::sync::{Arc, Mutex, MutexGuard};

use transship_memory::{ByteRange, FileIo};
use transship_wire::qemu::{Block, Configuration, bitmap_bytes};

use super::{
    file::MappedFile,
    layout::{Around, Layout},
    writer::MappedWriter,
};
use crate::{
    Error, FileReport, Misfit, Progress,
    guest::DiskFile,
    snapshot::file::target::Target,
    stream::{
        state::DeviceState,
        store::{FileStore, PageWriter, Store},
    },
};

/// The file, and what is in it beside pages.
pub(crate) struct MappedStore {
    file: Arc<MappedFile>,
    configuration: Configuration,
    ram_section: u32,
    around: Mutex<Beside>,
}

/// What is no page.
#[derive(Default)]
struct Beside {
    early: Vec<u8>,
    switchover: bool,
    disks: Option<Vec<DiskFile>>,
}

impl MappedStore {
    /// A file of a machine as `configuration` describes it. `ram_section`: the number that no section behind the memory
    /// has. `io`: how the kernel is asked to write pages.
    pub(crate) fn begin(target: Target, configuration: &Configuration, ram_section: u32, io: FileIo) -> Self {
        let layout = Layout::new(target.offset(), &[]);
        Self::with(target, layout, configuration, ram_section, io)
    }

    /// The same of an image, in the folder that is the target.
    pub(crate) fn begin_image(target: Target, configuration: &Configuration, ram_section: u32, io: FileIo) -> Self {
        Self::with(target, Layout::of_image(), configuration, ram_section, io)
    }

    fn with(target: Target, layout: Layout, configuration: &Configuration, ram_section: u32, io: FileIo) -> Self {
        let file = Arc::new(MappedFile::new(target, layout, io));
        Self { file, configuration: configuration.clone(), ram_section, around: Mutex::default() }
    }

    fn beside(&self) -> MutexGuard<'_, Beside> {
        self.around.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Store for MappedStore {
    fn list(&self, blocks: &[Block]) -> Result<(), Error> {
        self.file.add(blocks)
    }

    fn writer(self: Arc<Self>) -> Result<Box<dyn PageWriter>, Error> {
        Ok(Box::new(MappedWriter::new(Arc::clone(&self.file))?))
    }

    fn early(&self, bytes: &[u8]) -> Result<(), Error> {
        self.beside().early.extend_from_slice(bytes);
        Ok(())
    }

    fn switchover(&self) {
        self.beside().switchover = true;
    }
}

impl FileStore for MappedStore {
    fn disks(&self, disks: Vec<DiskFile>) {
        self.beside().disks = Some(disks);
    }

    fn complete(&self, tail: &[u8], report: &mut FileReport, progress: &Progress) -> Result<(), Error> {
        if !self.file.is_finished() {
            return Err(Misfit::Unfinished
                .file("pages are still on their way to a file that is being completed: a bug of transship"));
        }
        report.direct_io = self.file.target.is_direct();
        report.direct_io_refused = self.file.target.refused().map(str::to_owned);
        report.io_uring = self.file.is_uring();
        let Beside { early, switchover, disks } = std::mem::take(&mut *self.beside());
        let state = DeviceState {
            configuration: self.configuration.clone(),
            ram_section: self.ram_section,
            blocks: Vec::new(),
            early,
            switchover_start: switchover,
            tail: tail.to_vec(),
        };
        let blocks = self.file.blocks();
        let Around { pieces, .. } = blocks.layout.around(&state)?;
        for (place, at) in blocks.list.iter().zip(blocks.layout.bitmaps()) {
            let known = place.pages();
            report.pages_stored += known.content.count().get();
            for (offset, bytes) in known.content.bitmap(bitmap_bytes(place.bytes)) {
                at.map_or(Ok(()), |at| self.file.target.write_at(&bytes, at + offset))?;
            }
            for range in known.written.without(&known.content) {
                if progress.is_cancelled() {
                    return Err(Error::CANCELLED);
                }
                self.file.target.punch(place.at.file, ByteRange::sized(place.byte_of(range.first), range.bytes()))?;
                report.pages_freed += range.count.get();
            }
        }
        let (head, rest) = pieces.split_first().ok_or_else(|| Error::file("an empty snapshot"))?;
        rest.iter().try_for_each(|piece| self.file.target.write_at(&piece.bytes, piece.position))?;
        let target = &self.file.target;
        match blocks.layout.is_image() {
            true if target.files() == 1 => {
                return Err(Error::file(
                    "none of its blocks is called as a guest's memory is; save the guest itself with --format raw",
                ));
            }
            true => {
                let left_out = blocks.layout.left_out();
                target.complete_image(&head.bytes, &left_out, &self.configuration, disks.as_deref(), progress)?;
            }
            false => target.complete(&head.bytes, progress)?,
        }
        (report.bytes, report.allocated) = self.file.target.size()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::FileExt;

    use proptest::{collection::vec, prelude::*};
    use transship_memory::{FileQueue, GuestMemory, PAGE, PAGE_BYTES, PageNumber, PageRange};
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
                let room = writer.room(range.count.index() + 1).unwrap();
                for (at, page) in (1..).zip(range.iter()) {
                    let bytes = page_of(seed, page.get());
                    room[at * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(&bytes);
                    model[block][page.offset() as usize..][..PAGE_BYTES].copy_from_slice(&bytes);
                }
                writer.store(1, block, range).unwrap();
            }
            Op::Clear { block, first, count } => {
                let range = within(block, first, count);
                writers[(block + *epoch) % 2].clear(block, range).unwrap();
                model[block][range.first.offset() as usize..][..range.bytes() as usize].fill(0);
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
        let blocks = store.file.blocks();
        let places = blocks.list.iter().zip(blocks.layout.bitmaps());
        places
            .map(|(place, bitmap_offset)| {
                let mut bitmap = vec![0; bitmap_bytes(place.bytes) as usize];
                file.read_exact_at(&mut bitmap, bitmap_offset.unwrap()).unwrap();
                let mut memory = vec![0; place.bytes as usize];
                for (page, bytes) in memory.chunks_mut(PAGE_BYTES).enumerate() {
                    if bitmap[page / 8] >> (page % 8) & 1 == 1 {
                        file.read_exact_at(bytes, place.byte_of(PageNumber::new(page as u64))).unwrap();
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
            assert!(matches!(complete(), Err(Error::File { what: Misfit::Unfinished, .. })));
            if let Some(writer) = &mut writer {
                writer.finish().unwrap();
                complete().unwrap();
            }
        }
    }
}
