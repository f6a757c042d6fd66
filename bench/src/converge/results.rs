//! Single runs, and what follows from them: the table, the rows, and the picture.
use serde::Serialize;

use super::{Way, Wire, aims, cases::Case};
use crate::{
    aims::Aims,
    limits::{self, StateAlone},
    machine::Machine,
    plot::{Bar, Chart, Group, Line, Side},
    results::Spread,
    rows::{FRESH, Row},
    table::aligned,
    units,
};

/// What is set against each other in rows: ways that do the same thing.
const ALIKE: [(Way, Way); 2] = [(Way::Pace, Way::AutoConverge), (Way::Postcopy, Way::QemuPreempt)];

const HEAD: [&str; 10] =
    ["guest", "way", "ended", "ms", "downtime ms", "blackout ms", "work %", "bytes", "waits ms", "forecast ms"];
const LEFT_COLUMNS: usize = 3;

/// Everything.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Results {
    pub(crate) machine: Machine,
    /// As it calls itself.
    pub(crate) qemu: String,
    /// KVM runs the guests of that name.
    pub(crate) kvm: bool,
    pub(crate) guest_bytes: u64,
    pub(crate) channels: u8,
    pub(crate) links: Vec<Link>,
    pub(crate) link_bytes_per_s: u64,
    /// What no blackout is shorter than.
    pub(crate) state: Option<StateAlone>,
    pub(crate) series: Vec<Series>,
}

/// What lay between the two sides.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Link {
    pub(crate) wire: Wire,
    /// Of one byte, when nothing else is on it.
    pub(crate) round_trip_ms: f64,
}

/// All moves of one guest in one way.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Series {
    pub(crate) case: Case,
    pub(crate) way: Way,
    /// Why it can't be had here.
    pub(crate) not_possible: Option<String>,
    pub(crate) runs: Vec<Run>,
}

/// One move, or an attempt.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Run {
    /// `completed`, or the verdict.
    pub(crate) status: String,
    /// Until it ended, one way or the other.
    pub(crate) ms: f64,
    /// What the side itself says.
    pub(crate) downtime_ms: f64,
    /// The longest silence between two beats of the guest.
    pub(crate) blackout_ms: f64,
    /// The median time between two beats.
    pub(crate) beat_ms: f64,
    /// What the guest wrote before the move.
    pub(crate) writes_mib_per_s: f64,
    /// What it wrote meanwhile, of that.
    pub(crate) work: f64,
    pub(crate) wire_bytes: u64,
    /// For pages, in post-copy. QEMU does not tell.
    pub(crate) waits: Option<Waits>,
    /// What was thought after the first round.
    pub(crate) forecast_ms: Option<f64>,
}

/// How long the guest waited for pages.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct Waits {
    pub(crate) count: u64,
    pub(crate) median_ms: f64,
    pub(crate) p99_ms: f64,
}

impl Run {
    pub(crate) fn arrived(&self) -> bool {
        self.status == "completed"
    }

    pub(crate) fn text(&self) -> String {
        let [ms, blackout, work] = [self.ms, self.blackout_ms, self.work * 100.0].map(units::short);
        format!("{} after {ms} ms, {blackout} ms of silence, {work} % of its work", self.status)
    }

    /// By how much of the outcome the forecast was wrong.
    pub(crate) fn forecast_error(&self) -> Option<f64> {
        self.forecast_ms.map(|forecast| (forecast - self.ms).abs() / self.ms)
    }
}

impl Series {
    pub(crate) fn new(case: Case, way: Way) -> Self {
        Self { case, way, not_possible: None, runs: Vec::new() }
    }

    pub(crate) fn title(&self) -> String {
        format!("{}: {}", self.case.title(), self.way.title())
    }

    pub(crate) fn median(&self, of: impl Fn(&Run) -> f64) -> f64 {
        Spread::of(self.runs.iter().map(of)).median
    }

    /// Of its runs, those that ended with the guest at the destination.
    pub(crate) fn arrived(&self) -> f64 {
        self.runs.iter().filter(|run| run.arrived()).count() as f64 / self.runs.len() as f64
    }

    /// In words.
    fn ended(&self) -> String {
        match (&self.not_possible, self.runs.iter().find(|run| !run.arrived())) {
            (Some(_), _) => "not possible".to_owned(),
            (None, Some(run)) => run.status.clone(),
            (None, None) => "moved".to_owned(),
        }
    }

    fn cells(&self) -> [String; 10] {
        let (title, way, ended) = (self.case.title(), self.way.title().to_owned(), self.ended());
        if self.runs.is_empty() {
            let mut cells = [const { String::new() }; 10];
            [cells[0], cells[1], cells[2]] = [title, way, ended];
            return cells;
        }
        let short = |of: fn(&Run) -> f64| units::short(self.median(of));
        // What only some ways have.
        let if_any = |of: &dyn Fn(&Run) -> Option<f64>| {
            let list = self.runs.iter().filter_map(of).collect::<Vec<_>>();
            if list.is_empty() { String::new() } else { units::short(Spread::of(list).median) }
        };
        let waits =
            [if_any(&|run| run.waits.map(|waits| waits.median_ms)), if_any(&|run| run.waits.map(|waits| waits.p99_ms))];
        [
            title,
            way,
            ended,
            short(|run| run.ms),
            short(|run| run.downtime_ms),
            short(|run| run.blackout_ms),
            short(|run| run.work * 100.0),
            units::bytes(self.median(|run| run.wire_bytes as f64) as u64),
            if waits[0].is_empty() { String::new() } else { waits.join(", ") },
            if_any(&|run| run.forecast_ms),
        ]
    }

    /// Run by run; one that did not end has none.
    fn numbers(&self, of: fn(&Run) -> f64) -> Vec<f64> {
        self.runs.iter().map(|run| if run.arrived() { of(run) } else { f64::NAN }).collect()
    }
}

impl Results {
    fn setting(&self) -> String {
        let (memory, channels) = (units::bytes(self.guest_bytes), self.channels);
        let link = units::short(self.link_bytes_per_s as f64 / 1e6);
        let kvm = if self.kvm { "" } else { ", no KVM that is quicker than emulation: its guests are emulated, too" };
        format!("{memory}, a link of {link} MB/s, {channels} channels{kvm} · {}", self.machine.title(&self.qemu))
    }

    /// All series, a case at a time.
    pub(crate) fn cases(&self) -> Vec<(&Case, Vec<&Series>)> {
        let mut cases: Vec<(&Case, Vec<&Series>)> = Vec::new();
        for series in &self.series {
            match cases.last_mut().filter(|(case, _)| **case == series.case) {
                Some((_, list)) => list.push(series),
                None => cases.push((&series.case, vec![series])),
            }
        }
        cases
    }

    pub(crate) fn table(&self) -> String {
        let lines: Vec<_> =
            std::iter::once(HEAD.map(str::to_owned)).chain(self.series.iter().map(Series::cells)).collect();
        let mut text = format!("{}\n{}\n{}", self.setting(), self.machine.warning(), aligned(LEFT_COLUMNS, &lines));
        text.push_str(
            "\nMedians. Blackout: the longest silence between two beats of the guest. Work: what it wrote meanwhile, of what it\n\
             wrote before. Waits: for pages in post-copy, at the median and in 99 of 100 cases; QEMU does not tell. × N: N times\n\
             what the link carries; its most: the guest can't write so much more.\n",
        );
        for series in &self.series {
            if let Some(why) = &series.not_possible {
                text.push_str(&format!("{}: {why}\n", series.title()));
            }
        }
        if let Some((within, median)) = aims::forecasts(&self.series) {
            let [within, median] = [within * 100.0, median * 100.0].map(units::short);
            text.push_str(&format!(
                "Forecasts of time after the first round: {within} % of them within {:.0} % of what came; half of them \
                 within {median} %.\n",
                aims::FORECAST_ERROR * 100.0
            ));
        }
        text
    }

    pub(crate) fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for (case, all) in self.cases() {
            for (ours, theirs) in ALIKE {
                let find = |way| all.iter().find(|series| series.way == way && !series.runs.is_empty());
                let (Some(ours), Some(theirs)) = (find(ours), find(theirs)) else { continue };
                let row = |what: &str, of: fn(&Run) -> f64| {
                    let title = format!("{}: {} by {}, {what}", case.title(), ours.way.title(), theirs.way.title());
                    Row::of(title, FRESH, ours.numbers(of), theirs.numbers(of))
                };
                let work = |series: &Series| units::short(series.median(|run| run.work * 100.0));
                let sent = |series: &Series| series.median(|run| run.wire_bytes as f64);
                let bytes = |series: &Series| units::bytes(sent(series) as u64);
                let mbit = (self.link_bytes_per_s * 8 / 1_000_000) as u32;
                let time = row("time", |run| run.ms).limit(Some(limits::link(mbit, sent(ours))));
                let time = time.fact("work %", work(ours), work(theirs));
                rows.push(time.fact("bytes", bytes(ours), bytes(theirs)));
                rows.push(row("blackout", |run| run.blackout_ms).limit(self.state.map(StateAlone::moved)));
            }
        }
        rows
    }

    pub(crate) fn aims(&self) -> Aims {
        aims::of(self)
    }

    pub(crate) fn svg(&self) -> String {
        let line = |series: &&Series| {
            let side = if series.way.is_ours() { Side::Ours } else { Side::Qemu };
            let (ms, remark) = match series.ended() {
                ended if ended == "moved" => (series.median(|run| run.ms), String::new()),
                ended => (series.median(|run| run.ms), ended),
            };
            let note = format!("{} %", units::short(series.median(|run| run.work * 100.0)));
            Line { title: series.way.title().to_owned(), bars: vec![Bar { side, ms, remark }], note }
        };
        let group = |(case, all): (&Case, Vec<&Series>)| Group {
            title: case.title(),
            lines: all.iter().filter(|series| !series.runs.is_empty()).map(line).collect(),
        };
        Chart {
            title: "Guests that write faster than the link carries",
            setting: &self.setting(),
            legend: &[(Side::Ours, "transship"), (Side::Qemu, "stock QEMU")],
            notes: "work done",
            axis: "time until the move ended",
            groups: self.cases().into_iter().map(group).collect(),
        }
        .svg()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use super::*;
    use crate::converge::{Guest, cases::Hot};

    pub(crate) fn series(times: f64, way: Way, status: &str, (ms, work): (f64, f64)) -> Series {
        let case = Case { wire: Wire::Cable, guest: Guest::Kvm, hot: Hot::All, times, pages_per_s: 9 };
        let run = Run { status: status.to_owned(), ms, work, blackout_ms: 40.0, ..Run::default() };
        Series { runs: vec![run; 3], ..Series::new(case, way) }
    }

    pub(crate) fn results(series: Vec<Series>) -> Results {
        Results {
            machine: Machine::here(),
            qemu: "10".into(),
            kvm: true,
            guest_bytes: 1 << 30,
            channels: 2,
            links: vec![Link { wire: Wire::Cable, round_trip_ms: 0.2 }],
            link_bytes_per_s: 125_000_000,
            state: None,
            series,
        }
    }

    #[test]
    fn ways_that_do_the_same_are_set_against_each_other() {
        let results = results(vec![
            series(2.0, Way::Never, "not-converging", (5000.0, 1.0)),
            series(2.0, Way::Pace, "completed", (9000.0, 0.5)),
            series(2.0, Way::AutoConverge, "completed", (18_000.0, 0.5)),
            series(5.0, Way::Postcopy, "completed", (9000.0, 0.5)),
        ]);
        assert_eq!(results.cases().len(), 2);
        let rows = results.rows();
        assert_eq!(rows.len(), 2, "{rows:?}");
        assert_eq!(rows[0].compared.unwrap().times, 2.0);
        let text = results.table();
        assert!(text.contains("not-converging") && text.contains("× 2"), "{text}");
    }

    #[test]
    fn what_can_not_be_had_says_why() {
        let mut limited = series(2.0, Way::DirtyLimit, "completed", (1.0, 1.0));
        limited.runs.clear();
        limited.not_possible = Some("no dirty ring".into());
        let results = results(vec![limited]);
        let text = results.table();
        assert!(text.contains("not possible") && text.contains("no dirty ring"), "{text}");
        assert!(results.rows().is_empty());
    }

    #[test]
    fn the_picture_has_a_bar_for_each() {
        let svg = results(vec![
            series(2.0, Way::Pace, "completed", (9000.0, 0.5)),
            series(2.0, Way::AutoConverge, "no end in 60 s", (60_000.0, 0.2)),
        ])
        .svg();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let texts: Vec<_> = document.descendants().filter_map(|node| node.text()).collect();
        assert!(texts.iter().any(|text| text.contains("9000 ms") || text.contains("9 s")), "{texts:?}");
        assert!(texts.iter().any(|text| text.contains("no end")), "{texts:?}");
    }
}
