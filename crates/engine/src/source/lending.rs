//! On one host a source lends its memory: the destination reads the pages itself, so that they are copied once.
//!
//! ```text
//!   source                                  destination
//!     ├── Hello: would lend ──────────────────►│
//!     │◄────────────────────────────── Lend ───┤   or Welcome: it does not want to
//!     ├── Lent: where the regions are ────────►│
//!     ├── data connections ═══════════════════►│
//!     ├── their descriptors ══════════════════►│   on data connection 0, for reading only
//! ```
use std::os::fd::BorrowedFd;

use transship_lines::MAX_FDS;
use transship_memory::GuestMemory;
use transship_wire::Message;

use crate::{Compress, Error, MoveOptions, control::Control, transport::Connection};

/// Root, to whom nothing is new.
const ROOT: u32 = 0;

/// What would be lent.
pub(super) struct Offer {
    memory: GuestMemory,
    /// By region.
    lent: Vec<bool>,
}

impl Offer {
    /// None: nothing is lent. The destination must be root's or the user's who was named, on this host. Pages that
    /// follow the guest are not lent, nor those that are to be encoded or that only so many a second are to go of.
    pub(super) fn of(memory: GuestMemory, options: &MoveOptions, control: &Control) -> Option<Self> {
        let user = options.lend_to?;
        let may = control.user().is_some_and(|theirs| theirs == ROOT || theirs == user);
        let raw = options.compress == Compress::default() || options.compress == Compress::Auto;
        if !may || !raw || options.post_copy.is_some() || options.terms.bandwidth.is_some() {
            return None;
        }
        let mut left = MAX_FDS;
        let lent = memory.regions().iter().map(|region| {
            let lends = region.lent().is_some() && left > 0;
            left -= usize::from(lends);
            lends
        });
        let lent: Vec<_> = lent.collect();
        lent.contains(&true).then_some(Self { memory, lent })
    }

    /// The destination wants it: tells where the regions are.
    pub(super) fn tell(&self, control: &mut Control) -> Result<(), Error> {
        let offsets = self.files().map(|file| file.map(|(_, offset)| offset)).collect();
        control.send_or_hear(&Message::Lent { offsets })
    }

    /// Passes the files on. By region: whether it is lent.
    pub(super) fn pass(self, over: &Connection, peer: &str) -> Result<Vec<bool>, Error> {
        let files: Vec<_> = self.files().flatten().map(|(file, _)| file).collect();
        over.send_files(&files).map_err(|source| Error::Io { what: format!("lend memory to {peer}"), source })?;
        Ok(self.lent)
    }

    fn files(&self) -> impl Iterator<Item = Option<(BorrowedFd<'_>, u64)>> {
        let regions = self.memory.regions().iter().zip(&self.lent);
        regions.map(|(region, lends)| lends.then(|| region.lent()).flatten())
    }
}
