//! The end of a move whose guest runs here before all its pages are there.
//!
//! ```text
//!   owed             these pages are dropped; whoever touches one waits
//!   supply line      from now on any page can be had
//!   load, Go         the guest is ours, and runs
//!   fill             what is waited for first; a line that breaks is followed by another
//!   Complete         nothing waits any more, and the source need not stay
//! ```
use std::{
    sync::{Arc, atomic::Ordering},
    thread,
    time::Instant,
};

use transship_memory::{Claims, PAGE_BYTES, PageCount, PageRange, PageSet};
use transship_wire::{Message, SessionId};

use super::{
    Destination,
    arrival::Arrival,
    arriving::ArrivingMemory,
    keeper::{Keeper, Lines, OverOnDrop},
    loading,
    received::{GIVEN_WAIT, Received},
};
use crate::{
    Error, Phase, PostCopyReport, Progress,
    control::{Control, TICK},
    fail_point,
    filling::{
        EndOnDrop, Event, Filling,
        stand_in::{Ending, StandIn},
    },
    guest::{DestinationGuest, GuestError},
    owed,
    transport::STALL_TIMEOUT,
};

/// # Errors
/// This guest can't run before its pages are there.
pub(super) fn check_possible(guest: &mut dyn DestinationGuest) -> Result<(), Error> {
    // The reasons are those of a lazy restore, which is the same to the VMM.
    let cure = |error: GuestError| {
        let why = error.to_string().replace("leave out --lazy", "leave out --converge postcopy");
        Error::unfit(format!("post-copy is not possible into this VM: {why}"))
    };
    if guest.memory().regions().iter().any(|region| region.backing_page_bytes() > PAGE_BYTES as u64) {
        let why = "post-copy into memory on a hugetlbfs is not supported; leave out --converge postcopy, or start the \
                   destination with memory of small pages";
        return Err(Error::unfit(why));
    }
    if guest.memory().regions().iter().any(|region| region.is_private()) {
        let why = "post-copy into private memory of the VM's process is not supported; leave out --converge postcopy, \
                   or start the destination with its memory in a shared file";
        return Err(Error::unfit(why));
    }
    guest.may_miss().map_err(cure)
}

/// Drops the pages that the source names. Its guest runs meanwhile: this takes longer than all else that comes of a
/// hand-over before its pages.
pub(super) fn drop_stale(control: &mut Control, arriving: &ArrivingMemory, progress: &Progress) -> Result<(), Error> {
    let stale = owed::receive(control, None, arriving.intake().memory(), STALL_TIMEOUT * 2, progress)?;
    drop_pages(&stale, arriving)?;
    fail_point::reach("destination.stale")?;
    control.send_or_hear(&Message::OwedEnd { pages: PageCount::of(&stale).get() })
}

impl Destination<'_> {
    /// From the first message about what is owed to a guest that has all its pages.
    pub(super) fn run_before_its_pages(
        &mut self,
        control: &mut Control,
        (session, channels): (SessionId, u8),
        first: Message,
        arriving: &ArrivingMemory,
    ) -> Result<(), Error> {
        let memory = self.guest.memory();
        let gone = owed::receive(control, Some(first), &memory, STALL_TIMEOUT * 2, self.progress)?;
        let owed = owed::receive(control, None, &memory, STALL_TIMEOUT * 2, self.progress)?;
        for sets in [&gone, &owed] {
            drop_pages(sets, arriving)?;
        }
        fail_point::reach("destination.dropped")?;
        let missing = self.guest.missing(&owed)?;
        let claims = claims_of(&owed)?;
        fail_point::reach("destination.missing")?;
        let count = PageCount::of(&owed);
        let will = self.guest.last_will()?;
        let stand_in = self.stand_in.as_mut().ok_or(Error::Bug("post-copy without a stand-in"))?;
        let listener = self.arrivals.listener();
        let received = Received::of(&memory, &missing, will, listener, (session, channels));
        let charge = serde_json::json!({ "move": received }).to_string();
        stand_in.arm(&charge, &Received::files(&missing, &claims, listener)?)?;
        control.send_or_hear(&Message::OwedEnd { pages: count.get() })?;
        self.progress.round_total.store(count.bytes(), Ordering::Relaxed);
        self.progress.round_left.store(count.bytes(), Ordering::Relaxed);
        let arrival = Arc::new(Arrival::new(Filling::new(owed, missing, claims), self.progress));
        let result = self.fill(control, session, channels, &arrival, count.get());
        let ending = result.as_ref().err().map_or(Ending::Complete, |(_, ending)| *ending);
        if let Some(stand_in) = &mut self.stand_in {
            stand_in.end(ending);
        }
        result.map_err(|(error, _)| error)
    }

    fn fill(
        &mut self,
        control: &mut Control,
        session: SessionId,
        channels: u8,
        arrival: &Arc<Arrival>,
        owed: u64,
    ) -> Result<(), (Error, Ending)> {
        let lines = Lines::default();
        let Self { guest, arrivals, stand_in, progress, report, .. } = self;
        // Only to have fewer waits.
        let _ = arrival.filling.release_holes();
        let stopped = Instant::now();
        let mut sums = PostCopyReport { owed, ..PostCopyReport::default() };
        let mut keeper = Keeper::new(arrivals, arrival, &lines, progress, (session, channels));
        let result = thread::scope(|scope| {
            let (_over, _ended) = (OverOnDrop(&lines), EndOnDrop(&arrival.filling));
            scope.spawn(|| arrival.serve());
            scope.spawn(move || keeper.run());
            let before = |error| (error, Ending::Complete);
            let early = lines.first(control, progress).map_err(before)?;
            let mut hand_over =
                HandOver { guest: &mut **guest, stand_in, control, progress, report, stopped, arrival, lines: &lines };
            let (begin, started) = hand_over.run(early).map_err(before)?;
            wait(&mut **guest, &arrival.filling)?;
            sums.filled_ms = begin.elapsed().as_secs_f64() * 1e3;
            started.map_err(|error| (error, Ending::Complete))
        });
        arrival.report(&mut sums);
        sums.reconnects = lines.told().reconnects;
        self.report.postcopy = Some(sums);
        self.report.pages.normal += sums.by_fault + sums.by_push;
        // Without it the same happens when the last holder ends.
        result.map(|()| drop(arrival.filling.release_all()))
    }
}

/// Loads the guest, is given it, and starts it.
struct HandOver<'a, 'c, 's> {
    guest: &'a mut dyn DestinationGuest,
    stand_in: &'a mut Option<&'s mut dyn StandIn>,
    control: &'c mut Control,
    progress: &'a Arc<Progress>,
    report: &'a mut crate::Report,
    stopped: Instant,
    arrival: &'a Arrival,
    lines: &'a Lines,
}

impl HandOver<'_, '_, '_> {
    /// When it was started, and whether it could be. A guest that can't be started gets its pages all the same.
    /// `early`: what the source has said already.
    fn run(&mut self, early: Option<Message>) -> Result<(Instant, Result<(), Error>), Error> {
        let Self { guest, stand_in, control, progress, report, stopped, arrival, lines } = self;
        let state = || control.receive("its device state", STALL_TIMEOUT * 2, progress);
        let first = early.map_or_else(state, Ok)?;
        loading::load(&mut **guest, control, first, (arrival, lines), (progress, report))?;
        if let Some(stand_in) = stand_in {
            stand_in.may_be_given();
        }
        super::confirm(&mut **guest, control, progress)?;
        if let Ok(Event::Failed(cause)) = arrival.filling.events().try_recv() {
            return Err(cause);
        }
        let run = super::await_go(&mut **guest, control).or_else(|error| go_by_line(&mut **guest, arrival, error))?;
        progress.settle();
        progress.set_phase(Phase::HandedOver);
        let begin = Instant::now();
        if let Some(stand_in) = stand_in {
            if run {
                stand_in.starts();
            }
            stand_in.settle();
        }
        let started = super::start(&mut **guest, run);
        if let Some(stand_in) = stand_in {
            stand_in.started();
        }
        arrival.is_ours();
        report.downtime_ms = stopped.elapsed().as_secs_f64() * 1e3;
        progress.set_phase(Phase::Filling);
        if started.is_ok() {
            // The source may have disconnected, or waits on the supply line: the guest runs anyway.
            let _ = control.send(&Message::Running);
            arrival.runs();
        }
        arrival.start_is_over();
        Ok((begin, started))
    }
}

/// Whether the guest is to run, if the source has given it away, and the word was lost with its connection: it says so
/// again on the next line.
fn go_by_line(guest: &mut dyn DestinationGuest, arrival: &Arrival, error: Error) -> Result<bool, Error> {
    if matches!(error, Error::Refused(_) | Error::Guest(_)) {
        return Err(error);
    }
    let deadline = Instant::now() + GIVEN_WAIT;
    while Instant::now() < deadline {
        if let Ok(run) = arrival.given().recv_timeout(TICK) {
            return Ok(run);
        }
        guest.check_alive()?;
    }
    Err(error)
}

/// Waits until all pages are there.
fn wait(guest: &mut dyn DestinationGuest, filling: &Filling) -> Result<(), (Error, Ending)> {
    match filling.events().recv() {
        Ok(Event::Complete) | Err(_) => Ok(()),
        Ok(Event::Gone) => {
            let what = "the VMM has ended before all pages of its guest were here, and the guest with it";
            Err((Error::Guest(GuestError::vmm(what)), Ending::Complete))
        }
        Ok(Event::Failed(error)) => {
            let found = guest.stop().unwrap_or_else(|why| format!("can't stop it: {why}"));
            let error = Error::unknown(error, |error| {
                format!(
                    "{error}. The guest had been started, and was stopped where it was, before it read any wrong data: \
                     {found}. Until it has ended, a second process makes sure that missing pages are not read as zeros. {}",
                    Received::START_ANEW
                )
            });
            Err((error, Ending::Hold))
        }
    }
}

/// Makes these pages holes, where they are not.
fn drop_pages(sets: &[PageSet], arriving: &ArrivingMemory) -> Result<(), Error> {
    sets.iter().enumerate().try_for_each(|(region, set)| arriving.intake().clear_set(region, set))
}

/// Of these pages none was put; all others are nobody's to put.
fn claims_of(owed: &[PageSet]) -> Result<Claims, Error> {
    let claims = Claims::new(&owed.iter().map(PageSet::pages).collect::<Vec<_>>())?;
    for (region, owed) in owed.iter().enumerate() {
        let mut others = PageSet::full(owed.pages());
        others.subtract(owed);
        others.ranges().for_each(|range: PageRange| claims.exclude(region, range));
    }
    Ok(claims)
}
