//! Single moves, and what follows from them.
use serde::Serialize;

use super::Load;
use crate::{
    aims::{Aim, Aims, Bound},
    machine::Machine,
    plot::{Bar, Chart, Group, Line, Side},
    results::Spread,
    rows::{Limit, Row},
    table::aligned,
    units,
};

const IDLE_BLACKOUT_MS: f64 = 12.0;
const SETUP_MS: f64 = 10.0;
/// Of its rate before, what a tracked guest may take longer.
const SLOWDOWN: f64 = 1.03;

/// One move, or one guest that was tracked.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Run {
    #[serde(skip)]
    pub(crate) qemu: String,
    /// The longest silence between two beats.
    pub(crate) blackout_ms: f64,
    /// The median time between two beats.
    pub(crate) beat_ms: f64,
    pub(crate) beats: usize,
    /// What the side itself says.
    pub(crate) reported_ms: f64,
    pub(crate) setup_ms: f64,
    /// Of ours: what QEMU takes to answer whoever attaches.
    pub(crate) asked_ms: Option<f64>,
    pub(crate) total_ms: f64,
    /// What a tracked guest wrote before and meanwhile.
    pub(crate) mib_per_s: Option<(f64, f64)>,
}

impl Run {
    /// How many times as long as before the guest takes for what it does.
    pub(crate) fn slowdown(&self) -> f64 {
        self.mib_per_s.map_or(f64::NAN, |(before, meanwhile)| before / meanwhile)
    }

    pub(crate) fn text(&self) -> String {
        match self.mib_per_s {
            Some((before, meanwhile)) => {
                format!("{} MiB/s, before it {}", units::short(meanwhile), units::short(before))
            }
            None => {
                format!("{} ms of silence, reported {}", units::short(self.blackout_ms), units::short(self.reported_ms))
            }
        }
    }
}

/// All runs with one load.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Series {
    pub(crate) load: Load,
    pub(crate) ours: Vec<Run>,
    pub(crate) qemu: Vec<Run>,
    /// The blackout where two QEMUs have one memory and nobody asks anything.
    pub(crate) bare_ms: Vec<f64>,
}

impl Series {
    pub(crate) fn new(load: Load) -> Self {
        Self { load, ours: Vec::new(), qemu: Vec::new(), bare_ms: Vec::new() }
    }

    fn both(&self, of: fn(&Run) -> f64) -> [Vec<f64>; 2] {
        [&self.ours, &self.qemu].map(|runs| runs.iter().map(of).collect())
    }

    fn medians(&self, of: fn(&Run) -> f64) -> [f64; 2] {
        self.both(of).map(|numbers| Spread::of(numbers).median)
    }

    fn row(&self, title: String, memory: &str, of: fn(&Run) -> f64) -> Row {
        let [ours, qemu] = self.both(of);
        Row::of(title, memory, ours, qemu)
    }

    fn bare(&self) -> Option<Limit> {
        median(self.bare_ms.iter().copied(), "two QEMUs with one memory")
    }

    fn asked(&self) -> Option<Limit> {
        median(self.ours.iter().filter_map(|run| run.asked_ms), "QEMU asked what it is")
    }

    fn rows(&self, memory: &str) -> Vec<Row> {
        let load = self.load.title();
        if self.load == Load::Tracked {
            let [ours, qemu] =
                self.medians(|run| run.mib_per_s.map_or(f64::NAN, |(_, meanwhile)| meanwhile)).map(units::short);
            let row = self.row(format!("{load}: takes longer for its work"), memory, Run::slowdown).unit("times");
            let untracked = Limit { what: "a guest that nobody tracks".into(), value: 1.0 };
            return vec![row.limit(Some(untracked)).fact("MiB/s", ours, qemu)];
        }
        let [reported, other] = self.medians(|run| run.reported_ms).map(units::short);
        let [total, others] = self.medians(|run| run.total_ms).map(units::short);
        let [beat, beats] = self.medians(|run| run.beat_ms).map(units::short);
        vec![
            self.row(format!("{load}: blackout as the guest is heard"), memory, |run| run.blackout_ms)
                .limit(self.bare())
                .fact("downtime ms, as reported", reported, other)
                .fact("beat ms, usually", beat, beats)
                .fact("total ms", total, others),
            self.row(format!("{load}: until it can send"), memory, |run| run.setup_ms).limit(self.asked()),
        ]
    }
}

fn median(ms: impl Iterator<Item = f64>, what: &str) -> Option<Limit> {
    let value = Spread::of(ms).median;
    value.is_finite().then(|| Limit { what: what.into(), value })
}

/// Everything.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Results {
    pub(crate) machine: Machine,
    /// As it calls itself.
    pub(crate) qemu: String,
    pub(crate) kvm: bool,
    pub(crate) guest_bytes: u64,
    pub(crate) channels: u8,
    pub(crate) series: Vec<Series>,
}

const HEAD: [&str; 10] = [
    "guest",
    "blackout ms",
    "QEMU's",
    "reported ms",
    "QEMU's",
    "setup ms",
    "QEMU's",
    "total ms",
    "QEMU's",
    "slower, ours/QEMU",
];

impl Results {
    fn setting(&self) -> String {
        let accel = if self.kvm { "KVM" } else { "TCG" };
        let (memory, channels) = (units::bytes(self.guest_bytes), self.channels);
        format!("{memory}, 32-bit guest under {accel}, {channels} channels · {}", self.machine.title(&self.qemu))
    }

    pub(crate) fn rows(&self, memory: &str) -> Vec<Row> {
        self.series.iter().flat_map(|series| series.rows(memory)).collect()
    }

    pub(crate) fn table(&self) -> String {
        let cells = |series: &Series| {
            let [a, b] = series.medians(|run| run.blackout_ms).map(units::short);
            let [c, d] = series.medians(|run| run.reported_ms).map(units::short);
            let [e, f] = series.medians(|run| run.setup_ms).map(units::short);
            let [g, h] = series.medians(|run| run.total_ms).map(units::short);
            let [ours, qemu] = series.medians(Run::slowdown);
            if series.load == Load::Tracked {
                let none = || "-".to_owned();
                let slower = format!("{ours:.2}/{qemu:.2}");
                let title = series.load.title().to_owned();
                return [title, none(), none(), none(), none(), none(), none(), none(), none(), slower];
            }
            [series.load.title().to_owned(), a, b, c, d, e, f, g, h, String::new()]
        };
        let lines: Vec<_> = std::iter::once(HEAD.map(str::to_owned)).chain(self.series.iter().map(cells)).collect();
        format!(
            "{}\n{}\n{}\nMedians. Blackout: the longest silence between two beats of the guest, of which it has one a millisecond.\n",
            self.setting(),
            self.machine.warning(),
            aligned(1, &lines)
        )
    }

    pub(crate) fn aims(&self) -> Aims {
        self.series.iter().flat_map(aims_of).collect()
    }

    pub(crate) fn svg(&self) -> String {
        let moved = self.series.iter().filter(|series| series.load != Load::Tracked);
        let groups = moved.map(|series| {
            let line = |title: &str, of: fn(&Run) -> f64| {
                let [ours, qemu] = series.medians(of);
                let bar = |side, ms| Bar { side, ms, remark: String::new() };
                Line {
                    title: title.to_owned(),
                    bars: vec![bar(Side::Ours, ours), bar(Side::Qemu, qemu)],
                    note: String::new(),
                }
            };
            let lines = vec![line("heard", |run| run.blackout_ms), line("reported", |run| run.reported_ms)];
            Group { title: series.load.title().to_owned(), lines }
        });
        Chart {
            title: "How long a guest stands still",
            setting: &self.setting(),
            legend: &[(Side::Ours, "transship"), (Side::Qemu, "stock QEMU")],
            notes: "",
            axis: "blackout",
            groups: groups.collect(),
        }
        .svg()
    }
}

fn aims_of(series: &Series) -> Vec<Aim> {
    let load = series.load.title();
    let aim = |what: &str, wanted, got, unit| Aim::new(format!("{load}: {what}"), Bound::AtMost, wanted, got, unit);
    if series.load == Load::Tracked {
        return vec![aim("takes longer while it is tracked", SLOWDOWN, series.medians(Run::slowdown)[0], "times")];
    }
    let [ours, qemu] = series.medians(|run| run.blackout_ms);
    let mut aims = vec![aim("blackout, of QEMU's", 1.0, ours / qemu, "of it")];
    if series.load == Load::Idle {
        aims.push(aim("blackout", IDLE_BLACKOUT_MS, ours, "ms"));
    }
    aims.push(aim("until it can send", SETUP_MS, series.medians(|run| run.setup_ms)[0], "ms"));
    aims
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::verdict::Verdict;

    fn results() -> Results {
        let run = |blackout_ms, reported_ms| Run {
            blackout_ms,
            reported_ms,
            setup_ms: 8.0,
            asked_ms: Some(4.0),
            total_ms: 400.0,
            ..Run::default()
        };
        let tracked = |meanwhile| Run { mib_per_s: Some((100.0, meanwhile)), ..Run::default() };
        let idle = Series {
            load: Load::Idle,
            ours: vec![run(30.0, 29.0); 3],
            qemu: vec![run(40.0, 3.0); 3],
            bare_ms: vec![24.0; 3],
        };
        let slow = Series {
            load: Load::Tracked,
            ours: vec![tracked(99.0); 3],
            qemu: vec![tracked(50.0); 3],
            bare_ms: Vec::new(),
        };
        let machine = Machine::here();
        Results { machine, qemu: "10".into(), kvm: true, guest_bytes: 1 << 30, channels: 2, series: vec![idle, slow] }
    }

    #[test]
    fn what_is_heard_decides_and_not_what_is_reported() {
        let rows = results().rows("fresh");
        let verdict = |title: &str| {
            let row = rows.iter().find(|row| row.title.contains(title)).unwrap();
            row.compared.unwrap().verdict
        };
        assert_eq!(verdict("blackout"), Verdict::Ahead, "QEMU reports a tenth of ours, and is silent for longer");
        assert_eq!(verdict("until it can send"), Verdict::Even);
        assert_eq!(verdict("takes longer"), Verdict::Ahead);
        let near: Vec<_> = rows.iter().flat_map(Row::of_limits).map(|(share, _)| share).collect();
        assert_eq!(near, [0.8, 0.5, 0.99]);
        let text = results().table();
        assert!(text.contains("30") && text.contains("1.01/2.00"), "{text}");
    }

    #[test]
    fn aims_are_met_or_missed_by_their_own_bound() {
        let aims = results().aims().to_string();
        let verdict = |what: &str| aims.lines().find(|line| line.contains(what)).unwrap().split_whitespace().next();
        assert_eq!(verdict("blackout, of QEMU's"), Some("met"));
        assert_eq!(verdict("idle: blackout  "), Some("MISSED"), "{aims}");
        assert_eq!(verdict("until it can send"), Some("met"));
        assert_eq!(verdict("while it is tracked"), Some("met"));
    }

    #[test]
    fn the_picture_has_a_bar_for_each() {
        let svg = results().svg();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let texts: Vec<_> = document.descendants().filter_map(|node| node.text()).collect();
        assert!(
            texts.contains(&"30 ms") && texts.contains(&"3 ms") && !texts.contains(&"writing, tracked"),
            "{texts:?}"
        );
    }
}
