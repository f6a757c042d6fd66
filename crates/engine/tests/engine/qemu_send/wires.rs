//! What both are told.
use std::time::Duration;

use proptest::prelude::*;
use transship_codec::{Method as Codec, Setting};
use transship_engine::{MoveTerms, QemuSendOptions, WhenBusy, ZeroPages};

/// What both are told.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wires {
    pub(super) machine: &'static str,
    pub(super) channels: u8,
    pub(super) compress: Codec,
    pub(super) zero_pages: ZeroPages,
    pub(super) encoders: u8,
    pub(super) when_busy: WhenBusy,
}

impl Wires {
    /// Whether what the destination's memory held before must be gone.
    pub(super) fn clears(&self) -> bool {
        self.channels == 0 || self.machine != "pc-q35-10.0" || self.zero_pages == ZeroPages::Main
    }

    pub(super) fn options(&self) -> QemuSendOptions {
        let terms = MoveTerms {
            zero_pages: self.zero_pages,
            encoders: self.encoders,
            when_busy: self.when_busy,
            downtime: Duration::from_nanos(1),
            max_rounds: 1000,
            ..MoveTerms::default()
        };
        QemuSendOptions { channels: self.channels, compress: Setting::new(self.compress, None).unwrap(), terms }
    }
}

pub(super) fn wires() -> impl Strategy<Value = Wires> {
    let zero_pages = prop_oneof![Just(ZeroPages::Channels), Just(ZeroPages::Main), Just(ZeroPages::Off)];
    let machine = prop_oneof![Just("pc-q35-7.2"), Just("pc-q35-8.2"), Just("pc-q35-10.0")];
    let compress = prop_oneof![Just(Codec::None), Just(Codec::Zlib), Just(Codec::Zstd)];
    let when_busy = prop_oneof![Just(WhenBusy::Wait), Just(WhenBusy::Raw)];
    (machine, 0..4u8, compress, zero_pages, 1..4u8, when_busy).prop_map(
        |(machine, channels, compress, zero_pages, encoders, when_busy)| {
            let compress = if channels == 0 { Codec::None } else { compress };
            Wires { machine, channels, compress, zero_pages, encoders, when_busy }
        },
    )
}

pub(super) const ONE: Wires = Wires {
    machine: "pc-q35-10.0",
    channels: 0,
    compress: Codec::None,
    zero_pages: ZeroPages::Channels,
    encoders: 2,
    when_busy: WhenBusy::Wait,
};
pub(super) const TWO: Wires = Wires { channels: 2, ..ONE };
