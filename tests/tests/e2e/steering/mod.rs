//! Speaking to moves and saves that run, from other processes.
use serde_json::Value;
use transship_lab::{Finished, Result, Transship, wait_until};

/// What it says of itself; none if it is not found.
pub(crate) fn status(which: &str) -> Result<Option<Value>> {
    let ended = Transship::command(["status", which, "--json"]).run()?;
    if ended.code() != Some(0) {
        return Ok(None);
    }
    Ok(Some(ended.report()?[0].clone()))
}

/// Waits until it is in this state, and gives that.
pub(crate) fn wait_for(run: &mut Transship, which: &str, hold: &str) -> Result<Value> {
    let mut state = Value::Null;
    wait_until(&format!("it to be {hold}"), || {
        if let Some(status) = run.process().ended()? {
            let why = format!("it ended early, {status}: {}", run.stderr().tail());
            return Err(transship_lab::LabError(why));
        }
        state = status(which)?.unwrap_or_default();
        Ok(state["hold"] == hold)
    })?;
    Ok(state)
}

/// The run that has this process.
pub(crate) fn which(run: &Transship) -> String {
    run.pid().to_string()
}

pub(crate) fn go(which: &[&str]) -> Result<Finished> {
    Transship::command([&["go"], which].concat()).run()
}

pub(crate) fn cancel(which: &str) -> Result<Finished> {
    Transship::command(["cancel", which]).run()
}
