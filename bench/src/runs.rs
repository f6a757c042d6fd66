//! All runs of one thing that is measured, and what they say together.
use serde::ser::{SerializeStruct, Serializer};

use crate::results::{Cpu, Run, Sides, Spread};

/// Moves of the same memory in the same way.
#[derive(Debug, Clone, Default)]
pub(crate) struct Runs {
    /// Of each.
    pub(crate) guest_bytes: u64,
    pub(crate) list: Vec<Run>,
}

impl Runs {
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(crate) fn spread(&self, of: impl Fn(&Run) -> f64) -> Spread {
        Spread::of(self.list.iter().map(of))
    }

    /// Run by run.
    pub(crate) fn all_ms(&self) -> Vec<f64> {
        self.list.iter().map(|run| run.ms).collect()
    }

    pub(crate) fn ms(&self) -> Spread {
        self.spread(|run| run.ms)
    }

    /// Guest memory moved a second, in MB.
    pub(crate) fn mb_per_s(&self) -> f64 {
        self.guest_bytes as f64 / 1e3 / self.ms().median
    }

    /// Bytes on the wire.
    pub(crate) fn wire_bytes(&self) -> f64 {
        self.spread(|run| run.wire_bytes as f64).median
    }

    /// Bytes of the guest for each on the wire.
    pub(crate) fn ratio(&self) -> f64 {
        self.spread(|run| self.guest_bytes as f64 / run.wire_bytes as f64).median
    }

    /// Seconds of CPU for each 10^9 bytes of the guest.
    pub(crate) fn cpu_seconds_per_gb(&self, of: impl Fn(&Cpu) -> f64) -> f64 {
        self.spread(|run| of(&run.cpu)).median / (self.guest_bytes as f64 / 1e9)
    }

    /// The same of all processes of each side.
    pub(crate) fn cpu_seconds_per_gb_by_side(&self) -> Sides<f64> {
        Sides {
            source: self.cpu_seconds_per_gb(|cpu| cpu.qemu.source + cpu.transship.source),
            destination: self.cpu_seconds_per_gb(|cpu| cpu.qemu.destination + cpu.transship.destination),
        }
    }

    /// How many times as fast as the other.
    pub(crate) fn times(&self, other: &Self) -> f64 {
        other.ms().median / self.ms().median
    }

    /// The fields that every table has of them.
    pub(crate) fn serialize_fields<S: Serializer>(&self, object: &mut S::SerializeStruct) -> Result<(), S::Error> {
        object.serialize_field("ms", &self.ms())?;
        object.serialize_field("mb_per_s", &self.mb_per_s())?;
        object.serialize_field("ratio", &self.ratio())?;
        object.serialize_field("runs", &self.list)
    }
}
