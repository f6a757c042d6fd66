//! Named steps at which a test makes this process die or stall, to see what the other parties then do.
//!
//! Without the feature `fail-points` they do nothing. With it, `TRANSSHIP_FAIL_POINT=NAME=ACTION` arms one step:
//! `kill` ends the process as `kill -9` would; `stall` makes the file that `TRANSSHIP_FAIL_FILE` names and goes on when
//! somebody has removed it; `error` makes the step fail. A step acts once: what comes in rounds goes on with the next.

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
        sync::atomic::{AtomicBool, Ordering},
        thread,
        time::Duration,
    };
    static ACTED: AtomicBool = AtomicBool::new(false);
    let Ok(armed) = env::var("TRANSSHIP_FAIL_POINT") else { return Ok(()) };
    let Some((_, action)) = armed.split_once('=').filter(|(step, _)| *step == name) else { return Ok(()) };
    if ACTED.swap(true, Ordering::Relaxed) {
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
