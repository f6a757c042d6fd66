//! Shows how a move goes, on stderr: a bar on a terminal, lines elsewhere. Reads [`Progress`] on a thread of its own,
//! so that a slow terminal slows nothing else.
use std::{
    collections::VecDeque,
    io::{self, IsTerminal},
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use transship_engine::{CpuProgress, CpuTime, EncodingProgress, Held, Phase, Progress};

use crate::{
    output,
    units::{Bytes, Count, Rate, Time},
};

/// How often the numbers are looked at; a bar is drawn as often.
const TICK: Duration = Duration::from_millis(100);
/// Lines come no more often than this, apart from changes of phase.
const LINE_EVERY: Duration = Duration::from_secs(1);
/// Speeds are averages over this time.
const SPEED_OVER: Duration = Duration::from_secs(2);
const PAGE: f64 = transship_memory::PAGE_BYTES as f64;

/// Shows the progress while it lives.
pub(crate) struct Display {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Display {
    pub(crate) fn start(progress: &Arc<Progress>) -> io::Result<Self> {
        let progress = Arc::clone(progress);
        let (stop, stopped) = mpsc::channel();
        let thread =
            thread::Builder::new().name("progress".into()).spawn(move || run(&progress, &stopped, new_view()))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed; the move is not concerned.
            let _ = thread.join();
        }
    }
}

fn run(progress: &Progress, stopped: &mpsc::Receiver<()>, mut view: Box<dyn View>) {
    let mut meter = Meter::default();
    loop {
        let last = stopped.recv_timeout(TICK) != Err(RecvTimeoutError::Timeout);
        let now = Instant::now();
        let sample = Sample::of(progress);
        let speed = meter.measure(now, &sample);
        view.show(now, &sample, &speed);
        if last {
            return view.end();
        }
    }
}

/// The numbers at one moment.
#[derive(Debug, Clone, Copy, Default)]
struct Sample {
    phase: Phase,
    round: u32,
    left: u64,
    total: u64,
    wire: u64,
    relayed: u64,
    dirty_pages_per_s: u64,
    /// Of all writers together, in seconds.
    held: f64,
    time_left: Option<Duration>,
    /// While it is held ready.
    held_for: Duration,
    encoding: Encoding,
    cpu: CpuSeconds,
}

/// What the encoders did so far.
#[derive(Debug, Clone, Copy, Default)]
struct Encoding {
    bytes_in: u64,
    bytes_out: u64,
    busy_ratio: f64,
    raw_busy_pages: u64,
}

impl Encoding {
    fn of(progress: &EncodingProgress) -> Self {
        Self {
            bytes_in: progress.bytes_in.load(Ordering::Relaxed),
            bytes_out: progress.bytes_out.load(Ordering::Relaxed),
            busy_ratio: progress.busy_ratio(),
            raw_busy_pages: progress.raw_busy_pages.load(Ordering::Relaxed),
        }
    }

    /// Nothing where nothing is encoded.
    fn describe(&self) -> String {
        let Self { bytes_in, bytes_out, busy_ratio, raw_busy_pages } = *self;
        if bytes_in == 0 && raw_busy_pages == 0 {
            return String::new();
        }
        let raw = if raw_busy_pages == 0 { String::new() } else { format!(", {} pages raw", Count(raw_busy_pages)) };
        let (given, made) = (Bytes(bytes_in), Bytes(bytes_out));
        format!(", encoded {given} to {made}, busy {:.0} %{raw}", busy_ratio * 100.0)
    }
}

/// CPU seconds so far, of roles that work all the time.
#[derive(Debug, Clone, Copy, Default)]
struct CpuSeconds {
    main: f64,
    encoders: f64,
    decoders: f64,
    channels: f64,
}

impl CpuSeconds {
    fn of(progress: &CpuProgress) -> Self {
        let CpuProgress { main, encoders, decoders, channels } = progress;
        let [main, encoders, decoders, channels] = [main, encoders, decoders, channels].map(CpuTime::seconds);
        Self { main, encoders, decoders, channels }
    }

    /// In percent of a core, of seconds that passed. Nothing where nothing is counted.
    fn describe(&self) -> String {
        let Self { main, encoders, decoders, channels } = *self;
        let roles = [("main", main), ("encoders", encoders), ("decoders", decoders), ("channels", channels)];
        let roles: Vec<_> = roles.iter().filter(|(_, cores)| *cores >= 0.005).collect();
        if roles.is_empty() {
            return String::new();
        }
        let roles: Vec<_> = roles.iter().map(|(role, cores)| format!("{role} {:.0} %", cores * 100.0)).collect();
        format!(", cpu {}", roles.join(" "))
    }

    fn since(&self, before: &Self, seconds: f64) -> Self {
        let rate = |of: fn(&Self) -> f64| (of(self) - of(before)).max(0.0) / seconds;
        Self {
            main: rate(|cpu| cpu.main),
            encoders: rate(|cpu| cpu.encoders),
            decoders: rate(|cpu| cpu.decoders),
            channels: rate(|cpu| cpu.channels),
        }
    }
}

impl Sample {
    fn of(progress: &Progress) -> Self {
        Self {
            phase: progress.phase(),
            round: progress.round.load(Ordering::Relaxed),
            left: progress.round_left.load(Ordering::Relaxed),
            total: progress.round_total.load(Ordering::Relaxed),
            wire: progress.wire_bytes.load(Ordering::Relaxed),
            relayed: progress.relayed_bytes.load(Ordering::Relaxed),
            dirty_pages_per_s: progress.dirty_rate.load(Ordering::Relaxed),
            time_left: progress.time_left(),
            held_for: match progress.held() {
                Held::Since(then) => then.elapsed(),
                _ => Duration::ZERO,
            },
            held: progress.held_time().as_secs_f64(),
            encoding: Encoding::of(&progress.encoding),
            cpu: CpuSeconds::of(&progress.cpu),
        }
    }

    /// The numbers are read one by one while they change, so `left` may be beyond `total` for a moment.
    fn looked_at(&self) -> u64 {
        self.total.saturating_sub(self.left)
    }

    /// What is worth saying now, on one line.
    fn describe(&self, speed: &Speed) -> String {
        // Known from the second scan on.
        let dirty = match self.dirty_pages_per_s {
            0 => String::new(),
            pages => format!(", dirty {}", Rate(pages as f64 * PAGE)),
        };
        // In percent of the time of one processor.
        let held = match (speed.held * 100.0).round() as u64 {
            0 => String::new(),
            percent => format!(", writers held {percent} %"),
        };
        let until = self.time_left.map(|left| format!(", {} until the deadline", Time(left))).unwrap_or_default();
        let wire = Rate(speed.wire);
        let work = format!("{}{}", self.encoding.describe(), speed.cores.describe());
        match self.phase {
            Phase::Connecting => "connecting".into(),
            Phase::Rounds if self.total == 0 => {
                format!("round {}: {} received, {wire}{work}", self.round, Bytes(self.wire))
            }
            Phase::Rounds => {
                let eta = speed.eta(self.left).map(|eta| format!(", eta {}", Time(eta))).unwrap_or_default();
                format!("round {}: {} left, {wire}{dirty}{held}{eta}{until}{work}", self.round, Bytes(self.left))
            }
            Phase::Held => {
                let time = Time(self.held_for);
                let left = Bytes(self.left);
                format!("held for {time}, waits for `transship go`: {left} left, {wire}{dirty}{held}{until}{work}")
            }
            Phase::Switchover => "the guest is stopped: last pages, device state".into(),
            Phase::HandedOver => "handed over; the destination starts the guest".into(),
            Phase::Completing => "completing the file".into(),
            Phase::Reading if self.total == 0 => format!("reading: {} so far, {wire}", Bytes(self.wire)),
            Phase::Reading | Phase::Filling => {
                let eta = speed.eta(self.left).map(|eta| format!(", eta {}", Time(eta))).unwrap_or_default();
                let what = if self.phase == Phase::Reading { "reading" } else { "the guest runs" };
                format!("{what}: {} left, {wire}{eta}", Bytes(self.left))
            }
            Phase::Relaying => {
                format!("relayed {}, {} on the link, {wire}{work}", Bytes(self.relayed), Bytes(self.wire))
            }
            Phase::Loading => "the memory is there; its devices are loaded".into(),
            Phase::Done => format!("done, {} in all", Bytes(self.wire)),
        }
    }
}

/// Bytes a second: on the wire, and of guest memory that was looked at.
#[derive(Debug, Clone, Copy, Default)]
struct Speed {
    wire: f64,
    looked_at: f64,
    /// Seconds a second for which writers are held, all of them together.
    held: f64,
    /// CPU seconds a second.
    cores: CpuSeconds,
}

impl Speed {
    fn eta(&self, left: u64) -> Option<Duration> {
        if self.looked_at < 1.0 {
            return None;
        }
        Duration::try_from_secs_f64(left as f64 / self.looked_at).ok()
    }
}

/// What was counted at one moment.
#[derive(Debug, Clone, Copy)]
struct Point {
    at: Instant,
    wire: u64,
    looked_at: u64,
    held: f64,
    cpu: CpuSeconds,
}

/// Makes speeds from counters, over a sliding window.
#[derive(Debug, Default)]
struct Meter {
    round: u32,
    /// Bytes looked at in the rounds before this one, and in this one as far as was seen.
    before: u64,
    current: u64,
    points: VecDeque<Point>,
}

impl Meter {
    fn measure(&mut self, now: Instant, sample: &Sample) -> Speed {
        if sample.round != self.round {
            self.before += self.current;
            self.current = 0;
            self.round = sample.round;
        }
        self.current = self.current.max(sample.looked_at());
        let looked_at = self.before + self.current;
        let point = Point { at: now, wire: sample.wire, looked_at, held: sample.held, cpu: sample.cpu };
        self.points.push_back(point);
        while self.points.len() > 2 && now.duration_since(self.points[1].at) >= SPEED_OVER {
            self.points.pop_front();
        }
        let then = self.points[0];
        let seconds = now.duration_since(then.at).as_secs_f64();
        if seconds <= 0.0 {
            return Speed::default();
        }
        Speed {
            wire: point.wire.saturating_sub(then.wire) as f64 / seconds,
            looked_at: point.looked_at.saturating_sub(then.looked_at) as f64 / seconds,
            held: (point.held - then.held).max(0.0) / seconds,
            cores: point.cpu.since(&then.cpu, seconds),
        }
    }
}

/// One way to show it.
trait View: Send {
    fn show(&mut self, now: Instant, sample: &Sample, speed: &Speed);
    fn end(&mut self);
}

fn new_view() -> Box<dyn View> {
    let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    let logging = std::env::var_os(crate::LOG_VARIABLE).is_some();
    // A bar and a log on one terminal would overwrite each other.
    if io::stderr().is_terminal() && !dumb && !logging { Box::new(Bar::new()) } else { Box::new(Lines::default()) }
}

struct Bar(ProgressBar);

impl Bar {
    fn new() -> Self {
        Self(ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(10)))
    }

    /// A bar where the end is known, words alone elsewhere.
    fn style(sample: &Sample) -> ProgressStyle {
        let template = if sample.total > 0 { "[{bar:12}] {wide_msg}" } else { "{wide_msg}" };
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        style.progress_chars("=> ")
    }
}

impl View for Bar {
    fn show(&mut self, _now: Instant, sample: &Sample, speed: &Speed) {
        self.0.set_style(Self::style(sample));
        self.0.set_length(sample.total);
        self.0.set_position(sample.looked_at());
        self.0.set_message(sample.describe(speed));
        self.0.tick();
    }

    fn end(&mut self) {
        // What remains to be said is in the result.
        self.0.finish_and_clear();
    }
}

#[derive(Default)]
struct Lines {
    shown: Option<(Instant, Phase)>,
}

impl Lines {
    fn is_due(&self, now: Instant, phase: Phase) -> bool {
        self.shown.is_none_or(|(then, shown)| phase != shown || now.duration_since(then) >= LINE_EVERY)
    }
}

impl View for Lines {
    fn show(&mut self, now: Instant, sample: &Sample, speed: &Speed) {
        if self.is_due(now, sample.phase) {
            self.shown = Some((now, sample.phase));
            output::say(&sample.describe(speed));
        }
    }

    fn end(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(round: u32, left: u64, total: u64, wire: u64) -> Sample {
        Sample { phase: Phase::Rounds, round, left, total, wire, dirty_pages_per_s: 256, ..Sample::default() }
    }

    #[test]
    fn speed_goes_on_across_rounds() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let mut meter = Meter::default();
        assert_eq!(meter.measure(at(0), &sample(1, 1000, 1000, 0)).wire, 0.0);
        meter.measure(at(500), &sample(1, 0, 1000, 500));
        let speed = meter.measure(at(1000), &sample(2, 100, 300, 900));
        assert_eq!((speed.wire, speed.looked_at), (900.0, 1200.0));
        assert_eq!(speed.eta(600), Some(Duration::from_millis(500)));
    }

    #[test]
    fn old_points_leave_the_window() {
        let begin = Instant::now();
        let mut meter = Meter::default();
        let mut speed = Speed::default();
        for tick in 0..100u64 {
            // Fast for 5 seconds, then not at all.
            let wire = tick.min(50) * 100;
            speed = meter.measure(begin + TICK * tick as u32, &sample(1, 0, 0, wire));
        }
        assert_eq!(speed.wire, 0.0);
        assert!(meter.points.len() <= 23, "{}", meter.points.len());
    }

    #[test]
    fn nothing_moves_and_nothing_divides_by_zero() {
        let now = Instant::now();
        let mut meter = Meter::default();
        meter.measure(now, &sample(1, 10, 10, 0));
        let speed = meter.measure(now, &sample(1, 10, 10, 0));
        assert_eq!((speed.wire, speed.eta(10)), (0.0, None));
        // `left` was read after the next round began: not a huge number, nothing.
        assert_eq!(sample(1, 20, 10, 0).looked_at(), 0);
    }

    #[test]
    fn a_line_has_the_numbers_with_units() {
        let speed = Speed { wire: 3.0 * 1024.0 * 1024.0, looked_at: 1024.0 * 1024.0, ..Speed::default() };
        let line = sample(3, 64 << 20, 128 << 20, 5 << 20).describe(&speed);
        assert_eq!(line, "round 3: 64.0 MiB left, 3.0 MiB/s, dirty 1.0 MiB/s, eta 1 m 04 s");
        let line = sample(1, 0, 0, 5 << 20).describe(&speed);
        assert_eq!(line, "round 1: 5.0 MiB received, 3.0 MiB/s");
    }

    #[test]
    fn encoders_and_roles_are_named_where_there_are_any() {
        let begin = Instant::now();
        let mut meter = Meter::default();
        let mut sample = sample(1, 64 << 20, 128 << 20, 5 << 20);
        meter.measure(begin, &sample);
        sample.cpu = CpuSeconds { main: 0.02, encoders: 1.8, decoders: 0.0, channels: 0.25 };
        sample.encoding = Encoding { bytes_in: 64 << 20, bytes_out: 16 << 20, busy_ratio: 0.834, raw_busy_pages: 1234 };
        let line = sample.describe(&meter.measure(begin + Duration::from_secs(1), &sample));
        let work =
            ", encoded 64.0 MiB to 16.0 MiB, busy 83 %, 1,234 pages raw, cpu main 2 % encoders 180 % channels 25 %";
        assert!(line.ends_with(work), "{line}");
    }

    #[test]
    fn how_long_writers_are_held_is_shown_where_they_are() {
        let begin = Instant::now();
        let mut meter = Meter::default();
        let mut sample = sample(2, 64 << 20, 128 << 20, 5 << 20);
        meter.measure(begin, &sample);
        sample.held = 1.7;
        let speed = meter.measure(begin + Duration::from_secs(1), &sample);
        let line = sample.describe(&speed);
        assert!(line.ends_with("dirty 1.0 MiB/s, writers held 170 %"), "{line}");
        sample.time_left = Some(Duration::from_secs(90));
        let line = sample.describe(&speed);
        assert!(line.contains("held 170 %, 1 m 30 s until the deadline"), "{line}");
        let speed = meter.measure(begin + Duration::from_secs(4), &sample);
        assert!(!sample.describe(&speed).contains("held"), "{speed:?}");
    }

    #[test]
    fn lines_come_once_a_second_and_when_the_phase_changes() {
        let begin = Instant::now();
        let mut lines = Lines::default();
        assert!(lines.is_due(begin, Phase::Rounds));
        lines.shown = Some((begin, Phase::Rounds));
        assert!(!lines.is_due(begin + Duration::from_millis(900), Phase::Rounds));
        assert!(lines.is_due(begin + Duration::from_millis(1), Phase::Switchover));
        assert!(lines.is_due(begin + Duration::from_millis(1000), Phase::Rounds));
    }
}
