//! What happened, in numbers: the JSON object of the command.
use serde::Serialize;

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Default)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    Completed,
    #[default]
    Failed,
    Cancelled,
    /// The guest writes faster than the link carries.
    NotConverging,
    /// A person must look at both sides.
    Unknown,
}

/// One round.
#[derive(Debug, Clone, Default, Serialize)]
pub struct RoundReport {
    pub number: u32,
    /// Pages that were looked at.
    pub scanned: u64,
    /// Pages reported written since the round before.
    pub written: u64,
    pub zero: u64,
    pub hole: u64,
    pub free: u64,
    /// Bytes put on the wire.
    pub bytes: u64,
    pub ms: f64,
    /// Pages written a second while the round ran.
    pub dirty_pages_per_s: f64,
}

/// Pages by kind, over all rounds.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct PageCounts {
    /// Sent with content.
    pub normal: u64,
    pub zero: u64,
    pub hole: u64,
    pub free: u64,
    /// Sent with content more than once, counted each time after the first.
    pub resent: u64,
}

#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct ByteCounts {
    pub guest: u64,
    pub wire: u64,
}

/// CPU seconds of this process by role.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct CpuSeconds {
    pub main: f64,
    pub channels: f64,
    pub total: f64,
}

/// The whole of it. Both sides report; what only one side knows is zero on the other.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Report {
    pub status: Status,
    pub total_ms: f64,
    pub setup_ms: f64,
    pub downtime_ms: f64,
    pub rounds: Vec<RoundReport>,
    pub pages: PageCounts,
    pub bytes: ByteCounts,
    /// Wire bytes a second.
    pub throughput: f64,
    pub busy_ratio: f64,
    pub cpu: CpuSeconds,
    /// None: not asked for.
    pub verified: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}
