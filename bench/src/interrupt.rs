//! Ctrl-C: guest memory lies in files, gigabytes of them, which nobody else would remove.
use std::path::PathBuf;

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};
use transship_lab::{Scratch, SlowLink};

/// From now on a signal removes everything that this process has made in these folders, and its slow links, and ends
/// it. The guests end with it.
pub(crate) fn clean_up_in(folders: Vec<PathBuf>) -> Result<(), String> {
    let mut signals =
        Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(|error| format!("can't wait for signals: {error}"))?;
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            folders.iter().for_each(|folder| Scratch::remove_all(folder));
            SlowLink::remove_all();
            std::process::exit(128 + signal);
        }
    });
    Ok(())
}
