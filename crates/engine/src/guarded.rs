//! A guest that is about to be changed, and the guard that is told before.
//!
//! ```text
//!   unplug     begin               then the device goes
//!   stop       begin, RunAgain     then the guest is prepared and stops; what it turns out to have done is told as well
//!   resume     first the guest is as it was; then end, or LeaveIt while it lacks a device
//!   plug back  first the device is there; then end
//!   give up    end                 then the destination is told
//! ```
//!
//! Whoever dies in mid-step leaves a guard that does too much rather than too little: it lets a guest run that runs, or
//! plugs in what is there, which is refused.
use std::{ops::Deref, time::Instant};

use crate::Report;
use crate::guest::{Duty, Found, Guard, GuestError, SourceGuest};

/// A guest, and who puts it back as it was if we die.
pub(crate) struct Guarded<'g> {
    guest: &'g mut dyn SourceGuest,
    /// None: nobody, should this process be killed.
    guard: Option<&'g mut dyn Guard>,
    /// The guard was told that something changes, and not yet that it is over.
    is_armed: bool,
    /// Something was unplugged, or may have been.
    lacks: bool,
    /// All is done that can be done before it is stopped.
    is_prepared: bool,
    /// It was stopped, and nobody has looked yet whether it is what it was.
    is_unchecked: bool,
    /// Since when it has been standing still, and until when it has.
    stands: Option<(Instant, Option<Instant>)>,
}

/// What changes nothing. (What changes something is here, or goes by way of [`Guarded::unguarded`].)
impl<'g> Deref for Guarded<'g> {
    type Target = dyn SourceGuest + 'g;

    fn deref(&self) -> &Self::Target {
        self.guest
    }
}

impl<'g> Guarded<'g> {
    pub(crate) fn new(guest: &'g mut dyn SourceGuest, guard: Option<&'g mut (dyn Guard + '_)>) -> Self {
        let guard = guard.map(|guard| guard as &mut dyn Guard);
        Self { guest, guard, is_armed: false, lacks: false, is_prepared: false, is_unchecked: false, stands: None }
    }

    /// The guest itself, for what needs no guard: everything but what this type does.
    pub(crate) fn unguarded(&mut self) -> &mut dyn SourceGuest {
        self.guest
    }

    /// Waits until what the scan that was just made has found is there to be read: [`SourceGuest::drain`].
    pub(crate) fn drain(&mut self, report: &mut Report) -> Result<(), GuestError> {
        let begin = Instant::now();
        if self.guest.drain()? {
            report.drains.count += 1;
            report.drains.longest_ms = report.drains.longest_ms.max(begin.elapsed().as_secs_f64() * 1e3);
        }
        Ok(())
    }

    fn arm(&mut self) -> Result<(), GuestError> {
        if let Some(guard) = self.guard.as_mut().filter(|_| !self.is_armed) {
            guard.begin(self.guest.last_will()?)?;
            self.is_armed = true;
        }
        Ok(())
    }

    /// A guard that was not armed need not know.
    fn instruct(&mut self, duty: Duty) -> Result<(), GuestError> {
        match &mut self.guard {
            Some(guard) if self.is_armed => guard.instruct(duty),
            _ => Ok(()),
        }
    }

    fn disarm(&mut self) -> Result<(), GuestError> {
        match &mut self.guard {
            Some(guard) if std::mem::take(&mut self.is_armed) => guard.end(),
            _ => Ok(()),
        }
    }

    /// See [`SourceGuest::unplug`].
    pub(crate) fn unplug(&mut self, until: Instant) -> Result<bool, GuestError> {
        if !self.guest.must_unplug() {
            return Ok(true);
        }
        self.arm()?;
        self.lacks = true;
        self.guest.unplug(until)
    }

    /// The guest stays: it has again what was unplugged, if something was.
    pub(crate) fn plug_back(&mut self) {
        if std::mem::take(&mut self.lacks) {
            self.guest.plug_back();
            // If this fails the guard plugs in what is there already, which the VMM refuses.
            let _ = self.disarm();
        }
    }

    /// See [`SourceGuest::prepare_stop`]. Done by `stop` if it was not done before.
    pub(crate) fn prepare_stop(&mut self) -> Result<(), GuestError> {
        self.arm()?;
        self.guest.prepare_stop()?;
        self.is_prepared = true;
        Ok(())
    }

    /// See [`SourceGuest::stop`].
    pub(crate) fn stop(&mut self) -> Result<Found, GuestError> {
        let found = self.stop_at_once()?;
        self.check_unchanged()?;
        Ok(found)
    }

    /// See [`SourceGuest::stop_at_once`].
    pub(crate) fn stop_at_once(&mut self) -> Result<Found, GuestError> {
        if !self.is_prepared {
            self.prepare_stop()?;
        }
        // A guest that stands is not to be let run. Somebody may pause it, or let it run, right after we have asked:
        // the second word is right.
        if self.is_armed {
            let runs = self.guest.is_running()?;
            self.instruct(on(Found::by(runs)))?;
        }
        self.stands = Some((Instant::now(), None));
        self.is_unchecked = true;
        let found = self.guest.stop_at_once()?;
        self.instruct(on(found))?;
        Ok(found)
    }

    /// See [`SourceGuest::check_unchanged`]. Asked once after each stop.
    pub(crate) fn check_unchanged(&mut self) -> Result<(), GuestError> {
        if self.is_unchecked {
            self.guest.check_unchanged()?;
            self.is_unchecked = false;
        }
        Ok(())
    }

    /// See [`SourceGuest::give_up`]. Once this has returned, nobody here lets the guest run. A guest that nobody has
    /// looked at since it was stopped is looked at first.
    pub(crate) fn give_up(&mut self) -> Result<(), GuestError> {
        self.check_unchanged()?;
        self.disarm()?;
        self.guest.give_up()
    }

    /// How long it has been standing still, in milliseconds: from its last stop until it was resumed, or until now.
    pub(crate) fn stood_ms(&self) -> f64 {
        self.stands
            .map_or(0.0, |(since, until)| until.unwrap_or_else(Instant::now).duration_since(since).as_secs_f64() * 1e3)
    }

    /// See [`SourceGuest::resume`].
    pub(crate) fn resume(&mut self, run: bool) -> Result<(), GuestError> {
        self.is_prepared = false;
        let resumed = self.guest.resume(run);
        if let Some((_, until)) = &mut self.stands {
            *until = Some(Instant::now());
        }
        self.guest.tidy();
        resumed?;
        // If this fails the guard lets a guest run that runs already.
        let _ = if self.lacks { self.instruct(Duty::LeaveIt) } else { self.disarm() };
        Ok(())
    }
}

/// What is to become of a guest that we have stopped, should we die.
fn on(found: Found) -> Duty {
    match found {
        Found::Running => Duty::RunAgain,
        Found::Standing => Duty::LeaveIt,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{
        io::Read,
        sync::{Arc, Mutex},
        time::Duration,
    };

    use transship_memory::{GuestMemory, Tracker};
    use transship_wire::GuestDescription;

    use super::*;
    use crate::guest::LastWill;

    /// What was done, in order.
    type Log = Arc<Mutex<Vec<&'static str>>>;

    fn note(log: &Log, step: &'static str) {
        log.lock().unwrap().push(step);
    }

    fn taken(log: &Log) -> Vec<&'static str> {
        std::mem::take(&mut log.lock().unwrap())
    }

    /// A guest that writes down what becomes of it.
    struct Guest {
        log: Log,
        runs: bool,
        /// What it turns out to do when it is stopped.
        found: Found,
        has_balloon: bool,
        /// It is not what it was any more.
        has_changed: bool,
        /// How long its disks are waited for, if it has any that write past the tracker.
        drains: Option<Duration>,
    }

    impl SourceGuest for Guest {
        fn description(&self) -> GuestDescription {
            unreachable!("nobody asks")
        }
        fn memory(&self) -> GuestMemory {
            GuestMemory::new(Vec::new())
        }
        fn must_unplug(&self) -> bool {
            self.has_balloon
        }
        fn unplug(&mut self, _until: Instant) -> Result<bool, GuestError> {
            note(&self.log, "unplug");
            Ok(false)
        }
        fn plug_back(&mut self) {
            note(&self.log, "plug back");
        }
        fn track(&mut self) -> Result<Box<dyn Tracker>, GuestError> {
            unreachable!("nobody asks")
        }
        fn drain(&mut self) -> Result<bool, GuestError> {
            std::thread::sleep(self.drains.unwrap_or_default());
            Ok(self.drains.is_some())
        }
        fn is_running(&mut self) -> Result<bool, GuestError> {
            Ok(self.runs)
        }
        fn prepare_stop(&mut self) -> Result<(), GuestError> {
            note(&self.log, "prepare");
            Ok(())
        }
        fn stop(&mut self) -> Result<Found, GuestError> {
            note(&self.log, "stop");
            Ok(self.found)
        }
        fn check_unchanged(&mut self) -> Result<(), GuestError> {
            match self.has_changed {
                true => Err(GuestError::Unfit("it was changed".into())),
                false => Ok(()),
            }
        }
        fn state_estimate(&self) -> Duration {
            Duration::ZERO
        }
        fn save_state(&mut self) -> Result<Box<dyn Read + Send>, GuestError> {
            unreachable!("nobody asks")
        }
        fn state_saved(&mut self) -> Result<(), GuestError> {
            Ok(())
        }
        fn give_up(&mut self) -> Result<(), GuestError> {
            note(&self.log, "give up");
            Ok(())
        }
        fn resume(&mut self, _run: bool) -> Result<(), GuestError> {
            note(&self.log, "resume");
            Ok(())
        }
        fn tidy(&mut self) {
            note(&self.log, "tidy");
        }
        fn resume_hint(&self) -> String {
            String::new()
        }
        fn last_will(&mut self) -> Result<LastWill, GuestError> {
            Ok(LastWill { text: "the will".into(), files: Vec::new() })
        }
    }

    /// A guard that writes down what it is told, and may be deaf.
    struct Notes {
        log: Log,
        is_deaf: bool,
    }

    impl Guard for Notes {
        fn begin(&mut self, will: LastWill) -> Result<(), GuestError> {
            assert_eq!(will.text, "the will");
            note(&self.log, "guard: begin");
            Ok(())
        }
        fn instruct(&mut self, duty: Duty) -> Result<(), GuestError> {
            note(&self.log, if duty == Duty::RunAgain { "guard: run again" } else { "guard: leave it" });
            if self.is_deaf { Err(GuestError::vmm("it is deaf")) } else { Ok(()) }
        }
        fn end(&mut self) -> Result<(), GuestError> {
            note(&self.log, "guard: end");
            if self.is_deaf { Err(GuestError::vmm("it is deaf")) } else { Ok(()) }
        }
    }

    fn guest(runs: bool, found: Found, has_balloon: bool) -> (Guest, Notes) {
        let log = Log::default();
        (
            Guest { log: Arc::clone(&log), runs, found, has_balloon, has_changed: false, drains: None },
            Notes { log, is_deaf: false },
        )
    }

    #[test]
    fn the_guard_knows_before_the_guest_is_stopped_and_until_it_runs_again() {
        let (mut guest, mut guard) = guest(true, Found::Standing, false);
        let log = Arc::clone(&guest.log);
        let mut guest = Guarded::new(&mut guest, Some(&mut guard));
        assert!(guest.unplug(Instant::now()).unwrap(), "there is nothing");
        assert!(taken(&log).is_empty());
        assert_eq!(guest.stop().unwrap(), Found::Standing);
        // Somebody else has paused it in between: the last word is right.
        assert_eq!(taken(&log), ["guard: begin", "prepare", "guard: run again", "stop", "guard: leave it"]);
        guest.resume(true).unwrap();
        assert_eq!(taken(&log), ["resume", "tidy", "guard: end"]);
        guest.plug_back();
        assert!(taken(&log).is_empty(), "it lacks nothing");
        guest.stop().unwrap();
        assert_eq!(taken(&log).first(), Some(&"guard: begin"), "a second time it is told again");
    }

    #[test]
    fn a_guest_that_stands_is_not_to_be_let_run() {
        let (mut guest, mut guard) = guest(false, Found::Running, false);
        let log = Arc::clone(&guest.log);
        Guarded::new(&mut guest, Some(&mut guard)).stop().unwrap();
        assert_eq!(taken(&log), ["guard: begin", "prepare", "guard: leave it", "stop", "guard: run again"]);
    }

    #[test]
    fn the_guard_stays_until_the_guest_has_its_device_back() {
        let (mut guest, mut guard) = guest(true, Found::Running, true);
        let log = Arc::clone(&guest.log);
        let mut guest = Guarded::new(&mut guest, Some(&mut guard));
        guest.plug_back();
        assert!(taken(&log).is_empty(), "nothing was unplugged");
        assert!(!guest.unplug(Instant::now()).unwrap());
        assert!(!guest.unplug(Instant::now()).unwrap());
        assert_eq!(taken(&log), ["guard: begin", "unplug", "unplug"]);
        guest.stop().unwrap();
        assert_eq!(taken(&log), ["prepare", "guard: run again", "stop", "guard: run again"]);
        guest.resume(true).unwrap();
        assert_eq!(taken(&log), ["resume", "tidy", "guard: leave it"]);
        guest.plug_back();
        assert_eq!(taken(&log), ["plug back", "guard: end"]);
    }

    #[test]
    fn nobody_is_left_who_could_act_when_the_guest_is_given_up() {
        let (mut guest, mut guard) = guest(true, Found::Running, false);
        let log = Arc::clone(&guest.log);
        let mut guest = Guarded::new(&mut guest, Some(&mut guard));
        guest.stop().unwrap();
        taken(&log);
        guest.give_up().unwrap();
        assert_eq!(taken(&log), ["guard: end", "give up"]);
    }

    #[test]
    fn a_guard_that_does_not_listen_keeps_the_guest_here() {
        let (mut guest, mut guard) = guest(true, Found::Running, true);
        guard.is_deaf = true;
        let log = Arc::clone(&guest.log);
        let mut guest = Guarded::new(&mut guest, Some(&mut guard));
        assert!(guest.stop().is_err());
        assert_eq!(taken(&log), ["guard: begin", "prepare", "guard: run again"], "not stopped without it");
        assert!(guest.give_up().is_err());
        assert_eq!(taken(&log), ["guard: end"], "not given up without it");
    }

    #[test]
    fn without_a_guard_the_guest_is_stopped_all_the_same() {
        let (mut guest, _) = guest(true, Found::Running, false);
        let log = Arc::clone(&guest.log);
        let mut guest = Guarded::new(&mut guest, None);
        guest.stop().unwrap();
        guest.resume(true).unwrap();
        assert_eq!(taken(&log), ["prepare", "stop", "resume", "tidy"]);
    }

    #[test]
    fn a_guest_is_prepared_once_for_each_stop() {
        let (mut guest, _) = guest(true, Found::Running, false);
        let log = Arc::clone(&guest.log);
        let mut guest = Guarded::new(&mut guest, None);
        for _ in 0..2 {
            guest.prepare_stop().unwrap();
            guest.stop().unwrap();
            guest.resume(true).unwrap();
        }
        assert_eq!(taken(&log), ["prepare", "stop", "resume", "tidy"].repeat(2));
    }

    #[test]
    fn whoever_forgets_to_look_at_a_guest_that_was_stopped_at_once_does_not_give_it_up() {
        let (mut guest, _) = guest(true, Found::Running, false);
        let log = Arc::clone(&guest.log);
        guest.has_changed = true;
        let mut guest = Guarded::new(&mut guest, None);
        guest.stop_at_once().unwrap();
        assert!(guest.check_unchanged().is_err());
        assert!(guest.give_up().is_err(), "also when it was looked at in vain");
        assert_eq!(taken(&log), ["prepare", "stop"]);
        assert!(guest.stop().is_err(), "otherwise it is looked at right away");
    }

    #[test]
    fn a_guest_stands_from_its_stop_until_it_is_resumed() {
        let (mut guest, _) = guest(true, Found::Running, false);
        let mut guest = Guarded::new(&mut guest, None);
        guest.prepare_stop().unwrap();
        assert_eq!(guest.stood_ms(), 0.0, "it has not been stopped");
        guest.stop().unwrap();
        let stands = guest.stood_ms();
        std::thread::sleep(Duration::from_millis(2));
        assert!(guest.stood_ms() > stands, "it still stands");
        guest.resume(true).unwrap();
        let stood = guest.stood_ms();
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(guest.stood_ms(), stood, "it runs again");
    }

    #[test]
    fn waits_for_disks_are_counted_where_there_are_any() {
        let (mut guest, _) = guest(true, Found::Running, false);
        let mut report = Report::default();
        let begin = Instant::now();
        Guarded::new(&mut guest, None).drain(&mut report).unwrap();
        assert_eq!(report.drains, crate::report::Drains::default());
        for (wait_ms, least_ms) in [(10, 10.0), (1, 10.0)] {
            guest.drains = Some(Duration::from_millis(wait_ms));
            Guarded::new(&mut guest, None).drain(&mut report).unwrap();
            assert!(report.drains.longest_ms >= least_ms, "{:?}", report.drains);
        }
        assert_eq!(report.drains.count, 2);
        assert!(report.drains.longest_ms <= begin.elapsed().as_secs_f64() * 1e3, "{:?}", report.drains);
    }
}
