//! Encoders between the main thread and the channels.
//!
//! ```text
//!   main ── windows ──► a ring of 4 for each encoder ──► encode ──► one ring of results ──► whichever channel is free
//!     └── all rings full, and told not to wait ──────────────────────────► as it is ──┘
//! ```
//!
//! Nobody takes a lock on this path. An encoder copies the pages before it encodes them: the guest writes to them
//! meanwhile, and a compressor may misbehave on input that changes. A packet stands for itself, so any encoder serves
//! any channel.
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    thread,
    time::Duration,
};

use transship_ring::{Results, mpmc};

use super::{
    MainThread, Shared, Window,
    coder::{EncoderSetup, Tools, gone},
    dispatcher::{Chosen, Dispatcher},
    encoder::WindowEncoder,
    gate::{Gate, Ready},
};
use crate::{Compress, Error, WhenBusy};

/// How long a window that finds no room waits until its encoding is chosen anew.
const CHOOSE_AGAIN: Duration = Duration::from_millis(5);

/// How many encode what, and for whom.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EncodingOptions {
    pub(crate) compress: Compress,
    pub(crate) encoders: u8,
    pub(crate) when_busy: WhenBusy,
    pub(crate) channels: u8,
    /// The destination takes pages that are left as they are. If not, they are encoded although they do not shrink.
    pub(crate) may_be_raw: bool,
}

/// What was handed over in a round.
#[derive(Debug, Default)]
struct RoundTally {
    /// What channels will get, whatever happens.
    handed_over: u64,
    /// Windows that are to be left as they are, those that wait here included.
    raw: u64,
    /// Windows that are to be left as they are, until there are enough to wake a channel for.
    batch: Vec<Window>,
    /// There may be some that can be taken back.
    may_take_back: bool,
}

/// The encoders of a session.
pub(crate) struct Encoders {
    /// None only while it is dropped.
    dispatcher: Option<Dispatcher<Window>>,
    results: Option<Results<Ready>>,
    threads: Vec<thread::JoinHandle<()>>,
    when_busy: WhenBusy,
    channels: usize,
    tally: RoundTally,
    tools: Tools,
}

impl Encoders {
    /// None if nothing is to be encoded.
    pub(crate) fn start(options: &EncodingOptions, shared: &Arc<Shared>) -> Result<Option<Self>, Error> {
        let setup = EncoderSetup::new(options.compress, options.encoders, usize::from(options.channels));
        if setup.is_empty() {
            return Ok(None);
        }
        let (submitter, workers, results) = setup.pool();
        let tools = setup.tools(&shared.progress);
        let mut encoders = Self {
            dispatcher: Some(Dispatcher::new(submitter, &setup, &tools)),
            results: Some(results),
            threads: Vec::new(),
            when_busy: options.when_busy,
            channels: usize::from(options.channels),
            tally: RoundTally::default(),
            tools,
        };
        for (number, worker) in workers.into_iter().enumerate() {
            let coder = setup.coder(&encoders.tools, options.may_be_raw);
            let work = WindowEncoder::new(shared, &encoders.tools.meters);
            let thread = thread::Builder::new().name(format!("encoder {number}"));
            let started = thread.spawn(move || coder.run(worker, work));
            encoders.threads.push(started.map_err(|source| Error::Io { what: "start an encoder".into(), source })?);
        }
        Ok(Some(encoders))
    }

    /// Buffers of packets that were written, to be filled again.
    pub(crate) fn spare(&self) -> Arc<mpmc::Ring<Vec<u8>>> {
        Arc::clone(&self.tools.spare)
    }

    /// For a round: what the channels take from.
    pub(crate) fn open_gate(&mut self) -> Gate {
        self.tally = RoundTally::default();
        if let Some(auto) = &mut self.dispatcher().auto {
            auto.pause();
        }
        let results = self.results.clone().expect("taken only in drop");
        Gate::new(results, self.channels, Arc::clone(&self.tools.meters))
    }

    /// An encoder that ended early takes its windows with it: the session can't go on.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.threads.iter().any(thread::JoinHandle::is_finished) { Err(gone()) } else { Ok(()) }
    }

    fn dispatcher(&mut self) -> &mut Dispatcher<Window> {
        self.dispatcher.as_mut().expect("taken only in drop")
    }

    /// Hands a window to an encoder, or past them all.
    pub(crate) fn submit(&mut self, mut window: Window, gate: &Gate, main: &dyn MainThread) -> Result<(), Error> {
        while let Some(flow) = self.dispatcher().choose(&mut window.chosen) {
            let (raw, waiting) = (self.tally.raw, self.tally.batch.len());
            if !flow.lets(gate.raw_on_their_way(raw), waiting) {
                self.flush(gate, main)?; // it might be what is waited for
                if !gate.wait_for_raw(raw, flow.sleep_until(), CHOOSE_AGAIN) {
                    main.check()?;
                    continue;
                }
            }
            self.tally.raw += 1;
            if window.chosen.sample {
                return self.encode(window, gate, main);
            }
            self.tally.may_take_back = true;
            self.tally.batch.push(window);
            return if self.tally.batch.len() < flow.batch { Ok(()) } else { self.flush(gate, main) };
        }
        for earlier in self.take_back(gate, main)? {
            let chosen = Chosen { sample: earlier.chosen.sample, ..window.chosen };
            self.encode(Window { chosen, ..earlier }, gate, main)?;
        }
        self.encode(window, gate, main)
    }

    /// Takes back all that was to be left as it is and that no channel has taken: the choice has changed.
    fn take_back(&mut self, gate: &Gate, main: &dyn MainThread) -> Result<Vec<Window>, Error> {
        if !std::mem::take(&mut self.tally.may_take_back) {
            return Ok(Vec::new());
        }
        let (mut windows, others) = gate.take_back();
        self.tally.handed_over -= windows.len() as u64 + others.iter().map(|other| other.counts().0).sum::<u64>();
        windows.append(&mut self.tally.batch);
        self.tally.raw -= windows.len() as u64;
        others.into_iter().try_for_each(|other| self.hand_over(other, gate, main))?;
        Ok(windows)
    }

    /// Hands over the windows that are to be left as they are and wait for more of them.
    pub(crate) fn flush(&mut self, gate: &Gate, main: &dyn MainThread) -> Result<(), Error> {
        match std::mem::take(&mut self.tally.batch) {
            batch if batch.is_empty() => Ok(()),
            batch => self.hand_over(Ready::Unseen(batch), gate, main),
        }
    }

    /// Hands something to the channels past the encoders.
    pub(crate) fn pass(&mut self, ready: Ready, gate: &Gate, main: &dyn MainThread) -> Result<(), Error> {
        self.flush(gate, main)?;
        self.hand_over(ready, gate, main)
    }

    fn hand_over(&mut self, ready: Ready, gate: &Gate, main: &dyn MainThread) -> Result<(), Error> {
        let (count, _) = ready.counts();
        gate.pass(ready, main)?;
        self.tally.handed_over += count;
        Ok(())
    }

    /// What the channels get of this round, in all. What could not be handed over because of a failure is not among it.
    pub(crate) fn handed_over(&self) -> u64 {
        self.tally.handed_over
    }

    /// Hands a window to an encoder, or past them if all are busy and that is wanted.
    fn encode(&mut self, window: Window, gate: &Gate, main: &dyn MainThread) -> Result<(), Error> {
        self.flush(gate, main)?;
        if let Some(window) = self.dispatcher().try_submit(window)? {
            if self.when_busy == WhenBusy::Raw {
                let tally = &self.tools.progress.encoding;
                tally.raw_busy_pages.fetch_add(window.wanted.count_ones().into(), Relaxed);
                return self.hand_over(Ready::Unseen(vec![window]), gate, main);
            }
            self.dispatcher().submit(window, || main.check().map(|()| true))?;
        }
        self.tally.handed_over += 1;
        Ok(())
    }
}

impl Drop for Encoders {
    fn drop(&mut self) {
        // Without a dispatcher they find no more work, without a taker they don't wait for room.
        drop((self.dispatcher.take(), self.results.take()));
        for thread in self.threads.drain(..) {
            // A panic in there has been printed, and failed the session by `gone`.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc,
    };

    use transship_memory::{Access, ByteRange, GuestMemory, Region, WindowPages};

    use super::*;

    const CHANNELS: u8 = 3;
    const WINDOWS: u64 = 100;

    /// Can be told that the session has failed.
    #[derive(Default)]
    struct TestMain(AtomicBool);

    impl MainThread for TestMain {
        fn check(&self) -> Result<(), Error> {
            if self.0.load(SeqCst) { Err(Error::CANCELLED) } else { Ok(()) }
        }
        fn check_at_the_end(&self) -> Result<(), Error> {
            Ok(())
        }
        fn reason(&self) -> Option<Error> {
            None
        }
    }

    /// Encoders over memory that is all zero, so that nothing speaks for any encoding, and over a link of 5 GB/s.
    fn encoders() -> Encoders {
        let file = tempfile::tempfile().unwrap();
        file.set_len(WINDOWS * 128 * 4096).unwrap();
        let region =
            Region::map("ram", file.into(), ByteRange::sized(0, WINDOWS * 128 * 4096), Access::ReadWrite).unwrap();
        let shared = Shared::with_nobody(GuestMemory::new(vec![region]));
        let options = EncodingOptions {
            compress: Compress::Auto,
            encoders: 2,
            when_busy: WhenBusy::Wait,
            channels: CHANNELS,
            may_be_raw: true,
        };
        let mut encoders = Encoders::start(&options, &Arc::new(shared)).unwrap().unwrap();
        let auto = &mut encoders.dispatcher().auto;
        *auto = auto.take().map(|auto| auto.over_link(0.2e-9));
        encoders
    }

    /// Takes all of a round on threads of channels, and returns what each `Ready` counted for, when each of them has
    /// seen its end.
    fn take_all(gate: &Arc<Gate>) -> impl FnOnce() -> Vec<u64> + use<> {
        let (ended, all) = mpsc::channel();
        for _ in 0..CHANNELS {
            let (gate, ended) = (Arc::clone(gate), ended.clone());
            thread::spawn(move || {
                let mut taken = Vec::new();
                while let Some(ready) = gate.next().filter(|ready| !matches!(ready, Ready::RoundEnd)) {
                    taken.push(ready.counts().0);
                    gate.took(ready.counts());
                }
                ended.send(taken).unwrap();
            });
        }
        move || {
            let next = |_| all.recv_timeout(Duration::from_secs(60)).expect("the round ends for each channel");
            (0..CHANNELS).flat_map(next).collect()
        }
    }

    fn window(number: u64) -> Window {
        Window::new(0, 0, WindowPages::new(number * 128, u128::MAX))
    }

    #[test]
    fn windows_that_stay_as_they_are_go_together() {
        let (mut encoders, main) = (encoders(), TestMain::default());
        for round in 0..2 {
            let gate = Arc::new(encoders.open_gate());
            let all = take_all(&gate);
            (0..WINDOWS).for_each(|number| encoders.submit(window(number), &gate, &main).unwrap());
            encoders.flush(&gate, &main).unwrap();
            gate.close(encoders.handed_over());
            let taken = all();
            assert_eq!(taken.iter().sum::<u64>(), WINDOWS, "round {round}: {taken:?}");
            assert_eq!(taken.iter().max(), Some(&8), "round {round}: {taken:?}");
        }
        let encoded = encoders.tools.progress.encoding.submitted.load(SeqCst);
        assert!(encoded <= 2, "{encoded}: after a sample without content none is asked for until there is some");
    }

    /// Nobody takes anything, so the main thread waits when enough is on its way, and hears that the session has
    /// failed.
    #[test]
    fn what_could_not_be_handed_over_is_not_waited_for() {
        let (mut encoders, main) = (encoders(), TestMain::default());
        let gate = Arc::new(encoders.open_gate());
        let given = (0..WINDOWS).take_while(|number| {
            main.0.store(*number >= 20, SeqCst);
            encoders.submit(window(*number), &gate, &main).is_ok()
        });
        assert!((20..WINDOWS as usize).contains(&given.count()));
        gate.close(encoders.handed_over());
        let taken = take_all(&gate)();
        assert_eq!(taken.iter().sum::<u64>(), encoders.handed_over());
    }

    /// Windows on their way as they are, when another encoding is chosen: those that no channel has taken are encoded.
    #[test]
    fn what_waits_is_encoded_when_the_choice_changes() {
        let (mut encoders, main) = (encoders(), TestMain::default());
        let gate = Arc::new(encoders.open_gate());
        let submit = |encoders: &mut Encoders, number| encoders.submit(window(number), &gate, &main).unwrap();
        (0..20).for_each(|number| submit(&mut encoders, number));
        // The first two went to encoders, as samples.
        assert_eq!((encoders.handed_over(), encoders.tally.batch.len()), (18, 2));
        let auto = &mut encoders.dispatcher().auto;
        *auto = auto.take().map(|auto| auto.using(1));
        submit(&mut encoders, 20);
        assert_eq!((encoders.handed_over(), encoders.tally.raw), (21, 2));
        gate.close(encoders.handed_over());
        assert_eq!(take_all(&gate)(), [1; 21]);
    }

    /// A round may end in the middle of a batch, and the session with windows that wait for more.
    #[test]
    fn windows_that_wait_for_more_count_only_when_they_go() {
        let (mut encoders, main) = (encoders(), TestMain::default());
        let gate = Arc::new(encoders.open_gate());
        let all = take_all(&gate);
        (0..WINDOWS - 1).for_each(|number| encoders.submit(window(number), &gate, &main).unwrap());
        let waiting = encoders.tally.batch.len() as u64;
        assert_eq!(encoders.handed_over() + waiting, WINDOWS - 1);
        gate.close(encoders.handed_over());
        assert_eq!(all().iter().sum::<u64>(), WINDOWS - 1 - waiting);
    }
}
