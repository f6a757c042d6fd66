//! Named steps at which a test makes this process die or stall, to see what the other parties then do.
//!
//! Without the feature `fail-points` they do nothing. With it, `TRANSSHIP_FAIL_POINT=NAME=ACTION` arms one step, or
//! more, with commas between: `kill` ends the process as `kill -9` would; `stall` writes the step's name to the file
//! that `TRANSSHIP_FAIL_FILE` names and goes on when somebody has removed it; `error` makes the step fail. A step acts
//! once: what comes in rounds goes on with the next.

/// Marks a step.
#[cfg(not(feature = "fail-points"))]
#[inline]
pub(crate) fn reach(_name: &str) -> Result<(), crate::Error> {
    Ok(())
}

/// Marks a step that more than one kind of peer comes to.
pub(crate) fn reach_by(peer: &str, step: &str) -> Result<(), crate::Error> {
    if cfg!(feature = "fail-points") { reach(&format!("{peer}.{step}")) } else { Ok(()) }
}

/// Marks a step.
#[cfg(feature = "fail-points")]
pub(crate) fn reach(name: &str) -> Result<(), crate::Error> {
    use std::{
        env, fs,
        path::PathBuf,
        process,
        sync::atomic::{AtomicU64, Ordering},
        thread,
        time::Duration,
    };
    /// A bit for each step that is armed.
    static ACTED: AtomicU64 = AtomicU64::new(0);
    let Ok(armed) = env::var("TRANSSHIP_FAIL_POINT") else { return Ok(()) };
    let mut steps =
        armed.split(',').zip(0..u64::BITS).filter_map(|(step, bit)| Some((step.split_once('=')?, 1 << bit)));
    let Some(((_, action), bit)) = steps.find(|((step, _), _)| *step == name) else { return Ok(()) };
    if ACTED.fetch_or(bit, Ordering::Relaxed) & bit != 0 {
        return Ok(());
    }
    match action {
        "kill" => {
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            process::abort();
        }
        "stall" => {
            let gate = PathBuf::from(env::var_os("TRANSSHIP_FAIL_FILE").unwrap_or_default());
            let failed = |source| crate::Error::Io { what: format!("pass fail point {name}"), source };
            fs::write(&gate, name).map_err(failed)?;
            while gate.exists() {
                thread::sleep(Duration::from_millis(5));
            }
            Ok(())
        }
        _ => Err(crate::Error::Io {
            what: format!("pass fail point {name}"),
            source: std::io::Error::other("armed to fail"),
        }),
    }
}
