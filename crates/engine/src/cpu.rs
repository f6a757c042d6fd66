//! CPU time by role.
use rustix::time::{ClockId, clock_gettime};

/// CPU seconds of the calling thread so far.
pub(crate) fn thread_seconds() -> f64 {
    seconds(ClockId::ThreadCPUTime)
}

/// CPU seconds of the whole process so far.
pub(crate) fn process_seconds() -> f64 {
    seconds(ClockId::ProcessCPUTime)
}

fn seconds(clock: ClockId) -> f64 {
    let time = clock_gettime(clock);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// What the calling thread takes from one moment to the next.
pub(crate) struct Laps(f64);

impl Laps {
    /// From now on.
    pub(crate) fn begin() -> Self {
        Self(thread_seconds())
    }

    /// CPU seconds since the last call, or since the start.
    pub(crate) fn next(&mut self) -> f64 {
        let now = thread_seconds();
        now - std::mem::replace(&mut self.0, now)
    }
}
