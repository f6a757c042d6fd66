//! How fast a guest writes while it is tracked: the first round of a move that is so slow that it does not end.
use std::{
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::json;
use transship_lab::{Qemu, Transship};

use super::results::Run;
use crate::{
    files::By,
    pair::{Pair, text},
    stock,
    threads::mib_per_s,
};

/// Bytes a second: of 64 MiB, the least that a guest has, a quarter is left when all is measured.
const SLOW: u64 = 8_000_000;
/// From the beginning of the move until the guest is looked at: whatever comes once has come.
const SETTLE: Duration = Duration::from_millis(500);

/// Its rate before and meanwhile; the move is called off.
pub(super) fn run(pair: &Pair<'_>, by: By) -> Result<Run, String> {
    let qemu = stock::version(&pair.source)?;
    // Its own first round through memory may be slower.
    settle();
    let before = mib_per_s(&pair.source)?;
    let meanwhile = match by {
        By::Transship => by_transship(pair)?,
        By::Qemu => by_qemu(pair)?,
    };
    Ok(Run { qemu, mib_per_s: Some((before, meanwhile)), ..Run::default() })
}

fn by_transship(pair: &Pair<'_>) -> Result<f64, String> {
    let listen = format!("unix:{}", pair.destination.folder().join("move").display());
    let receiving = Transship::receiving(&pair.destination.vm(), &listen).start().map_err(text)?;
    let to = receiving.listening().map_err(text)?;
    let rate = format!("{SLOW}B/s");
    let moving = Transship::moving(&pair.source.vm(), &to).args(["--channels", "2", "--bandwidth", &rate]);
    let mut moving = moving.start().map_err(text)?;
    settle();
    let rate = rate_without_end(&pair.source, || Ok(moving.process().ended().map_err(text)?.is_none()))?;
    moving.signal(Signal::INT).map_err(text)?;
    moving.wait().map_err(text)?;
    // It has nothing to receive any more.
    receiving.wait().map_err(text)?;
    Ok(rate)
}

fn by_qemu(pair: &Pair<'_>) -> Result<f64, String> {
    let parameters = json!({ "multifd-channels": 2, "zero-page-detection": "multifd" });
    stock::set(&pair.source, &parameters)?;
    stock::set(&pair.destination, &parameters)?;
    pair.source.qmp("migrate-set-parameters", json!({ "max-bandwidth": SLOW })).map_err(text)?;
    let uri = stock::socket(pair);
    pair.destination.qmp("migrate-incoming", json!({ "uri": uri })).map_err(text)?;
    pair.source.qmp("migrate", json!({ "uri": uri })).map_err(text)?;
    settle();
    let rate = rate_without_end(&pair.source, || {
        let info = pair.source.qmp("query-migrate", json!({})).map_err(text)?;
        Ok(info["status"] == "active")
    })?;
    pair.source.qmp("migrate_cancel", json!({})).map_err(text)?;
    Ok(rate)
}

/// The guest's rate, if the move still goes on behind it.
fn rate_without_end(guest: &Qemu, goes_on: impl FnOnce() -> Result<bool, String>) -> Result<f64, String> {
    let begin = Instant::now();
    let rate = mib_per_s(guest)?;
    match goes_on()? {
        true => Ok(rate),
        false => {
            Err(format!("the move has ended within {:.1} s: measure with more --mem", begin.elapsed().as_secs_f64()))
        }
    }
}

fn settle() {
    thread::sleep(SETTLE);
}
