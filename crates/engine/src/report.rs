//! What happened, in numbers: the JSON object of the command.
use serde::Serialize;
use transship_memory::PageCount;

use crate::{Actor, Error, guest::DiskSnapshot};

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Default)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// The guest is at the destination.
    Completed,
    /// The source runs on.
    #[default]
    Failed,
    /// By the user; the source runs on.
    Cancelled,
    /// The guest writes faster than the link carries.
    NotConverging,
    /// It did not end by its deadline; the source runs on.
    TooLate,
    /// A person must look at both sides.
    Unknown,
}

/// One round.
#[derive(Debug, Clone, Default, Serialize)]
pub struct RoundReport {
    /// From 1.
    pub number: u32,
    /// Pages that were looked at.
    pub scanned: u64,
    /// Pages reported written since the round before.
    pub written: u64,
    /// Pages found to be zero.
    pub zero: u64,
    /// Pages that hold nothing at the source: not read, not sent.
    pub hole: u64,
    /// Pages that the guest said are free.
    pub free: u64,
    /// Bytes that went to the destination.
    pub bytes: u64,
    /// Those of them that the destination read itself, from memory that it was lent.
    pub lent: u64,
    /// How long it took, until the destination had everything in place.
    pub ms: f64,
    /// Pages written a second while the round ran.
    pub dirty_pages_per_s: f64,
    /// Milliseconds for which writers were held, all of them together, until the next scan; in the last round, since
    /// the last scan. They are as many as there are processors that write.
    pub held_ms: f64,
}

/// What ended a hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReleasedBy {
    /// `transship go`, or whoever else has said so.
    Go,
    /// Its time was over.
    Time,
    /// Its command has succeeded.
    Command,
}

/// How a guest that could have been stopped was kept ready.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct HoldReport {
    /// From the moment when it was ready for the first time.
    pub ms: f64,
    /// Rounds that were sent to keep it ready. The last ones of them are in the list of rounds.
    pub rounds: u64,
    /// Their bytes.
    pub bytes: u64,
    /// How often it was searched for written pages.
    pub looks: u64,
    /// None: it was not released.
    pub released_by: Option<ReleasedBy>,
}

/// What was thought of a move after its first round.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct ForecastReport {
    /// Whether it would end with the guest at the destination, or with a verdict.
    pub converges: bool,
    /// From the call to its end.
    pub total_ms: f64,
    /// For how long the guest would stand still, or would have to.
    pub downtime_ms: f64,
    /// On the wire.
    pub bytes: u64,
    /// The last one included.
    pub rounds: u32,
}

/// Pages by kind, over all rounds.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct PageCounts {
    /// Sent with content.
    pub normal: u64,
    /// Pages found to be zero.
    pub zero: u64,
    /// Pages that hold nothing at the source: not read, not sent.
    pub hole: u64,
    /// Pages that the guest said are free.
    pub free: u64,
    /// Sent as they are because all encoders were busy.
    pub raw_busy: u64,
    /// Sent with content more than once, counted each time after the first.
    pub resent: u64,
}

/// How written pages were found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TrackerName {
    /// The kernel took note of them.
    #[default]
    Async,
    /// Each page's first write in a round waited for us.
    Sync,
}

/// What the tracking of writes cost the guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct TrackerReport {
    /// How it was done.
    pub name: TrackerName,
    /// Writes that waited until they were let through; most of them for some microseconds.
    pub waits: u64,
    /// Those of them that were held because of the pace.
    pub held: u64,
    /// How long, all of them together, in milliseconds.
    pub held_ms: f64,
    /// The longest, in milliseconds.
    pub longest_ms: f64,
}

/// Bytes by kind.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct ByteCounts {
    /// Size of the guest's memory.
    pub guest: u64,
    /// Bytes that encoders were given and made.
    pub encoder_in: u64,
    /// See `encoder_in`.
    pub encoder_out: u64,
    /// Put on, or taken from, all connections together.
    pub wire: u64,
    /// Pages that the destination read itself, from memory that it was lent.
    pub lent: u64,
}

/// CPU seconds of this process by role.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct CpuSeconds {
    /// All encoder threads together.
    pub encoders: f64,
    /// All decoder threads together.
    pub decoders: f64,
    /// The thread that leads.
    pub main: f64,
    /// All channel threads together.
    pub channels: f64,
    /// The whole process, including what it did before.
    pub total: f64,
}

/// A snapshot file.
#[derive(Debug, Clone, Default, Serialize)]
pub struct FileReport {
    /// `mapped-ram` or `stream`.
    pub format: String,
    /// Its length from the snapshot's start on.
    pub bytes: u64,
    /// Bytes that it takes on the disk.
    pub allocated: u64,
    /// Whether pages went past the page cache.
    pub direct_io: bool,
    /// Why they did not, where it was left to us.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub direct_io_refused: Option<String>,
    /// Whether the kernel took requests by io_uring.
    pub io_uring: bool,
    /// Pages of the guest that it holds.
    pub pages_stored: u64,
    /// Pages that were written and became zero or holes afterwards; their disk space was given back.
    pub pages_freed: u64,
    /// Of a background snapshot: pages that were saved before their turn, because the guest was about to write them or
    /// a neighbour.
    pub pages_first: u64,
    /// From the last page to the file at its place, durably.
    pub sync_ms: f64,
}

/// How the pages came to a guest that ran already.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct LazyReport {
    /// How often somebody had to wait for a page.
    pub faults: u64,
    /// From the call until all pages were in place.
    pub filled_ms: f64,
}

/// How the pages followed a guest that was handed over before them.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct PostCopyReport {
    /// Pages that the guest was handed over without.
    pub owed: u64,
    /// Pages that came because somebody waited for them, or for one beside them.
    pub by_fault: u64,
    /// Pages that came in order.
    pub by_push: u64,
    /// How often a page was waited for; known to the destination.
    pub faults: u64,
    /// Half of the waits were at most so long, in milliseconds; known to the destination.
    pub fault_median_ms: f64,
    /// 99 of 100 waits were at most so long, in milliseconds; known to the destination.
    pub fault_p99_ms: f64,
    /// How long the guest ran before all its pages were there, in milliseconds.
    pub filled_ms: f64,
    /// How often the link broke and was made again.
    pub reconnects: u64,
}

/// How a clone has its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CloneMemory {
    /// It maps the image: nothing was copied.
    #[default]
    Mapped,
    /// Memory of its own, to which pages came when they were touched.
    Lazy,
    /// Memory of its own, to which all pages were copied first.
    Copied,
}

/// How a guest became a clone.
#[derive(Debug, Clone, Default, Serialize)]
pub struct CloneReport {
    /// How it has its memory.
    pub memory: CloneMemory,
    /// Pages that the waiting VMM had written by itself, and that were put back.
    pub pages_written: u64,
    /// From the call until all was known and checked.
    pub prepare_ms: f64,
    /// Of it all: until the VMM had loaded its devices.
    pub load_ms: f64,
    /// From the call until the guest ran.
    pub runs_ms: f64,
}

/// What a relay has carried.
#[derive(Debug, Clone, Default, Serialize)]
pub struct RelayReport {
    /// QEMU's connections.
    pub connections: u64,
    /// Bytes that came from the QEMU here, and that it was given.
    pub from_qemu: u64,
    /// See `from_qemu`.
    pub to_qemu: u64,
    /// Bytes that were put on the link, and taken from it.
    pub link_out: u64,
    /// See `link_out`.
    pub link_in: u64,
    /// Bytes of QEMU's by bytes on the link, both directions together; 0 if there were none.
    pub ratio: f64,
    /// What was put on the link, by method; those that were not used are left out.
    pub methods: Vec<MethodBytes>,
}

/// What was put on a link by one method.
#[derive(Debug, Clone, Default, Serialize)]
pub struct MethodBytes {
    /// Its name; `none`: as it is.
    pub method: String,
    /// Bytes of QEMU's.
    pub bytes: u64,
    /// What was made of them.
    pub made: u64,
}

/// Waits for what others were writing to guest memory when it was scanned. The guest runs meanwhile, and its disk
/// requests wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Drains {
    /// How often: once before each round, where it is needed at all.
    pub count: u64,
    /// The longest of them, in milliseconds.
    pub longest_ms: f64,
}

/// The whole of it. Both sides report; what only one side knows is zero on the other.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Report {
    /// How it ended.
    pub status: Status,
    /// From the call to its end, in milliseconds; at the destination from the first connection on.
    pub total_ms: f64,
    /// Of it: until the first page could go.
    pub setup_ms: f64,
    /// How long the guest stood still, until the destination said that it runs.
    pub downtime_ms: f64,
    /// Of it: for how long the command of `--at-stop` ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_stop_ms: Option<f64>,
    /// Of it: how long the snapshot of its disks took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disks_ms: Option<f64>,
    /// Disks that the guest does not write to any more, and where it writes to instead; also if the save failed later.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskSnapshot>,
    /// Of a move of a guest that ran: what was thought of it after the first round, to be compared with the rest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forecast: Option<ForecastReport>,
    /// Where it was held ready before it was stopped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hold: Option<HoldReport>,
    /// Of a restore: from the call until the guest ran, or stood there whole if it is not to run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_ms: Option<f64>,
    /// One entry a round.
    pub rounds: Vec<RoundReport>,
    /// Pages by kind.
    pub pages: PageCounts,
    /// Pages that somebody wrote after the last round, when the guest stood still. They were sent all the same; there
    /// should be none.
    pub late_pages: u64,
    /// Waits for disks that read into guest memory by themselves.
    pub drains: Drains,
    /// How written pages were found, where they had to be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tracker: Option<TrackerReport>,
    /// Bytes by kind.
    pub bytes: ByteCounts,
    /// Wire bytes a second.
    pub throughput: f64,
    /// Share of packets that found all encoders busy; 0 without encoders.
    pub busy_ratio: f64,
    /// CPU seconds by role.
    pub cpu: CpuSeconds,
    /// The snapshot file, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<FileReport>,
    /// Of a lazy restore that brought all pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lazy: Option<LazyReport>,
    /// Of a move whose guest ran before all its pages were there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub postcopy: Option<PostCopyReport>,
    /// Of a clone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clone: Option<CloneReport>,
    /// Of a relay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relay: Option<RelayReport>,
    /// None: not asked for.
    pub verified: Option<bool>,
    /// Why it ended early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The party that can act on that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_by: Option<Actor>,
    /// Which error it was, in a word for scripts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_kind: Option<&'static str>,
}

impl Report {
    /// Why it ended early, or that it did not: for people, for scripts, and who can act on it.
    pub fn set_error(&mut self, error: Option<&Error>) {
        self.error = error.map(ToString::to_string);
        self.error_by = error.map(Error::actor);
        self.error_kind = error.map(Error::kind);
    }

    /// A round is over, in which `normal` pages went as data, `resent` of them again.
    pub(crate) fn add_round(&mut self, round: RoundReport, normal: PageCount, resent: PageCount) {
        self.pages.normal += normal.get();
        self.pages.zero += round.zero;
        self.pages.hole += round.hole;
        self.pages.free += round.free;
        self.pages.resent += resent.get();
        self.bytes.wire += round.bytes - round.lent;
        self.bytes.lent += round.lent;
        self.rounds.push(round);
    }
}
