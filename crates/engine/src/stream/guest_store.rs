//! A guest that waits: its memory takes the pages of its blocks, and its VMM the rest, when all of it is there.
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, RwLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use transship_memory::{GuestMemory, PAGE, PAGE_BYTES, PageCount, PageNumber, PageRange, WINDOW_PAGES};
use transship_wire::qemu::{Block, Configuration, xbzrle};

use super::{
    fit::{Fit, check_devices, check_sizes},
    pieces::{PieceReader, Pieces},
    recompose::Recomposer,
    store::{Counts, PageWriter, PromptStore, PromptWriter, Store},
};
use crate::{Error, guest::StateFormat, intake::Intake};

/// The memory of the guest, and what is kept for its VMM.
pub(crate) struct GuestStore {
    /// What comes, for errors: a file, or a guest.
    name: String,
    intake: Intake,
    /// What the VMM may have beside that memory.
    format: StateFormat,
    /// By block.
    homes: RwLock<Vec<Home>>,
    beside: Mutex<Beside>,
    /// Pages of the regions that came, with content and without.
    normal: AtomicU64,
    zero: AtomicU64,
}

/// Where the pages of a block go.
enum Home {
    Region(usize),
    /// A ROM or a video memory: small, and QEMU's to load.
    Device(Block, Mutex<Pages>),
}

/// Pages that are not zero, by their numbers.
type Pages = BTreeMap<PageNumber, Box<[u8; PAGE_BYTES]>>;

#[derive(Default)]
struct Beside {
    early: Vec<u8>,
    switchover: bool,
}

impl GuestStore {
    /// `name`: what comes, for errors; `fit`: which of `blocks` is what; `format`: of the VMM that waits.
    ///
    /// # Errors
    /// Memory that is to be there can't be had.
    pub(crate) fn new(
        name: String,
        memory: GuestMemory,
        fit: &Fit,
        blocks: &[Block],
        format: StateFormat,
    ) -> Result<Self, Error> {
        let homes = blocks.iter().enumerate().map(|(number, block)| {
            match fit.regions.iter().position(|&region| region == number) {
                Some(region) => Home::Region(region),
                None => Home::Device(block.clone(), Mutex::default()),
            }
        });
        Ok(Self {
            name,
            intake: Intake::over_old(memory)?,
            format,
            homes: RwLock::new(homes.collect()),
            beside: Mutex::default(),
            normal: AtomicU64::new(0),
            zero: AtomicU64::new(0),
        })
    }

    /// All pages have come: those that did not are to read as zero. To be called before the memory is used.
    pub(crate) fn settle(&self) -> Result<(), Error> {
        self.intake.clear_old()
    }

    fn with<T>(&self, block: usize, act: impl FnOnce(&Home) -> T) -> T {
        act(&self.homes.read().unwrap_or_else(|poisoned| poisoned.into_inner())[block])
    }

    fn beside(&self) -> MutexGuard<'_, Beside> {
        self.beside.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Pages of the regions that hold content.
    pub(crate) fn stored(&self) -> PageCount {
        let regions = self.intake.memory().regions().iter().zip(self.intake.written());
        regions.map(|(region, content)| content.to_set(region.pages()).count()).sum()
    }

    /// Pages of the regions that came so far, each as often as it came.
    pub(crate) fn counts(&self) -> Counts {
        Counts { normal: PageCount::new(self.normal.load(Relaxed)), zero: PageCount::new(self.zero.load(Relaxed)) }
    }

    /// All that is not the guest's own memory, as the VMM loads it. `tail`: what follows the memory.
    pub(crate) fn device_stream(&self, configuration: &Configuration, tail: Vec<u8>) -> PieceReader<DeviceStream> {
        let mut homes = self.homes.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        let devices = homes.drain(..).filter_map(|home| match home {
            Home::Region(_) => None,
            Home::Device(block, pages) => {
                Some((block, pages.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner())))
            }
        });
        let mut blocks: Vec<(Block, Pages)> = devices.collect();
        let mut recomposer = Recomposer::new(configuration, blocks.iter().map(|(block, _)| block));
        let Beside { early, switchover } = std::mem::take(&mut *self.beside());
        recomposer.early(&early);
        if switchover {
            recomposer.switchover();
        }
        recomposer.last();
        blocks.reverse();
        PieceReader::new(DeviceStream { blocks, next: PageNumber::FIRST, recomposer: Some(recomposer), tail })
    }
}

impl Store for GuestStore {
    fn list(&self, blocks: &[Block]) -> Result<(), Error> {
        // All memory of the guest was in the first list: these are the devices'.
        check_devices(&self.name, blocks.iter(), &self.format)?;
        let mut homes = self.homes.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        // What is kept for them here is bounded by all lists together.
        let before = homes.iter().filter_map(|home| match home {
            Home::Region(_) => None,
            Home::Device(block, _) => Some(block),
        });
        check_sizes(&self.name, &before.chain(blocks).collect::<Vec<_>>())?;
        homes.extend(blocks.iter().map(|block| Home::Device(block.clone(), Mutex::default())));
        Ok(())
    }

    fn writer(self: Arc<Self>) -> Result<Box<dyn PageWriter>, Error> {
        Ok(Box::new(PromptWriter::new(self)))
    }

    fn early(&self, bytes: &[u8]) -> Result<(), Error> {
        self.beside().early.extend_from_slice(bytes);
        Ok(())
    }

    fn switchover(&self) {
        self.beside().switchover = true;
    }
}

impl PromptStore for GuestStore {
    fn write(&self, block: usize, offset: u64, pages: &[u8]) -> Result<(), Error> {
        let first = PageNumber::at(offset);
        self.with(block, |home| match home {
            Home::Region(region) => {
                let mut rest = pages;
                for window in first.run(PageCount::within(pages.len() as u64)).windows() {
                    let (these, others) = rest.split_at(window.bytes() as usize);
                    self.intake.write(*region, window, these)?;
                    rest = others;
                }
                self.normal.fetch_add(pages.len() as u64 / PAGE, Relaxed);
                Ok(())
            }
            Home::Device(_, held) => {
                let mut held = held.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                let (pages, _) = pages.as_chunks();
                held.extend(
                    first.run(PageCount::new(pages.len() as u64)).iter().zip(pages.iter().map(|page| Box::new(*page))),
                );
                Ok(())
            }
        })
    }

    fn clear(&self, block: usize, pages: PageRange) -> Result<(), Error> {
        self.with(block, |home| match home {
            Home::Region(region) => {
                self.intake.clear_range(*region, pages)?;
                self.zero.fetch_add(pages.count.get(), Relaxed);
                Ok(())
            }
            Home::Device(_, held) => {
                let mut held = held.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                let gone: Vec<_> = held.range(pages.first..pages.end()).map(|(&page, _)| page).collect();
                for page in gone {
                    held.remove(&page);
                }
                Ok(())
            }
        })
    }

    fn patch(&self, block: usize, offset: u64, delta: &[u8]) -> Result<(), Error> {
        let (number, mut page) = (PageNumber::at(offset), [0; PAGE_BYTES]);
        self.with(block, |home| match home {
            Home::Region(region) => {
                if self.intake.written()[*region].contains(number) {
                    self.intake.memory().regions()[*region].copy_to(number.run(PageCount::ONE), &mut page)?;
                }
                Ok::<_, Error>(())
            }
            Home::Device(_, held) => {
                let held = held.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                if let Some(before) = held.get(&number) {
                    page = **before;
                }
                Ok(())
            }
        })?;
        xbzrle::decode(delta, 0, &mut page).map_err(|error| Error::file(error.to_string()))?;
        self.write(block, offset, &page)
    }
}

/// The stream, made while it is read.
pub(crate) struct DeviceStream {
    /// The next one last.
    blocks: Vec<(Block, Pages)>,
    /// The next page of it.
    next: PageNumber,
    recomposer: Option<Recomposer>,
    tail: Vec<u8>,
}

impl Pieces for DeviceStream {
    fn advance(&mut self) -> Result<Vec<u8>, Error> {
        let Some(recomposer) = &mut self.recomposer else { return Ok(std::mem::take(&mut self.tail)) };
        if let Some((block, pages)) = self.blocks.last() {
            let all = PageRange::all(PageCount::new(block.pages()));
            let end = all.end().min(self.next + WINDOW_PAGES);
            for page in self.next.to(end).iter() {
                match pages.get(&page) {
                    Some(bytes) => recomposer.page(&block.name, page.offset(), bytes),
                    None => recomposer.zero_page(&block.name, page.offset()),
                }
            }
            self.next = end;
            if end == all.end() {
                self.blocks.pop();
                self.next = PageNumber::FIRST;
            }
            return Ok(recomposer.take());
        }
        recomposer.finish();
        let piece = recomposer.take();
        self.recomposer = None;
        Ok(piece)
    }
}
