//! The load of a guest before its pages: the VMM may wait for one meanwhile, and for good if it can't come any more.
//!
//! Until this side has said that the guest is loaded, the source does not give it up. So if the source, its link or the
//! user ends the session in this time, this side decides not to say so, and only then has what is waited for read as
//! zeros: what is loaded so never runs.
use std::{sync::Arc, thread};

use crossbeam_channel::{Receiver, bounded, never, select};
use transship_wire::Message;

use super::{arrival::Arrival, keeper::Lines, state::StateReader};
use crate::{
    Error, Progress, Report,
    control::{Control, TICK},
    guest::DestinationGuest,
};

/// Loads the guest. An error: it is not the source's wish any more, or can't be; nothing waits for a page then.
pub(super) fn load(
    guest: &mut dyn DestinationGuest,
    control: &Control,
    first: Message,
    (arrival, lines): (&Arrival, &Lines),
    (progress, report): (&Arc<Progress>, &mut Report),
) -> Result<(), Error> {
    let ((tell_whole, whole), (tell_over, over)) = (bounded(1), bounded::<()>(0));
    let watch = Watch { control_says: control.incoming.clone(), lines, progress, over };
    thread::scope(|scope| {
        let watching = scope.spawn(move || {
            let is_given_up = watch.until_it_is_over(&whole);
            if is_given_up.is_some() {
                // Without a VMM nothing waits.
                let _ = arrival.filling.release_all();
            }
            is_given_up
        });
        let state = StateReader::new(control, first, progress).telling(tell_whole);
        let loaded = super::loaded(guest, state, report);
        drop(tell_over);
        match watching.join().map_err(|_| Error::Bug("the thread that watches a load panicked"))? {
            None => loaded,
            Some(GivenUp::BrokenOff) => loaded.and(Err(control.gone())),
            Some(GivenUp::Heard(heard)) => Err(heard.map_or_else(
                || control.gone(),
                |message| match message.and_then(|message| control.unless_abort(message)) {
                    Ok(other) => control.unexpected(&other, "while its guest was loaded"),
                    Err(error) => error,
                },
            )),
            Some(GivenUp::NoLine(error)) => Err(error),
            Some(GivenUp::Cancelled) => Err(Error::CANCELLED),
        }
    })
}

/// Why the guest is not taken any more.
enum GivenUp {
    /// Its state did not come whole.
    BrokenOff,
    /// The source has spoken, or has gone.
    Heard(Option<Result<Message, Error>>),
    /// The supply line is broken.
    NoLine(Error),
    Cancelled,
}

/// What may end a load.
struct Watch<'a> {
    control_says: Receiver<Result<Message, Error>>,
    lines: &'a Lines,
    progress: &'a Progress,
    /// Closed when the load is over.
    over: Receiver<()>,
}

impl Watch<'_> {
    /// `whole`: has a word when all of the state has come, and is closed without one if it does not come.
    fn until_it_is_over(&self, whole: &Receiver<()>) -> Option<GivenUp> {
        // Until the state is whole its reader hears what the source says.
        let (mut whole, mut control_says) = (whole.clone(), never());
        loop {
            select! {
                recv(self.over) -> _ => return None,
                recv(whole) -> word => match word {
                    Ok(()) => (whole, control_says) = (never(), self.control_says.clone()),
                    Err(_) => return Some(GivenUp::BrokenOff),
                },
                recv(control_says) -> heard => return Some(GivenUp::Heard(heard.ok())),
                recv(self.lines.broken()) -> _ => return Some(GivenUp::NoLine(self.lines.why())),
                default(TICK) => if self.progress.is_cancelled() {
                    return Some(GivenUp::Cancelled);
                },
            }
        }
    }
}
