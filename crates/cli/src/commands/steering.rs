//! `transship status`, `cancel` and `go`: moves and saves that run, from another process.
use std::{fmt::Write as _, time::Duration};

use serde::Serialize;

use crate::{
    args::{CancelArgs, GoArgs, StatusArgs},
    control::{self, Call, Found, Hold, Request, State},
    failure::Failure,
    output,
    units::{Bytes, Rate, Time},
};

pub(crate) fn status(args: &StatusArgs) -> Result<(), Failure> {
    let mut failed = Vec::new();
    let found = match &args.which {
        Some(which) => vec![control::one(which)?],
        None => control::all(&mut failed)?,
    };
    failed.iter().for_each(|why| output::complain(why));
    let shown: Vec<_> = found.iter().map(|Found { socket, state, .. }| Shown { state, socket }).collect();
    match args.json {
        true => output::json(&shown)?,
        false => output::result(&table(&shown))?,
    }
    Ok(())
}

pub(crate) fn cancel(args: &CancelArgs) -> Result<(), Failure> {
    let mut found = control::one(&args.which)?;
    let answer = found.tell(Request { call: Call::Cancel, early: false }).and_then(|()| found.answer());
    match answer {
        Ok(words) => Ok(output::result(&format!("{}\n", in_words(&words)))?),
        Err(why) => Err(Failure::Failed(format!("{}: {why}", found.state.vm))),
    }
}

/// All of them, or none: each is asked first. Then all are told before any is waited for.
pub(crate) fn go(args: &GoArgs) -> Result<(), Failure> {
    let mut found = args.which.iter().map(|which| control::one(which)).collect::<Result<Vec<_>, _>>()?;
    if found.len() > 1
        && let Some(Found { state, .. }) = found.iter().find(|found| !may_go(&found.state, args.early))
    {
        let line = format!("{} is not ready: {}; nothing was released", state.vm, doing(state));
        return Err(Failure::Failed(line));
    }
    let told: Vec<_> =
        found.iter_mut().map(|found| found.tell(Request { call: Call::Go, early: args.early })).collect();
    let mut failed = 0;
    for (found, told) in found.iter_mut().zip(told) {
        match told.and_then(|()| found.answer()) {
            Ok(words) => output::result(&format!("{}: {}\n", found.state.vm, in_words(&words)))?,
            Err(why) => {
                failed += 1;
                output::complain(&format!("{}: {why}", found.state.vm));
            }
        }
    }
    match failed {
        0 => Ok(()),
        _ => Err(Failure::Failed(format!("{failed} of {} were not released", found.len()))),
    }
}

fn may_go(state: &State, early: bool) -> bool {
    match state.hold {
        Hold::Ready | Hold::Released => true,
        Hold::NotYet | Hold::Converging => early,
        Hold::Never => false,
    }
}

fn in_words(answer: &serde_json::Value) -> String {
    output::one_line(answer.as_str().unwrap_or("done"))
}

#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    state: &'a State,
    socket: &'a std::path::Path,
}

fn table(all: &[Shown<'_>]) -> String {
    if all.is_empty() {
        return "no move or save runs for this user\n".into();
    }
    let row = |state: &State| [state.pid.to_string(), state.command.clone(), state.vm.clone(), state.to.clone()];
    let head = ["PID", "COMMAND", "VM", "TO"].map(str::to_owned);
    let rows: Vec<_> = std::iter::once(head).chain(all.iter().map(|shown| row(shown.state))).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths = [0, 1, 2, 3].map(width);
    let doings = std::iter::once("DOES".to_owned()).chain(all.iter().map(|shown| doing(shown.state)));
    let mut text = String::new();
    for (row, doing) in rows.iter().zip(doings) {
        for (cell, width) in row.iter().zip(widths) {
            let _ = write!(text, "{:<width$}  ", output::one_line(cell));
        }
        let _ = writeln!(text, "{}", output::one_line(&doing));
    }
    text
}

/// On one line.
fn doing(state: &State) -> String {
    let time = |ms: u64| Time(Duration::from_millis(ms));
    let mut text = match (state.hold, state.held_ms) {
        (Hold::Ready, Some(ms)) => format!("held for {}", time(ms)),
        (Hold::Converging, Some(ms)) => format!("held for {}, converging again", time(ms)),
        _ => state.phase.clone(),
    };
    if matches!(&*state.phase, "rounds" | "held") {
        let (left, dirty) = (Bytes(state.left_bytes), Rate(state.dirty_bytes_per_s as f64));
        let _ = write!(text, ", round {}, {left} left, dirty {dirty}", state.round);
    }
    let _ = write!(text, ", {} in {}", Bytes(state.wire_bytes), time(state.elapsed_ms));
    if let Some(ms) = state.deadline_ms {
        let _ = write!(text, ", {} until the deadline", time(ms));
    }
    if state.hold == Hold::NotYet {
        text.push_str(", to be held");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_table_has_a_line_for_each() {
        assert_eq!(table(&[]), "no move or save runs for this user\n");
        let state = State {
            pid: 17,
            command: "move".into(),
            vm: "qemu:/run/vm1.qmp".into(),
            to: "tcp:ship2:4444".into(),
            phase: "held".into(),
            hold: Hold::Ready,
            held_ms: Some(12_000),
            elapsed_ms: 61_000,
            deadline_ms: Some(90_000),
            round: 5,
            left_bytes: 1 << 20,
            wire_bytes: 3 << 30,
            dirty_bytes_per_s: 2 << 20,
        };
        let converging = State { pid: 4711, hold: Hold::Converging, phase: "rounds".into(), ..state.clone() };
        let socket = Path::new("/run/transship/control/17-vm1.qmp");
        let text = table(&[Shown { state: &state, socket }, Shown { state: &converging, socket }]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "PID   COMMAND  VM                 TO              DOES");
        let held = "held for 12.0 s, round 5, 1.0 MiB left, dirty 2.0 MiB/s, 3.0 GiB in 1 m 01 s, 1 m 30 s until the \
                    deadline";
        assert_eq!(lines[1], format!("17    move     qemu:/run/vm1.qmp  tcp:ship2:4444  {held}"));
        assert!(lines[2].contains("converging again, round 5"), "{text}");
        let waiting = State { hold: Hold::NotYet, phase: "connecting".into(), ..state };
        assert!(doing(&waiting).ends_with("until the deadline, to be held"), "{}", doing(&waiting));
    }
}
