//! The device: its configuration, and what both its users, QEMU and a client, ask of it.
mod queues;

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use queues::{give_back, signal};
use rustix::rand::{GetRandomFlags, getrandom};
use transship_memory::PAGE_BYTES;
use vhost::vhost_user::VhostUserProtocolFeatures;
use vhost_user_backend::{VhostUserBackend, VringRwLock};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::{
    epoll::EventSet,
    event::{EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier},
};

use crate::{
    buffers::Hint,
    config::{BALLOON_PAGE_BYTES, Config},
    features::{Features, QUEUE_SIZE, QUEUES, Queue},
    hinting::{Answer, DONE, Hinting},
    message::{Description, Line, Statistics, VERSION},
    notifier::Notifier,
    outbox::Outbox,
    table::{Piece, Table},
};

/// Guest memory that QEMU may exchange for another at any time.
type Memory = GuestMemoryAtomic<GuestMemoryMmap>;

/// How long a client waits for the one before it, which may have gone a moment ago.
const TURN: Duration = Duration::from_secs(2);

/// The device. It outlives the QEMUs and clients that come and go, of each there is one at a time.
pub(crate) struct Device {
    state: Mutex<State>,
    /// A client has gone.
    client_left: Condvar,
    /// Must be notified of each change of the configuration, with the state not locked.
    pub(crate) qemu: Notifier,
    /// QEMU is going: the queues are not to be worked on any more.
    leaving: AtomicBool,
}

/// Held only for moments; never while a ring is locked.
struct State {
    memory: Option<Memory>,
    table: Table,
    features: Features,
    config: Config,
    hinting: Hinting,
    client: Option<Outbox>,
    /// Nothing is given back to the host.
    keep: bool,
    statistics: Statistics,
    /// Guest addresses and bytes of the used rings that were there since QEMU is: what we write to.
    rings: Vec<(u64, u64)>,
    /// The buffer that the driver wants back when it is to fill it anew.
    statistics_buffer: Option<(VringRwLock, u16)>,
}

impl Device {
    /// A device that nobody uses yet.
    pub(crate) fn new() -> io::Result<Self> {
        let mut seed = [0; 4];
        getrandom(&mut seed, GetRandomFlags::empty())?;
        let state = State {
            memory: None,
            table: Table::default(),
            features: Features::default(),
            config: Config::default(),
            hinting: Hinting::new(u32::from_ne_bytes(seed)),
            client: None,
            keep: false,
            statistics: Statistics::default(),
            rings: Vec::new(),
            statistics_buffer: None,
        };
        Ok(Self {
            state: Mutex::new(state),
            client_left: Condvar::new(),
            qemu: Notifier::default(),
            leaving: AtomicBool::new(false),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is whole at once: what a panic leaves behind can be used.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// For the QEMU behind the door.
impl Device {
    /// A queue runs; they begin in their order.
    pub(crate) fn queue_starts(&self, index: u32) {
        let features = self.state().features;
        if u16::try_from(index + 1).is_ok_and(|next| features.queue(next).is_none()) {
            self.qemu.set_running(true);
        }
    }

    /// It is about to go.
    pub(crate) fn leave(&self) {
        self.qemu.close();
        // The worker sees it before it takes the next buffer; nothing else depends on it.
        self.leaving.store(true, Ordering::Relaxed);
    }

    /// It has gone.
    pub(crate) fn left(&self) {
        let mut state = self.state();
        state.lose("QEMU has disconnected from the balloon");
        state.memory = None;
        state.table = Table::default();
        state.features = Features::default();
        state.rings.clear();
        state.statistics_buffer = None;
        self.leaving.store(false, Ordering::Relaxed);
    }
}

/// For the client behind the door.
impl Device {
    /// It is here: `wake` becomes readable when there is something for it.
    pub(crate) fn attach(&self, wake: Arc<OwnedFd>) -> Result<(), String> {
        let turn = self.client_left.wait_timeout_while(self.state(), TURN, |state| state.client.is_some());
        let (mut state, _) = turn.unwrap_or_else(PoisonError::into_inner);
        if state.client.is_some() {
            return Err("another process uses this balloon now; wait for it or end it".into());
        }
        state.client = Some(Outbox::new(wake));
        Ok(())
    }

    /// It has gone, and with it whatever it wanted.
    pub(crate) fn detach(&self) {
        {
            let mut state = self.state();
            state.client = None;
            state.keep = false;
        }
        self.change_hinting(Hinting::done);
        self.client_left.notify_one();
    }

    pub(crate) fn take_lines(&self) -> Vec<Line> {
        self.state().client.as_mut().map(Outbox::take).unwrap_or_default()
    }

    pub(crate) fn describe(&self) -> Description {
        let state = self.state();
        let bytes = |pages: u32| u64::from(pages) * BALLOON_PAGE_BYTES;
        Description {
            version: VERSION,
            pid: std::process::id(),
            hints: self.can_hint(&state),
            poison: state.poison(),
            target_bytes: bytes(state.config.target_pages),
            given_bytes: bytes(state.config.given_pages),
            memory: state.table.ranges(),
            rings: state.ring_pages().map(|piece| (piece.entry, piece.offset, piece.bytes)).collect(),
        }
    }

    /// Asks the driver for hints: the command that they will answer to.
    pub(crate) fn start(&self) -> Result<u32, String> {
        let command = {
            let mut state = self.state();
            if !self.can_hint(&state) {
                let why = match self.qemu.is_running() {
                    false => "no driver of the guest uses this balloon now",
                    true => "the guest's driver does not name free pages",
                };
                return Err(why.into());
            }
            let command = state.hinting.ask();
            if let Some(client) = &mut state.client {
                client.begin(command);
            }
            command
        };
        self.qemu.change();
        if self.qemu.wait_told() {
            return Ok(command);
        }
        self.change_hinting(Hinting::done);
        Err("QEMU did not accept the request for hints".into())
    }

    pub(crate) fn stop(&self) {
        self.change_hinting(Hinting::stop);
    }

    pub(crate) fn done(&self) {
        self.change_hinting(Hinting::done);
    }

    /// Returns when QEMU knows it; after that it is safe to stop the guest.
    fn change_hinting(&self, change: fn(&mut Hinting)) {
        let (before, after) = {
            let mut state = self.state();
            let before = state.hinting.shown();
            change(&mut state.hinting);
            (before, state.hinting.shown())
        };
        if before != after {
            self.qemu.change();
            self.qemu.wait_told();
        }
    }

    fn can_hint(&self, state: &State) -> bool {
        self.qemu.is_running() && state.features.hints()
    }

    pub(crate) fn keep(&self) {
        self.state().keep = true;
    }

    pub(crate) fn set_target(&self, bytes: u64) -> Result<(), String> {
        let pages = u32::try_from(bytes / BALLOON_PAGE_BYTES).map_err(|_| format!("{bytes} bytes are too many"))?;
        self.state().config.target_pages = pages;
        self.qemu.change();
        self.qemu.wait_told();
        Ok(())
    }

    /// What the driver said last; it is asked to say it anew.
    pub(crate) fn statistics(&self) -> Statistics {
        let (statistics, buffer) = {
            let mut state = self.state();
            (state.statistics.clone(), state.statistics_buffer.take())
        };
        if let Some((ring, head)) = buffer {
            give_back(&ring, head);
            signal(&ring);
        }
        statistics
    }
}

impl State {
    /// What free pages hold, if the driver sees to that.
    fn poison(&self) -> Option<u32> {
        self.features.poison().then_some(self.config.poison)
    }

    /// All pages that have a part of a ring that we write to.
    fn ring_pages(&self) -> impl Iterator<Item = Piece> + '_ {
        let page = PAGE_BYTES as u64;
        self.rings.iter().flat_map(move |&(from, bytes)| {
            let (first, end) = (from / page * page, from.saturating_add(bytes).div_ceil(page).saturating_mul(page));
            self.table.pages(first, end - first)
        })
    }

    /// Hints can't be had any more, or would mean something else.
    fn lose(&mut self, why: &str) {
        self.hinting.done();
        if let Some(client) = &mut self.client {
            client.lost(why);
        }
    }

    fn discard(&self, from: u64, bytes: u64) {
        for piece in self.table.pages(from, bytes) {
            if let Err(error) = self.table.discard(piece) {
                // The guest says how often.
                static SAID: Once = Once::new();
                SAID.call_once(|| tracing::warn!("can't give memory back to the host: {error}; the guest keeps it"));
                tracing::info!(%error, ?piece, "can't give memory back to the host");
            }
        }
    }

    fn hint(&mut self, hint: Hint) {
        match hint {
            Hint::Number(number) => match self.hinting.answered(number) {
                Answer::Begins(command) => tracing::debug!(command, "the guest begins to name free pages"),
                Answer::NamedAll(command) => {
                    tracing::debug!(command, "the guest has named its free pages");
                    if let Some(client) = &mut self.client {
                        client.named_all();
                    }
                }
                Answer::Stale => {}
            },
            Hint::Range { from, bytes } if self.hinting.counting().is_some() => {
                let Some(client) = &mut self.client else { return };
                self.table.pages(from, bytes).for_each(|piece| client.hint(piece));
            }
            Hint::Range { .. } => {}
        }
    }
}

impl VhostUserBackend for Device {
    type Bitmap = ();
    type Vring = VringRwLock;

    fn num_queues(&self) -> usize {
        QUEUES
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_SIZE
    }

    fn features(&self) -> u64 {
        Features::offered().0
    }

    fn acked_features(&self, features: u64) {
        self.state().features = Features(features);
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        Features::protocol()
    }

    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let state = self.state();
        let bytes = state.config.bytes(state.hinting.shown());
        let part = (offset as usize).checked_add(size as usize).and_then(|end| bytes.get(offset as usize..end));
        part.unwrap_or_default().to_vec()
    }

    fn set_config(&self, offset: u32, data: &[u8]) -> io::Result<()> {
        let mut state = self.state();
        let shown = state.hinting.shown();
        state.config.write(offset, data, shown);
        Ok(())
    }

    fn update_memory(&self, memory: Memory) -> io::Result<()> {
        let table = Table::of(&memory.memory())?;
        let mut state = self.state();
        // A client with an old table would take the places of a new one for others.
        let before = state.table.ranges();
        if !before.is_empty() && before != table.ranges() {
            state.lose("the guest's memory layout changed");
            self.qemu.change();
        }
        state.table = table;
        state.memory = Some(memory);
        Ok(())
    }

    fn stop_vring(&self, index: u32) -> io::Result<()> {
        self.qemu.set_running(false);
        let buffer = {
            let mut state = self.state();
            if state.hinting.shown() != DONE {
                state.lose("the guest, or its driver, was stopped");
                // It will hear of it if it is only a pause.
                self.qemu.change();
            }
            let queue = u16::try_from(index).ok().and_then(|index| state.features.queue(index));
            state.statistics_buffer.take_if(|_| queue == Some(Queue::Statistics))
        };
        // QEMU knows of no buffers that we hold: the next time it would count as given back.
        if let Some((ring, head)) = buffer {
            give_back(&ring, head);
        }
        Ok(())
    }

    fn exit_event(&self, _thread: usize) -> Option<(EventConsumer, EventNotifier)> {
        new_event_consumer_and_notifier(EventFlag::NONBLOCK | EventFlag::CLOEXEC).ok()
    }

    fn handle_event(&self, index: u16, _: EventSet, rings: &[VringRwLock], _thread: usize) -> io::Result<()> {
        self.note_rings(rings);
        // An error would end the thread, and all queues with it.
        if let Some(ring) = rings.get(usize::from(index)) {
            self.work(index, ring);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
