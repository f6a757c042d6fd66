//! How written pages are found, and what is done where there are too many.
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Converge {
    Never,
    Pace,
    /// Of a move only.
    Postcopy,
}

impl From<Converge> for transship_engine::Converge {
    fn from(how: Converge) -> Self {
        match how {
            // Writers are not held: the rest of their pages follows the guest.
            Converge::Never | Converge::Postcopy => Self::Never,
            Converge::Pace => Self::Pace,
        }
    }
}
