//! The life of a reception.
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Instant,
};

use transship_memory::PAGE;
use transship_wire::qemu::{Block, Configuration, GlobalState, Record, RunState, StreamReader, TailWatch};

use super::{
    FileSink, FileSinkOptions, Sink,
    channel::{Channels, Shared},
    main_line::{Answers, BarrierLater, Incoming, split},
};
use crate::{
    Error, Listener, Misfit, Phase, Progress, Report, RoundReport, Rule,
    ending::finish,
    fail_point,
    guest::{DestinationGuest, StateFormat, StateMade},
    qemu_peer::{end, lobby::Lobby},
    snapshot::{Format, convert::file_store},
    stream::{
        feed::{Feed, Flow},
        fit::{check_sizes, fit},
        guest_store::GuestStore,
        records::{Input, Records},
        store::{FileStore, Store},
        tail::check_tail,
        whence::Whence,
    },
};

/// Whom errors are about that come up between pages.
const COMING: &str = "the guest that comes";

/// Receives one guest that a stock QEMU migrates to `listener`. `channels`: the source's multifd-channels, 0 without
/// multifd; none: as many as come.
///
/// On success the guest is in the file, which is on the disk under its name, or runs here if it ran there. The source
/// learns of success not before that is so (of a guest: not before it is loaded); on failure its guest runs on, except
/// that [`Error::Unknown`] means what it says.
///
/// # Errors
/// See [`Error`].
pub fn receive_from_qemu(
    into: Sink<'_>,
    listener: &Listener,
    channels: Option<u8>,
    progress: &Arc<Progress>,
    report: &mut Report,
) -> Result<(), Error> {
    let mut begin = Instant::now();
    let mut lobby = Lobby::new(listener, progress);
    let result = check_guest(&into).and_then(|()| lobby.main()).and_then(|main| {
        begin = Instant::now(); // waiting for somebody to come is not part of the work
        let (incoming, mut answers) = split(main, progress)?;
        let barrier = incoming.barrier();
        let reception =
            Reception { lobby, channels, progress, report, begin, answers: &mut answers, barrier, all_there: false };
        let (result, all_there) = reception.run(into, incoming);
        if result.is_err() {
            answers.it_failed();
        }
        result.map_err(|error| told(error, &answers, all_there))
    });
    finish(result, begin, progress, report)
}

/// A source that expects no answer may think that all is well.
fn told(error: Error, answers: &Answers, all_there: bool) -> Error {
    match error {
        Error::Unknown(_) => error,
        error if all_there && !answers.open => Error::unknown(error, |error| {
            format!(
                "{error}. The source has no return path (its capability return-path is off), so it can't be told and \
                 may report its migration as completed. Nothing runs here; resume its guest with `cont` there"
            )
        }),
        error => error,
    }
}

fn check_guest(into: &Sink<'_>) -> Result<(), Error> {
    match into {
        Sink::Guest(guest) if guest.state_format() == StateFormat::Opaque => Err(Misfit::Vmm.unfit(
            "only a QEMU can load what a stock QEMU sends: name one with --vm qemu:SOCKET, or a file with --to",
        )),
        _ => Ok(()),
    }
}

struct Reception<'a, 'l> {
    lobby: Lobby<'l>,
    channels: Option<u8>,
    progress: &'a Arc<Progress>,
    report: &'a mut Report,
    begin: Instant,
    answers: &'a mut Answers,
    barrier: BarrierLater,
    /// The source may have written everything.
    all_there: bool,
}

/// What a source says before the first page.
struct Head {
    configuration: Configuration,
    ram_section: u32,
    blocks: Vec<Block>,
    /// Its barriers are by rounds.
    flush: bool,
}

/// Which records on the main stream are halves of barriers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Barriers {
    None,
    Sections,
    Rounds,
}

/// A store, and what becomes of it.
enum OpenedSink<'g> {
    File(Arc<dyn FileStore>, Format),
    Guest(Arc<GuestStore>, &'g mut dyn DestinationGuest),
}

impl OpenedSink<'_> {
    fn store(&self) -> Arc<dyn Store> {
        match self {
            Self::File(store, _) => Arc::clone(store) as Arc<dyn Store>,
            Self::Guest(store, _) => Arc::clone(store) as Arc<dyn Store>,
        }
    }
}

impl Reception<'_, '_> {
    /// The result, and whether the source may have nothing left to send.
    fn run(mut self, into: Sink<'_>, incoming: Incoming) -> (Result<(), Error>, bool) {
        let result = self.receive(into, incoming);
        // What a user or a channel did shows as a failure to read on.
        let result = match (result, self.barrier.get().map_or(Ok(()), |barrier| barrier.check())) {
            (Err(error @ Error::Unknown(_)), _) => Err(error),
            (Err(_), _) if self.progress.is_cancelled() => Err(Error::CANCELLED),
            (Err(_), Err(channel)) => Err(channel),
            (result, _) => result,
        };
        (result, self.all_there)
    }

    fn receive(&mut self, into: Sink<'_>, incoming: Incoming) -> Result<(), Error> {
        let whence = Whence::Peer(self.answers.peer.clone());
        let silence = incoming.silence();
        let input = Input::Pipe { pipe: Box::new(incoming), position: 0 };
        let mut records = Records::new(whence.clone(), input, StreamReader::new());
        records.expect_pages();
        let head = self.head(&mut records)?;
        let mut place = self.place(into, &head)?;
        let store = place.store();
        let channels = self.open_channels(&head, &store)?;
        if let OpenedSink::Guest(_, guest) = &mut place {
            // While the first pages come.
            guest.expect_state(StateMade::ByVmm)?;
        }
        self.report.setup_ms = self.begin.elapsed().as_secs_f64() * 1e3;
        self.progress.round.store(1, Relaxed);
        self.progress.set_phase(Phase::Rounds);
        let feed = Feed::new(&whence, store.as_ref(), Arc::clone(&store).writer()?, self.progress);
        let stopped = self.memory(&mut records, &head, &channels, feed)?;
        let base = records.reader().position();
        let guest_bytes = records.reader().blocks().iter().map(|block| block.used_bytes).sum();
        let answered = self.answers.open;
        let mut watch = TailWatch::new();
        let mut tail = records.tail_until(|tail| {
            silence.store(if answered { end::silence(tail) } else { 0 }, Relaxed);
            answered && watch.whole(tail).is_some()
        })?;
        let question = if answered { end::take_question(&mut tail) } else { None };
        check_tail(&whence, &tail, base)?;
        fail_point::reach("qemu-receive.tail")?;
        self.count(guest_bytes, tail.len() as u64);
        match place {
            OpenedSink::File(store, format) => {
                self.complete(store.as_ref(), format, &tail)?;
                // The file is worth having whether or not the source hears of it, so it stays.
                self.tell(question)?;
            }
            OpenedSink::Guest(store, guest) => {
                let ran = self.load(&store, guest, &head.configuration, tail, base)?;
                self.tell(question)?;
                self.start(guest, ran)?;
            }
        }
        self.report.downtime_ms = stopped.elapsed().as_secs_f64() * 1e3;
        Ok(())
    }

    /// Everything between the list of blocks and the device sections. Returns when the guest's last pages began.
    fn memory(
        &mut self,
        records: &mut Records,
        head: &Head,
        channels: &Channels,
        mut feed: Feed<'_>,
    ) -> Result<Instant, Error> {
        let barriers = match (channels.count(), head.flush) {
            (0, false) => Barriers::None,
            (0, true) => {
                return Err(self.broke(
                    Rule::Channels,
                    "uses multifd, but none of its channels has connected; do they use this address?",
                ));
            }
            (_, true) => Barriers::Rounds,
            (_, false) => Barriers::Sections,
        };
        let pass = |reception: &Self, feed: &mut Feed<'_>| {
            feed.finish()?;
            channels.barrier.pass(&reception.answers.peer, reception.progress)
        };
        if barriers != Barriers::None {
            pass(self, &mut feed)?;
        }
        let mut stopped = None;
        loop {
            let position = records.reader().position();
            let flow = records.step(|record, bytes| feed.take(record, bytes, position))?;
            self.progress.wire_bytes.fetch_add(records.reader().position() - position, Relaxed);
            match flow {
                Flow::On => {}
                Flow::EndOfBody if barriers == Barriers::Sections => pass(self, &mut feed)?,
                Flow::EndOfBody => {}
                Flow::Flush if barriers == Barriers::Rounds => pass(self, &mut feed)?,
                Flow::Flush => return Err(self.broke(Rule::Turn, "sent a multifd barrier where there can be none")),
                Flow::Last => {
                    stopped = Some(Instant::now());
                    // All that follows may be on its way.
                    self.all_there = true;
                    self.progress.set_phase(Phase::Switchover);
                }
                Flow::Command(command) => self.answers.obey(&command, Some(&head.configuration))?,
                Flow::Tail => break,
            }
        }
        channels.barrier.check_complete(&self.answers.peer)?;
        if channels.count() > 0 {
            self.lobby.check_nobody_was_missed()?;
        }
        Ok(stopped.unwrap_or_else(Instant::now))
    }

    /// Reads up to the end of the list of blocks.
    fn head(&mut self, records: &mut Records) -> Result<Head, Error> {
        let (mut configuration, mut ram_section, mut flush) = (None, 0, false);
        loop {
            let mut command = None;
            let listed = records.step(|record, _| {
                match record {
                    Record::Configuration(found) => configuration = Some(found),
                    Record::RamStart { section, .. } => ram_section = section,
                    Record::MultifdFlush => flush = true,
                    Record::Command(found) => command = Some(found),
                    Record::EndOfBody => return Ok(true),
                    _ => {}
                }
                Ok(false)
            })?;
            if let Some(configuration) = &configuration {
                self.check_configuration(configuration)?;
            }
            if let Some(command) = command {
                self.answers.obey(&command, configuration.as_ref())?;
            }
            if listed {
                break;
            }
        }
        let configuration = configuration.ok_or_else(|| self.broke(Rule::Turn, "has not named its machine"))?;
        if !self.answers.open {
            tracing::warn!(
                "the source has no return path: it will take its last write for success, whatever happens here; turn \
                 on its capability return-path"
            );
        }
        Ok(Head { configuration, ram_section, blocks: records.reader().blocks().to_vec(), flush })
    }

    fn check_configuration(&self, configuration: &Configuration) -> Result<(), Error> {
        let capability = match configuration {
            Configuration { ignore_shared: true, .. } => "x-ignore-shared",
            Configuration { mapped_ram: true, .. } => "mapped-ram",
            _ => return Ok(()),
        };
        Err(self.broke(Rule::Abilities, format!(
            "has its capability {capability} on, with which its memory does not come over the connection; turn it off \
             there"
        )))
    }

    /// Where everything goes. Whether the guest fits is known before anything of the waiting one is touched.
    fn place<'g>(&mut self, into: Sink<'g>, head: &Head) -> Result<OpenedSink<'g>, Error> {
        match into {
            Sink::File(FileSink { target, options: FileSinkOptions { format, io, .. } }) => {
                let store = file_store(*target, format, &head.configuration, head.ram_section, io);
                store.list(&head.blocks)?;
                Ok(OpenedSink::File(store, format))
            }
            Sink::Guest(guest) => {
                let name = format!("the guest from {}", self.answers.peer);
                let (description, state) = (guest.description(), guest.state_format());
                let fit = fit(&name, &head.configuration, &head.blocks, &description, &state)?;
                let devices: Vec<_> = fit.devices.iter().map(|&index| &head.blocks[index]).collect();
                check_sizes(&name, &devices)?;
                let store = GuestStore::new(COMING.to_owned(), guest.memory(), &fit, &head.blocks, state)?;
                Ok(OpenedSink::Guest(Arc::new(store), guest))
            }
        }
    }

    fn open_channels(&mut self, head: &Head, store: &Arc<dyn Store>) -> Result<Channels, Error> {
        let lines = self.lobby.channels(self.channels)?;
        let shared = Shared::new(&head.blocks, self.progress);
        let channels = Channels::start(lines, store, &shared)?;
        // Set once: there is one reception.
        let _ = self.barrier.set(Arc::clone(&channels.barrier));
        Ok(channels)
    }

    fn count(&mut self, guest_bytes: u64, tail_bytes: u64) {
        let progress = self.progress;
        progress.wire_bytes.fetch_add(tail_bytes, Relaxed);
        let report = &mut *self.report;
        report.bytes.guest = guest_bytes;
        report.bytes.wire = progress.wire_bytes.load(Relaxed);
        report.pages.normal = progress.normal_pages.load(Relaxed);
        report.pages.zero = progress.zero_pages.load(Relaxed);
        report.cpu.channels = progress.cpu.channels.seconds();
        report.rounds.push(RoundReport {
            number: 1,
            scanned: guest_bytes / PAGE,
            zero: report.pages.zero,
            bytes: report.bytes.wire,
            ms: self.begin.elapsed().as_secs_f64() * 1e3 - report.setup_ms,
            ..RoundReport::default()
        });
    }

    /// The file is on the disk and has its name before the source hears of it.
    fn complete(&mut self, store: &dyn FileStore, format: Format, tail: &[u8]) -> Result<(), Error> {
        self.progress.set_phase(Phase::Completing);
        let completing = Instant::now();
        let file = self.report.file.get_or_insert_default();
        store.complete(tail, file, self.progress)?;
        file.format = format.to_string();
        file.sync_ms = completing.elapsed().as_secs_f64() * 1e3;
        fail_point::reach("qemu-receive.complete")
    }

    /// All of it is safe: tells the source, which may then give its guest up.
    fn tell(&mut self, question: Option<u32>) -> Result<(), Error> {
        if let Some(number) = question {
            self.answers.answer_and_await_end(number, self.progress)?;
        }
        self.answers.all_is_well()
    }

    /// Has the waiting VMM load what is not memory. Returns whether the guest ran.
    fn load(
        &mut self,
        store: &GuestStore,
        guest: &mut dyn DestinationGuest,
        configuration: &Configuration,
        mut tail: Vec<u8>,
        base: u64,
    ) -> Result<bool, Error> {
        self.progress.set_phase(Phase::Loading);
        let mut ran = true;
        let whence = Whence::Peer(self.answers.peer.clone());
        if let Some(mut state) = GlobalState::find(&tail, base).map_err(|error| whence.bad(error))? {
            ran = state.runs();
            state.patch(&mut tail, RunState::Paused);
        }
        store.settle()?;
        self.report.pages.hole = (guest.memory().bytes() / PAGE).saturating_sub(store.stored().get());
        guest.load_state(&mut store.device_stream(configuration, tail))?;
        fail_point::reach("qemu-receive.loaded")?;
        if self.progress.is_cancelled() { Err(Error::CANCELLED) } else { Ok(ran) }
    }

    /// The source was told, and may have given its guest up: lets it run here as soon as that is sure.
    fn start(&mut self, guest: &mut dyn DestinationGuest, run: bool) -> Result<(), Error> {
        self.progress.set_phase(Phase::HandedOver);
        fail_point::reach("qemu-receive.told")?;
        if !self.answers.let_go() {
            return Err(Error::Unknown(format!(
                "the guest is loaded here, and the source at {} was told so, but it is unknown whether it has given \
                 its guest up. Check the source: if `info migrate` there says completed, start the guest here with: \
                 {}. If its guest runs, end this one",
                self.answers.peer,
                guest.start_hint()
            ).into()));
        }
        guest.start(run).map_err(|error| {
            Error::unknown(error, |error| {
                format!(
                    "the guest was handed over to this side, but can't be started: {error}. If the VMM still runs, the \
                     guest is loaded and whole here; start it with: {}. Do not resume it at the source unless it is \
                     ended here first",
                    guest.start_hint()
                )
            })
        })?;
        self.report.started_ms = Some(self.begin.elapsed().as_secs_f64() * 1e3);
        Ok(())
    }

    fn broke(&self, rule: Rule, what: impl Into<String>) -> Error {
        Error::breach(&self.answers.peer, rule, what)
    }
}
