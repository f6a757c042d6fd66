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

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use transship_guest::{AskToHold, GuestError, Hold};

use super::{
    inject::{self, Tracee},
    vcpus::Processors,
};
use crate::freeze::watch;

/// How long QEMU's main loop may take to see a command: longer through libvirt.
const AWAITED_WAIT: Duration = Duration::from_millis(250);
const LOOK_AGAIN: Duration = Duration::from_micros(200);
/// `futex`, by which a thread waits for others.
const FUTEX: &str = "202";

/// Holds processors in the place of a source that has given up the right to. `processors`: what its
/// [`SourceGuest::processors`](transship_guest::SourceGuest::processors) has said.
///
/// # Errors
/// That was no such text; there is no such process; no thread can be had.
pub fn processors_to_hold(processors: &str) -> Result<AskToHold, GuestError> {
    holder(
        serde_json::from_str(processors)
            .map_err(|e| GuestError::Bug(format!("can't read whose processors they are: {e}")))?,
    )
}

/// A thread that holds them when it is asked to. When one can't be held, none is, and the thread ends.
pub(super) fn holder(processors: Processors) -> Result<AskToHold, GuestError> {
    let mut hold = ProcessorHold::of(processors)?;
    let (asks, asked) = channel();
    let (results, done): (Sender<Result<(), GuestError>>, Receiver<_>) = channel();
    let serve = move || {
        for ask in asked {
            let begun = if ask == Hold::Begin { hold.begin() } else { Ok(()) };
            let failed = begun.is_err();
            // What follows is awaited by nobody.
            let _ = results.send(begun);
            match ask {
                // One that does not stop now may do so later. The kernel lets it go when this thread ends.
                Hold::Begin if failed => return,
                Hold::Begin => {}
                Hold::End => hold.end(),
                Hold::EndWhenAwaited => hold.end_when_awaited(),
            }
        }
    };
    let thread = thread::Builder::new().name("hold".into()).spawn(serve);
    thread.map_err(GuestError::system("start a thread that holds processors"))?;
    let ended = || io::Error::other("one could not be held before");
    Ok(Box::new(move |ask| {
        asks.send(ask).map_err(|_| ended())?;
        done.recv().map_err(|_| ended())?.map_err(io::Error::other)
    }))
}

/// The processors of one QEMU's guest. They are let go by the thread that holds them, at its end at the latest.
struct ProcessorHold {
    processors: Processors,
    /// Its number is that of another process once it has ended.
    process: OwnedFd,
    held: Vec<Tracee>,
}

impl ProcessorHold {
    fn of(processors: Processors) -> Result<Self, GuestError> {
        Ok(Self { process: watch(processors.pid())?, processors, held: Vec::new() })
    }

    /// They stand still when this returns. A thread that came since QEMU was asked for them is not known.
    fn begin(&mut self) -> Result<(), GuestError> {
        let pid = self.processors.pid();
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut [PollFd::new(&self.process, PollFlags::IN)], Some(&at_once)) != Ok(0) {
            return Err(GuestError::vmm(format!("process {pid} has ended")));
        }
        for thread in self.processors.numbers_here() {
            self.held.push(inject::hold(pid, thread as i32)?);
        }
        Ok(())
    }

    fn end(&mut self) {
        self.held.drain(..).for_each(Tracee::let_go);
    }

    /// They go on as soon as QEMU's main thread waits for somebody: for them, if it is to stop them. To be called just
    /// before it is told to.
    fn end_when_awaited(&mut self) {
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

        fn holder(&self) -> AskToHold {
            let pid = self.0.id();
            processors_to_hold(&format!(r#"{{"pid":{pid},"has_kvm":false,"threads":[{pid}]}}"#)).unwrap()
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
        let mut ask = busy.holder();
        for end in [Hold::End, Hold::EndWhenAwaited, Hold::End] {
            ask(Hold::Begin).unwrap();
            assert_eq!(busy.state(), 't');
            // It waits for nobody, so the second one takes its time.
            ask(end).unwrap();
            busy.assert_goes_on();
        }
    }

    #[test]
    fn processors_go_on_when_whatever_holds_them_ends() {
        let busy = Busy::start();
        let mut ask = busy.holder();
        ask(Hold::Begin).unwrap();
        assert_eq!(busy.state(), 't');
        drop(ask);
        busy.assert_goes_on();
    }

    /// Another one traces it already.
    #[test]
    fn what_can_not_be_held_is_left_as_it_is() {
        let busy = Busy::start();
        let (mut first, mut second) = (busy.holder(), busy.holder());
        first(Hold::Begin).unwrap();
        assert!(second(Hold::Begin).unwrap_err().to_string().contains("can't trace it"));
        assert_eq!(busy.state(), 't');
        first(Hold::End).unwrap();
        busy.assert_goes_on();
    }

    #[test]
    fn nobody_is_taken_for_a_process_that_has_ended() {
        let mut busy = Busy::start();
        let mut ask = busy.holder();
        busy.0.kill().unwrap();
        busy.0.wait().unwrap();
        assert!(ask(Hold::Begin).unwrap_err().to_string().contains("has ended"));
        assert!(ask(Hold::Begin).unwrap_err().to_string().contains("could not be held before"));
    }
}
