//! Both ends of a move.
use serde_json::Value;
use transship_lab::{
    Finished, LabError, Result, Scratch, Synthetic, Transship,
    synthetic::{SyntheticBuilder, SyntheticState},
    transship::TransshipBuilder,
    wait_until,
};

/// Both ends of a move that have ended as they should.
pub(crate) struct Moved {
    pub(crate) source: Finished,
    pub(crate) destination: Finished,
}

/// Runs a move to its end over a unix socket; both ends must exit with 0.
pub(crate) fn move_between(source: &str, destination: &str, flags: &[&str]) -> Result<Moved> {
    move_with(source, destination, flags, &[])
}

/// The same with flags for the receiver.
pub(crate) fn move_with(source: &str, destination: &str, flags: &[&str], receiver: &[&str]) -> Result<Moved> {
    let folder = Scratch::new()?;
    let receiving = Transship::receiving(destination, &format!("unix:{}", folder.join("move").display()));
    let receive = receiving.args(receiver.iter().copied()).start()?;
    let to = receive.listening()?;
    let source = Transship::moving(source, &to).args(flags.iter().copied()).run()?.expect_code(0)?;
    Ok(Moved { source, destination: receive.wait()?.expect_code(0)? })
}

/// Starts a move that waits after its first round, until the file `gate` is removed.
pub(crate) fn in_the_middle(builder: TransshipBuilder, folder: &Scratch) -> Result<Transship> {
    held_at("source.round", builder, folder)
}

/// The same at another step.
pub(crate) fn held_at(step: &str, builder: TransshipBuilder, folder: &Scratch) -> Result<Transship> {
    let gate = folder.join("gate");
    let armed = builder.env("TRANSSHIP_FAIL_POINT", format!("{step}=stall")).env("TRANSSHIP_FAIL_FILE", &gate);
    let mut moving = armed.start()?;
    wait_until(step, || {
        if let Some(status) = moving.process().ended()? {
            return Err(LabError(format!("the move ended early, {status}: {}", moving.stderr().tail())));
        }
        Ok(gate.exists())
    })?;
    Ok(moving)
}

pub(crate) fn number(report: &Value, pointer: &str) -> f64 {
    report.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("no {pointer} in {report}"))
}

/// The synthetic guest that came in has every page as it was written last.
pub(crate) fn assert_whole(guest: &Synthetic) -> Result<()> {
    assert_eq!(guest.state()?, SyntheticState::Running);
    let check = guest.check()?;
    assert_eq!(check.wrong, 0, "{check:?}");
    assert!(check.pages > 0);
    Ok(())
}

/// A guest, and one that waits for it.
pub(crate) fn synthetic_pair(builder: SyntheticBuilder) -> Result<(Synthetic, Synthetic)> {
    let destination = builder.clone().incoming().start()?;
    Ok((builder.start()?, destination))
}
