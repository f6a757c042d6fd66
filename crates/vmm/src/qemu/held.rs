//! Holds a guest's processors for a moment, from outside: each thread that runs one is stopped by ptrace, wherever it
//! is, and goes on there. QEMU's other threads run on. If whoever holds them ends, the kernel lets them go.
//!
//! A process that has given up the right to trace QEMU has somebody else do so.
use std::{
    fs, io,
    os::fd::OwnedFd,
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, pidfd_open},
};
use transship_guest::{AskToHold, GuestError, Hold};

use super::{
    inject::{self, Tracee},
    vcpus::{self, Processors},
};

/// How long QEMU's main loop may take to see a command: longer through libvirt.
const AWAITED_WAIT: Duration = Duration::from_millis(250);
const LOOK_AGAIN: Duration = Duration::from_micros(200);
/// `futex`, by which a thread waits for others.
const FUTEX: &str = "202";

/// The processors of one QEMU's guest. Only the thread that holds them can let them go.
pub struct ProcessorHold {
    processors: Processors,
    /// Its number is that of another process once it has ended.
    process: OwnedFd,
    held: Vec<Tracee>,
}

impl ProcessorHold {
    /// To hold them in the place of a source that has given up the right to. `processors`: what its
    /// [`SourceGuest::processors`](transship_guest::SourceGuest::processors) has said.
    ///
    /// # Errors
    /// That was no such text; there is no such process.
    pub fn of_text(processors: &str) -> Result<Self, GuestError> {
        let processors = serde_json::from_str(processors)
            .map_err(|e| GuestError::Bug(format!("can't read whose processors they are: {e}")))?;
        Self::of(processors)
    }

    pub(super) fn of(processors: Processors) -> Result<Self, GuestError> {
        let pid = processors.pid();
        let process = Pid::from_raw(pid).ok_or(rustix::io::Errno::SRCH);
        let process = process.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()));
        Ok(Self {
            processors,
            process: process.map_err(GuestError::system(format!("watch process {pid}")))?,
            held: Vec::new(),
        })
    }

    /// They stand still when this returns. A thread that came since QEMU was asked for them is not known.
    ///
    /// # Errors
    /// One can't be held; then none is.
    pub fn begin(&mut self) -> Result<(), GuestError> {
        let pid = self.processors.pid();
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut [PollFd::new(&self.process, PollFlags::IN)], Some(&at_once)) != Ok(0) {
            return Err(GuestError::vmm(format!("process {pid} has ended")));
        }
        for thread in vcpus::numbers_here(&self.processors) {
            match inject::hold(pid, thread as i32) {
                Ok(tracee) => self.held.push(tracee),
                Err(why) => {
                    self.end();
                    return Err(why);
                }
            }
        }
        Ok(())
    }

    /// They go on.
    pub fn end(&mut self) {
        self.held.drain(..).for_each(Tracee::let_go);
    }

    /// They go on as soon as QEMU's main thread waits for somebody: for them, if it is to stop them. To be called just
    /// before it is told to, and returns when they have been let go.
    pub fn end_when_awaited(&mut self) {
        let deadline = Instant::now() + AWAITED_WAIT;
        while !self.main_thread_waits() && Instant::now() < deadline {
            thread::sleep(LOOK_AGAIN);
        }
        self.end();
    }

    fn main_thread_waits(&self) -> bool {
        let pid = self.processors.pid();
        let call = fs::read_to_string(format!("/proc/{pid}/task/{pid}/syscall")).unwrap_or_default();
        call.split_ascii_whitespace().next() == Some(FUTEX)
    }

    /// For a process that has the rights: a thread of its own holds them.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub(super) fn in_a_thread(mut self) -> io::Result<AskToHold> {
        let (asks, asked) = channel();
        let (results, done): (Sender<Result<(), GuestError>>, Receiver<_>) = channel();
        thread::Builder::new().name("hold".into()).spawn(move || {
            for ask in asked {
                // Nobody waits for what is done afterwards.
                let begun = if ask == Hold::Begin { self.begin() } else { Ok(()) };
                let _ = results.send(begun);
                match ask {
                    Hold::Begin => {}
                    Hold::End => self.end(),
                    Hold::EndWhenAwaited => self.end_when_awaited(),
                }
            }
        })?;
        let ended = || io::Error::other("the thread that holds processors has ended");
        Ok(Box::new(move |ask| {
            asks.send(ask).map_err(|_| ended())?;
            done.recv().map_err(|_| ended())?.map_err(io::Error::other)
        }))
    }
}

impl Drop for ProcessorHold {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::process::{Child, Command};

    use super::*;

    /// A program that never waits, with one thread.
    struct Busy(Child);

    impl Busy {
        fn start() -> Self {
            Self(Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap())
        }

        fn hold(&self) -> ProcessorHold {
            let pid = self.0.id();
            ProcessorHold::of_text(&format!(r#"{{"pid":{pid},"has_kvm":false,"threads":[{pid}]}}"#)).unwrap()
        }

        fn state(&self) -> char {
            let stat = fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap();
            stat.rsplit_once(") ").unwrap().1.chars().next().unwrap()
        }

        fn assert_goes_on(&self) {
            let begin = Instant::now();
            while self.state() != 'R' {
                assert!(begin.elapsed() < Duration::from_secs(30), "it is held: {}", self.state());
                thread::sleep(LOOK_AGAIN);
            }
        }
    }

    impl Drop for Busy {
        fn drop(&mut self) {
            let _ = (self.0.kill(), self.0.wait());
        }
    }

    #[test]
    fn processors_stand_still_until_they_are_let_go() {
        let busy = Busy::start();
        let mut hold = busy.hold();
        for _ in 0..3 {
            hold.begin().unwrap();
            assert_eq!(busy.state(), 't');
            hold.end();
            busy.assert_goes_on();
        }
        // It waits for nobody.
        hold.begin().unwrap();
        let begin = Instant::now();
        hold.end_when_awaited();
        assert!(begin.elapsed() >= AWAITED_WAIT);
        busy.assert_goes_on();
    }

    #[test]
    fn processors_go_on_when_whoever_holds_them_ends() {
        let busy = Busy::start();
        let mut ask = busy.hold().in_a_thread().unwrap();
        ask(Hold::Begin).unwrap();
        assert_eq!(busy.state(), 't');
        drop(ask);
        busy.assert_goes_on();
    }

    #[test]
    fn nobody_is_taken_for_a_process_that_has_ended() {
        let mut busy = Busy::start();
        let mut hold = busy.hold();
        busy.0.kill().unwrap();
        busy.0.wait().unwrap();
        assert!(hold.begin().unwrap_err().to_string().contains("has ended"));
    }
}
