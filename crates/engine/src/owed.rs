//! Sets of pages as they travel when a guest is handed over before them: what it goes without, and what it still lacks.
use std::time::Duration;

use transship_memory::{GuestMemory, PageCount, PageRange, PageSet, WindowPages};
use transship_wire::{MAX_OWED_WINDOWS, Message, OwedWindow};

use crate::{Error, Progress, Rule, control::Control};

/// Names all pages of the sets, by region.
pub(crate) fn send(control: &mut Control, sets: &[PageSet]) -> Result<(), Error> {
    for (region, set) in (0..).zip(sets) {
        let windows: Vec<_> =
            set.windows().map(|window| OwedWindow { first: window.first.get(), pages: window.mask }).collect();
        for windows in windows.chunks(MAX_OWED_WINDOWS) {
            control.send_or_hear(&Message::Owed { region, windows: windows.to_vec() })?;
        }
    }
    control.send_or_hear(&Message::OwedEnd { pages: PageCount::of(sets).get() })
}

/// Takes what `send` has sent, up to its end: by region of this memory. `first`: the message that came first, if it was
/// received already. Each message may take `limit`.
pub(crate) fn receive(
    control: &Control,
    first: Option<Message>,
    memory: &GuestMemory,
    limit: Duration,
    progress: &Progress,
) -> Result<Vec<PageSet>, Error> {
    let mut sets: Vec<_> = memory.regions().iter().map(|region| PageSet::empty(region.pages())).collect();
    let mut next = first;
    loop {
        let message = match next.take() {
            Some(message) => message,
            None => control.receive("the pages that are owed", limit, progress)?,
        };
        match message {
            Message::Owed { region, windows } => {
                let broke = |what: String| Error::breach(&control.peer, Rule::Bounds, what);
                let set = sets
                    .get_mut(usize::from(region))
                    .ok_or_else(|| broke(format!("names pages of region {region}, which there is not")))?;
                for OwedWindow { first, pages } in windows {
                    for run in WindowPages::new(first, pages).runs() {
                        if run.end() > PageRange::all(set.pages()).end() {
                            return Err(broke(format!(
                                "names page {} of region {region}, which it has not",
                                run.end().get() - 1
                            )));
                        }
                        set.insert(run);
                    }
                }
            }
            Message::OwedEnd { pages } => {
                let named = PageCount::of(&sets);
                if named == PageCount::new(pages) {
                    return Ok(sets);
                }
                let what = format!("announced {pages} owed pages and named {named}");
                return Err(Error::breach(&control.peer, Rule::Count, what));
            }
            other => return Err(control.unexpected(&other, "where owed pages were due")),
        }
    }
}
