//! On one host a source lends its memory: the destination reads the pages itself, so that they are copied once.
//!
//! ```text
//!   source                                  destination
//!     ├── Hello: would lend ──────────────────►│
//!     │◄────────────────────────────── Lend ───┤   or Welcome: it does not want to
//!     ├── Lent: where the regions are ────────►│
//!     ├── data connections ═══════════════════►│
//!     ├── their descriptors ══════════════════►│   on data connection 0, for reading only
//!     │◄────────────────────────── Borrowed ───┤   or not, if there is somebody between who passes no descriptors on
//! ```
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use transship_lines::MAX_FDS;
use transship_memory::{GuestMemory, Region, WindowBuffer, make_slots};
use transship_wire::Message;

use super::channels::Channels;
use crate::{Compress, Error, MoveOptions, control::Control, transport::Connection};

/// Of each channel, for pages of memory that can't be lent: some are filled while others are emptied.
const SLOTS: u8 = 4;
/// With more channels there are no slots. They take 2 MiB for each.
const CHANNELS_WITH_SLOTS: u8 = 32;
/// Root, to whom nothing is new.
const ROOT: u32 = 0;

/// What would be lent.
pub(super) struct Offer {
    memory: GuestMemory,
    /// By region.
    lent: Vec<bool>,
    channels: u8,
    needs_slots: bool,
    /// Those of all channels, and the file that they are in; none: they are not made.
    slots: Option<(OwnedFd, Vec<WindowBuffer>)>,
}

/// What was passed on.
pub(super) struct Handed {
    /// By region: whether the destination reads it itself.
    lent: Vec<bool>,
    /// By channel.
    slots: Vec<Vec<WindowBuffer>>,
}

impl Handed {
    /// The destination has it. What still goes over the channels goes as it is: on one host encoding only takes time.
    pub(super) fn put_to_use(self, channels: &mut Channels) {
        let Self { lent, slots } = self;
        let _ = channels.shared().lent.set(lent); // nobody else does
        channels.all_mut().iter_mut().zip(slots).for_each(|(channel, rooms)| channel.use_slots(rooms));
        channels.encode_nothing();
    }
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
        let mut left = MAX_FDS - 1; // one for the slots
        let lent = memory.regions().iter().map(|region| {
            let lends = region.lent().is_some() && left > 0;
            left -= usize::from(lends);
            lends
        });
        let lent: Vec<_> = lent.collect();
        let channels = options.channels;
        let needs_slots = memory.regions().iter().any(Region::is_private) && channels <= CHANNELS_WITH_SLOTS;
        (needs_slots || lent.contains(&true)).then_some(Self { memory, lent, channels, needs_slots, slots: None })
    }

    /// The destination wants it: tells where the regions are.
    pub(super) fn tell(&mut self, control: &mut Control) -> Result<(), Error> {
        if self.needs_slots {
            match make_slots(usize::from(SLOTS) * usize::from(self.channels)) {
                Ok(slots) => self.slots = Some(slots),
                Err(error) => tracing::info!("private memory is sent, as there is no room to share: {error}"),
            }
        }
        let offsets = self.files().map(|file| file.map(|(_, offset)| offset)).collect();
        let slots = if self.slots.is_some() { SLOTS } else { 0 };
        control.send_or_hear(&Message::Lent { offsets, slots })
    }

    /// Passes the files on.
    pub(super) fn pass(self, over: &Connection, peer: &str) -> Result<Handed, Error> {
        let slots = self.slots.as_ref().map(|(file, _)| file.as_fd());
        let files: Vec<_> = self.files().flatten().map(|(file, _)| file).chain(slots).collect();
        over.send_files(&files).map_err(|source| Error::Io { what: format!("lend memory to {peer}"), source })?;
        let mut rooms = self.slots.map(|(_, rooms)| rooms).unwrap_or_default().into_iter();
        let of_one = |_| rooms.by_ref().take(usize::from(SLOTS)).collect();
        let slots = (0..self.channels).map(of_one).collect();
        Ok(Handed { lent: self.lent, slots })
    }

    fn files(&self) -> impl Iterator<Item = Option<(BorrowedFd<'_>, u64)>> {
        let regions = self.memory.regions().iter().zip(&self.lent);
        regions.map(|(region, lends)| lends.then(|| region.lent()).flatten())
    }
}
