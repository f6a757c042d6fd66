//! A move in virtual time, for the choice between encodings: feeder, rings, encoders, channels, sockets that take more
//! than they send, a link, decoders, and cores that all of them share. Nothing in here knows what the choice believes.
#![allow(clippy::unwrap_used)]
use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use proptest::{prelude::*, test_runner::RngSeed};

use super::{link::LOOK_WINDOWS, *};

/// Seconds of a step.
const STEP: f64 = 50e-6;
const WINDOW: u64 = 128;
const PAGE: f64 = PAGE_BYTES as f64;
const RAW: usize = 0;

/// What encodings make of one kind of pages.
#[derive(Debug, Clone, Copy)]
struct Data {
    /// By encoding: bytes left of each, and seconds of a core to encode and to decode one page.
    left: [f64; 3],
    encode: [f64; 3],
    decode: [f64; 3],
}

const fn per_page(mb_per_s: f64) -> f64 {
    PAGE / (mb_per_s * 1e6)
}

/// As the corpus of the documentation, one core: lz4 626 and 3885 MB/s, zstd 549 and 1835.
const CORPUS: Data = Data {
    left: [1.0, 1.0 / 2.66, 1.0 / 3.93],
    encode: [0.0, per_page(626.0), per_page(549.0)],
    decode: [0.0, per_page(3885.0), per_page(1835.0)],
};
const NOISE: Data =
    Data { left: [1.0, 1.0, 1.0], encode: [0.0, per_page(4000.0), per_page(1500.0)], decode: [0.0, 0.0, 0.0] };
const TEXT: Data = Data {
    left: [1.0, 1.0 / 10.0, 1.0 / 15.0],
    encode: [0.0, per_page(2000.0), per_page(1300.0)],
    decode: [0.0, per_page(6000.0), per_page(3000.0)],
};

/// The machines and what is between them.
#[derive(Debug, Clone, Copy)]
struct Hosts {
    encoders: usize,
    channels: usize,
    /// Of each host; of both together if they are one.
    cores: f64,
    one_host: bool,
    /// What a socket holds.
    socket: f64,
    /// Seconds of a core, at each side, that a byte on the wire costs.
    per_byte: f64,
}

const TWO_CORES: Hosts =
    Hosts { encoders: 2, channels: 4, cores: 2.0, one_host: true, socket: 212e3, per_byte: 0.45e-9 };

/// From a page on: what the pages are, and how many bytes a second the link carries.
type Part = (u64, Data, f64);

enum Chooser {
    Fixed(usize),
    Auto(Box<Auto>),
}

#[derive(Clone, Copy)]
struct Job {
    encoding: usize,
    sample: bool,
    data: Data,
}

#[derive(Default)]
struct Encoder {
    ring: VecDeque<Job>,
    at: Option<(Job, f64)>,
    done: Option<Job>,
}

#[derive(Default)]
struct Channel {
    /// What it has taken, without the window at hand, and the bytes of that which have still to be given to the socket.
    taken: VecDeque<Job>,
    raw_taken: u64,
    at: Option<(Job, f64)>,
    /// In the socket, and what decoding a byte of it costs.
    socket: f64,
    decode_a_byte: f64,
}

/// Moves `pages` and returns the seconds.
fn simulate(hosts: &Hosts, pages: u64, parts: &[Part], mut chooser: Chooser) -> f64 {
    let begin = Instant::now();
    let mut encoders: Vec<Encoder> = (0..hosts.encoders).map(|_| Encoder::default()).collect();
    let mut channels: Vec<Channel> = (0..hosts.channels).map(|_| Channel::default()).collect();
    let mut results: VecDeque<Vec<Job>> = VecDeque::new();
    let mut batch: Vec<Job> = Vec::new();
    let ring_places = (hosts.channels + 2 * hosts.encoders).next_power_of_two().max(16);
    let mut counts = Counts::default();
    let mut own = [(0, 0); 3];
    let (mut fed, mut raw_on_their_way, mut seconds, mut next_encoder, mut wait) = (0, 0, 0.0, 0, None);
    let (mut scale, mut far_scale): (f64, f64) = (1.0, 1.0);
    while counts.pages < pages {
        let link = parts.iter().rev().find(|part| part.0 <= counts.pages).unwrap().2;
        // The feeder.
        while fed < pages {
            let now = begin + Duration::from_secs_f64(seconds);
            let choice = match &mut chooser {
                Chooser::Fixed(encoding) => Choice { encoding: *encoding, sample: false },
                Chooser::Auto(auto) => {
                    (counts.own_pages, counts.own_wire) = own[auto.current()];
                    let choice = auto.choose(now, &counts);
                    Choice { sample: choice.sample || wait.is_some_and(|before: Choice| before.sample), ..choice }
                }
            };
            let data = parts.iter().rev().find(|part| part.0 <= fed).unwrap().1;
            let job = Job { encoding: choice.encoding, sample: choice.sample, data };
            let (batch_windows, may_go) = match &chooser {
                Chooser::Fixed(_) => (1, true),
                Chooser::Auto(auto) => (auto.raw_flow().batch, auto.raw_flow().lets(raw_on_their_way, batch.len())),
            };
            let is_raw = choice.encoding == RAW;
            if !is_raw && raw_on_their_way > 0 {
                // What no channel has taken is fed again.
                let taken_back = batch.drain(..).count();
                let before: usize = results.iter().map(Vec::len).sum();
                results.retain(|jobs| jobs[0].encoding != RAW);
                let taken_back = (taken_back + before - results.iter().map(Vec::len).sum::<usize>()) as u64;
                raw_on_their_way -= taken_back;
                fed -= taken_back * WINDOW;
            }
            let free = (0..encoders.len()).map(|i| (next_encoder + i) % encoders.len());
            let free = free.into_iter().find(|i| encoders[*i].ring.len() < 4);
            let placed = match free {
                _ if is_raw && !may_go => {
                    results.extend((!batch.is_empty()).then(|| std::mem::take(&mut batch)));
                    false
                }
                _ if is_raw && !choice.sample => {
                    let fits = batch.len() + 1 < batch_windows || results.len() < ring_places;
                    batch.extend(fits.then_some(job));
                    results.extend((batch.len() >= batch_windows).then(|| std::mem::take(&mut batch)));
                    fits
                }
                Some(free) => {
                    encoders[free].ring.push_back(job);
                    next_encoder = free + 1;
                    true
                }
                None => false,
            };
            raw_on_their_way += u64::from(placed && is_raw);
            if !placed {
                wait = Some(choice);
                break;
            }
            wait = None;
            fed += WINDOW;
        }
        if fed == pages {
            results.extend((!batch.is_empty()).then(|| std::mem::take(&mut batch)));
        }
        // Encoders, as fast as the cores allow.
        let mut busy = 0.0;
        for encoder in &mut encoders {
            if let Some(done) = encoder.done.take() {
                if results.len() < ring_places { results.push_back(vec![done]) } else { encoder.done = Some(done) }
            }
            if encoder.done.is_some() {
                continue;
            }
            if encoder.at.is_none() {
                encoder.at = encoder.ring.pop_front().map(|job| {
                    let all: f64 =
                        if job.sample { job.data.encode.iter().sum() } else { job.data.encode[job.encoding] };
                    (job, (all + per_page(8000.0)) * WINDOW as f64)
                });
            }
            let Some((job, left)) = &mut encoder.at else { continue };
            busy += 1.0;
            counts.encoding += Duration::from_secs_f64(STEP);
            *left -= STEP * scale;
            if *left > 0.0 {
                continue;
            }
            if let (true, Chooser::Auto(auto)) = (job.sample, &mut chooser) {
                let outcome = |i: usize| {
                    let left = (WINDOW as f64 * PAGE * job.data.left[i]) as u64;
                    (left, Duration::from_secs_f64(job.data.encode[i] * WINDOW as f64 / scale.sqrt()))
                };
                auto.learn(&Sample { pages: WINDOW, outcomes: (0..3).map(outcome).collect() });
            }
            encoder.done = Some(*job);
            encoder.at = None;
        }
        // Channels give to sockets what there is room for.
        for channel in &mut channels {
            if channel.at.is_none() {
                if channel.taken.is_empty() {
                    channel.taken.extend(results.pop_front().into_iter().flatten());
                    channel.raw_taken = channel.taken.iter().filter(|job| job.encoding == RAW).count() as u64;
                }
                channel.at =
                    channel.taken.pop_front().map(|job| (job, WINDOW as f64 * PAGE * job.data.left[job.encoding]));
            }
            let Some((job, left)) = &mut channel.at else { continue };
            let taken = left.min(hosts.socket - channel.socket);
            let bytes = channel.socket + taken;
            let decode = job.data.decode[job.encoding] / (PAGE * job.data.left[job.encoding]);
            channel.decode_a_byte = (channel.decode_a_byte * channel.socket + decode * taken) / bytes.max(1.0);
            channel.socket = bytes;
            *left -= taken;
            if *left <= 0.5 {
                if channel.taken.is_empty() {
                    raw_on_their_way -= std::mem::take(&mut channel.raw_taken);
                }
                counts.pages += WINDOW;
                counts.all_pages += WINDOW;
                let wire = (WINDOW as f64 * PAGE * job.data.left[job.encoding]) as u64;
                counts.wire += wire;
                own[job.encoding] = (own[job.encoding].0 + WINDOW, own[job.encoding].1 + wire);
                channel.at = None;
            }
        }
        // The link serves all that have something, alike; the far side's cores have to keep up.
        let waiting = channels.iter().filter(|channel| channel.socket > 0.0).count().max(1);
        let (mut near, mut far) = (busy, 0.0);
        for channel in &mut channels {
            let share = (link * STEP / waiting as f64).min(channel.socket);
            let drained = share * if hosts.one_host { scale } else { far_scale };
            channel.socket -= drained;
            near += share / STEP * hosts.per_byte;
            far += share / STEP * (hosts.per_byte + channel.decode_a_byte);
        }
        if hosts.one_host {
            near += far;
        }
        scale = (hosts.cores / near.max(1e-9)).min(1.0);
        far_scale = (hosts.cores / far.max(1e-9)).min(1.0);
        seconds += STEP;
    }
    seconds
}

fn fixed(hosts: &Hosts, pages: u64, parts: &[Part]) -> [f64; 3] {
    [0, 1, 2].map(|encoding| simulate(hosts, pages, parts, Chooser::Fixed(encoding)))
}

fn auto(hosts: &Hosts, pages: u64, parts: &[Part]) -> f64 {
    let Hosts { encoders, channels, cores, .. } = *hosts;
    let auto = Auto::new(3, RAW, Threads { encoders, channels, cores: cores as usize });
    simulate(hosts, pages, parts, Chooser::Auto(Box::new(auto)))
}

const GIB: u64 = 262_144;
const GIGABIT: f64 = 125e6;

/// Within `more` times the best, and 1.05 times what it takes without encoding, apart from two measurements of the
/// link's speed, at the start and later, and what is seen only after two or three stretches of 10 ms.
fn assert_near_best(hosts: &Hosts, pages: u64, parts: &[Part], more: f64) {
    let fixed = fixed(hosts, pages, parts);
    let (ours, best) = (auto(hosts, pages, parts), fixed.iter().copied().fold(f64::INFINITY, f64::min));
    let look = (LOOK_WINDOWS * WINDOW) as f64 * PAGE / parts[0].2;
    let most = (best * more).min(fixed[RAW] * 1.05) + 2.0 * look + 0.04;
    assert!(ours < most, "{ours:.3} s, fixed {fixed:.3?}: {hosts:?} {parts:?}");
}

/// How near the best it has to come. Decoders on the same cores are nothing that the model knows of.
fn near(hosts: &Hosts) -> f64 {
    if hosts.one_host { 1.3 } else { 1.05 }
}

#[test]
fn it_is_nearly_as_fast_as_the_best_whatever_that_is() {
    let far = Hosts { one_host: false, socket: 1e6, cores: 8.0, encoders: 8, ..TWO_CORES };
    for data in [CORPUS, NOISE, TEXT] {
        for link in [GIGABIT / 10.0, GIGABIT, 2.5 * GIGABIT, 10.0 * GIGABIT, 4e9] {
            assert_near_best(&TWO_CORES, GIB, &[(0, data, link)], 1.05);
            assert_near_best(&far, GIB, &[(0, data, link)], 1.05);
        }
    }
}

#[test]
fn it_notices_that_the_link_has_become_slow_and_fast_again() {
    let far = Hosts { one_host: false, socket: 1e6, cores: 4.0, encoders: 4, ..TWO_CORES };
    let parts = [(0, CORPUS, 4e9), (2 * GIB, CORPUS, GIGABIT), (4 * GIB, CORPUS, 4e9)];
    let ideal: f64 = parts.iter().map(|&(_, data, link)| best(&far, 2 * GIB, &[(0, data, link)])).sum();
    let ours = auto(&far, 6 * GIB, &parts);
    assert!(ours < ideal * 1.06, "{ours} s, {ideal} s if it had known");
    let fixed = best(&far, 6 * GIB, &parts);
    assert!(ours < fixed * 0.99, "{ours} s, {fixed} s by the best that does not change its mind");
}

/// Over a link that waits for nobody's encoders, zstd is better than lz4. It was held up in the only sample of it so
/// far.
#[test]
fn a_sample_that_came_out_slow_is_soon_made_up_for() {
    let far = Hosts { one_host: false, socket: 1e6, ..TWO_CORES };
    let mut auto = Auto::new(3, RAW, Threads { encoders: 2, channels: 4, cores: 2 });
    assert!(auto.samples.ask(0));
    let outcome = |encoding: usize, slower: f64| {
        let left = (WINDOW as f64 * PAGE * CORPUS.left[encoding]) as u64;
        (left, Duration::from_secs_f64(CORPUS.encode[encoding] * WINDOW as f64 * slower))
    };
    auto.learn(&Sample { pages: WINDOW, outcomes: vec![outcome(RAW, 1.0), outcome(1, 1.0), outcome(2, 10.0)] });
    let parts = [(0, CORPUS, GIGABIT)];
    let (ours, best) = (simulate(&far, GIB, &parts, Chooser::Auto(Box::new(auto))), best(&far, GIB, &parts));
    assert!(ours < best * 1.12, "{ours} s, {best} s by the best");
}

/// Figures of a relay whose QEMU is slow. What a byte took and what is left of a page are both averages of stretches;
/// their product is half of what a page took, since pages that shrink more took as long.
#[test]
fn where_the_link_is_not_what_is_slow_more_bytes_are_no_better() {
    const ZSTD: usize = 2;
    let mut auto = Auto::new(3, RAW, Threads { encoders: 2, channels: 4, cores: 2 }).using(ZSTD);
    assert!(auto.samples.ask(0));
    let outcome = |left: u64, us: u64| (left * WINDOW, Duration::from_micros(us * WINDOW));
    auto.learn(&Sample { pages: WINDOW, outcomes: vec![outcome(4080, 0), outcome(866, 4), outcome(490, 5)] });
    let pace = EncodingPace { seconds_a_page: 10e-6, seconds_a_byte: 15.6e-9, waits_for_link: true, harder: 0.64 };
    let seconds = [1, ZSTD].map(|encoding| auto.model(encoding, pace) / pace.seconds_a_page);
    assert!(seconds[0] > 1.7 && (0.99..1.01).contains(&seconds[1]), "{seconds:?}");
}

fn best(hosts: &Hosts, pages: u64, parts: &[Part]) -> f64 {
    fixed(hosts, pages, parts).into_iter().fold(f64::INFINITY, f64::min)
}

#[test]
fn a_pause_is_not_taken_for_a_slow_link() {
    let mut auto = Auto::new(3, RAW, Threads { encoders: 2, channels: 2, cores: 2 });
    auto.learn(&Sample {
        pages: 128,
        outcomes: vec![(0, Duration::ZERO), (100_000, Duration::from_millis(1)), (90_000, Duration::from_millis(1))],
    });
    let begin = Instant::now();
    let mut counts = Counts::default();
    let mut run = |auto: &mut Auto, from: Instant| {
        for window in 0..400 {
            let choice = auto.choose(from + Duration::from_micros(window * 300), &counts);
            assert_eq!(choice.encoding, RAW, "at window {window}");
            counts.pages += WINDOW;
            counts.wire += WINDOW * PAGE_BYTES as u64;
            (counts.own_pages, counts.own_wire) = (counts.pages, counts.wire);
        }
    };
    run(&mut auto, begin);
    auto.pause();
    run(&mut auto, begin + Duration::from_secs(3600));
    assert!(auto.active < 1.0, "{} s", auto.active);
}

fn data() -> impl Strategy<Value = Data> {
    let kind = prop_oneof![Just(CORPUS), Just(NOISE), Just(TEXT)];
    (kind, 0.7..1.4f64, 0.7..1.4f64).prop_map(|(kind, smaller, slower)| Data {
        left: kind.left.map(|left| if left == 1.0 { 1.0 } else { (left * smaller).min(0.97) }),
        encode: kind.encode.map(|encode| encode * slower),
        decode: kind.decode,
    })
}

fn hosts() -> impl Strategy<Value = Hosts> {
    (1..17usize, 1..17usize, 2..17u32, any::<bool>(), 0.1e6..0.3e6f64).prop_map(
        |(encoders, channels, cores, one_host, socket)| Hosts {
            encoders,
            channels,
            cores: cores.into(),
            one_host,
            socket,
            ..TWO_CORES
        },
    )
}

proptest! {
    // The same cases each time: how near it comes is a matter of degree, and a test that fails now and then teaches to
    // ignore it.
    #![proptest_config(ProptestConfig {
        cases: 16,
        rng_seed: RngSeed::Fixed(7),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    #[ignore = "long: make test-long"]
    fn it_is_nearly_as_fast_as_the_best_anywhere(hosts in hosts(), link in link(), data in data(), long in 2..5u64) {
        let pages = if link < GIGABIT { GIB } else { GIB * long };
        assert_near_best(&hosts, pages, &[(0, data, link)], near(&hosts));
    }

    /// Memory whose parts shrink more or less: what was learnt in one of them is wrong in the next.
    #[test]
    #[ignore = "long: make test-long"]
    fn it_keeps_up_with_memory_that_changes(
        hosts in hosts(),
        link in link(),
        parts in proptest::collection::vec(data(), 2..5),
        long in 2..5u64,
    ) {
        let pages = if link < GIGABIT { GIB } else { GIB * long };
        let part = pages / parts.len() as u64;
        let parts: Vec<Part> = parts.into_iter().enumerate().map(|(i, data)| (i as u64 * part, data, link)).collect();
        assert_near_best(&hosts, pages, &parts, near(&hosts) * 1.1);
    }
}

/// 10 MB/s to 5 GB/s.
fn link() -> impl Strategy<Value = f64> {
    (7.0..9.7f64).prop_map(|digits| 10f64.powf(digits))
}
