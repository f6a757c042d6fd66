//! The destination of a move: its phases, from the first connection to the running guest.
mod accept;
mod arrival;
mod arriving;
mod borrowing;
mod channel;
mod decoding;
mod event;
mod keeper;
mod late;
mod loading;
mod probed;
mod received;
mod state;

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use crossbeam_channel::{bounded, select};
use transship_wire::{GuestDescription, Message};

use crate::{
    Error, Listener, Misfit, Phase, Progress, Report, RoundReport, Rule,
    control::{Control, TICK},
    digest::digest,
    ending::finish,
    fail_point,
    filling::stand_in::StandIn,
    guest::{DestinationGuest, StateMade},
    intake::Intake,
};
use accept::Arrivals;
use arriving::ArrivingMemory;
use borrowing::Offered;
use channel::Channels;
use decoding::{Decoders, Origin};
use event::{Arrived, ChannelEvent};
pub use received::{Given, Received, Taken};

/// How long a source that has received `Loaded` may take to send `Go`; it has nothing left to do. A source that dies
/// closes its connection, so this limit matters only for a host that hangs.
const GO_TIMEOUT: Duration = Duration::from_secs(120);
/// Of the rounds, the last ones are in the report.
const ROUNDS_REPORTED: usize = 1000;

/// Receives one guest over `listener`. Strangers that connect and don't speak the protocol are turned away; the first
/// source that does is the one. `stand_in`: who holds what a guest needs that runs before all its pages are there;
/// none: there is no such guest.
///
/// On success the guest is here, and runs if it ran there. On failure it does not run here, and transship will never
/// start it; only after [`Error::Unknown`] is that uncertain. The memory of the waiting guest may have been
/// overwritten.
///
/// # Errors
/// See [`Error`].
pub fn receive_guest(
    guest: &mut dyn DestinationGuest,
    listener: Listener,
    stand_in: Option<&mut dyn StandIn>,
    progress: &Arc<Progress>,
    report: &mut Report,
) -> Result<(), Error> {
    let mut begin = Instant::now();
    report.bytes.guest = guest.memory().bytes();
    let mut arrivals = Arrivals::new(&listener, progress);
    let result = arrivals.source().and_then(|(mut control, session)| {
        begin = Instant::now(); // waiting for somebody to come is not part of the work
        let stand_in = stand_in.map(|stand_in| stand_in as &mut dyn StandIn);
        let mut destination = Destination { guest, arrivals, stand_in, progress, report, begin };
        destination.run(&mut control, session).inspect_err(|error| control.abort(error))
    });
    finish(result, begin, progress, report)
}

struct Destination<'a> {
    guest: &'a mut dyn DestinationGuest,
    arrivals: Arrivals<'a>,
    stand_in: Option<&'a mut dyn StandIn>,
    progress: &'a Arc<Progress>,
    report: &'a mut Report,
    begin: Instant,
}

impl Destination<'_> {
    fn run(&mut self, control: &mut Control, session: transship_wire::SessionId) -> Result<(), Error> {
        let (Wishes { channels: count, verify, post_copy, lends }, intake) = self.welcome(control)?;
        let offered = match lends {
            true => Some(Offered::ask(control, self.guest.memory().regions().len(), self.progress)?),
            false => {
                control.send_or_hear(&Message::Welcome)?;
                None
            }
        };
        let connections = self.arrivals.channels(session, count, control)?;
        if !post_copy {
            self.arrivals.close();
        }
        let mut arriving = ArrivingMemory::new(intake, Arc::clone(self.progress));
        if let Some(offered) = offered {
            arriving.lent = offered.take(&connections, &self.guest.memory())?;
            control.send_or_hear(&Message::Borrowed { is_readable: arriving.lent.is_some() })?;
        }
        let arriving = Arc::new(arriving);
        // At most one `RoundEnd` of each channel waits here, and there is room for as many more, so the first failure
        // gets in at once.
        let (events, incoming) = bounded(usize::from(count) * 2);
        let origin = |(channel, (_, peer)): (usize, &(_, String))| Origin { peer: peer.clone(), channel };
        let origins = connections.iter().enumerate().map(origin).collect();
        let (decoders, lanes) = Decoders::start(origins, &arriving, &events)?;
        // Declared after the decoders and so dropped before them.
        let channels = Channels::start(connections, lanes, &arriving, (events, incoming))?;
        self.report.setup_ms = self.begin.elapsed().as_secs_f64() * 1e3;
        self.progress.round.store(1, Ordering::Relaxed);
        self.progress.set_phase(Phase::Rounds);

        let first = self.rounds(control, &arriving, &channels, (verify, post_copy))?;
        self.progress.set_phase(Phase::Switchover);
        let stopped = Instant::now();
        if matches!(first, Message::Owed { .. } | Message::OwedEnd { .. }) {
            self.end_channels(channels, decoders);
            return self.run_before_its_pages(control, (session, count), first, &arriving);
        }
        load(self.guest, control, first, self.progress, self.report)?;
        let run = await_go(self.guest, control)?;
        self.progress.set_phase(Phase::HandedOver);
        start(self.guest, run)?;
        // The source may have disconnected; the guest runs anyway.
        let _ = control.send(&Message::Running);
        self.report.downtime_ms = stopped.elapsed().as_secs_f64() * 1e3;
        // They take a moment to end.
        self.end_channels(channels, decoders);
        Ok(())
    }

    fn end_channels(&mut self, channels: Channels, decoders: Decoders) {
        drop((channels, decoders));
        self.report.cpu.decoders = self.progress.cpu.decoders.seconds();
    }

    /// Checks that the guest fits, and readies its memory for pages.
    fn welcome(&mut self, control: &mut Control) -> Result<(Wishes, Intake), Error> {
        let wishes = match control.receive("its Hello", accept::GREETING_TIMEOUT, self.progress)? {
            Message::Hello { channels, verify, post_copy, lends, guest } => {
                check_fits(&guest, &self.guest.description())?;
                // Files come over a socket of this host only.
                Wishes { channels, verify, post_copy, lends: lends && control.user().is_some() }
            }
            other => return Err(control.unexpected(&other, "where Hello was due")),
        };
        let memory = self.guest.memory();
        let intake = if wishes.post_copy {
            if self.stand_in.is_none() {
                let why = "this receiver takes no guest before its pages; start it with --postcopy, or leave out \
                           --converge postcopy";
                return Err(Error::unfit(why));
            }
            late::check_possible(self.guest)?;
            // No huge pages of a tmpfs: pages go, and come, one by one.
            memory.empty()?;
            Intake::of_zeros(memory)
        } else {
            Intake::over_old(memory)?
        };
        fail_point::reach("destination.hello")?;
        Ok((wishes, intake))
    }

    /// Answers rounds, and a digest, until the device state begins, or the list of what is owed; returns its first
    /// message.
    fn rounds(
        &mut self,
        control: &mut Control,
        arriving: &ArrivingMemory,
        channels: &Channels,
        (verify, post_copy): (bool, bool),
    ) -> Result<Message, Error> {
        // While pages come: the state may follow the first round at once.
        self.guest.expect_state(StateMade::ByAdapter)?;
        let mut round = OpenRound::new(0, channels.count());
        let (mut ours, mut verified) = (None, false);
        loop {
            select! {
                recv(channels.events()) -> event => match event {
                    Ok(ChannelEvent::RoundEnd { round: number, arrived, cpu_seconds }) => {
                        if round.add(number, &arrived) {
                            self.round_done(control, arriving, channels, &mut round)?;
                        }
                        self.report.cpu.channels += cpu_seconds;
                    }
                    Ok(ChannelEvent::Failed(error)) => return Err(control.explain(error)),
                    Err(_) => return Err(control.gone()),
                },
                recv(control.incoming) -> message => {
                    let message = message.map_err(|_| control.gone())??;
                    match (control.unless_abort(message)?, ours) {
                        (Message::DigestWanted, _) if verify && round.is_closed() => {
                            ours = Some(digest(&self.guest.memory(), &[])?);
                        }
                        (Message::Digest { digest: theirs }, Some(ours)) if round.is_closed() => {
                            self.compare(control, ours, theirs)?;
                            verified = true;
                        }
                        (first @ (Message::State { .. } | Message::StateEnd { .. }), _)
                            if round.is_closed() && round.number > 0 && verified == verify => return Ok(first),
                        (Message::Stale, _) if post_copy && round.is_closed() && round.number > 0 => {
                            late::drop_stale(control, arriving, self.progress)?;
                        }
                        (first @ (Message::Owed { .. } | Message::OwedEnd { .. }), _)
                            if post_copy && round.is_closed() => return Ok(first),
                        (other, _) => return Err(control.unexpected(&other, "while pages were due")),
                    }
                },
                default(TICK) => {}
            }
            if self.progress.is_cancelled() {
                return Err(Error::CANCELLED);
            }
        }
    }

    /// Sends the source our digest of this guest's memory, and compares.
    fn compare(&mut self, control: &mut Control, ours: [u8; 32], theirs: [u8; 32]) -> Result<(), Error> {
        control.send_or_hear(&Message::DigestIs { digest: ours })?;
        self.report.verified = Some(ours == theirs);
        fail_point::reach("destination.digest")?;
        if ours == theirs {
            return Ok(());
        }
        let what = "holds different memory than this side: the digests differ";
        Err(Error::breach(&control.peer, Rule::Digest, what))
    }

    fn round_done(
        &mut self,
        control: &mut Control,
        arriving: &ArrivingMemory,
        channels: &Channels,
        round: &mut OpenRound,
    ) -> Result<(), Error> {
        let done = OpenRound::new(round.number + 1, channels.count());
        let closed = std::mem::replace(round, done);
        let Arrived { pages, zero, bytes, lent } = closed.arrived;
        self.report.pages.normal += pages;
        self.report.pages.zero += zero;
        self.report.bytes.wire += bytes;
        self.report.bytes.lent += lent;
        // A source that is held sends rounds for as long as it likes.
        if self.report.rounds.len() >= ROUNDS_REPORTED {
            self.report.rounds.remove(0);
        }
        self.report.rounds.push(RoundReport {
            number: closed.number + 1,
            zero,
            bytes: bytes + lent,
            lent,
            ms: closed.begin.elapsed().as_secs_f64() * 1e3,
            ..RoundReport::default()
        });
        self.progress.round.store(round.number + 1, Ordering::Relaxed);
        if closed.number == 0 {
            // The first round named everything that holds something there.
            arriving.intake().clear_old()?;
        }
        fail_point::reach("destination.round")?;
        // Released before the source is told, so that no channel sees the next round too early.
        arriving.release_round(round.number);
        let done = Message::RoundDone { round: closed.number, pages, zero };
        control.send_or_hear(&done)
    }
}

/// What a source has said of its session.
#[derive(Debug, Clone, Copy)]
struct Wishes {
    channels: u8,
    verify: bool,
    /// Pages may come after the guest.
    post_copy: bool,
    /// Pages can be read here.
    lends: bool,
}

/// Loads the device state, and reports it.
fn load(
    guest: &mut dyn DestinationGuest,
    control: &mut Control,
    first: Message,
    progress: &Progress,
    report: &mut Report,
) -> Result<(), Error> {
    loaded(guest, state::StateReader::new(control, first, progress), report)?;
    confirm(guest, control, progress)
}

/// Loads the device state.
fn loaded(
    guest: &mut dyn DestinationGuest,
    mut state: state::StateReader<'_>,
    report: &mut Report,
) -> Result<(), Error> {
    let loaded = guest.load_state(&mut state);
    // The error of the stream is the cause; the guest's complaint about it is the consequence.
    let bytes = state.finish()?;
    loaded?;
    report.bytes.wire += bytes;
    fail_point::reach("destination.loaded")
}

/// Says that it is loaded: from now on the guest may be given up to this side.
fn confirm(guest: &mut dyn DestinationGuest, control: &mut Control, progress: &Progress) -> Result<(), Error> {
    guest.check_alive()?;
    if progress.is_cancelled() {
        return Err(Error::CANCELLED);
    }
    // A source that gave the move up before this has said why, and may have left.
    control.send_or_hear(&Message::Loaded)?;
    // While the source decides. If we are killed once it has, nothing of ours is left in a VMM whose guest runs.
    guest.tidy();
    fail_point::reach("destination.confirmed")
}

/// Waits for the source to give the guest up. From then on the guest is ours: it is started even if the source never
/// learns of it. Whether it is to run.
fn await_go(guest: &mut dyn DestinationGuest, control: &Control) -> Result<bool, Error> {
    // After `Loaded` the source may give the guest up at any moment: it is too late to cancel here. If the VMM ends
    // before that moment, the source is to know.
    match control.receive_while("its Go", GO_TIMEOUT, || Ok(guest.check_alive()?))? {
        Message::Go { run } => Ok(run),
        other => Err(control.unexpected(&other, "where Go was due")),
    }
}

/// Lets a guest run that was handed over.
fn start(guest: &mut dyn DestinationGuest, run: bool) -> Result<(), Error> {
    fail_point::reach("destination.go")?;
    guest.start(run).map_err(|error| {
        Error::unknown(error, |error| {
            format!(
                "the guest was handed over to this side, but can't be started: {error}. If the VMM still runs, the \
                 guest is loaded and whole here; start it with: {}. Do not resume it at the source unless it is ended \
                 here first",
                guest.start_hint()
            )
        })
    })?;
    fail_point::reach("destination.started")
}

/// A round that is not complete yet.
struct OpenRound {
    number: u32,
    begin: Instant,
    channels_left: usize,
    channels: usize,
    arrived: Arrived,
}

impl OpenRound {
    fn new(number: u32, channels: usize) -> Self {
        let arrived = Arrived::default();
        Self { number, begin: Instant::now(), channels_left: channels, channels, arrived }
    }

    /// Counts a channel's `RoundEnd`; true when it was the last one. A channel can't end a round that is not open: it
    /// checks that itself.
    fn add(&mut self, round: u32, arrived: &Arrived) -> bool {
        debug_assert_eq!(round, self.number);
        self.arrived.add(arrived);
        self.channels_left -= 1;
        self.channels_left == 0
    }

    /// No channel has ended it, so nothing of it is known to be in transit.
    fn is_closed(&self) -> bool {
        self.channels_left == self.channels
    }
}

/// Names and sizes of all regions, and the machine, must be the same.
fn check_fits(theirs: &GuestDescription, ours: &GuestDescription) -> Result<(), Error> {
    let unfit = |misfit: Misfit, what: String| {
        Err(misfit.unfit(format!("{what}; start the destination with the same machine and memory")))
    };
    if theirs.machine != ours.machine {
        return unfit(
            Misfit::Machine,
            format!("the guest is a {:?}, the destination waits for a {:?}", theirs.machine, ours.machine),
        );
    }
    for region in &theirs.regions {
        match ours.regions.iter().find(|r| r.name == region.name) {
            None => {
                return unfit(
                    Misfit::Memory,
                    format!("the guest has a memory region {:?}, the destination has none of that name", region.name),
                );
            }
            Some(r) if r.bytes != region.bytes => {
                return unfit(
                    Misfit::Memory,
                    format!(
                        "memory region {:?} has {} bytes at the source and {} at the destination",
                        region.name, region.bytes, r.bytes
                    ),
                );
            }
            Some(_) => {}
        }
    }
    if theirs.regions.len() != ours.regions.len() {
        return unfit(
            Misfit::Memory,
            format!("the guest has {} memory regions, the destination {}", theirs.regions.len(), ours.regions.len()),
        );
    }
    if theirs.regions != ours.regions {
        return unfit(Misfit::Memory, "the memory regions have another order".into());
    }
    Ok(())
}
