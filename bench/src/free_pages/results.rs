//! Single moves, and what follows from them.
use std::path::Path;

use serde::{Serialize, Serializer, ser::SerializeStruct};

use super::{
    cases::{Case, Load, Way},
    guests::Work,
};
use crate::{
    files::By,
    limits,
    machine::Machine,
    rows::{FRESH, Limit, Row},
    units,
};

/// One move. What a side does not tell is none.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Run {
    /// Ours: `total_ms` of the report. QEMU's: from the command until both sides say that it is completed.
    pub(crate) ms: f64,
    /// Ours: from the start of the process to its end.
    pub(crate) process_ms: Option<f64>,
    /// Of `ms`, ours: the first round, without waiting for hints before it.
    pub(crate) first_round_ms: Option<f64>,
    /// What QEMU itself gives as the total time.
    pub(crate) own_total_ms: Option<f64>,
    /// As each side gives it.
    pub(crate) downtime_ms: f64,
    pub(crate) wire_bytes: u64,
    /// Ours: rounds, with the last one. QEMU's: how often it has looked for written pages.
    pub(crate) rounds: u64,
    /// Ours: pages that hints spared.
    pub(crate) named_pages: Option<u64>,
    /// Of the source's memory, before: what was not a hole.
    pub(crate) allocated_bytes: u64,
    /// What a busy guest did before, and from the call until it is heard at the destination. None: it is idle.
    pub(crate) work_before: Option<Work>,
    pub(crate) work_during: Option<Work>,
}

impl Run {
    /// Of what the guest does undisturbed.
    fn work_share(&self) -> f64 {
        match (self.work_before, self.work_during) {
            (Some(before), Some(during)) => during.per_s() / before.per_s(),
            _ => f64::NAN,
        }
    }

    /// So long the guest would have to work undisturbed for what it did not do.
    fn lost_s(&self) -> f64 {
        self.work_during.map_or(f64::NAN, |during| during.seconds * (1.0 - self.work_share()))
    }
}

/// All moves of one case.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    pub(crate) case: Case,
    pub(crate) runs: Vec<Run>,
}

/// Of several numbers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Mean {
    pub(crate) mean: f64,
    /// The standard deviation; 0 for a single number.
    pub(crate) deviation: f64,
}

impl Mean {
    pub(crate) fn of(numbers: impl Iterator<Item = f64>) -> Self {
        let numbers: Vec<f64> = numbers.collect();
        let count = numbers.len() as f64;
        let mean = numbers.iter().sum::<f64>() / count;
        let squares: f64 = numbers.iter().map(|number| (number - mean).powi(2)).sum();
        let deviation = if numbers.len() < 2 { 0.0 } else { (squares / (count - 1.0)).sqrt() };
        Self { mean, deviation }
    }
}

impl Series {
    pub(crate) fn new(case: Case) -> Self {
        Self { case, runs: Vec::new() }
    }

    fn mean(&self, of: impl Fn(&Run) -> f64) -> Mean {
        Mean::of(self.runs.iter().map(of))
    }

    pub(super) fn ms(&self) -> Mean {
        self.mean(|run| run.ms)
    }

    pub(super) fn downtime_ms(&self) -> Mean {
        self.mean(|run| run.downtime_ms)
    }

    pub(super) fn wire_bytes(&self) -> f64 {
        self.mean(|run| run.wire_bytes as f64).mean
    }

    pub(super) fn rounds(&self) -> f64 {
        self.mean(|run| run.rounds as f64).mean
    }

    /// Of what the guest does undisturbed: what it does while it is moved.
    pub(super) fn work_share(&self) -> f64 {
        self.mean(Run::work_share).mean
    }

    pub(super) fn lost_s(&self) -> f64 {
        self.mean(Run::lost_s).mean
    }
}

impl Serialize for Series {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Case { guest_bytes, load, way, by } = self.case;
        let mut object = serializer.serialize_struct("Series", 11)?;
        object.serialize_field("guest_bytes", &guest_bytes)?;
        object.serialize_field("load", &load)?;
        object.serialize_field("way", &way)?;
        object.serialize_field("by", &by)?;
        object.serialize_field("ms", &self.ms())?;
        object.serialize_field("downtime_ms", &self.downtime_ms())?;
        object.serialize_field("wire_bytes", &self.wire_bytes())?;
        object.serialize_field("rounds", &self.rounds())?;
        object.serialize_field("work_share", &self.work_share())?;
        object.serialize_field("lost_s", &self.lost_s())?;
        object.serialize_field("runs", &self.runs)?;
        object.end()
    }
}

/// Everything.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Results {
    pub(crate) machine: Machine,
    /// As it calls itself.
    pub(crate) qemu: String,
    pub(crate) channels: u8,
    /// There and back.
    pub(crate) times: u32,
    pub(crate) series: Vec<Series>,
}

impl Results {
    pub(super) fn of(&self, case: Case) -> Option<&Series> {
        self.series.iter().find(|series| series.case == case)
    }

    /// The same guest with the same devices, moved by QEMU.
    pub(super) fn beside(&self, ours: &Series) -> Option<&Series> {
        self.of(Case { by: By::Qemu, ..ours.case })
    }

    /// The same move of a guest that says nothing of its free memory, by the same side.
    pub(super) fn without(&self, series: &Series) -> Option<&Series> {
        self.of(Case { way: Way::Without, ..series.case }).filter(|_| series.case.way != Way::Without)
    }

    /// What is spared of the time without, from 0 to 1.
    pub(super) fn gain(&self, series: &Series) -> Option<f64> {
        Some(1.0 - series.ms().mean / self.without(series)?.ms().mean)
    }

    /// What all tables say alike, move by move.
    pub(super) fn rows(&self, base: &Path) -> Result<Vec<Row>, String> {
        let ms = |series: &Series| series.runs.iter().map(|run| run.ms).collect::<Vec<_>>();
        let row = |ours: &Series| {
            let qemu = self.beside(ours);
            let Case { guest_bytes, load, way, .. } = ours.case;
            let title = format!("{}, {}, {}", units::bytes(guest_bytes), load.title(), way.title());
            let fact = |of: &dyn Fn(&Series) -> String| (of(ours), qemu.map_or_else(String::new, of));
            let (wire, downtime) = (
                fact(&|series| units::bytes(series.wire_bytes() as u64)),
                fact(&|series| units::short(series.downtime_ms().mean)),
            );
            let row = Row::of(title, "full of old data", ms(ours), qemu.map(ms).unwrap_or_default());
            let Limit { what, value } = limits::copy(base, ours.wire_bytes() as u64, FRESH)?;
            let row = row.limit(Some(Limit { what: format!("{what}, of what was sent"), value }));
            Ok(row.fact("wire", wire.0, wire.1).fact("downtime ms, as reported", downtime.0, downtime.1))
        };
        self.ours().map(row).collect()
    }

    pub(super) fn ours(&self) -> impl Iterator<Item = &Series> {
        self.series.iter().filter(|series| series.case.by == By::Transship)
    }

    /// As they are told: by size, then load.
    pub(super) fn groups(&self) -> Vec<(u64, Load)> {
        let mut groups = Vec::new();
        for Series { case, .. } in &self.series {
            if !groups.contains(&(case.guest_bytes, case.load)) {
                groups.push((case.guest_bytes, case.load));
            }
        }
        groups.sort_by_key(|(bytes, load)| (*bytes, *load == Load::Busy));
        groups
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn series(gib: u64, load: Load, way: Way, by: By, ms: f64, wire_bytes: u64, during: u64) -> Series {
        let work = |units| (load == Load::Busy).then_some(Work { units, seconds: 2.0 });
        let run = |ms| Run {
            ms,
            downtime_ms: 50.0,
            wire_bytes,
            rounds: 3,
            work_before: work(400),
            work_during: work(during),
            ..Run::default()
        };
        Series { case: Case { guest_bytes: gib * GIB, load, way, by }, runs: vec![run(ms - 10.0), run(ms + 10.0)] }
    }

    pub(crate) fn results() -> Results {
        use {By::*, Load::*, Way::*};
        let all = vec![
            series(2, Idle, Without, Transship, 2000.0, 1 << 31, 0),
            series(2, Idle, Without, Qemu, 2500.0, 1 << 31, 0),
            series(2, Idle, Hints, Transship, 500.0, 1 << 27, 0),
            series(2, Idle, Hints, Qemu, 1200.0, 1 << 28, 0),
            series(2, Idle, Reporting, Transship, 300.0, 1 << 27, 0),
            series(2, Idle, Reporting, Qemu, 1500.0, 1 << 27, 0),
            series(2, Busy, Without, Transship, 2200.0, 1 << 31, 300),
            series(2, Busy, Hints, Transship, 1000.0, 1 << 28, 360),
            series(2, Busy, Hints, Qemu, 2400.0, 1 << 28, 380),
            series(4, Idle, Without, Transship, 4000.0, 1 << 32, 0),
            series(4, Idle, Hints, Transship, 600.0, 1 << 27, 0),
        ];
        Results { machine: Machine::here(), qemu: "11.1.0".into(), channels: 4, times: 1, series: all }
    }

    #[test]
    fn means_have_their_spread() {
        assert_eq!(Mean::of([2.0, 4.0, 6.0].into_iter()), Mean { mean: 4.0, deviation: 2.0 });
        assert_eq!(Mean::of([5.0].into_iter()), Mean { mean: 5.0, deviation: 0.0 });
        assert!(Mean::of([].into_iter()).mean.is_nan());
    }

    #[test]
    fn cases_are_compared_with_what_belongs_to_them() {
        let results = results();
        let case = |way, by| Case { guest_bytes: 2 * GIB, load: Load::Idle, way, by };
        let hints = results.of(case(Way::Hints, By::Transship)).unwrap();
        assert_eq!(results.gain(hints), Some(0.75));
        assert_eq!(results.beside(hints).unwrap().case, case(Way::Hints, By::Qemu));
        assert_eq!(results.gain(results.of(case(Way::Without, By::Transship)).unwrap()), None);
        let busy = results.of(Case { load: Load::Busy, ..hints.case }).unwrap();
        assert_eq!((busy.work_share(), busy.rounds()), (0.9, 3.0));
        assert!((busy.lost_s() - 0.2).abs() < 1e-9);
        assert_eq!(results.groups(), [(2 * GIB, Load::Idle), (2 * GIB, Load::Busy), (4 * GIB, Load::Idle)]);
    }

    #[test]
    fn all_single_runs_are_in_the_json() {
        let json = serde_json::to_value(results()).unwrap();
        let busy = &json["series"][7];
        assert_eq!((&busy["load"], &busy["way"], &busy["by"]), (&"busy".into(), &"hints".into(), &"transship".into()));
        assert_eq!(busy["runs"][1]["ms"], 1010.0);
        assert_eq!(busy["runs"][0]["work_during"]["units"], 360);
        assert_eq!(json["series"][0]["runs"][0]["work_before"], serde_json::Value::Null);
    }
}
