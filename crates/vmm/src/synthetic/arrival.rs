//! The check of every page after a move. It goes on while the guest runs already: a thread that writes a page that was
//! not yet checked checks it first.
use std::sync::{
    Mutex,
    atomic::{AtomicBool, Ordering},
};

use transship_memory::{Access, ByteRange, PageCount, PageNumber, PageSet, Region};

use super::{lock, mapping::Ram};

/// Pages that one lock is for.
const GROUP: u64 = 64;

/// Which pages are not yet checked, and which were found wrong.
pub(super) struct Arrival {
    /// A bit for each page of a group that is not yet checked. The lock is held while one of them is.
    left: Box<[Mutex<u64>]>,
    /// Not all are checked. Set to false (Release) after the last check; a writer that sees it (Acquire) writes after
    /// all reads.
    unfinished: AtomicBool,
    /// By region, as they were on arrival.
    data: Vec<PageSet>,
    wrong: Mutex<Vec<u64>>,
}

impl Arrival {
    pub(super) fn new(ram: &[Ram], holes: Holes) -> Result<Self, transship_memory::Error> {
        let pages = ram.iter().map(Ram::pages).sum::<PageCount>().get();
        let bits = |group: u64| u64::MAX >> (GROUP - (pages - group * GROUP).min(GROUP));
        Ok(Self {
            left: (0..pages.div_ceil(GROUP)).map(|group| Mutex::new(bits(group))).collect(),
            unfinished: AtomicBool::new(true),
            data: data(ram, holes)?,
            wrong: Mutex::new(Vec::new()),
        })
    }

    /// Checks what is left, until `quit` is set. Returns whether all is checked. `is_right`: whether this page, a hole
    /// or not, is what it must be.
    pub(super) fn check_all(&self, quit: &AtomicBool, mut is_right: impl FnMut(u64, bool) -> bool) -> bool {
        for (group, left) in (0..).zip(&self.left) {
            if quit.load(Ordering::Relaxed) {
                return false;
            }
            let mut left = lock(left);
            while *left != 0 {
                let bit = left.trailing_zeros();
                self.check(group * GROUP + u64::from(bit), &mut is_right);
                *left &= !(1 << bit);
            }
        }
        self.unfinished.store(false, Ordering::Release);
        true
    }

    pub(super) fn check_before_write(&self, number: u64, mut is_right: impl FnMut(u64, bool) -> bool) {
        if !self.unfinished.load(Ordering::Acquire) {
            return;
        }
        let mut left = lock(&self.left[(number / GROUP) as usize]);
        let bit = 1 << (number % GROUP);
        if *left & bit != 0 {
            self.check(number, &mut is_right);
            *left &= !bit;
        }
    }

    fn check(&self, number: u64, is_right: &mut impl FnMut(u64, bool) -> bool) {
        if !is_right(number, is_hole(&self.data, number)) {
            lock(&self.wrong).push(number);
        }
    }

    /// Pages that were found wrong so far.
    pub(super) fn wrong(&self) -> Vec<u64> {
        lock(&self.wrong).clone()
    }
}

/// What the holes in the memory's files are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holes {
    /// Pages of zeros, which need not be read.
    AreZero,
    /// Pages that come when they are touched.
    MayCome,
}

/// The pages of each region that must be read to know them.
pub(super) fn data(ram: &[Ram], holes: Holes) -> Result<Vec<PageSet>, transship_memory::Error> {
    if holes == Holes::MayCome {
        return Ok(ram.iter().map(|ram| PageSet::full(ram.pages())).collect());
    }
    let data = |ram: &Ram| {
        let unusable =
            |e: std::io::Error| transship_memory::Error::System { what: format!("read {}", ram.name()), source: e };
        let file = ram.file().try_clone_to_owned().map_err(unusable)?;
        Region::map(ram.name(), file, ByteRange::sized(0, ram.bytes()), Access::Read)?.data()
    };
    ram.iter().map(data).collect()
}

/// Whether page `number` was a hole. All regions have the same size.
pub(super) fn is_hole(data: &[PageSet], number: u64) -> bool {
    let pages = data.first().map_or(1, |data| data.pages().get());
    !data[(number / pages) as usize].contains(PageNumber::new(number % pages))
}
