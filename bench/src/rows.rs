//! Rows as every table has them: both sides run by run, what bounds them, and how the row stands.
use std::fmt::Write;

use serde::{Deserialize, Serialize};

use crate::{
    results::Spread,
    table::aligned,
    units,
    verdict::{Compared, compare},
};

/// One thing that was measured by both sides, or by one.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) title: String,
    /// In which state memory was before each run.
    pub(crate) memory: String,
    /// What the numbers are: `ms` where nothing else is said. Less is always better.
    pub(crate) unit: String,
    /// Run by run; those with the same place are a pair. What did not end is none.
    pub(crate) ours: Vec<Option<f64>>,
    /// Empty: QEMU has nothing like it.
    pub(crate) qemu: Vec<Option<f64>>,
    /// None, or several: each bounds it by itself.
    #[serde(default)]
    pub(crate) limits: Vec<Limit>,
    /// What else is known of both, in their own units.
    pub(crate) facts: Vec<Fact>,
    /// From the numbers above; here for whoever reads the JSON.
    pub(crate) compared: Option<Compared>,
}

/// What nobody is faster than, measured beside the row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Limit {
    /// Of what.
    pub(crate) what: String,
    /// In the row's unit.
    pub(crate) value: f64,
}

/// Another number of both sides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Fact {
    pub(crate) name: String,
    pub(crate) ours: String,
    pub(crate) qemu: String,
}

/// Memory of the destination that is not there yet, of which the machine has enough at hand.
pub(crate) const FRESH: &str = "fresh";
/// Memory of the destination that is there already.
pub(crate) const WARM: &str = "warm";

impl Row {
    /// Of milliseconds, run by run.
    pub(crate) fn of(title: impl Into<String>, memory: impl Into<String>, ours: Vec<f64>, qemu: Vec<f64>) -> Self {
        let known = |list: Vec<f64>| list.into_iter().map(|ms| ms.is_finite().then_some(ms)).collect();
        let (title, memory) = (title.into(), memory.into());
        let row = Self { title, memory, unit: "ms".into(), ours: known(ours), qemu: known(qemu), ..Self::default() };
        let compared = compare(&row.numbers(Side::Ours), &row.numbers(Side::Qemu));
        Self { compared, ..row }
    }

    /// With another unit.
    pub(crate) fn unit(self, unit: &str) -> Self {
        Self { unit: unit.into(), ..self }
    }

    /// With what bounds it, beside what already does.
    pub(crate) fn limit(mut self, limit: impl IntoIterator<Item = Limit>) -> Self {
        self.limits.extend(limit);
        self
    }

    /// With one more number of both sides.
    pub(crate) fn fact(mut self, name: &str, ours: impl Into<String>, qemu: impl Into<String>) -> Self {
        self.facts.push(Fact { name: name.into(), ours: ours.into(), qemu: qemu.into() });
        self
    }

    /// The numbers of a side; NaN where a run did not end.
    pub(crate) fn numbers(&self, side: Side) -> Vec<f64> {
        let list = if side == Side::Ours { &self.ours } else { &self.qemu };
        list.iter().map(|ms| ms.unwrap_or(f64::NAN)).collect()
    }

    /// The median of the runs that ended.
    pub(crate) fn median(&self, side: Side) -> f64 {
        Spread::of(self.numbers(side).into_iter().filter(|ms| ms.is_finite())).median
    }

    /// How near to each of its limits we are: 1 is there.
    pub(crate) fn of_limits(&self) -> impl Iterator<Item = (f64, &Limit)> {
        let ours = self.median(Side::Ours);
        self.limits.iter().map(move |limit| (limit.value / ours, limit)).filter(|(share, _)| share.is_finite())
    }
}

/// Whose numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Ours,
    Qemu,
}

const HEAD: [&str; 8] = ["row", "memory", "ours", "QEMU", "× QEMU", "interval", "verdict", "of its limits"];
const LEFT_COLUMNS: usize = 2;

/// The rows for people.
pub(crate) fn text(rows: &[Row]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let lines: Vec<[String; 8]> = std::iter::once(HEAD.map(str::to_owned)).chain(rows.iter().map(cells)).collect();
    let mut text = format!("Rows\n{}", aligned(LEFT_COLUMNS, &lines));
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "\n× QEMU: QEMU's time by ours, median of the pairs, and where 95 % of a bootstrap's medians are. Ahead or behind: that\n\
         interval is on one side of 1."
    );
    text
}

fn cells(row: &Row) -> [String; 8] {
    let number = |side| match row.median(side) {
        median if median.is_finite() => format!("{} {}", units::short(median), row.unit),
        _ => String::new(),
    };
    let (times, interval, verdict) =
        row.compared.map_or_else(Default::default, |Compared { times, low, high, .. }| {
            let verdict = row.compared.map_or("", |compared| compared.verdict.title());
            (format!("{times:.2}"), format!("{low:.2} to {high:.2}"), verdict.to_owned())
        });
    let limits: Vec<_> = row.of_limits().map(|(share, limit)| format!("{share:.2} ({})", limit.what)).collect();
    let limits = limits.join(", ");
    [row.title.clone(), row.memory.clone(), number(Side::Ours), number(Side::Qemu), times, interval, verdict, limits]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Verdict;

    #[test]
    fn a_row_has_its_verdict_and_its_limit() {
        let limit = |what: &str, value| Limit { what: what.into(), value };
        let row = Row::of("random", FRESH, vec![100.0, 110.0, 100.0], vec![150.0, 160.0, 140.0]);
        let row = row.limit(Some(limit("copy", 90.0))).limit([limit("look", 50.0), limit("none", f64::NAN)]);
        assert_eq!(row.compared.map(|compared| compared.verdict), Some(Verdict::Ahead));
        assert_eq!(row.of_limits().map(|(share, _)| share).collect::<Vec<_>>(), [0.9, 0.5]);
        let text = text(&[row]);
        let line = text.lines().find(|line| line.starts_with("random")).unwrap_or_default();
        let words: Vec<_> = line.split_whitespace().collect();
        assert_eq!(words.join(" "), "random fresh 100 ms 150 ms 1.45 1.40 to 1.50 ahead 0.90 (copy), 0.50 (look)");
    }

    #[test]
    fn a_side_that_is_not_there_has_no_verdict() {
        let row = Row::of("lz4", FRESH, vec![100.0], vec![]).unit("µs").fact("wire", "1 MiB", "");
        assert_eq!((row.compared, row.of_limits().count()), (None, 0));
        assert!(text(&[row]).contains("100 µs"));
        assert_eq!(text(&[]), "");
    }

    #[test]
    fn a_run_that_did_not_end_survives_the_json() {
        let row = Row::of("live", FRESH, vec![f64::NAN, 5.0], vec![7.0, 8.0]);
        let json = serde_json::to_string(&row).expect("it has only names and numbers");
        assert_eq!(serde_json::from_str::<Row>(&json).expect("it was written so"), row);
        assert_eq!(row.ours, [None, Some(5.0)]);
    }
}
