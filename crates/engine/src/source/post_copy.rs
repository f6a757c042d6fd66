//! The end of a move whose guest runs at the destination before all its pages are there.
//!
//! ```text
//!   what will be owed                    the destination drops it while the guest still runs
//!   stop · device state · last scan      as always
//!   what is owed                         the destination drops it, and waits for it
//!   supply line                          from now on it can have any page
//!   device state, Go                     the point of no return is where it always is
//!   serve                                until it has all pages; a line that breaks is dialled again
//! ```
use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::{Duration, Instant},
};

use transship_memory::{PageCount, PageSet};
use transship_wire::Message;

use super::{
    line::{Base, Line, pause},
    recovery::HandedOver,
    serving::Serving,
    session::MoveSession,
    switchover::{await_loaded, save_state, send_state},
    urgent::cant_read,
};
use crate::{
    Error, Phase, PostCopyReport, Progress, Report, Rule,
    control::Control,
    fail_point,
    filling::stand_in::{Ending, StandIn},
    guarded::Guarded,
    guest::Found,
    hand_over::Peer,
    owed,
    rounds::{MoveInProgress, Rounds},
    transport::STALL_TIMEOUT,
};

/// How long a destination may take to drop pages and to have the VMM wait for them; the guest stands still meanwhile.
const DROP_TIMEOUT: Duration = Duration::from_secs(120);

/// So few pages are dropped while the guest stands still: it takes milliseconds.
const DROPPED_SOON: PageCount = PageCount::new(2048);
/// So often the destination drops pages while the guest runs. A guest that writes all its memory is soon through.
const STALE_LISTS: usize = 4;

/// A line that breaks within this time is not followed by the next at once.
const QUICK: Duration = Duration::from_secs(1);

/// The transship that receives a guest before its pages.
pub(super) struct PostCopy<'a> {
    pub(super) session: &'a mut MoveSession,
    pub(super) base: Base<'a>,
    pub(super) stand_in: Option<&'a mut dyn StandIn>,
    pub(super) line: Option<Line>,
    pub(super) owed: PageCount,
    /// The guest ran when it was stopped, so it is to run.
    pub(super) ran: bool,
    /// The destination has said that the guest runs, or stands if it stood.
    pub(super) is_confirmed: bool,
}

impl Peer for PostCopy<'_> {
    fn name(&self) -> &'static str {
        "source"
    }

    /// The device state comes first: from then on the VMM has no reason to write, and one scan finds all.
    fn bring_the_rest(
        &mut self,
        course: &mut MoveInProgress<'_, '_>,
        rounds: &mut Rounds,
        found: Found,
    ) -> Result<(), Error> {
        let MoveInProgress { guest, progress, report, .. } = course;
        let state = save_state(guest.unguarded(), &AtomicBool::new(false))?;
        let pending = rounds.find_owed(&*self.session)?;
        let owed: Vec<PageSet> = pending.iter().map(|pending| pending.send.clone()).collect();
        let gone: Vec<PageSet> = pending.iter().map(|pending| pending.gone.clone()).collect();
        (self.owed, self.ran) = (PageCount::of(&owed), found.ran());
        let control = &mut self.session.control;
        owed::send(control, &gone)?;
        owed::send(control, &owed)?;
        fail_point::reach("source.owed")?;
        // While the destination drops it.
        guest.check_unchanged()?;
        await_dropped(control, self.owed, progress)?;
        let line = Line::open(&self.base, 1, None).map_err(|error| control.explain(error))?;
        if line.lacks() != owed {
            return Err(Error::breach(&control.peer, Rule::Count, "lacks other pages than it was told to"));
        }
        self.line = Some(line);
        fail_point::reach("source.line")?;
        self.arm()?;
        let control = &mut self.session.control;
        send_state(&state, control)?;
        report.bytes.wire += state.len() as u64;
        fail_point::reach("source.state-sent")?;
        await_loaded(control, progress)?;
        fail_point::reach("source.loaded")
    }

    fn check_silence(&mut self) -> Result<(), Error> {
        self.line.as_ref().map_or(Ok(()), Line::check)?;
        self.session.control.check_silence()
    }

    fn commit(&mut self, found: Found) -> Result<(), Error> {
        // Before the first byte that gives the guest away.
        if let Some(stand_in) = &mut self.stand_in {
            stand_in.settle();
        }
        self.session.control.send_whole(&Message::Go { run: found.ran() })
    }

    /// A link that breaks now is no reason to give up: the next line tells.
    fn await_word(&mut self) -> Result<(), Error> {
        let control = &mut self.session.control;
        let deaf = Progress::default(); // cancelling has no effect any more
        fail_point::reach("source.go-sent")?;
        self.is_confirmed = match control.receive("the confirmation that the guest runs", STALL_TIMEOUT * 2, &deaf) {
            Ok(Message::Running) => true,
            Ok(other) => {
                tracing::warn!("{}", control.unexpected(&other, "where Running was due"));
                false
            }
            Err(error @ Error::Refused(_)) => return Err(error),
            Err(error) => {
                tracing::warn!("{error}: the destination has not said yet that the guest runs");
                false
            }
        };
        Ok(())
    }

    fn hang_up(&mut self) {
        self.line = None;
    }

    fn without_word(&self, error: &Error, by_hand: &str) -> String {
        format!(
            "the guest was handed over, but the destination can't run it: {error}. Check there first. Only if it does \
             not run there and will not be started there, resume it here with: {by_hand}"
        )
    }
}

/// Waits until the destination has dropped the pages that were named.
fn await_dropped(control: &Control, owed: PageCount, progress: &Progress) -> Result<(), Error> {
    match control.receive("the word that it goes without these pages", DROP_TIMEOUT, progress)? {
        Message::OwedEnd { pages } if PageCount::new(pages) == owed => Ok(()),
        other => Err(control.unexpected(&other, "where OwedEnd was due")),
    }
}

impl PostCopy<'_> {
    /// Has the destination drop what it will be owed, while the guest runs: this takes it longer than all that the
    /// guest stands still for. What is written meanwhile is dropped as well, until it is little.
    pub(super) fn drop_stale(
        &mut self,
        guest: &mut Guarded<'_>,
        rounds: &mut Rounds,
        progress: &Progress,
    ) -> Result<(), Error> {
        let mut told: Vec<PageSet> = Vec::new();
        for _ in 0..STALE_LISTS {
            let stale = rounds.find_stale(guest.unguarded(), &*self.session, progress)?;
            let mut new = stale.clone();
            new.iter_mut().zip(&told).for_each(|(new, told)| new.subtract(told));
            let count = PageCount::of(&new);
            if count <= DROPPED_SOON {
                break;
            }
            let control = &mut self.session.control;
            control.send_or_hear(&Message::Stale)?;
            owed::send(control, &new)?;
            fail_point::reach("source.stale")?;
            await_dropped(control, count, progress)?;
            told = stale;
        }
        Ok(())
    }

    /// Has somebody stand by who goes on should this process die once the guest is given up.
    fn arm(&mut self) -> Result<(), Error> {
        let Some(stand_in) = &mut self.stand_in else { return Ok(()) };
        stand_in.note(&serde_json::json!(HandedOver::of(&self.base, self.ran)).to_string());
        if let Some((serving, files)) = Serving::of(&self.base, self.ran) {
            stand_in.arm(&serde_json::json!({ "serve": serving }).to_string(), &files)?;
        }
        Ok(())
    }

    /// Nobody need stand by any more.
    pub(super) fn end(&mut self) {
        if let Some(stand_in) = &mut self.stand_in {
            stand_in.end(Ending::Complete);
        }
    }

    /// Serves until the destination has all pages. The guest belongs to it, so nothing ends this but that: a link that
    /// breaks is made again. `by_hand`: how a person resumes it here.
    pub(super) fn serve(&mut self, by_hand: &str, progress: &Progress, report: &mut Report) -> Result<(), Error> {
        let bytes = self.owed.bytes();
        progress.settle();
        progress.round_total.store(bytes, Relaxed);
        progress.round_left.store(bytes, Relaxed);
        progress.set_phase(Phase::Filling);
        let mut line = self.line.take();
        if !self.is_confirmed {
            // It may not have heard that the guest is its own. Another line begins with that.
            line = None;
            tracing::warn!(
                "the destination has not said yet that the guest runs. If it never ran there, and nobody listens at \
                 {} any more, end this command, and resume the guest here with: {by_hand}",
                self.base.to
            );
        }
        let said_why = || said_why(&self.session.control);
        let result = serve((&self.base, self.ran), &said_why, (line, 1), self.owed, report);
        // All of its memory is here as it was when it was stopped.
        let result = result.map_err(|error| {
            Error::unknown(error, |error| {
                format!("{error}. Only if the guest has never run there, resume it here with: {by_hand}")
            })
        });
        let is_confirmed = self.is_confirmed | result?;
        if is_confirmed { Ok(()) } else { Err(Error::Unknown(never_said().into())) }
    }
}

/// Why the destination has ended the session, if it has said so.
fn said_why(control: &Control) -> Option<Error> {
    let said = control.incoming.try_iter().filter_map(Result::ok);
    said.filter_map(|message| control.unless_abort(message).err()).next()
}

/// Serves on this line, and on others with higher numbers when that breaks, until the destination has all pages.
/// Whether it has said that the guest was started. `said_why`: its reason, if it has ended the session. `owed`: pages,
/// or 0 if nobody has said how many.
pub(super) fn serve(
    base: (&Base<'_>, bool),
    said_why: &dyn Fn() -> Option<Error>,
    line: (Option<Line>, u32),
    owed: PageCount,
    report: &mut Report,
) -> Result<bool, Error> {
    let (begin, wire) = (Instant::now(), &base.0.progress.wire_bytes);
    let (before, mut sums) = (wire.load(Relaxed), PostCopyReport { owed: owed.get(), ..PostCopyReport::default() });
    let result = serve_on(base, said_why, line, &mut sums, report);
    sums.filled_ms = begin.elapsed().as_secs_f64() * 1e3;
    report.postcopy = Some(sums);
    report.bytes.wire += wire.load(Relaxed) - before + PageCount::new(sums.by_fault).bytes();
    result
}

fn serve_on(
    (base, ran): (&Base<'_>, bool),
    said_why: &dyn Fn() -> Option<Error>,
    (mut line, mut number): (Option<Line>, u32),
    sums: &mut PostCopyReport,
    report: &mut Report,
) -> Result<bool, Error> {
    let mut is_confirmed = false;
    loop {
        let mut stands = match line.take() {
            Some(line) => line,
            None => {
                sums.reconnects += 1;
                dial((base, ran), said_why, &mut number)?
            }
        };
        let begin = Instant::now();
        let lacks = PageCount::of(stands.lacks());
        if sums.owed == 0 {
            sums.owed = lacks.get(); // nobody has said before how much it is
        }
        base.progress.round_total.store(PageCount::new(sums.owed).bytes(), Relaxed);
        base.progress.round_left.store(lacks.bytes(), Relaxed);
        let served = stands.serve(sums);
        is_confirmed |= stands.guest_runs();
        stands.report(report);
        match served {
            Ok(()) => return Ok(is_confirmed),
            // Its own word, not that of the network.
            Err(error @ Error::Refused(_)) => return Err(lost(error)),
            // Of memory that was its VMM's own, when that has ended: dialling again would bring nothing.
            Err(error @ Error::Memory(_)) => {
                stands.give_up(cant_read(&error));
                return Err(gone(error));
            }
            Err(error) => tracing::warn!(
                "the link to {} is broken: {error}. The guest runs at the destination, and waits at pages that it \
                 lacks; this side dials again until the link is back. Leave this command and the VMM here as they are",
                base.to
            ),
        }
        if begin.elapsed() < QUICK {
            pause(1);
        }
    }
}

fn dial((base, ran): (&Base<'_>, bool), said_why: &dyn Fn() -> Option<Error>, number: &mut u32) -> Result<Line, Error> {
    for attempt in 1.. {
        if let Some(why) = said_why() {
            return Err(lost(why));
        }
        *number += 1;
        match Line::open(base, *number, Some(ran)) {
            Ok(line) => {
                tracing::warn!("the link to {} is back; the rest of the guest's pages follows", base.to);
                return Ok(line);
            }
            Err(error) if attempt == 1 => tracing::warn!("{error}; trying again"),
            Err(error) => tracing::info!("{error}; trying again"),
        }
        pause(attempt);
    }
    unreachable!("there are more numbers than attempts")
}

fn lost(error: Error) -> Error {
    Error::unknown(error, |error| {
        format!(
            "the guest was handed over before all its pages, and the destination has ended before it had them: \
             {error}. Check there first: whether it can be used is said there"
        )
    })
}

fn gone(error: Error) -> Error {
    Error::unknown(error, |error| {
        format!(
            "the guest was handed over before all its pages, and the others can't be read any more: {error}. It was \
             stopped at the destination, and is lost: end its VMM there"
        )
    })
}

pub(super) fn never_said() -> String {
    "all pages of the guest are at the destination, which has not said that the guest runs. Check there: it says how \
     to start it"
        .to_owned()
}
