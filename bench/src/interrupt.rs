//! Ctrl-C: guest memory lies in files, gigabytes of them, which nobody else would remove.
use std::{
    path::PathBuf,
    sync::atomic::{AtomicI32, Ordering::SeqCst},
};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};
use transship_lab::{Scratch, SlowLink};

/// A table that runs as a process of its own; 0: none.
static TABLE: AtomicI32 = AtomicI32::new(0);

/// From now on a signal removes everything that this process has made in these folders, and its slow links, and ends
/// it. The guests end with it. A table that runs as a process of its own does so first.
pub(crate) fn clean_up_in(folders: Vec<PathBuf>) -> Result<(), String> {
    clean_up_in_after(folders, || {})
}

/// As [`clean_up_in`], for a table that takes hours: `publish` is called first, with what was measured until then.
pub(crate) fn clean_up_in_after(folders: Vec<PathBuf>, publish: impl FnOnce() + Send + 'static) -> Result<(), String> {
    let mut signals =
        Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(|error| format!("can't wait for signals: {error}"))?;
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            publish();
            end_table();
            folders.iter().for_each(|folder| Scratch::remove_all(folder));
            SlowLink::remove_all();
            std::process::exit(128 + signal);
        }
    });
    Ok(())
}

/// From now on this process is the table that runs; none does otherwise.
pub(crate) fn table_runs(pid: Option<u32>) {
    TABLE.store(pid.and_then(|pid| i32::try_from(pid).ok()).unwrap_or(0), SeqCst);
}

/// Lets it remove what it has made: killed, it could not.
fn end_table() {
    let Some(pid) = Pid::from_raw(TABLE.load(SeqCst)) else { return };
    if kill_process(pid, Signal::TERM).is_ok() {
        // Its end stays to be had for the thread that waits for it, too.
        let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
    }
}
