//! The thread of one channel, for a round.
//!
//! Only one thread reads a page that is sent as it is. It checks whether the page is zero and writes it to the socket
//! while it is in that core's cache.
use std::sync::Arc;

use crossbeam_channel::Receiver;
use transship_memory::WindowBuffer;
use transship_ring::mpmc;

use super::{
    Batch, Body, Channel, Encoded, Sent, SessionOver, Window,
    gate::{Gate, Ready},
};
use crate::{
    Error,
    cpu::{self, Laps},
};

/// Sends batches until there are no more, then ends the round.
pub(super) fn run(channel: &mut impl Channel, round: u32, batches: &Receiver<Batch>) -> Result<Sent, SessionOver> {
    let begin = cpu::thread_seconds();
    let result = send_all(channel, round, batches).map_err(|error| channel.shared().failure.of_channel(error));
    result.map(|sent| Sent { cpu_seconds: cpu::thread_seconds() - begin, ..sent })
}

fn send_all(channel: &mut impl Channel, round: u32, batches: &Receiver<Batch>) -> Result<Sent, Error> {
    let shared = Arc::clone(channel.shared());
    let (mut sent, mut buffer) = (Sent::default(), WindowBuffer::default());
    let mut laps = Laps::begin();
    for batch in batches {
        if shared.failure.is_over() {
            break; // the main thread ends the session
        }
        match batch {
            Batch::Hole { region, range } => channel.send_hole(round, region, range, &mut sent)?,
            Batch::Pages(windows) => {
                for window in windows {
                    shared.each_claimed(window, |mut window| {
                        let fill =
                            &mut |window: &mut Window, room: &mut WindowBuffer| shared.read(window, room).map(drop);
                        let body = match channel.fill_slot(&mut window, fill)? {
                            Some(slot) => Body::Slot(slot),
                            None => shared.body(&mut window, &mut buffer)?,
                        };
                        let pages = shared.settle(&window, &mut sent);
                        channel.send_window(&window, pages, body, &mut sent)
                    })?;
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
) -> Result<Sent, SessionOver> {
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
) -> Result<Sent, SessionOver> {
    let shared = Arc::clone(channel.shared());
    let (mut sent, mut buffer) = (Sent::default(), WindowBuffer::default());
    let mut outcome = Ok(());
    let mut laps = Laps::begin();
    loop {
        let ready = match gate.next() {
            Some(Ready::RoundEnd) | None => break,
            Some(ready) => ready,
        };
        let counts = ready.counts(); // of all of it, whatever becomes of it
        if outcome.is_ok() && !shared.failure.is_over() {
            let sending = send_ready(channel, ready, round, Hand { gate, spare, buffer: &mut buffer }, &mut sent);
            outcome = sending.map_err(|error| shared.failure.of_channel(error));
        }
        shared.progress.cpu.channels.add(laps.next());
        gate.took(counts);
    }
    outcome?;
    channel.end_round(round, &mut sent).map_err(|error| shared.failure.of_channel(error))?;
    Ok(sent)
}

/// What a channel behind encoders works with.
struct Hand<'a> {
    gate: &'a Gate,
    spare: &'a mpmc::Ring<Vec<u8>>,
    buffer: &'a mut WindowBuffer,
}

fn send_ready(
    channel: &mut impl Channel,
    ready: Ready,
    round: u32,
    mut hand: Hand<'_>,
    sent: &mut Sent,
) -> Result<(), Error> {
    match ready {
        Ready::Hole { region, range } => channel.send_hole(round, region, range, sent),
        Ready::RoundEnd => Ok(()),
        Ready::Unseen(windows) => {
            windows.into_iter().try_for_each(|window| send_window(channel, window, None, &mut hand, sent))
        }
        Ready::Window { window, encoded } => send_window(channel, window, encoded, &mut hand, sent),
    }
}

fn send_window(
    channel: &mut impl Channel,
    mut window: Window,
    encoded: Option<Encoded>,
    Hand { gate, spare, buffer }: &mut Hand<'_>,
    sent: &mut Sent,
) -> Result<(), Error> {
    let shared = Arc::clone(channel.shared());
    let body = match &encoded {
        Some(encoded) => Body::Encoded(encoded),
        None => Body::Plain(gate.meters.read(&shared, &mut window, buffer)?),
    };
    let (normal, zero, bytes) = (sent.normal, sent.zero, sent.bytes);
    let pages = shared.settle(&window, sent);
    channel.send_window(&window, pages, body, sent)?;
    let pages = sent.normal - normal;
    gate.meters.sent(window.chosen.encoding, pages + sent.zero - zero, pages, sent.bytes - bytes);
    if let Some(Encoded { bytes, .. }) = encoded {
        let _ = spare.push(bytes); // full: one buffer less to keep
    }
    Ok(())
}
