//! The life of a restore: from the file that the user named to the running guest.
//!
//! - `restoring`: the steps of every way
//! - `clones`: nothing of its memory is brought, as it is the image's
//! - `eager`: all of it first; `sequential`: the same from a plain stream
//! - `from_file`: pages that come when they are touched; `lazy`: such a restore; `stand_in`: the process that could go
//!   on with it
mod clones;
mod eager;
mod from_file;
mod lazy;
mod restoring;
mod sequential;
pub(crate) mod stand_in;

use std::{path::Path, sync::Arc, time::Instant};

use super::{
    FileUri, RestoreOptions,
    image::opened::Image,
    open::{Opened, open},
};
use crate::{
    Error, Progress, Report, ending::finish, filling::stand_in::StandIn, guest::DestinationGuest, stream::whence::wrong,
};
use restoring::Restore;

/// Restores the guest of a snapshot file into one that waits: its memory first, then its devices; then it runs. With
/// `lazily` it runs first, and this returns when all of its memory has followed.
///
/// On success the guest is there, and runs if the file or `options` say so. On failure it does not run and never will
/// by our doing, except that [`Error::Unknown`] means what it says. Everything about the file that can be known from
/// its structure, and whether it fits the guest, is known before anything of the guest is touched; after that the
/// memory of the waiting guest may have been overwritten.
///
/// # Errors
/// See [`Error`].
pub fn restore_guest(
    guest: &mut dyn DestinationGuest,
    from: &FileUri,
    options: &RestoreOptions,
    lazily: Option<&mut dyn StandIn>,
    progress: &Arc<Progress>,
    report: &mut Report,
) -> Result<(), Error> {
    let begin = Instant::now();
    report.bytes.guest = guest.memory().bytes();
    let result = open(from, options.direct_io, options.identities.as_ref()).and_then(|opened| {
        let mut restore = Restore { guest, options, progress, report, begin };
        match (opened, lazily) {
            (Opened::Mapped(snapshot), None) => eager::restore(&mut restore, *snapshot),
            (Opened::Mapped(snapshot), Some(stand_in)) => lazy::restore(&mut restore, *snapshot, stand_in),
            (Opened::Image(image), None) => eager::restore_image(&mut restore, *image),
            (Opened::Image(image), Some(stand_in)) => lazy::restore_image(&mut restore, *image, stand_in),
            (Opened::Stream(stream), None) => sequential::restore(&mut restore, *stream),
            (Opened::Stream(stream), Some(_)) => {
                let what = "it is a plain stream, whose pages have no fixed places; restore it without --lazy";
                Err(wrong(&stream.origin.name, what))
            }
        }
    });
    finish(result, begin, progress, report)
}

/// An image that clones are made from. It is read once, whatever the number of clones.
pub struct CloneSource(Image);

impl CloneSource {
    /// Opens the image in a folder and checks that its parts fit each other.
    ///
    /// # Errors
    /// There is no image, or it is damaged.
    pub fn open(folder: &Path) -> Result<Self, Error> {
        Image::open(&folder.display().to_string(), folder).map(Self)
    }
}

/// Makes a clone of the guest in an image, of one that waits and has mapped the image's memory for itself: nothing of
/// it is copied. One with memory of its own is restored: lazily if there is a stand-in and that memory allows it.
/// `since`: when it began, for the report.
///
/// On success the guest is there, and runs if the image or `options` say so. On failure it does not run and never will
/// by our doing, except that [`Error::Unknown`] means what it says. All checks come before anything of it is touched.
///
/// # Errors
/// See [`Error`].
pub fn clone_guest(
    guest: &mut dyn DestinationGuest,
    from: &CloneSource,
    options: &RestoreOptions,
    stand_in: Option<&mut dyn StandIn>,
    since: Instant,
    progress: &Arc<Progress>,
    report: &mut Report,
) -> Result<(), Error> {
    let begin = Instant::now();
    report.bytes.guest = guest.memory().bytes();
    let mut restore = Restore { guest, options, progress, report, begin };
    let result = clones::clone(&mut restore, &from.0, stand_in, since);
    finish(result, begin, progress, report)
}
