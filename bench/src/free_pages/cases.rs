//! What is measured: guests of several sizes, what they do, and what they say of their free memory.
use clap::ValueEnum;
use serde::Serialize;

use crate::files::By;

/// What the guest says of its free memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// Nothing
    Without,
    /// Nothing, though it has a balloon, as libvirt gives one to each guest
    Balloon,
    /// Names it when it is asked
    Hints,
    /// Gives it back by and by
    Reporting,
}

/// What the guest does meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Load {
    /// Nothing
    Idle,
    /// It compiles
    Busy,
}

/// One line of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Case {
    pub(crate) guest_bytes: u64,
    pub(crate) load: Load,
    pub(crate) way: Way,
    pub(crate) by: By,
}

const SIDES: [By; 2] = [By::Transship, By::Qemu];

impl Way {
    /// As it is called in tables.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Without => "without",
            Self::Balloon => "balloon",
            Self::Hints => "hints",
            Self::Reporting => "reporting",
        }
    }

    /// The programs that alternately move the same guest. Hints come from another device for each, so that each has a
    /// guest of its own.
    pub(crate) fn turns(self) -> Vec<Vec<By>> {
        match self {
            Self::Without | Self::Balloon | Self::Reporting => vec![SIDES.to_vec()],
            Self::Hints => SIDES.map(|by| vec![by]).to_vec(),
        }
    }
}

impl Load {
    /// As it is called in tables.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Busy => "busy",
        }
    }
}

impl Case {
    /// As it is called in messages: `2 GiB, idle, hints, transship`.
    pub(crate) fn title(self) -> String {
        let Self { guest_bytes, load, way, by } = self;
        format!("{}, {}, {}, {}", crate::units::bytes(guest_bytes), load.title(), way.title(), by.title())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_is_moved_by_both() {
        for way in [Way::Without, Way::Balloon, Way::Hints, Way::Reporting] {
            assert_eq!(way.turns().concat(), SIDES, "{way:?}");
        }
        assert_eq!(Way::Hints.turns().len(), 2);
        let case = Case { guest_bytes: 2 << 30, load: Load::Idle, way: Way::Hints, by: By::Transship };
        assert_eq!(case.title(), "2 GiB, idle, hints, transship");
    }
}
