//! Takes samples: the same bytes, encoded in all ways, by an encoder's thread.
use std::time::{Duration, Instant};

use transship_codec::{Encoder, Outcome};
use transship_memory::PAGE_BYTES;

use transship_auto::Sample;

use crate::cpu;

/// The time that an encoder took is believed up to so many times its CPU time: beyond that it was held up by what has
/// nothing to do with it.
const HELD_UP: f64 = 3.0;
/// A new encoder warms up with this share of the bytes.
const WARM_UP: usize = 8;

/// Of one thread.
#[derive(Debug, Default)]
pub(crate) struct Sampler {
    /// For what is encoded to learn from, and not sent.
    scratch: Vec<u8>,
    /// Its encoders have made something.
    is_warm: bool,
}

impl Sampler {
    /// Encodes `bytes`, of whole pages but maybe the last, in all ways, and keeps only what there is to learn from it.
    /// `raw`: the encoding that leaves them as they are.
    pub(crate) fn take(&mut self, encoders: &mut [(u8, Box<dyn Encoder>)], raw: Option<usize>, bytes: &[u8]) -> Sample {
        let Self { scratch, is_warm } = self;
        if !std::mem::replace(is_warm, *is_warm || !bytes.is_empty()) {
            warm_up(encoders, bytes, scratch);
        }
        let mut outcomes = Vec::with_capacity(encoders.len());
        for (index, (_, encoder)) in encoders.iter_mut().enumerate() {
            let (begin, mut laps) = (Instant::now(), cpu::Laps::begin());
            let is_raw = Some(index) == raw || bytes.is_empty() || encoder.encode(bytes, scratch) == Outcome::Raw;
            let left = if is_raw { bytes.len() } else { scratch.len() };
            let needs = match Some(index) == raw {
                true => Duration::ZERO,
                false => needs(begin.elapsed().as_secs_f64(), laps.next()),
            };
            outcomes.push((left as u64, needs));
        }
        Sample { pages: bytes.len().div_ceil(PAGE_BYTES) as u64, outcomes }
    }
}

/// What an encoder needs that took so much wall time and CPU time, in seconds. A thread that shares its core with
/// others now would not have the core for itself later either, but it would have more of it than now.
fn needs(wall: f64, cpu: f64) -> Duration {
    Duration::from_secs_f64((wall.clamp(0.0, HELD_UP * cpu.max(0.0)) * cpu.max(0.0)).sqrt())
}

/// The first thing that a new encoder makes is slow: its tables and the buffer for what it makes are not in memory yet,
/// nor its code in caches. So before the first sample of a thread each of its encoders gets something that nobody
/// measures.
fn warm_up(encoders: &mut [(u8, Box<dyn Encoder>)], bytes: &[u8], scratch: &mut Vec<u8>) {
    scratch.resize(bytes.len(), 0);
    let some = &bytes[..bytes.len() / WARM_UP / PAGE_BYTES * PAGE_BYTES];
    if !some.is_empty() {
        for (_, encoder) in encoders {
            let _ = encoder.encode(some, scratch);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_encoder_that_was_held_up_is_not_taken_for_a_slow_one() {
        let ms = |wall: f64, cpu: f64| needs(wall / 1e3, cpu / 1e3).as_secs_f64() * 1e3;
        assert!((ms(1.0, 1.0) - 1.0).abs() < 1e-6);
        assert!((ms(2.0, 1.0) - 2f64.sqrt()).abs() < 1e-6, "it shares the core");
        assert!((ms(100.0, 1.0) - 3f64.sqrt()).abs() < 1e-6, "it did not run at all for most of the time");
        assert_eq!(ms(1.0, 0.0), 0.0, "clocks are not exact");
    }
}
