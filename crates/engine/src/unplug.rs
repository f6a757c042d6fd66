//! A device that can't go with the guest.
use std::time::{Duration, Instant};

use crate::{Error, control::TICK, guarded::Guarded};

/// How long the guest may take to let go of a device: where it is asked by the button of a slot, it waits 5 s for a
/// second thought.
const UNPLUG_TIMEOUT: Duration = Duration::from_secs(20);

/// Unplugs what the guest can't take along, unless somebody ends it. It runs, and there is a scan to come: what it
/// writes meanwhile is in that.
pub(crate) fn unplug(guest: &mut Guarded<'_>, is_cancelled: &dyn Fn() -> bool) -> Result<(), Error> {
    let deadline = Instant::now() + UNPLUG_TIMEOUT;
    while !guest.unplug(Instant::now() + TICK)? {
        if is_cancelled() {
            return Err(Error::CANCELLED);
        }
        if Instant::now() > deadline {
            let seconds = UNPLUG_TIMEOUT.as_secs();
            let why = format!(
                "it has not released a device that can't go with it within {seconds} s; is its system \
                         running?"
            );
            return Err(Error::unfit(format!("the guest runs on here: {why}")));
        }
    }
    Ok(())
}
