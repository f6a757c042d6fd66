//! The same packets through the same encoders in this process: by the rings that moves use, and by the old model.
use std::{
    thread,
    time::{Duration, Instant},
};

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use transship_codec::Setting;
use transship_ring::{Submitter, TrySubmitError, mpmc, pool, spsc};

use super::{encoding::Encoding, old_model::OldModel};
use crate::results::Spread;

/// As the packets of a move.
pub(super) const PACKET_BYTES: usize = 512 << 10;
/// Packets that are handed to encoders that sleep, and the time between two of them.
const SLEEPERS: usize = 32;
const PAUSE: Duration = Duration::from_millis(10);
/// Results, and buffers, that wait.
const RESULT_PLACES: usize = 64;

/// How all packets went through once.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct Pass {
    pub(crate) ms: f64,
    /// The median time of an attempt that found a free place at once, while all had to be encoded as fast as possible.
    pub(crate) hand_over_ns: f64,
    /// The same when all encoders slept, so that one had to be woken.
    pub(crate) wake_ns: f64,
    /// Packets that did so.
    pub(crate) at_once: u64,
    /// Of the submitting thread, with its waiting, for each packet.
    pub(crate) submitter_cpu_us: f64,
    pub(crate) encoded_bytes: u64,
}

/// By the rings.
pub(super) fn by_rings(setting: Setting, packets: &[&[u8]], count: usize, encoders: usize) -> Pass {
    let (submitter, workers, results) = pool::<usize, Vec<u8>>(encoders, spsc::CAPACITY, RESULT_PLACES);
    let spare = mpmc::Ring::<Vec<u8>>::new(RESULT_PLACES);
    thread::scope(|scope| {
        for mut worker in workers {
            let (spare, mut encoding) = (&spare, Encoding::new(setting, packets));
            scope.spawn(move || {
                while let Some(packet) = worker.next_job() {
                    let mut made = spare.pop().unwrap_or_default();
                    encoding.encode(packet, &mut made);
                    if worker.deliver(made).is_err() {
                        return;
                    }
                }
            });
        }
        let taker = scope.spawn(|| {
            let mut bytes = 0;
            while let Some(made) = results.next_result() {
                bytes += made.len() as u64;
                let _ = spare.push(made); // full: one buffer less to keep
            }
            bytes
        });
        timed(count, submitter, |submitter| {
            drop(submitter);
            taker.join().expect("it only counts")
        })
    })
}

/// By the old model.
pub(super) fn by_old_model(setting: Setting, packets: &[&[u8]], count: usize, encoders: usize) -> Pass {
    thread::scope(|scope| {
        let encodings = (0..encoders).map(|_| Encoding::new(setting, packets)).collect();
        timed(count, OldModel::start(scope, encodings), OldModel::finish)
    })
}

/// What hands packets over.
trait Model {
    /// Whether there was a free place.
    fn try_submit(&mut self, packet: usize) -> bool;
    /// Waits for one.
    fn submit(&mut self, packet: usize);
}

impl Model for Submitter<usize> {
    fn try_submit(&mut self, packet: usize) -> bool {
        match Submitter::try_submit(self, packet) {
            Ok(_) => true,
            Err(TrySubmitError::Busy(_)) => false,
            Err(TrySubmitError::Gone(_)) => panic!("an encoder ended early"),
        }
    }

    fn submit(&mut self, packet: usize) {
        Submitter::submit(self, packet).expect("no encoder ends early");
    }
}

impl Model for OldModel<'_> {
    fn try_submit(&mut self, packet: usize) -> bool {
        OldModel::try_submit(self, packet)
    }

    fn submit(&mut self, packet: usize) {
        OldModel::submit(self, packet);
    }
}

/// `finish` waits for everything, and says how many bytes came out.
fn timed<M: Model>(count: usize, mut model: M, finish: impl FnOnce(M) -> u64) -> Pass {
    let wake_ns = to_sleepers(&mut model);
    let (begin, cpu_before) = (Instant::now(), thread_cpu());
    let mut costs = Vec::with_capacity(count);
    for packet in 0..count {
        let attempt = Instant::now();
        if model.try_submit(packet) {
            costs.push(attempt.elapsed().as_nanos() as f64);
        } else {
            model.submit(packet);
        }
    }
    let cpu = thread_cpu() - cpu_before;
    let encoded_bytes = finish(model);
    Pass {
        ms: begin.elapsed().as_secs_f64() * 1e3,
        at_once: costs.len() as u64,
        hand_over_ns: Spread::of(costs).median,
        wake_ns,
        submitter_cpu_us: cpu.as_secs_f64() * 1e6 / count as f64,
        encoded_bytes,
    }
}

/// Some packets, each when there has been time enough to encode the one before and to fall asleep.
fn to_sleepers(model: &mut impl Model) -> f64 {
    let cost = |packet| {
        thread::sleep(PAUSE);
        let attempt = Instant::now();
        let taken = model.try_submit(packet);
        let cost = attempt.elapsed();
        if !taken {
            model.submit(packet);
        }
        cost.as_nanos() as f64
    };
    Spread::of((0..SLEEPERS).map(cost)).median
}

fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::corpus::Corpus;
    use transship_codec::Method;

    #[test]
    fn both_models_encode_every_packet_once() {
        let corpus = Corpus::new(None, 1 << 20).unwrap();
        let packets: Vec<_> = corpus.packets(64 << 10).collect();
        let setting = Setting::new(Method::Zstd, None).unwrap();
        let mut one = Encoding::new(setting, &packets);
        let (mut wanted, mut out) = (0, Vec::new());
        for packet in (0..SLEEPERS).chain(0..40) {
            one.encode(packet, &mut out);
            wanted += out.len() as u64;
        }
        for encoders in [1, 3] {
            let (rings, old) =
                (by_rings(setting, &packets, 40, encoders), by_old_model(setting, &packets, 40, encoders));
            assert_eq!((rings.encoded_bytes, old.encoded_bytes), (wanted, wanted), "{encoders} encoders");
            // The first always finds one of a ring's places. The old model has one, which may still be taken by the
            // packet before.
            assert!(rings.at_once > 0 && rings.hand_over_ns > 0.0);
            assert!(rings.wake_ns > 0.0 && old.wake_ns > 0.0);
        }
    }
}
