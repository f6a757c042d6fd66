//! How pages become packets: what several commands ask alike.

use clap::ValueEnum;

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum ZeroPages {
    Channels,
    Main,
    Off,
}

impl From<ZeroPages> for transship_engine::ZeroPages {
    fn from(who: ZeroPages) -> Self {
        match who {
            ZeroPages::Channels => Self::Channels,
            ZeroPages::Main => Self::Main,
            ZeroPages::Off => Self::Off,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum WhenBusy {
    Wait,
    Raw,
}

impl From<WhenBusy> for transship_engine::WhenBusy {
    fn from(what: WhenBusy) -> Self {
        match what {
            WhenBusy::Wait => Self::Wait,
            WhenBusy::Raw => Self::Raw,
        }
    }
}
