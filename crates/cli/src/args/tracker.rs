//! How written pages are found.
use clap::ValueEnum;
use transship_vmm::Tracking;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Tracker {
    Auto,
    Async,
    Sync,
}

impl From<Tracker> for Tracking {
    fn from(how: Tracker) -> Self {
        match how {
            Tracker::Auto => Self::Auto,
            Tracker::Async => Self::Async,
            Tracker::Sync => Self::Sync,
        }
    }
}
