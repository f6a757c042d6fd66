//! What guests do while they are moved.
use std::str::FromStr;

use serde::Serialize;
use transship_lab::Workload;

use super::{Guest, Wire};
use crate::units;

/// The 32-bit guest has its program, its table of versions and the firmware beside its pages.
const BESIDE_SMALL_MIB: u64 = 24;
/// A kernel and its page tables need more.
const BESIDE_LINUX_MIB: u64 = 192;
/// A guest that writes so much of what it can at most is told to write as fast as it can: the time between two batches
/// would be none, and it would not beat.
const NEARLY: f64 = 0.9;

/// What is written again and again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hot {
    /// So many bytes
    Bytes(u64),
    /// All that the guest has for its pages
    All,
}

impl FromStr for Hot {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "all" { Ok(Self::All) } else { units::memory(text).map(Self::Bytes) }
    }
}

impl Hot {
    pub(crate) fn title(self) -> String {
        match self {
            Self::Bytes(bytes) => units::bytes(bytes),
            Self::All => "all".to_owned(),
        }
    }

    /// As the guest is told. None: it has not got so much.
    pub(crate) fn mib(self, guest: Guest, mem: u64) -> Option<u32> {
        let beside = if guest == Guest::Linux { BESIDE_LINUX_MIB } else { BESIDE_SMALL_MIB };
        let most = (mem >> 20).saturating_sub(beside);
        let mib = match self {
            Self::Bytes(bytes) => Some(bytes >> 20).filter(|mib| *mib <= most),
            Self::All => Some(most).filter(|mib| *mib > 0),
        };
        mib.and_then(|mib| u32::try_from(mib).ok())
    }
}

/// One guest that does one thing.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Case {
    pub(crate) wire: Wire,
    pub(crate) guest: Guest,
    pub(crate) hot: Hot,
    /// What it was to write, by what the link carries.
    pub(crate) times: f64,
    /// As it is told; 0: as fast as it can, which is less than `times` asks for, or no more.
    pub(crate) pages_per_s: u32,
}

impl Case {
    pub(crate) fn title(&self) -> String {
        let wire = if self.wire == Wire::Cable { "cable" } else { "loopback" };
        let times = if self.pages_per_s == 0 { "its most".to_owned() } else { format!("× {}", self.times) };
        format!("{wire}, {}, {} hot, {times}", self.guest.title(), self.hot.title())
    }
}

/// A case for each rate that the guest can write at, and one for as fast as it can, if one asks for more.
pub(crate) fn cases(times: &[f64], link_pages_per_s: f64, most: f64) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    for times in sorted {
        let wanted = times * link_pages_per_s;
        let pages_per_s = if wanted > most * NEARLY { 0 } else { (wanted as u32).max(1) };
        if pages_per_s == 0 && cases.last().is_some_and(|case| case.pages_per_s == 0) {
            continue;
        }
        cases.push(Case { wire: Wire::Loopback, guest: Guest::Kvm, hot: Hot::All, times, pages_per_s });
    }
    cases
}

/// No check of everything while time is taken.
pub(crate) fn workload(mib: u32, pages_per_s: u32) -> Workload {
    Workload { mib, rate: pages_per_s, hot_mib: None, idle: false, sweep_ms: 3_600_000 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_can_not_write_is_one_case() {
        let told = |most| -> Vec<(f64, u32)> {
            cases(&[0.5, 1.0, 2.0, 5.0, 20.0], 1000.0, most).iter().map(|case| (case.times, case.pages_per_s)).collect()
        };
        assert_eq!(told(1e6), [(0.5, 500), (1.0, 1000), (2.0, 2000), (5.0, 5000), (20.0, 20_000)]);
        assert_eq!(told(4000.0), [(0.5, 500), (1.0, 1000), (2.0, 2000), (5.0, 0)]);
        assert_eq!(told(100.0), [(0.5, 0)], "it can't even write half of what the link carries");
    }

    #[test]
    fn hot_sets_leave_room_for_the_rest_of_the_guest() {
        let hot = |text: &str| text.parse::<Hot>().unwrap();
        assert_eq!(hot("64M").mib(Guest::Kvm, 1 << 30), Some(64));
        assert_eq!(hot("all").mib(Guest::Kvm, 1 << 30), Some(1000));
        assert_eq!(hot("all").mib(Guest::Linux, 1 << 30), Some(832));
        assert_eq!(hot("512M").mib(Guest::Kvm, 512 << 20), None);
        assert!("much".parse::<Hot>().is_err());
    }
}
