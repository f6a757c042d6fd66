//! Which encoding pays: by a model of the move, and by what really happens.
//!
//! A page passes two stages, the encoders and the link with all that lies behind it; the slower one sets the pace:
//!
//! ```text
//!   seconds a page = the larger of   seconds that an encoder needs / encoders that can run at once
//!                                    bytes that are left of it × seconds that the link takes for a byte
//! ```
//!
//! What an encoding costs and leaves is known from samples: now and then an encoder encodes a window in all ways after
//! it has gone, and throws the results away. That disturbs nobody's bytes. How fast the link is shows when pages go as
//! they are, and whenever everything else waits for it. So nothing has to be tried that can't win. What should win is
//! used for a stretch, and stays only if it was better: the model knows nothing of slow decoders and of cores that both
//! sides share. What it promised in vain is doubted for a while.
#![forbid(unsafe_code)]
mod flow;
mod link;
mod pace;
mod samples;
#[cfg(test)]
mod simulation;

use std::time::{Duration, Instant};

use transship_codec::{Method, Setting};
use transship_memory::PAGE_BYTES;
use transship_wire::PAGES_PER_PACKET;

use flow::Probe;
use link::Link;
use pace::{Counted, EncodingPace};
use samples::Samples;
pub use {flow::RawFlow, pace::Counts, samples::Sample};

/// A stretch that is measured takes so long, since schedulers give and take cores for milliseconds at a time,
const STRETCH: Duration = Duration::from_millis(10);
/// and has so many windows (4 MiB), and so many for each channel and encoder: all of them may end one at the same time.
const STRETCH_WINDOWS: u64 = 8;
const STRETCH_WINDOWS_A_CHANNEL: u64 = 4;
const STRETCH_WINDOWS_AN_ENCODER: u64 = 2;
/// Windows under a new encoding before it is measured: what is in rings and sockets still is the earlier one's. Pages
/// as they are overtake what each encoder has, which is only waited for when there is time.
const SETTLING_WINDOWS: u64 = 4;
const SETTLING_WINDOWS_PROBING: u64 = 1;
const SETTLING_WINDOWS_AN_ENCODER: u64 = 5;
/// What the socket of a channel takes without sending it, about.
const SOCKET_BYTES: u64 = 256 * 1024;
/// A stretch in which something else is so much faster, even if all that is on its way had arrived, is over after its
/// time, and so many windows: before those the threads may not even have begun. At the very beginning it gets more
/// time: a machine that stalled for a moment is soon taken for a slow link, and a link that is slow loses no more than
/// that.
const PATIENCE: f64 = 1.5;
const CUT_WINDOWS: u64 = 2;
const FIRST_CUT: Duration = Duration::from_millis(30);
/// What a change has to gain.
const GAIN: f64 = 1.05;
/// A promise so large is always looked into: the link must have changed.
const GAIN_LARGE: f64 = 1.5;
/// Share of all time that may be lost by looking.
const LOSS: f64 = 0.01;
/// Seconds for which what was found out is believed; more where another look would cost more than `LOSS`.
const BELIEVED: f64 = 1.0;
/// A pace so much slower or faster than when it was found out is reason enough not to believe it.
const ANOTHER_PACE: f64 = 2.0;

/// The encodings to choose from.
pub fn candidates() -> Vec<Setting> {
    let fastest = |method| Setting::new(method, Some(1)).expect("every method but none has a level 1");
    vec![Setting::NONE, fastest(Method::Lz4), fastest(Method::Zstd)]
}

/// What to do with a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Which of the encodings, by its index.
    pub encoding: usize,
    /// Encode it in all ways, to learn.
    pub sample: bool,
}

/// The threads that there are.
#[derive(Debug, Clone, Copy)]
pub struct Threads {
    /// Threads that encode.
    pub encoders: usize,
    /// Threads that send, each by a connection of its own.
    pub channels: usize,
    /// Processors of this host.
    pub cores: usize,
}

impl Threads {
    /// Encoders that can run at once.
    fn parallel(&self) -> f64 {
        self.encoders.min(self.cores) as f64
    }
}

/// Chooses between encodings.
#[derive(Debug)]
pub struct Auto {
    threads: Threads,
    /// The encoding that leaves pages as they are. It is used first: it shows how fast the link is, and where it is the
    /// best there is least time for anything else.
    raw: usize,
    current: usize,
    /// What was used before, while the current one is on trial.
    trial: Option<Trial>,
    stretch: Option<Stretch>,
    /// How the current one does; none until its first stretch is over.
    pace: Option<EncodingPace>,
    /// How much slower what lies behind the link is for what the current one makes, than the link.
    beyond: f64,
    /// How fast the link takes pages as they are; none before the first stretch of all.
    link: Option<Link>,
    samples: Samples,
    /// By encoding.
    doubts: Vec<Option<Doubt>>,
    /// Seconds in rounds; seconds lost by promises that were not kept.
    active: f64,
    lost: f64,
    last: Option<Instant>,
    /// Bytes that were sent when sockets were empty.
    begin_wire: Option<u64>,
}

/// A stretch of pages under one encoding.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    /// Own pages at its beginning.
    begin: u64,
    settled: Option<(Instant, Counts)>,
    /// If it is one of pages as they are, only to see how fast the link is.
    probe: Probe,
}

/// An encoding that has to be better than another one.
#[derive(Debug, Clone, Copy)]
struct Trial {
    /// The other one, and its seconds a page; infinite if they are not known.
    before: usize,
    pace: f64,
    /// Seconds a page, of the model alone.
    promised: f64,
}

/// How much slower than the model an encoding turned out to be.
#[derive(Debug, Clone, Copy)]
struct Doubt {
    factor: f64,
    /// Seconds a page of the one that was better.
    pace: f64,
    /// In active seconds.
    until: f64,
}

impl Auto {
    /// Between so many encodings, of which `raw` leaves pages as they are.
    pub fn new(encodings: usize, raw: usize, threads: Threads) -> Self {
        Self {
            threads,
            raw,
            current: raw,
            trial: None,
            stretch: None,
            pace: None,
            beyond: 1.0,
            link: None,
            samples: Samples::new(encodings),
            doubts: vec![None; encodings],
            active: 0.0,
            lost: 0.0,
            last: None,
            begin_wire: None,
        }
    }

    /// For a link of which is known how many seconds it takes for a byte: it is not looked at first.
    pub fn over_link(self, seconds_a_byte: f64) -> Self {
        let seconds_a_page = seconds_a_byte * PAGE_BYTES as f64;
        let pace = EncodingPace { seconds_a_page, seconds_a_byte, waits_for_link: true, harder: 1.0 };
        Self { link: Some(Link::seen(None, pace, pace, false, 0.0)), ..self }
    }

    /// With this encoding in use to begin with.
    pub fn using(self, current: usize) -> Self {
        Self { current, ..self }
    }

    /// The encoding in use.
    pub fn current(&self) -> usize {
        self.current
    }

    /// The encoding that leaves pages as they are.
    pub fn raw(&self) -> usize {
        self.raw
    }

    /// Whether pages that are sent as they are are so only to see how fast the link is.
    fn is_probing(&self) -> bool {
        self.link.is_none() || self.trial.is_some()
    }

    /// How windows go that go as they are.
    pub fn raw_flow(&self) -> RawFlow {
        match self.link {
            Some(link) if !self.is_probing() => RawFlow::over(link.seconds_a_byte(), self.threads),
            _ => self.stretch.map_or(Probe::BEGIN, |stretch| stretch.probe).flow,
        }
    }

    /// Between two rounds time passes in which nothing is sent, and sockets become empty.
    pub fn pause(&mut self) {
        (self.stretch, self.last, self.begin_wire) = (None, None, None);
    }

    /// Takes what an encoder has found out.
    pub fn learn(&mut self, sample: &Sample) {
        self.samples.add(sample);
    }

    /// What to do with the next window.
    pub fn choose(&mut self, now: Instant, counts: &Counts) -> Choice {
        if let Some(last) = self.last.replace(now) {
            let passed = now.saturating_duration_since(last).as_secs_f64();
            self.active += passed;
            self.samples.pass(passed * self.threads.parallel(), self.idle());
        }
        let begin = Stretch { begin: counts.own_pages, settled: None, probe: Probe::BEGIN };
        let mut stretch = *self.stretch.get_or_insert(begin);
        let are_full = self.sockets_are_full(counts.wire);
        if self.current == self.raw && self.is_probing() {
            let is_void = stretch.probe.pass(now, counts, are_full, self.threads);
            stretch.settled = stretch.settled.filter(|_| !is_void);
            self.stretch = Some(stretch);
        }
        // At the very beginning empty sockets must do: there is something to be seen earlier if it is slow in spite of
        // that.
        let may_settle = are_full || self.link.is_none();
        match stretch.settled {
            None if counts.own_pages >= stretch.begin + self.settling_pages() && may_settle => {
                self.stretch = Some(Stretch { settled: Some((now, *counts)), ..stretch });
            }
            Some((since, from)) if self.is_over(now - since, counts.own_pages - from.own_pages) => {
                self.close(now - since, &from, counts, counts.own_pages - stretch.begin);
                self.stretch = None;
            }
            _ => {}
        }
        let sample = self.samples.ask(counts.pages);
        Choice { encoding: self.current, sample }
    }

    /// Pages as they are pass the encoders by, but on two hosts in one, or where there are few cores, what carries them
    /// needs the cores.
    fn idle(&self) -> samples::Encoders {
        match self.pace {
            Some(pace) if self.current != self.raw && pace.waits_for_link => samples::Encoders::Waiting,
            _ => samples::Encoders::Needed,
        }
    }

    /// Empty ones take everything at once, and make any link look fast.
    fn sockets_are_full(&mut self, wire: u64) -> bool {
        let begin = *self.begin_wire.get_or_insert(wire);
        wire - begin >= SOCKET_BYTES * self.threads.channels as u64
    }

    fn settling_pages(&self) -> u64 {
        let windows = match self.current == self.raw {
            false => SETTLING_WINDOWS,
            true if self.is_probing() => SETTLING_WINDOWS_PROBING,
            true => SETTLING_WINDOWS_AN_ENCODER * self.threads.encoders as u64,
        };
        windows * PAGES_PER_PACKET
    }

    fn stretch_pages(&self) -> u64 {
        let Threads { encoders, channels, .. } = self.threads;
        let for_all = (STRETCH_WINDOWS_A_CHANNEL * channels as u64).max(STRETCH_WINDOWS_AN_ENCODER * encoders as u64);
        PAGES_PER_PACKET * for_all.max(STRETCH_WINDOWS)
    }

    /// Pages that channels may have at hand.
    fn on_their_way(&self) -> u64 {
        let is_probing = self.current == self.raw && self.is_probing();
        PAGES_PER_PACKET * if is_probing { self.raw_flow().most } else { self.threads.channels as u64 }
    }

    fn is_over(&self, took: Duration, own_pages: u64) -> bool {
        took >= STRETCH && (own_pages >= self.stretch_pages() || self.is_hopeless(took, own_pages))
    }

    /// It can't become as fast as what was before, or, at the very beginning, as encoders could be.
    fn is_hopeless(&self, took: Duration, own_pages: u64) -> bool {
        let other = match &self.trial {
            Some(trial) => trial.pace,
            None if self.link.is_none() && took < FIRST_CUT => return false,
            None if self.link.is_none() => {
                let encodings = (0..self.doubts.len()).filter(|encoding| *encoding != self.raw);
                encodings.map(|encoding| self.by_samples(encoding, 1.0, 0.0, 1.0)).fold(f64::INFINITY, f64::min)
            }
            None => return false,
        };
        own_pages >= CUT_WINDOWS * PAGES_PER_PACKET
            && took.as_secs_f64() > PATIENCE * other * (own_pages + self.on_their_way()) as f64
    }

    /// A stretch is over; `own_pages` were sent with it, settling included.
    fn close(&mut self, took: Duration, from: &Counts, to: &Counts, own_pages: u64) {
        let is_raw = self.current == self.raw;
        let is_cut = to.own_pages - from.own_pages < self.stretch_pages();
        let counted = Counted::new(took, from, to, is_raw, self.threads, is_cut.then(|| self.on_their_way()));
        let newest = match self.samples.of(self.current) {
            Some((left, _)) if !is_raw => counted.encoded(left),
            _ => counted.raw(),
        };
        let mut pace = self.pace.map_or(newest, |before| before.then(newest));
        if self.pace.is_none() {
            self.beyond = self.link.map_or(1.0, |link| link.compared_with(&pace));
        }
        pace.waits_for_link &= self.beyond < link::ANOTHER;
        self.see_link(pace, newest, is_cut);
        let before = self.current;
        match self.trial.take() {
            Some(trial) => self.judge(trial, pace, own_pages),
            None => self.look_around(pace),
        }
        self.pace = (self.current == before).then_some(pace);
        if self.current != before {
            // While the link was only looked at, most sockets became empty.
            self.begin_wire = Some(if self.current == self.raw { 0 } else { to.wire });
            let samples = self.samples.all();
            tracing::debug!(from = before, to = self.current, ?pace, link = ?self.link, ?samples, lost = self.lost, "another encoding");
        }
    }

    fn see_link(&mut self, pace: EncodingPace, newest: EncodingPace, is_cut: bool) {
        match &mut self.link {
            _ if self.current == self.raw => self.link = Some(Link::seen(self.link, pace, newest, is_cut, self.active)),
            Some(link) => link.pass_encoded(pace, self.active),
            None => {}
        }
    }

    /// The trial is over: was it better than what was before?
    fn judge(&mut self, trial: Trial, pace: EncodingPace, own_pages: u64) {
        let Trial { before, pace: pace_before, promised } = trial;
        let here = pace.seconds_a_page;
        if here > pace_before {
            let lost = (here - pace_before) * own_pages as f64;
            self.lost += lost;
            self.doubt(self.current, here / promised, pace_before, lost);
            self.current = before;
        } else if pace_before.is_finite() {
            self.doubt(before, pace_before / self.model(before, pace), here, 0.0);
        }
    }

    /// `pace`: of the one that was better. `lost`: what it cost to find out.
    fn doubt(&mut self, encoding: usize, factor: f64, pace: f64, lost: f64) {
        if encoding != self.raw {
            let until = self.active + BELIEVED.max(lost / LOSS);
            self.doubts[encoding] = Some(Doubt { factor: factor.max(1.0), pace, until });
        } else if let Some(link) = &mut self.link {
            link.looked_in_vain(); // the model says nothing of it but what was seen
        }
    }

    /// Puts the best of the others on trial, if it promises enough.
    fn look_around(&mut self, pace: EncodingPace) {
        let others = (0..self.doubts.len()).filter(|other| *other != self.current);
        let best = others.min_by(|a, b| self.expected(*a, pace).total_cmp(&self.expected(*b, pace)));
        let Some(best) = best else { return };
        let gain = pace.seconds_a_page / self.expected(best, pace);
        if gain > GAIN_LARGE || gain > GAIN && self.lost <= LOSS * self.active {
            let promised = self.model(best, pace);
            let is_guess = self.current == self.raw && self.link.is_some_and(|link| link.is_guess());
            let known = if is_guess { f64::INFINITY } else { pace.seconds_a_page };
            self.trial = Some(Trial { before: self.current, pace: known, promised });
            self.current = best;
        }
    }

    /// Seconds that a page will take under an encoding, when it is `pace` that is given up for it.
    fn expected(&self, encoding: usize, pace: EncodingPace) -> f64 {
        self.model(encoding, pace) * self.doubted(encoding, pace)
    }

    /// By what factor. One encoding that was slow because others need the cores makes us doubt those that nobody has
    /// tried.
    fn doubted(&self, encoding: usize, pace: EncodingPace) -> f64 {
        let valid = |doubt: &Option<Doubt>| {
            let Doubt { factor, pace: then, until } = (*doubt)?;
            let is_same = (then / pace.seconds_a_page).max(pace.seconds_a_page / then) < ANOTHER_PACE;
            (is_same && self.active < until).then_some(factor)
        };
        let of_others = || self.doubts.iter().filter_map(valid).min_by(f64::total_cmp);
        match encoding {
            raw if raw == self.raw => 1.0,
            other => valid(&self.doubts[other]).or_else(of_others).unwrap_or(1.0),
        }
    }

    /// Seconds that a page takes by the model. Beside an encoding in use the others are seen in its light: what makes
    /// it slow makes them slow.
    fn model(&self, encoding: usize, pace: EncodingPace) -> f64 {
        let link = self.link.map_or(0.0, |link| link.seconds_a_byte());
        if encoding == self.raw {
            return PAGE_BYTES as f64 * link;
        }
        if self.current == self.raw {
            return self.by_samples(encoding, 1.0, link, 1.0);
        }
        if pace.waits_for_link {
            // What a page took, by the bytes that are left of one. What a byte took says less: where something else
            // than the link is slow, it took longer in pages that shrink more.
            let left = self.samples.of(self.current).map_or(PAGE_BYTES as f64, |(left, _)| left * pace.harder);
            return self.by_samples(encoding, 1.0, pace.seconds_a_page / left, pace.harder);
        }
        let slower = pace.seconds_a_page / self.by_samples(self.current, 1.0, 0.0, 1.0);
        self.by_samples(encoding, slower, link, pace.harder)
    }

    /// With encoders that are `slower` than in the samples, and pages that are `harder`. Nothing is promised by what
    /// was never sampled.
    fn by_samples(&self, encoding: usize, slower: f64, link: f64, harder: f64) -> f64 {
        let Some((left, seconds)) = self.samples.of(encoding) else { return f64::INFINITY };
        let left = (left * harder).min(PAGE_BYTES as f64);
        (slower * seconds / self.threads.parallel()).max(left * link)
    }
}
