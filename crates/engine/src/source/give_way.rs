//! Channels that give way. What a guest waits for goes over a connection of its own, and behind everything that the
//! channels have put into the link before it. So they are kept just below what the link carries: then no queue builds
//! up in it, and nothing stands in the way.
use std::{
    thread::Scope,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use transship_lines::{TcpState, limit_tcp_pace};
use transship_memory::PageCount;

use crate::{channels::PagesAtOnce, transport::Connection};

/// Time between two looks at the connections.
const INTERVAL: Duration = Duration::from_millis(10);
/// Looks after which the pace is set anew. The first time it is earlier: by then the link is full.
const LOOKS: u32 = 10;
const FIRST_LOOKS: u32 = 3;
/// What bytes may take longer than on an empty link, at the best of these looks, before there must be a queue. A single
/// look says little: where the processors are busy, acknowledgements are late, too.
const QUEUE: Duration = Duration::from_micros(1500);
/// A queue that is still there after so many paces is not ours: others fill the link, or the processors are late.
const IN_VAIN: u32 = 10;
/// Looks, of those that set the pace, without one after that.
const REST: u32 = 50;
/// What goes into the link at once takes so long there.
const AT_ONCE: Duration = Duration::from_micros(100);
/// The part of the pace that the channels have at least, whatever goes beside them.
const LEAST: f64 = 0.1;

/// What all connections together may carry, in bytes a second. None: nothing stood in the way yet.
#[derive(Debug, Default)]
struct Pace {
    total: Option<f64>,
    /// The most that came through, of late.
    best: f64,
    /// The part of the pace that is left out until the next look, for the queue to become empty.
    drain: f64,
    /// How often in a row there was a queue all the same.
    in_vain: u32,
    /// Looks without a pace that are still to come.
    rest: u32,
}

impl Pace {
    /// So much came through by the second, and bytes took so much longer than on an empty link.
    fn adapt(&mut self, came: f64, queue: Duration) {
        if self.rest > 0 {
            self.rest -= 1;
            return;
        }
        self.best = came.max(self.best * 0.98);
        self.drain = 0.0;
        self.in_vain = if queue > QUEUE { self.in_vain + 1 } else { 0 };
        match self.total {
            _ if self.in_vain > IN_VAIN => *self = Self { rest: REST, ..Self::default() },
            // The link was busy all the time, so this is what it carries.
            _ if queue > QUEUE => {
                self.total = Some((came * 0.95).max(self.best * 0.8));
                self.drain = (queue.as_secs_f64() / (INTERVAL * LOOKS).as_secs_f64()).min(0.5);
            }
            Some(total) if came > total * 0.95 => self.total = Some(total * 1.02),
            _ => {}
        }
    }

    /// Pages that take the link for a moment only. Without a pace they are as many as can be: nobody knows how long
    /// they take.
    fn pages_at_once(&self) -> PageCount {
        self.total.map_or(PageCount::MAX, |total| PageCount::within((total * AT_ONCE.as_secs_f64()) as u64))
    }

    /// What is left for the channels.
    fn beside(&self, urgent: f64) -> Option<f64> {
        self.total.map(|total| (total * (1.0 - self.drain) - urgent).max(total * LEAST))
    }
}

/// Keeps the channels from filling the link until the returned value is dropped.
pub(super) fn give_way<'s, 'e: 's>(
    scope: &'s Scope<'s, 'e>,
    channels: &'e [Connection],
    urgent: &'e Connection,
    at_once: &'e PagesAtOnce,
) -> Sender<()> {
    let (until, is_over) = bounded(0);
    // Sockets without such figures have no link to fill.
    if channels.iter().chain([urgent]).all(|connection| TcpState::of(connection).is_ok()) {
        scope.spawn(move || watch(channels, urgent, at_once, &is_over));
    }
    until
}

fn watch(channels: &[Connection], urgent: &Connection, at_once: &PagesAtOnce, is_over: &Receiver<()>) {
    let mut pace = Pace::default();
    let (mut before, mut since) = (acknowledged(channels, urgent), Instant::now());
    let (mut looks, mut queue) = (LOOKS - FIRST_LOOKS, Duration::MAX);
    while is_over.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
        queue = queue.min(queued(channels));
        looks += 1;
        if looks < LOOKS {
            continue;
        }
        let (now, time) = (acknowledged(channels, urgent), since.elapsed().as_secs_f64());
        let [came, by_urgent] = [0, 1].map(|which| (now[which] - before[which]) as f64 / time);
        pace.adapt(came + by_urgent, queue);
        let each = pace.beside(by_urgent).map(|left| (left / channels.len() as f64) as u64);
        for channel in channels {
            // One that has ended says so to whoever sends.
            let _ = limit_tcp_pace(channel, each);
        }
        at_once.set(pace.pages_at_once());
        (before, since, looks, queue) = (now, Instant::now(), 0, Duration::MAX);
    }
}

/// How much longer bytes take than on an empty link, on the channel where they are quickest.
fn queued(channels: &[Connection]) -> Duration {
    let states = channels.iter().filter_map(|channel| TcpState::of(channel).ok());
    states.map(|state| state.round_trip.saturating_sub(state.least_round_trip)).min().unwrap_or_default()
}

/// Bytes that have arrived, by the channels and by the other connection.
fn acknowledged(channels: &[Connection], urgent: &Connection) -> [u64; 2] {
    let of = |connection: &Connection| TcpState::of(connection).map_or(0, |state| state.acknowledged);
    [channels.iter().map(of).sum(), of(urgent)]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A link with a queue of a twentieth of a second at most.
    #[derive(Default)]
    struct Link {
        carries: f64,
        /// Bytes.
        queue: f64,
    }

    impl Link {
        /// Seconds of a sender that has enough to send, beside so much that is urgent.
        fn run(&mut self, pace: &mut Pace, urgent: f64, seconds: f64) -> (f64, Duration) {
            let (mut sent, mut longest) = (0.0, Duration::ZERO);
            for step in 0..(seconds * 10.0) as u32 {
                let offered = pace.beside(urgent).unwrap_or(self.carries * 10.0) + urgent;
                let came = (offered + self.queue * 10.0).min(self.carries);
                self.queue = (self.queue + (offered - came) / 10.0).clamp(0.0, self.carries / 20.0);
                let queue = Duration::from_secs_f64(self.queue / self.carries);
                pace.adapt(came, queue);
                sent += came / 10.0;
                if step >= 3 {
                    longest = longest.max(queue);
                }
            }
            (sent / seconds / self.carries, longest)
        }
    }

    #[test]
    fn a_link_is_used_and_stays_free() {
        for (urgent, least) in [(0.0, 0.95), (30e6, 0.95), (90e6, 0.9)] {
            let (mut link, mut pace) = (Link { carries: 125e6, ..Link::default() }, Pace::default());
            let (used, longest) = link.run(&mut pace, urgent, 10.0);
            assert!(used > least, "{urgent}: {used}");
            assert!(longest < Duration::from_millis(8), "{urgent}: {longest:?}");
        }
    }

    #[test]
    fn a_link_that_changes_is_followed() {
        let (mut link, mut pace) = (Link { carries: 125e6, ..Link::default() }, Pace::default());
        link.run(&mut pace, 0.0, 5.0);
        link.carries = 25e6;
        link.run(&mut pace, 0.0, 10.0);
        let (used, longest) = link.run(&mut pace, 0.0, 5.0);
        assert!(used > 0.95 && longest < Duration::from_millis(8), "slower: {used}, {longest:?}");
        link.carries = 125e6;
        link.run(&mut pace, 0.0, 15.0);
        let (used, longest) = link.run(&mut pace, 0.0, 5.0);
        assert!(used > 0.95 && longest < Duration::from_millis(8), "faster: {used}, {longest:?}");
    }

    #[test]
    fn a_queue_that_is_not_ours_does_not_slow_it_down_for_long() {
        let mut pace = Pace::default();
        let mut sent = 0.0;
        for _ in 0..600 {
            let came = pace.beside(0.0).unwrap_or(100e6).min(100e6);
            pace.adapt(came, Duration::from_millis(5));
            sent += came / 600.0;
        }
        assert!(sent > 90e6, "{sent}");
    }
}
