//! What came of all steps, by who was hurt.
use crate::plan::{Blow, Harm, Step, Victim, Way};
use crate::verdict::Outcome;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

const OUTCOMES: [(Outcome, &str); 5] = [
    (Outcome::Arrived, "arrived"),
    (Outcome::Stayed, "stayed"),
    (Outcome::ByHand, "by hand"),
    (Outcome::Again, "again"),
    (Outcome::Lost, "lost with its host"),
];

#[derive(Debug, Default)]
struct Row {
    outcomes: BTreeMap<Outcome, u64>,
    /// The step had ended before, or there was nobody.
    missed: u64,
    failed: u64,
}

/// All of it.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    rows: BTreeMap<(Victim, Option<Harm>), Row>,
    steps: u64,
    /// Those of the steps that were a move, and no save with its restore.
    moves: u64,
    longest: Duration,
}

impl Tally {
    pub(crate) fn count(&mut self, step: &Step, hit: bool, outcome: Outcome, took: Duration) {
        let (blow, row) = (&step.blow, self.row(&step.blow));
        *row.outcomes.entry(outcome).or_default() += 1;
        row.missed += u64::from(!hit && blow.victim != Victim::Nobody);
        self.begun(step);
        self.longest = self.longest.max(took);
    }

    pub(crate) fn fail(&mut self, step: &Step) {
        self.row(&step.blow).failed += 1;
        self.begun(step);
    }

    fn begun(&mut self, step: &Step) {
        self.steps += 1;
        self.moves += u64::from(matches!(step.way, Way::Move { .. }));
    }

    pub(crate) fn failures(&self) -> u64 {
        self.rows.values().map(|row| row.failed).sum()
    }

    fn row(&mut self, blow: &Blow) -> &mut Row {
        let harm = (blow.victim != Victim::Nobody).then_some(blow.harm);
        self.rows.entry((blow.victim, harm)).or_default()
    }

    /// As Markdown.
    pub(crate) fn table(&self) -> String {
        let mut text = String::from("| who | what | steps |");
        OUTCOMES.iter().for_each(|(_, name)| _ = write!(text, " {name} |"));
        text.push_str(" too late | wrong |\n| --- | --- | ---: |");
        text.push_str(&" ---: |".repeat(OUTCOMES.len() + 2));
        for ((victim, harm), row) in &self.rows {
            let steps = row.outcomes.values().sum::<u64>() + row.failed;
            _ = write!(text, "\n| {} | {} | {steps} |", name(*victim), done(*harm));
            OUTCOMES.iter().for_each(|(outcome, _)| _ = write!(text, " {} |", row.outcomes.get(outcome).unwrap_or(&0)));
            _ = write!(text, " {} | {} |", row.missed, row.failed);
        }
        text
    }

    pub(crate) fn json(&self, seed: u64, took: Duration) -> Value {
        let rows = self.rows.iter().map(|((victim, harm), row)| {
            let mut value =
                json!({ "victim": name(*victim), "harm": done(*harm), "too_late": row.missed, "wrong": row.failed });
            for (outcome, name) in OUTCOMES {
                value[name.replace(' ', "_")] = (*row.outcomes.get(&outcome).unwrap_or(&0)).into();
            }
            value
        });
        let rows: Vec<Value> = rows.collect();
        json!({
            "seed": seed, "steps": self.steps, "moves": self.moves, "total_s": took.as_secs_f64(),
            "longest_step_s": self.longest.as_secs_f64(), "rows": rows
        })
    }
}

fn name(victim: Victim) -> &'static str {
    match victim {
        Victim::Nobody => "nobody",
        Victim::Move => "move",
        Victim::Receive => "receive",
        Victim::Guard => "guard",
        Victim::SourceQemu => "source QEMU",
        Victim::DestinationQemu => "destination QEMU",
        Victim::Link => "link",
        Victim::Save => "save",
        Victim::Restore => "restore",
        Victim::StandIn => "stand-in",
    }
}

fn done(harm: Option<Harm>) -> &'static str {
    match harm {
        None => "",
        Some(Harm::Kill) => "killed",
        Some(Harm::Hold) => "held",
    }
}
