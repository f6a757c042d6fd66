//! Single moves and passes, and their lines in the tables.
use std::time::Duration;

use serde::{Serialize, Serializer, ser::SerializeStruct};
use serde_json::Value;

use super::{Guest, WhenBusy, one_process::Pass};
use crate::{
    ours::Moved,
    plot::Side,
    results::{QemuRun, Spread},
    stock, units,
};

pub(super) const MOVES_HEAD: [&str; 13] = [
    "guest",
    "encoders",
    "ended",
    "ms",
    "(least)",
    "rounds",
    "busy %",
    "raw pages",
    "downtime ms",
    "wire",
    "main CPU s",
    "encoders CPU s",
    "all CPU s",
];
pub(super) const PASSES_HEAD: [&str; 10] = [
    "encoders",
    "rings ms",
    "old ms",
    "old by rings",
    "rings ns",
    "old ns",
    "rings wake ns",
    "old wake ns",
    "rings CPU us",
    "old CPU us",
];

/// All moves of one guest, in one way.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    pub(crate) guest: Guest,
    pub(crate) side: Side,
    /// QEMU's channels, in its own migration.
    pub(crate) encoders: u8,
    /// None: QEMU's own migration.
    pub(crate) when_busy: Option<WhenBusy>,
    pub(crate) runs: Vec<Run>,
}

/// One move, or an attempt. What QEMU does not tell is none.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Run {
    /// `completed`, or the verdict.
    pub(crate) status: String,
    pub(crate) ms: f64,
    pub(crate) rounds: u64,
    pub(crate) downtime_ms: f64,
    pub(crate) wire_bytes: u64,
    pub(crate) busy_ratio: Option<f64>,
    pub(crate) raw_busy_pages: Option<u64>,
    pub(crate) main_cpu_seconds: Option<f64>,
    pub(crate) encoders_cpu_seconds: Option<f64>,
    pub(crate) channels_cpu_seconds: Option<f64>,
    /// Of both transship processes; of both QEMUs, with their guest, in QEMU's own migration.
    pub(crate) cpu_seconds: Option<f64>,
}

/// How QEMU and we call a move that arrived.
pub(super) const COMPLETED: &str = "completed";

impl Run {
    pub(super) fn of_ours(moved: &Moved) -> Result<Self, String> {
        let number = |path: &str| moved.number(path);
        let rounds = moved.report["rounds"].as_array().map_or(0, Vec::len) as u64;
        Ok(Self {
            status: moved.report["status"].as_str().unwrap_or("without a status").to_owned(),
            ms: number("/total_ms")?,
            rounds,
            downtime_ms: number("/downtime_ms")?,
            wire_bytes: number("/bytes/wire")? as u64,
            busy_ratio: Some(number("/busy_ratio")?),
            raw_busy_pages: Some(number("/pages/raw_busy")? as u64),
            main_cpu_seconds: Some(number("/cpu/main")?),
            encoders_cpu_seconds: Some(number("/cpu/encoders")?),
            channels_cpu_seconds: Some(number("/cpu/channels")?),
            cpu_seconds: Some(moved.used.source.cpu_seconds + moved.used.destination.cpu_seconds),
        })
    }

    /// `info` is QEMU's last word; without a run it did not end in time.
    pub(super) fn of_qemu(ran: Option<&QemuRun>, info: &Value, patience: Duration) -> Result<Self, String> {
        let number = |path: &str| stock::number(info, path);
        Ok(Self {
            status: if ran.is_some() { COMPLETED.into() } else { format!("no end in {} s", patience.as_secs()) },
            ms: number("/total-time")?,
            rounds: number("/ram/dirty-sync-count")? as u64,
            downtime_ms: if ran.is_some() { number("/downtime")? } else { 0.0 },
            wire_bytes: number("/ram/transferred")? as u64,
            cpu_seconds: ran.map(|run| run.cpu.total()),
            ..Self::default()
        })
    }

    pub(super) fn arrived(&self) -> bool {
        self.status == COMPLETED
    }
}

impl Series {
    pub(crate) fn title(&self) -> String {
        format!("{}, {}", self.guest_title(), self.how())
    }

    pub(super) fn guest_title(&self) -> &'static str {
        match self.guest {
            Guest::Synthetic => "transship's guest",
            Guest::Qemu => "QEMU's guest",
        }
    }

    pub(super) fn how(&self) -> String {
        match self.when_busy {
            Some(WhenBusy::Wait) => format!("{}, wait", self.encoders),
            Some(WhenBusy::Raw) => format!("{}, raw", self.encoders),
            None => format!("QEMU's, {} channels", self.encoders),
        }
    }

    pub(super) fn spread(&self, of: impl Fn(&Run) -> f64) -> Spread {
        Spread::of(self.runs.iter().map(of))
    }

    pub(super) fn wire_bytes(&self) -> f64 {
        self.spread(|run| run.wire_bytes as f64).median
    }

    pub(super) fn ms(&self) -> Spread {
        self.spread(|run| run.ms)
    }

    /// Of the first that did not arrive, if one did not.
    pub(super) fn status(&self) -> &str {
        self.runs.iter().find(|run| !run.arrived()).map_or("moved", |run| &run.status)
    }

    pub(super) fn cells(&self) -> [String; 13] {
        let number = |of: fn(&Run) -> Option<f64>| {
            let median = self.spread(|run| of(run).unwrap_or(f64::NAN)).median;
            units::short(median)
        };
        let ms = self.ms();
        [
            self.guest_title().to_owned(),
            self.how(),
            self.status().to_owned(),
            units::short(ms.median),
            format!("({})", units::short(ms.least)),
            number(|run| Some(run.rounds as f64)),
            number(|run| run.busy_ratio.map(|ratio| ratio * 100.0)),
            number(|run| run.raw_busy_pages.map(|pages| pages as f64)),
            number(|run| Some(run.downtime_ms)),
            units::bytes(self.wire_bytes() as u64),
            number(|run| run.main_cpu_seconds),
            number(|run| run.encoders_cpu_seconds),
            number(|run| run.cpu_seconds),
        ]
    }
}

impl Serialize for Series {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_struct("Series", 6)?;
        object.serialize_field("guest", &self.guest)?;
        object.serialize_field("side", if self.side == Side::Qemu { "qemu" } else { "transship" })?;
        object.serialize_field("encoders", &self.encoders)?;
        object.serialize_field("when_busy", &self.when_busy)?;
        object.serialize_field("ms", &self.ms())?;
        object.serialize_field("runs", &self.runs)?;
        object.end()
    }
}

/// The same packets by both models, in one process.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Comparison {
    pub(crate) encoders: u8,
    pub(crate) rings: Vec<Pass>,
    pub(crate) old_model: Vec<Pass>,
}

impl Comparison {
    pub(super) fn both(&self, of: fn(&Pass) -> f64) -> [f64; 2] {
        [&self.rings, &self.old_model].map(|passes| Spread::of(passes.iter().map(of)).median)
    }

    pub(super) fn cells(&self) -> [String; 10] {
        let [rings_ms, old_ms] = self.both(|pass| pass.ms);
        let [rings_ns, old_ns] = self.both(|pass| pass.hand_over_ns);
        let [rings_wake, old_wake] = self.both(|pass| pass.wake_ns);
        let [rings_us, old_us] = self.both(|pass| pass.submitter_cpu_us);
        let times = old_ms / rings_ms;
        let [a, b, c, d, e, f, g, h] =
            [rings_ms, old_ms, rings_ns, old_ns, rings_wake, old_wake, rings_us, old_us].map(units::short);
        [self.encoders.to_string(), a, b, format!("{times:.2}"), c, d, e, f, g, h]
    }
}
