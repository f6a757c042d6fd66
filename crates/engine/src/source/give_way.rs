//! Channels that give way. What a guest waits for goes over a connection of its own, and behind everything that the
//! channels have put into the link before it. So they are kept just below what the link carries, together with what
//! goes there beside it: then no queue builds up in the link, and nothing stands in the way.
use std::{
    thread::Scope,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use transship_lines::{TcpState, limit_tcp_pace};

use super::room::Room;
use crate::{channels::PagesAtOnce, transport::Connection};

/// Time between two looks at the connections.
const INTERVAL: Duration = Duration::from_millis(10);
/// Looks after which the pace is set anew. The first time it is earlier: by then the link is full.
const LOOKS: u32 = 10;
const FIRST_LOOKS: u32 = 3; // fewer than LAST_LOOKS
const PACE_INTERVAL: Duration = INTERVAL.saturating_mul(LOOKS);
/// What bytes may take longer than on an empty link, at the best of the last looks, before there must be a queue. A
/// single look says little: where the processors are busy, acknowledgements are late, too.
const QUEUE: Duration = Duration::from_micros(300);
/// The same where so little is always there: the processors are late.
const LATE: Duration = Duration::from_micros(1500);
const LAST_LOOKS: u32 = 5;
/// A queue that is still there after so many paces is not ours: others fill the link, or the processors are late.
const IN_VAIN: u32 = 10;
/// What is taken for sent and waits in a socket takes so long at the pace. A guest that has come there asks for these
/// pages, and is sent them again.
const HELD: Duration = Duration::from_millis(1);
/// Looks, of those that set the pace, without one after that.
const REST: u32 = 50;
/// The part of what a full link carries that does not fill it.
const BELOW: f64 = 0.97;
/// The part of its pace at which a link carries all of that.
const FULL: f64 = 0.99;
/// The part of its pace that is used where it may grow.
const USED: f64 = 0.95;
/// The part of the pace that the channels have at least, whatever goes beside them.
const LEAST: f64 = 0.1;
/// By how much the pace grows at first, and after how many such steps by twice as much.
const GROWTH: f64 = 0.005;
const STEPS: f64 = 8.0;

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
    /// Small queues say nothing.
    is_late: bool,
    /// How often in a row it has grown.
    grown: u32,
    /// Looks without a pace that are still to come.
    rest: u32,
}

impl Pace {
    /// Of a link that carries so much, if that is known.
    fn of(carries: Option<f64>) -> Self {
        Self { total: carries.map(|carries| carries * BELOW), best: carries.unwrap_or(0.0), ..Self::default() }
    }

    /// So much came through by the second, and bytes took so much longer than on an empty link.
    fn adapt(&mut self, came: f64, queue: Duration) {
        if self.rest > 0 {
            self.rest -= 1;
            return;
        }
        self.best = came.max(self.best * 0.98);
        self.is_late &= queue > QUEUE;
        let stands = queue > if self.is_late { LATE } else { QUEUE };
        self.in_vain = if stands { self.in_vain + 1 } else { 0 };
        if self.in_vain > IN_VAIN && queue > LATE {
            *self = Self { rest: REST, ..Self::default() };
            return;
        }
        self.is_late |= self.in_vain > IN_VAIN;
        let allowed = self.allowed().unwrap_or(f64::MAX);
        let grows = !stands && self.total.is_some_and(|total| came > total * USED);
        self.total = match self.total {
            // The link carries all that it is given: what waits there is only to go.
            Some(total) if stands && came > allowed * FULL => Some(total),
            // It was busy all the time, so this is what it carries.
            _ if stands => Some((came * BELOW).max(self.best * 0.8)),
            Some(total) if grows => Some(total * (1.0 + GROWTH * (1.0 + f64::from(self.grown) / STEPS))),
            total => total,
        };
        self.grown = if grows { self.grown + 1 } else { 0 };
        self.drain = if stands { (2.0 * queue.as_secs_f64() / PACE_INTERVAL.as_secs_f64()).min(0.5) } else { 0.0 };
    }

    /// What may go until the next look.
    fn allowed(&self) -> Option<f64> {
        self.total.map(|total| total * (1.0 - self.drain))
    }

    /// What is left for the channels.
    fn beside(&self, urgent: f64) -> Option<f64> {
        self.total.zip(self.allowed()).map(|(total, allowed)| (allowed - urgent).max(total * LEAST))
    }

    /// What is left by the channels that have the least.
    fn urgent(&self) -> Option<f64> {
        self.total.map(|total| total * (1.0 - self.drain - LEAST))
    }
}

/// What the link carries, and who is told what of it is theirs.
pub(super) struct LinkShare<'e> {
    /// The channels.
    pub(super) at_once: &'e PagesAtOnce,
    /// The connection of those who wait.
    pub(super) room: &'e Room,
    /// Bytes a second, if that is known from the beginning.
    pub(super) carries: Option<f64>,
}

impl LinkShare<'_> {
    /// So much of it is taken by the connection of those who wait.
    fn share_out(&self, pace: &Pace, urgent: f64, channels: &[Connection]) {
        let each = pace.beside(urgent).map(|left| (left / channels.len() as f64) as u64);
        let held = each.map_or(u64::MAX, |each| (each as f64 * HELD.as_secs_f64()) as u64);
        for channel in channels {
            // One that has ended says so to whoever sends.
            let _ = limit_tcp_pace(channel, each).and_then(|()| channel.hold(held));
        }
        self.room.set(pace.urgent());
        self.at_once.set(self.room.at_once());
    }
}

/// Keeps the channels from filling the link until the returned value is dropped.
pub(super) fn give_way<'s, 'e: 's>(
    scope: &'s Scope<'s, 'e>,
    channels: &'e [Connection],
    urgent: &'e Connection,
    link: LinkShare<'e>,
) -> Sender<()> {
    let (until, is_over) = bounded(0);
    // Sockets without such figures have no link to fill.
    if channels.iter().chain([urgent]).all(|connection| TcpState::of(connection).is_ok()) {
        let pace = Pace::of(link.carries);
        // Before the first byte.
        link.share_out(&pace, 0.0, channels);
        scope.spawn(move || watch(channels, urgent, &link, pace, &is_over));
    }
    until
}

/// Whether what has gone over these connections last had to wait in the link.
pub(super) fn is_full(channels: &[Connection]) -> bool {
    queued(channels) > QUEUE
}

fn watch(channels: &[Connection], urgent: &Connection, link: &LinkShare<'_>, mut pace: Pace, is_over: &Receiver<()>) {
    let (mut before, mut since) = (acknowledged(channels, urgent), Instant::now());
    let (mut looks, mut queue) = (LOOKS - FIRST_LOOKS, Duration::MAX);
    while is_over.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
        looks += 1;
        if looks > LOOKS - LAST_LOOKS {
            queue = queue.min(queued(channels));
        }
        if looks < LOOKS {
            continue;
        }
        let (now, time) = (acknowledged(channels, urgent), since.elapsed().as_secs_f64());
        let [came, by_urgent] = [0, 1].map(|which| (now[which] - before[which]) as f64 / time);
        pace.adapt(came + by_urgent, queue);
        link.share_out(&pace, by_urgent, channels);
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
        /// What comes through by the second, of so much that is offered for so many seconds.
        fn carry(&mut self, offered: f64, seconds: f64) -> f64 {
            let came = (offered + self.queue / seconds).min(self.carries);
            self.queue = (self.queue + (offered - came) * seconds).clamp(0.0, self.carries / 20.0);
            came
        }

        fn delay(&self) -> Duration {
            Duration::from_secs_f64(self.queue / self.carries)
        }

        /// Seconds of a sender that has enough to send, beside so much that is urgent.
        fn run(&mut self, pace: &mut Pace, urgent: f64, seconds: f64) -> (f64, Duration) {
            let (mut sent, mut longest) = (0.0, Duration::ZERO);
            for step in 0..(seconds * 10.0) as u32 {
                let offered = pace.beside(urgent).unwrap_or(self.carries * 10.0) + urgent;
                let before = self.delay();
                let came = self.carry(offered, 0.1);
                // The least of the second half.
                pace.adapt(came, self.delay().min((before + self.delay()) / 2));
                sent += came / 10.0;
                if step >= 3 {
                    longest = longest.max(self.delay());
                }
            }
            (sent / seconds / self.carries, longest)
        }
    }

    #[test]
    fn a_link_is_used_and_stays_free() {
        for (urgent, least) in [(0.0, 0.97), (30e6, 0.97), (90e6, 0.95)] {
            let (mut link, mut pace) = (Link { carries: 125e6, ..Link::default() }, Pace::default());
            let (used, longest) = link.run(&mut pace, urgent, 10.0);
            assert!(used > least, "{urgent}: {used}");
            assert!(longest < Duration::from_millis(2), "{urgent}: {longest:?}");
        }
    }

    /// Nothing has to wait before the first look.
    #[test]
    fn a_link_that_is_known_is_never_filled() {
        for (known, least) in [(125e6, 0.96), (110e6, 0.95), (60e6, 0.8)] {
            let (mut link, mut pace) = (Link { carries: 125e6, ..Link::default() }, Pace::of(Some(known)));
            let first = pace.beside(0.0).unwrap_or_default();
            assert!(first < link.carries && first > known * 0.9, "{first}");
            let used = link.carry(first, 0.03) / link.carries;
            pace.adapt(used * link.carries, link.delay());
            assert_eq!(link.delay(), Duration::ZERO);
            let (used, longest) = link.run(&mut pace, 0.0, 10.0);
            assert!(used > least && longest < Duration::from_millis(2), "{known}: {used}, {longest:?}");
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
    fn processors_that_are_late_do_not_slow_it_down() {
        // Acknowledgements are late by so much, always or now and then.
        for (late, every) in [(500, 1), (500, 2), (1400, 1), (1400, 3), (400, 7)] {
            let (mut link, mut pace) = (Link { carries: 125e6, ..Link::default() }, Pace::default());
            let mut sent = 0.0;
            for step in 0..300 {
                let came = link.carry(pace.beside(0.0).unwrap_or(link.carries * 10.0), 0.1);
                let noise = Duration::from_micros(if step % every == 0 { late } else { 0 });
                pace.adapt(came, link.delay() + noise);
                sent += came / 300.0;
            }
            assert!(sent > link.carries * 0.93, "{late} every {every}: {sent}");
        }
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
