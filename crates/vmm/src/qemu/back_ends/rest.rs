//! Stops a guest when no request of its vhost-user disks and file systems is under way.
//!
//! ```text
//!   hold the processors ──► as many requests are done as were made? ── yes ─► `stop` ─► let the processors go: they stop
//!           ▲                                                       └─ none gets done: perhaps nobody was told of it yet
//!           └──────────────── let them go for a moment ◄────────────────────┘
//! ```
//!
//! A guest that somebody else has stopped may have requests under way, too. They are waited for; those that never get
//! done are a reason to refuse it.
//!
//! A split virtqueue counts both: the guest writes to its available ring how many requests it has made, the back end to
//! the used ring how many are done, both modulo 2^16 (virtio 1.2, 2.7.6 and 2.7.8).
use std::{
    os::unix::fs::FileExt,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use transship_guest::{AskToHold, GuestError, Hold};

use super::BackEnds;
use crate::qemu::{
    held,
    machine::Device,
    qmp::{Keeper, Qmp, QmpError, WithStop},
};

/// The first QEMU that says where queues are.
const TELLS: (u64, u64) = (7, 2);
/// How often queues are looked at.
const LOOK_AGAIN: Duration = Duration::from_micros(200);
/// No request was done for so long: longer than a disk takes for one, most of the time.
const STUCK: Duration = Duration::from_millis(100);
/// How long QEMU's main loop may take to answer. One that waits for a processor does not.
const ANSWER: Duration = Duration::from_millis(20);
/// How long the processors run before they are held again: one tells of its request.
const RUN: Duration = Duration::from_millis(2);
/// After this the guest is not stopped.
const REST_WAIT: Duration = Duration::from_secs(10);

/// Of a device in QEMU's tree of objects; where its two counts are in QEMU's memory.
struct Queue {
    device: String,
    number: u16,
    made: u64,
    done: u64,
}

impl Queue {
    /// With its two rings at these addresses of the guest.
    fn at(qmp: &mut Qmp, device: &str, number: u16, (available, used): (u64, u64)) -> Result<Self, GuestError> {
        // Behind two bytes of flags.
        let (made, done) = (host_address(qmp, available)? + 2, host_address(qmp, used)? + 2);
        Ok(Self { device: device.to_owned(), number, made, done })
    }

    /// Of a stopped device: until it is done with what it had taken.
    fn wait_until_done(&self, qmp: &mut Qmp, deadline: Instant) -> Result<(), GuestError> {
        if count(qmp, self.made)? == count(qmp, self.done)? {
            return Ok(());
        }
        let taken = status(qmp, "x-query-virtio-queue-status", &self.device, self.number)?;
        let taken = taken.and_then(|status| status["last-avail-idx"].as_u64());
        while taken.is_some_and(|taken| u64::from(count(qmp, self.done).unwrap_or_default()) != taken) {
            if Instant::now() >= deadline {
                let what =
                    format!("the back end of {} does not get done with a request; is its disk stuck?", self.device);
                return Err(GuestError::Unfit(what));
            }
            thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }
}

/// Processors that are held until this is dropped.
struct Held<'a>(&'a mut AskToHold);

impl<'a> Held<'a> {
    fn begin(hold: &'a mut AskToHold) -> Result<Self, GuestError> {
        hold(Hold::Begin).map_err(hold_failed)?;
        Ok(Self(hold))
    }

    fn end_when_awaited(&mut self) -> Result<(), GuestError> {
        (self.0)(Hold::EndWhenAwaited).map_err(hold_failed)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // Whoever does not answer has ended, and holds nobody.
        let _ = (self.0)(Hold::End);
    }
}

impl BackEnds {
    /// Stops the running guest within `limit`. `hold`: who holds its processors meanwhile, if that is somebody else.
    /// `with`: what goes with the stop where nothing comes between.
    ///
    /// # Errors
    /// Requests do not get done within 10 s, or its processors can't be held: it runs on. QEMU does not say that it has
    /// stopped it, or a request that was made in the last moment does not get done: it may be stopped.
    pub(in crate::qemu) fn stop(
        &self,
        qmp: &mut Qmp,
        hold: &mut Option<AskToHold>,
        with: &WithStop,
        limit: Duration,
    ) -> Result<(), GuestError> {
        let Some(processors) = self.processors() else { return Ok(qmp.stop_with(with, limit)?) };
        let hold = match hold {
            Some(hold) => hold,
            None => hold.insert(held::holder(processors.clone())?),
        };
        let queues = self.queues(qmp)?;
        let deadline = Instant::now() + REST_WAIT;
        while !stop_if_at_rest(qmp, hold, (&queues, deadline), limit)? {
            if Instant::now() >= deadline {
                return Err(GuestError::Unfit(format!(
                    "the back end of {} did not get done with its requests within {} s, though the guest made no more; \
                     is its disk stuck? The guest runs on",
                    self.asked().join(", "),
                    REST_WAIT.as_secs()
                )));
            }
            thread::sleep(RUN);
        }
        // The last instructions of a processor that is stopped may still make one.
        queues.iter().try_for_each(|queue| queue.wait_until_done(qmp, deadline.max(Instant::now() + STUCK)))
    }

    /// Waits until no request of a guest is under way that somebody else has stopped, perhaps a moment ago.
    ///
    /// # Errors
    /// Some don't get done within 10 s. A back end may have dropped the device when it could not tell the guest of one.
    pub(in crate::qemu) fn wait_for_rest(&self, qmp: &mut Qmp) -> Result<(), GuestError> {
        let queues = self.queues_of_stopped(qmp)?;
        let deadline = Instant::now() + REST_WAIT;
        while let Some(queue) = busy_one(qmp, &queues)? {
            if Instant::now() >= deadline {
                return Err(GuestError::Unfit(format!(
                    "the guest was stopped while requests to its device {} were under way, and the back end of that does \
                     not get done with them; let the guest run (cont), and leave it to transship to stop it. If it \
                     does not answer any more, its back end has dropped it when the guest was stopped: start \
                     both anew",
                    queue.device
                )));
            }
            thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }

    /// Those that a driver has set up in a guest that stands still.
    fn queues_of_stopped(&self, qmp: &mut Qmp) -> Result<Vec<Queue>, GuestError> {
        let mut queues = Vec::new();
        for device in self.asked() {
            for number in 0.. {
                let Some(status) = status(qmp, "x-query-virtio-queue-status", device, number)? else { break };
                let (made, done) = (status["vring-avail"].as_u64(), status["vring-used"].as_u64());
                if let (Some(made @ 1..), Some(done @ 1..)) = (made, done) {
                    queues.push(Queue::at(qmp, device, number, (made, done))?);
                }
            }
        }
        Ok(queues)
    }

    /// Those that a driver has set up now.
    fn queues(&self, qmp: &mut Qmp) -> Result<Vec<Queue>, GuestError> {
        let mut queues = Vec::new();
        for device in self.asked() {
            for number in 0.. {
                // The question that QEMU has for all virtio devices would stop the queue of a running one.
                let Some(status) = status(qmp, "x-query-virtio-vhost-queue-status", device, number)? else { break };
                // Where it has them itself, 11.1 does not say any more.
                let address = |name: &str| status[name].as_u64();
                let (Some(made), Some(done)) = (address("avail-phys"), address("used-phys")) else {
                    return Err(GuestError::vmm(format!("QEMU does not say where queues of {device} are: {status}")));
                };
                if made != 0 && done != 0 {
                    queues.push(Queue::at(qmp, device, number, (made, done))?);
                }
            }
        }
        Ok(queues)
    }
}

/// None: the device has no such queue, or none that is in use.
fn status(qmp: &mut Qmp, question: &str, device: &str, number: u16) -> Result<Option<Value>, GuestError> {
    match qmp.execute(question, json!({ "path": format!("{device}/virtio-backend"), "queue": number })) {
        Err(QmpError::Refused { .. }) => Ok(None),
        status => Ok(status.map(Some)?),
    }
}

/// Whether it can be known when the device is at rest: its queues are split ones, at addresses that are the guest's.
pub(super) fn can_be_known(qmp: &mut Qmp, device: &Device) -> bool {
    let mut is_off = |name: &str| {
        qmp.execute("qom-get", json!({ "path": device.path, "property": name })).is_ok_and(|is| is == json!(false))
    };
    is_off("packed") && is_off("iommu_platform") && qmp.version() >= TELLS
}

/// Has the guest stopped if no request is under way, or when none is any more as long as they get done. The processors
/// go on when QEMU waits for them, or else at once.
fn stop_if_at_rest(
    qmp: &mut Qmp,
    hold: &mut AskToHold,
    (queues, deadline): (&[Queue], Instant),
    limit: Duration,
) -> Result<bool, GuestError> {
    let mut held = Held::begin(hold)?;
    if !are_at_rest(qmp, queues, deadline)? || !main_loop_answers(qmp)? {
        return Ok(false);
    }
    held.end_when_awaited()?;
    qmp.stop(limit)?;
    Ok(true)
}

/// Waits until they are, as long as requests get done, and until the deadline.
fn are_at_rest(qmp: &mut Qmp, queues: &[Queue], deadline: Instant) -> Result<bool, GuestError> {
    let (mut before, mut since) = (None, Instant::now());
    loop {
        let counts = queues.iter().map(|queue| Ok((count(qmp, queue.made)?, count(qmp, queue.done)?)));
        let counts: Vec<(u16, u16)> = counts.collect::<Result<_, GuestError>>()?;
        if counts.iter().all(|(made, done)| made == done) {
            return Ok(true);
        }
        if before.as_ref() != Some(&counts) {
            (before, since) = (Some(counts), Instant::now());
        } else if since.elapsed() >= STUCK || Instant::now() >= deadline {
            return Ok(false);
        }
        thread::sleep(LOOK_AGAIN);
    }
}

/// Where QEMU has what the guest has at this address.
fn host_address(qmp: &mut Qmp, guest: u64) -> Result<u64, GuestError> {
    let answer = qmp.execute("human-monitor-command", json!({ "command-line": format!("gpa2hva {guest:#x}") }))?;
    let address = answer.as_str().and_then(|answer| answer.trim().rsplit_once(" is 0x")).map(|(_, address)| address);
    address
        .and_then(|address| u64::from_str_radix(address, 16).ok())
        .ok_or_else(|| GuestError::vmm(format!("QEMU does not say where a queue of a vhost-user device is: {answer}")))
}

/// A queue with a request that is not done.
fn busy_one<'q>(qmp: &mut Qmp, queues: &'q [Queue]) -> Result<Option<&'q Queue>, GuestError> {
    for queue in queues {
        if count(qmp, queue.made)? != count(qmp, queue.done)? {
            return Ok(Some(queue));
        }
    }
    Ok(None)
}

fn count(qmp: &mut Qmp, at: u64) -> Result<u16, GuestError> {
    let mut bytes = [0; 2];
    let memory = qmp.process().memory();
    let read = memory.and_then(|memory| memory.read_exact_at(&mut bytes, at));
    read.map_err(GuestError::system("read a queue of a vhost-user device"))?;
    Ok(u16::from_le_bytes(bytes))
}

/// A processor may have been held with QEMU's lock in its hand. Then the main loop could not stop the guest.
fn main_loop_answers(qmp: &mut Qmp) -> Result<bool, GuestError> {
    // libvirt waits for QEMU as long as that takes.
    if qmp.keeper() == Keeper::Libvirt {
        return Ok(true);
    }
    match qmp.execute_within("query-name", json!({}), ANSWER) {
        Ok(_) => Ok(true),
        Err(QmpError::Timeout { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn hold_failed(why: std::io::Error) -> GuestError {
    GuestError::Unfit(format!("can't hold the guest's processors: {why}"))
}
