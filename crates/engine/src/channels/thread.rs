//! The thread of one channel, for a round.
//!
//! A page is read by one thread only, which looks whether it is zero and writes it to the socket straight from guest memory while it
//! is in that core's cache.
use std::sync::{Arc, atomic::Ordering::Relaxed};

use crossbeam_channel::Receiver;
use transship_ring::mpmc;

use super::{
    Batch, Channel, Encoded, Sent,
    encoding::{Gate, Ready},
};
use crate::{
    Error,
    cpu::{self, Laps},
};

/// Sends batches until there are no more, then ends the round.
pub(super) fn run(channel: &mut impl Channel, round: u32, batches: &Receiver<Batch>) -> Result<Sent, Error> {
    let begin = cpu::thread_seconds();
    let result = send_all(channel, round, batches);
    if result.is_err() {
        channel.shared().failed.store(true, Relaxed);
    }
    result.map(|sent| Sent { cpu_seconds: cpu::thread_seconds() - begin, ..sent })
}

fn send_all(channel: &mut impl Channel, round: u32, batches: &Receiver<Batch>) -> Result<Sent, Error> {
    let shared = Arc::clone(channel.shared());
    let mut sent = Sent::default();
    let mut laps = Laps::begin();
    for batch in batches {
        if shared.failed.load(Relaxed) {
            break; // the main thread ends the session
        }
        match batch {
            Batch::Hole { region, range } => channel.send_hole(round, region, range, &mut sent)?,
            Batch::Pages(windows) => {
                for window in windows {
                    let pages = shared.settle(&window, &mut sent);
                    channel.send_window(&window, pages, None, &mut sent)?;
                }
            }
        }
        shared.progress.cpu.channels.add(laps.next());
    }
    channel.end_round(round, &mut sent)?;
    Ok(sent)
}

/// As `run`, with what comes from the encoders.
pub(super) fn run_encoded(
    channel: &mut impl Channel,
    round: u32,
    gate: &Gate,
    spare: &mpmc::Ring<Vec<u8>>,
) -> Result<Sent, Error> {
    let begin = cpu::thread_seconds();
    let result = send_all_encoded(channel, round, gate, spare);
    result.map(|sent| Sent { cpu_seconds: cpu::thread_seconds() - begin, ..sent })
}

/// After a failure it takes on, and drops what it takes, so that nobody waits for room for ever.
fn send_all_encoded(
    channel: &mut impl Channel,
    round: u32,
    gate: &Gate,
    spare: &mpmc::Ring<Vec<u8>>,
) -> Result<Sent, Error> {
    let shared = Arc::clone(channel.shared());
    let mut sent = Sent::default();
    let mut outcome = Ok(());
    let mut laps = Laps::begin();
    loop {
        let ready = match gate.next() {
            Some(Ready::RoundEnd) | None => break,
            Some(ready) => ready,
        };
        let is_raw = matches!(&ready, Ready::Unseen(window) | Ready::Window { window, .. } if window.raw);
        if outcome.is_ok() && !shared.failed.load(Relaxed) {
            outcome = send_ready(channel, ready, round, gate, spare, &mut sent);
            if outcome.is_err() {
                shared.failed.store(true, Relaxed);
            }
        }
        shared.progress.cpu.channels.add(laps.next());
        if is_raw {
            gate.took_raw();
        }
        gate.took();
    }
    outcome?;
    channel.end_round(round, &mut sent)?;
    Ok(sent)
}

fn send_ready(
    channel: &mut impl Channel,
    ready: Ready,
    round: u32,
    gate: &Gate,
    spare: &mpmc::Ring<Vec<u8>>,
    sent: &mut Sent,
) -> Result<(), Error> {
    let (mut window, encoded) = match ready {
        Ready::Hole { region, range } => return channel.send_hole(round, region, range, sent),
        Ready::RoundEnd => return Ok(()),
        Ready::Unseen(window) => (window, None),
        Ready::Window { window, encoded } => (window, encoded),
    };
    let shared = Arc::clone(channel.shared());
    gate.meters.look(&shared, &mut window);
    let (normal, bytes) = (sent.normal, sent.bytes);
    let pages = shared.settle(&window, sent);
    channel.send_window(&window, pages, encoded.as_ref(), sent)?;
    gate.meters.sent(window.encoding, sent.normal - normal, sent.bytes - bytes);
    if let Some(Encoded { bytes, .. }) = encoded {
        let _ = spare.push(bytes); // full: one buffer less to keep
    }
    Ok(())
}
