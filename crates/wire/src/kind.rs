//! Which messages there are, and how long each may be.
use std::ops::RangeInclusive;

use crate::guest::{GuestDescription, MAX_REGIONS};
use crate::owed;

/// The longest piece of device state in one message. Large enough that framing costs nothing, small enough to buffer.
pub const MAX_STATE_BYTES: usize = 256 << 10;
/// The longest payload of any message: that of a Hello with [`MAX_REGIONS`](crate::MAX_REGIONS) regions whose names are
/// as long as can be.
pub const MAX_MESSAGE_BYTES: usize = HELLO_FIXED_BYTES + GuestDescription::BYTES_MAX;
/// The longest text of a [`Refusal`](crate::Refusal): a few lines on a terminal.
pub const MAX_REASON_BYTES: usize = 4096;

const _: () = assert!(MAX_STATE_BYTES <= MAX_MESSAGE_BYTES);
const _: () = assert!(*owed::OWED_BYTES.end() <= MAX_MESSAGE_BYTES && *owed::PAGE_SIZES.end() <= MAX_MESSAGE_BYTES);
/// Of a Hello, what is not the description of the guest.
const HELLO_FIXED_BYTES: usize = 2;

/// Of a Lent: how many slots and regions, and a place for each region.
const LENT_BYTES: RangeInclusive<usize> = 3 + 8..=3 + 8 * MAX_REGIONS;

/// The numbers of the messages, and what their payloads may measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Kind {
    Hello = 1,
    Welcome = 2,
    RoundDone = 3,
    Digest = 4,
    DigestIs = 5,
    State = 6,
    StateEnd = 7,
    Loaded = 8,
    Go = 9,
    Running = 10,
    Abort = 11,
    DigestWanted = 12,
    Owed = 13,
    OwedEnd = 14,
    Want = 15,
    Page = 16,
    Complete = 17,
    Stale = 18,
    Lend = 19,
    Lent = 20,
    Borrowed = 21,
}

impl Kind {
    pub(crate) fn of_number(number: u16) -> Option<Self> {
        Some(match number {
            1 => Kind::Hello,
            2 => Kind::Welcome,
            3 => Kind::RoundDone,
            4 => Kind::Digest,
            5 => Kind::DigestIs,
            6 => Kind::State,
            7 => Kind::StateEnd,
            8 => Kind::Loaded,
            9 => Kind::Go,
            10 => Kind::Running,
            11 => Kind::Abort,
            12 => Kind::DigestWanted,
            13 => Kind::Owed,
            14 => Kind::OwedEnd,
            15 => Kind::Want,
            16 => Kind::Page,
            17 => Kind::Complete,
            18 => Kind::Stale,
            19 => Kind::Lend,
            20 => Kind::Lent,
            21 => Kind::Borrowed,
            _ => return None,
        })
    }

    /// Checked before a payload is received, so that nothing is allocated for a length that no honest peer sends.
    pub(crate) fn payload_sizes(self) -> RangeInclusive<usize> {
        match self {
            Kind::Hello => HELLO_FIXED_BYTES + GuestDescription::BYTES_MIN..=MAX_MESSAGE_BYTES,
            Kind::Welcome
            | Kind::Loaded
            | Kind::Running
            | Kind::DigestWanted
            | Kind::Complete
            | Kind::Stale
            | Kind::Lend => 0..=0,
            Kind::RoundDone => 20..=20,
            Kind::Digest | Kind::DigestIs => 32..=32,
            Kind::State => 1..=MAX_STATE_BYTES,
            Kind::StateEnd => 40..=40,
            Kind::Go | Kind::Borrowed => 1..=1,
            Kind::Abort => 2..=2 + MAX_REASON_BYTES,
            Kind::Owed => owed::OWED_BYTES,
            Kind::OwedEnd => 8..=8,
            Kind::Want => 10..=10,
            Kind::Page => owed::PAGE_SIZES,
            Kind::Lent => LENT_BYTES,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Hello => "Hello",
            Kind::Welcome => "Welcome",
            Kind::RoundDone => "RoundDone",
            Kind::Digest => "Digest",
            Kind::DigestIs => "DigestIs",
            Kind::State => "State",
            Kind::StateEnd => "StateEnd",
            Kind::Loaded => "Loaded",
            Kind::Go => "Go",
            Kind::Running => "Running",
            Kind::Abort => "Abort",
            Kind::DigestWanted => "DigestWanted",
            Kind::Owed => "Owed",
            Kind::OwedEnd => "OwedEnd",
            Kind::Want => "Want",
            Kind::Page => "Page",
            Kind::Complete => "Complete",
            Kind::Stale => "Stale",
            Kind::Lend => "Lend",
            Kind::Lent => "Lent",
            Kind::Borrowed => "Borrowed",
        }
    }
}
