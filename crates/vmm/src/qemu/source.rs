//! A running QEMU whose guest is to be moved away.
mod departure;
mod unchanged;

use std::{
    io::Read,
    os::fd::OwnedFd,
    path::Path,
    time::{Duration, Instant},
};

use transship_guest::{
    AskOthers, AskToHold, DiskFile, DiskSnapshot, Found, GuestError, Hints, LastWill, SourceGuest, StateFormat, Watch,
};
use transship_memory::{Area, Freeing, GuestMemory, LetWait, Protection, Region, Tracker};
use transship_wire::{GuestDescription, libvirt::Definition};

use departure::Departure;

use super::{
    DESTINATION,
    abandoned::Will,
    back_ends::BackEnds,
    balloon::OwnBalloon,
    blocks::RamBlock,
    checks, disk_files, faults,
    giving_back::{self, Balloon},
    libvirt, machine,
    memory::{self, Backend},
    migration::Settings,
    qmp::{Keeper, Qmp},
    questions,
    survey::{SourceSeen, background, waiting_writers},
    tracking::Acquired,
    writers::Lookout,
};
use crate::{AttachOptions, Tracking};

/// How long QEMU may take to stop: it waits for the disk requests in flight.
const STOP_WAIT: Duration = Duration::from_secs(60);
/// Saving, sending and loading the state of a machine without much video memory.
const STATE_ESTIMATE: Duration = Duration::from_millis(60);

/// A stock QEMU as the source of a move.
///
/// After a move it stays as QEMU leaves it (`postmigrate`): stopped, its disks given up. Dropped before that, whatever
/// was changed in it is put back; whether the guest then runs is what [`SourceGuest::resume`] was told.
pub struct QemuSource {
    qmp: Qmp,
    description: GuestDescription,
    state_format: StateFormat,
    backends: Vec<Backend>,
    memory: GuestMemory,
    /// Asked when attaching, and again when the guest stands still.
    freeing: Freeing,
    /// The user knows of those that are there and of those that come.
    allow_untracked_writers: bool,
    /// Processes of vhost-user devices, which are tracked as QEMU is.
    back_ends: BackEnds,
    /// Another process that holds the processors for a moment; none: that is done here.
    hold: Option<AskToHold>,
    /// Disks read into guest memory by themselves, so each scan is followed by a wait for them.
    has_direct_disks: bool,
    tracking: Tracking,
    /// What was acquired for it, or for a protection, before either began.
    tracker: Option<Acquired>,
    waiting_faults: Option<OwnedFd>,
    /// The process that knows other writers, if we may not look any more.
    ask_others: Option<AskOthers>,
    /// Where QEMU had the memory when the tracking, or the protection, began.
    tracked: Option<Vec<Area>>,
    /// As it was when the protection began.
    balloon: Option<Balloon>,
    /// As it was when the tracking began, or when it was asked last.
    balloon_seen: Option<Balloon>,
    /// The balloon that a process of ours is.
    own_balloon: Option<OwnBalloon>,
    /// What that balloon says of the guest's memory, until somebody asks.
    hints: Option<Box<dyn Hints>>,
    /// How its device state leaves.
    departure: Departure,
    /// Its blocks of memory, if it was looked at right before its stop and not since.
    before_stop: Option<Vec<RamBlock>>,
    /// What the guest did when it was stopped last; standing before that, as it is not ours to let run then.
    found: Found,
    /// Files that the guest is to write to from its stop on.
    overlays: Vec<DiskSnapshot>,
}

impl QemuSource {
    /// Attaches to the QEMU whose QMP socket this is. Changes nothing in it.
    ///
    /// # Errors
    /// Every refusal that can be known beforehand, each with its cure.
    pub fn attach(socket: &Path, options: AttachOptions) -> Result<Self, GuestError> {
        Self::over(Qmp::connect(socket)?, options)
    }

    /// Attaches to the QEMU of a domain of libvirt, which goes on owning it. Changes nothing in it.
    ///
    /// # Errors
    /// Every refusal that can be known beforehand, each with its cure.
    pub fn attach_domain(address: &libvirt::Address, options: AttachOptions) -> Result<Self, GuestError> {
        if options.balloon.is_some() {
            return Err(GuestError::Unfit("libvirt does not know transship's balloon; leave out --balloon".to_owned()));
        }
        Self::over(libvirt::attach(address)?, options)
    }

    fn over(mut qmp: Qmp, options: AttachOptions) -> Result<Self, GuestError> {
        qmp.ask_ahead(&questions::source())?;
        let _mappings = qmp.process().hold_mappings();
        let seen = SourceSeen::look(&mut qmp, &options, &mut Err)?;
        qmp.forget_answers();
        let SourceSeen { own_balloon, has_direct_disks, backends, memory, description, state_format, .. } = seen;
        let SourceSeen { back_ends, device_state, quick_state, freeing, .. } = seen;
        let hints = options.balloon.and_then(|balloon| (balloon.connect)(&balloon.socket, &memory));
        Ok(Self {
            qmp,
            description,
            state_format,
            backends,
            memory,
            freeing,
            allow_untracked_writers: options.allow_untracked_writers,
            back_ends,
            hold: None,
            has_direct_disks,
            tracking: options.tracking,
            tracker: None,
            waiting_faults: None,
            ask_others: None,
            tracked: None,
            balloon: None,
            balloon_seen: None,
            own_balloon,
            hints,
            departure: Departure::by(device_state, quick_state),
            before_stop: None,
            found: Found::Standing,
            overlays: Vec::new(),
        })
    }

    /// Of protected memory `check_protected` asks all of it when the guest runs again and its pages are written. The
    /// questions take half of the time that such a guest would stand still.
    fn asks_later(&self) -> bool {
        self.balloon.is_some()
    }

    /// Has the device state come without a migration of QEMU's, where it can.
    fn avoid_migration(&mut self) {
        self.departure.avoid_migration(&mut self.qmp, &self.description, &self.state_format);
    }
}

impl SourceGuest for QemuSource {
    fn description(&self) -> GuestDescription {
        self.description.clone()
    }

    fn memory(&self) -> GuestMemory {
        self.memory.clone()
    }

    fn process(&self) -> Option<i32> {
        Some(self.qmp.pid())
    }

    fn freeing(&self) -> Freeing {
        self.freeing
    }

    fn gave_back(&mut self) -> Result<bool, GuestError> {
        self.balloon_seen.as_mut().map_or(Ok(true), |balloon| balloon.has_changed(&mut self.qmp))
    }

    fn hints(&mut self) -> Option<Box<dyn Hints>> {
        self.hints.take()
    }

    fn must_unplug(&self) -> bool {
        self.own_balloon.is_some()
    }

    fn unplug(&mut self, until: Instant) -> Result<bool, GuestError> {
        let Some(balloon) = &mut self.own_balloon else { return Ok(true) };
        let gone = balloon.unplug(&mut self.qmp, until)?;
        if gone {
            // Without it nothing is in the way any more, of which it could be thought to be the reason.
            checks::source_state(&mut self.qmp, None)?;
        }
        Ok(gone)
    }

    fn plug_back(&mut self) {
        let Some(balloon) = &mut self.own_balloon else { return };
        if let Err(error) = balloon.plug_back(&mut self.qmp) {
            let by_hand = balloon.made().by_hand();
            tracing::warn!("can't plug the guest's balloon in again: {error}; do it by hand: {by_hand}");
        }
    }

    fn acquire(&mut self, watch: Watch) -> Result<(), GuestError> {
        match watch {
            Watch::Track => {
                let (memory, tracking) = (&self.memory, self.tracking);
                self.tracker = Some(Acquired::of(&mut self.qmp, memory, tracking, &self.back_ends)?);
            }
            Watch::Protect => {
                match &self.own_balloon {
                    None => background(&mut self.qmp, &self.back_ends, &mut Err)?,
                    // It is unplugged before the protection begins, which looks again at what gives memory back.
                    Some(_) => waiting_writers(&mut self.qmp, &self.back_ends, &mut Err)?,
                }
                self.waiting_faults = Some(faults::for_all(&mut self.qmp)?);
                // It takes rights that may be gone when the protection begins.
                self.avoid_migration();
            }
        }
        Ok(())
    }

    fn lookout(&self) -> Option<String> {
        if self.allow_untracked_writers {
            return None;
        }
        Lookout::of(&self.qmp, &self.backends, self.allowed()).to_text()
    }

    fn threads(&self) -> Option<String> {
        self.tracker.as_ref()?.threads()
    }

    fn know_threads_by(&mut self, other: Box<dyn LetWait>) {
        if let Some(acquired) = &mut self.tracker {
            acquired.know_threads_by(other);
        }
    }

    fn processors(&self) -> Option<String> {
        self.back_ends.processors()?.to_text()
    }

    fn hold_by(&mut self, ask: AskToHold) {
        self.hold = Some(ask);
    }

    fn look_by(&mut self, ask: AskOthers) {
        self.ask_others = Some(ask);
    }

    fn track(&mut self) -> Result<Box<dyn Tracker>, GuestError> {
        let areas = memory::areas(&mut self.qmp, &self.backends)?;
        let acquired = match self.tracker.take() {
            Some(acquired) => acquired,
            None => Acquired::of(&mut self.qmp, &self.memory, self.tracking, &self.back_ends)?,
        };
        let elsewhere = self.back_ends.begin(&self.backends)?;
        let tracker = acquired.begin(&self.memory, areas.clone(), elsewhere)?;
        if self.freeing == Freeing::Announced {
            self.balloon_seen = Some(Balloon::now(&mut self.qmp)?);
        }
        self.tracked = Some(areas);
        Ok(tracker)
    }

    fn drain(&mut self) -> Result<bool, GuestError> {
        if self.has_direct_disks {
            self.qmp.drain_disks(STOP_WAIT)?;
        }
        Ok(self.has_direct_disks)
    }

    fn definition(&mut self) -> Result<Option<Definition>, GuestError> {
        Ok(self.qmp.definition()?)
    }

    fn is_running(&mut self) -> Result<bool, GuestError> {
        Ok(machine::run_state(&mut self.qmp)? == "running")
    }

    fn plan_disks(&mut self, folder: Option<&Path>) -> Result<Vec<DiskSnapshot>, GuestError> {
        self.overlays = self.qmp.plan_disks(folder)?;
        Ok(self.overlays.clone())
    }

    fn snapshot_disks(&mut self) -> Result<(), GuestError> {
        if self.overlays.is_empty() {
            return Err(GuestError::Bug("no snapshot of disks was planned".to_owned()));
        }
        Ok(self.qmp.use_overlays()?)
    }

    fn prepare_stop(&mut self) -> Result<(), GuestError> {
        if !self.overlays.is_empty() {
            self.qmp.make_overlays()?;
        }
        match (self.asks_later(), self.qmp.keeper()) {
            // One that stands still is asked when it is stopped: nobody waits for it.
            (false, _) if !machine::runs(&machine::run_state(&mut self.qmp)?) => {}
            (false, _) => self.look_before_stop()?,
            // Each question takes a millisecond, for which writers may wait already.
            (true, Keeper::Libvirt) => {}
            (true, Keeper::Nobody) => self.check_no_writers_came()?,
        }
        self.departure.prepare(&mut self.qmp, self.before_stop.as_deref())
    }

    fn stop(&mut self) -> Result<Found, GuestError> {
        let found = self.stop_at_once()?;
        self.check_unchanged()?;
        Ok(found)
    }

    fn stop_at_once(&mut self) -> Result<Found, GuestError> {
        let before = machine::run_state(&mut self.qmp)?;
        // Of an earlier stop.
        self.qmp.forget_answers();
        // A sleeping guest that QEMU stops is to sleep on.
        self.found = Found::by(machine::runs(&before));
        match before.as_str() {
            "running" => {
                let with = self.departure.with_stop(&self.qmp);
                self.back_ends.stop(&mut self.qmp, &mut self.hold, &with, STOP_WAIT)?;
            }
            // It makes no requests; some may still be under way.
            _ => {
                self.qmp.stop(STOP_WAIT)?;
                self.back_ends.wait_for_rest(&mut self.qmp)?;
            }
        }
        self.look_at_stopped(&before)
    }

    fn check_unchanged(&mut self) -> Result<(), GuestError> {
        self.look_after_stop()
    }

    fn protect(&mut self) -> Result<Protection, GuestError> {
        let uffd = match self.waiting_faults.take() {
            Some(uffd) => {
                giving_back::refuse(&mut self.qmp)?;
                uffd
            }
            None => {
                background(&mut self.qmp, &self.back_ends, &mut Err)?;
                self.avoid_migration();
                faults::for_all(&mut self.qmp)?
            }
        };
        let areas = memory::areas(&mut self.qmp, &self.backends)?;
        let pages: Vec<_> = self.memory.regions().iter().map(Region::pages).collect();
        let protection = Protection::new(uffd, areas.clone(), &pages)?;
        self.tracked = Some(areas);
        self.balloon = Some(Balloon::now(&mut self.qmp)?);
        Ok(protection)
    }

    fn check_protected(&mut self) -> Result<(), GuestError> {
        self.check_balloon()?;
        giving_back::refuse(&mut self.qmp)?;
        self.check_no_writers_came()?;
        self.check_memory_unchanged()
    }

    fn state_format(&self) -> StateFormat {
        self.state_format.clone()
    }

    fn disks(&mut self) -> Result<Option<Vec<DiskFile>>, GuestError> {
        disk_files::list(&mut self.qmp, disk_files::Which::All).map(Some)
    }

    fn uuid(&mut self) -> Result<[u8; 16], GuestError> {
        machine::uuid(&mut self.qmp)
    }

    fn check_for_stock(&mut self) -> Result<(), GuestError> {
        checks::state_before_pages(&mut self.qmp)
    }

    fn hurry_state(&mut self) {
        // Where back ends may end with the state, the last scan comes before it.
        self.departure.hurry(!self.back_ends.may_end_with_state());
    }

    fn state_estimate(&self) -> Duration {
        STATE_ESTIMATE
    }

    fn check_going_on(&mut self) -> Result<(), GuestError> {
        self.back_ends.check_going_on()
    }

    fn state_ends_writers(&self) -> bool {
        self.back_ends.may_end_with_state()
    }

    fn stays_here(&mut self) {
        self.departure.guest_stays();
    }

    fn keep_stopped(&mut self) {
        self.departure.guest_stays_stopped();
    }

    fn save_state(&mut self) -> Result<Box<dyn Read + Send>, GuestError> {
        self.back_ends.state_is_asked();
        let state = self.departure.save(&mut self.qmp);
        if self.before_stop.is_none() {
            // Nobody will ask for what was asked on the way.
            self.qmp.forget_answers();
        }
        state
    }

    fn state_saved(&mut self) -> Result<(), GuestError> {
        self.departure.end(&mut self.qmp)
    }

    fn prepare_to_give_up(&mut self) -> Result<(), GuestError> {
        self.departure.mark(&mut self.qmp)
    }

    fn give_up(&mut self) -> Result<(), GuestError> {
        self.departure.mark(&mut self.qmp)
    }

    fn tidy(&mut self) {
        // What is refused is tried again, and told, when we are done with QEMU.
        let _ = self.departure.tidy(&mut self.qmp);
    }

    fn resume(&mut self, run: bool) -> Result<(), GuestError> {
        self.qmp.forget_answers();
        self.before_stop = None;
        self.departure.take_back(&mut self.qmp);
        if !run || !self.found.ran() {
            return self.departure.take_disks_back(&mut self.qmp);
        }
        machine::let_run_again(&mut self.qmp, DESTINATION)
    }

    fn resume_hint(&self) -> String {
        self.qmp.cont_by_hand()
    }

    fn last_will(&mut self) -> Result<LastWill, GuestError> {
        if self.qmp.keeper() == Keeper::Libvirt {
            let overlays = self.overlays.iter().map(|snapshot| snapshot.overlay.clone()).collect();
            return Ok(LastWill { text: libvirt::will(self.qmp.pid(), overlays)?, files: Vec::new() });
        }
        let balloon = self.own_balloon.as_ref().map(|balloon| balloon.made().clone());
        let end = self.departure.promise()?;
        let text = Will { settings: Settings::now(&mut self.qmp)?, balloon }.to_text()?;
        Ok(LastWill { text, files: vec![end] })
    }
}

impl Drop for QemuSource {
    fn drop(&mut self) {
        if let Err(e) = self.departure.undo(&mut self.qmp) {
            tracing::warn!("can't restore QEMU's migration settings: {e}");
        }
    }
}
