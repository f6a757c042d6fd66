//! What is measured: guests, layouts of the file, and who writes and reads it.
use clap::ValueEnum;
use serde::Serialize;

use crate::plot::Side;

/// What the guest does while it is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Guest {
    /// It stands still, and has never touched its memory.
    Sparse,
    /// It stands still.
    Paused,
    /// It writes, and what it has written is saved again.
    Live,
    /// It writes, and the state of the first moment is saved.
    Background,
}

/// How the file is laid out and written. Each is the one before it and more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Layout {
    /// One stream.
    Plain,
    /// Every page at its place, by one thread, through the page cache.
    Mapped,
    /// By many.
    Channels,
    /// Past the page cache.
    Direct,
}

/// Whose file it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum By {
    Transship,
    Qemu,
}

/// What both are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Case {
    pub(crate) guest: Guest,
    pub(crate) layout: Layout,
}

pub(crate) const LAYOUTS: [Layout; 4] = [Layout::Plain, Layout::Mapped, Layout::Channels, Layout::Direct];

impl Guest {
    /// As it is called in tables.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Sparse => "never touched",
            Self::Paused => "paused",
            Self::Live => "live",
            Self::Background => "background",
        }
    }

    /// Does it run?
    pub(crate) fn runs(self) -> bool {
        matches!(self, Self::Live | Self::Background)
    }

    /// All that is measured with it.
    pub(crate) fn cases(self) -> impl Iterator<Item = Case> {
        let layouts: &[Layout] = match self {
            Self::Paused | Self::Live => &LAYOUTS,
            Self::Background => &[Layout::Plain, Layout::Mapped, Layout::Direct],
            Self::Sparse => &[Layout::Direct],
        };
        layouts.iter().map(move |&layout| Case { guest: self, layout })
    }
}

impl Layout {
    /// As it is called in tables.
    pub(crate) fn title(self, channels: u8) -> String {
        let plural = if channels == 1 { "" } else { "s" };
        match self {
            Self::Plain => "file".into(),
            Self::Mapped => "mapped".into(),
            Self::Channels => format!("mapped, {channels} channel{plural}"),
            Self::Direct => format!("mapped, {channels} channel{plural}, direct I/O"),
        }
    }

    /// In `channels`, or alone.
    pub(crate) fn threads(self, channels: u8) -> u8 {
        if matches!(self, Self::Channels | Self::Direct) { channels } else { 1 }
    }
}

impl By {
    /// As it is called in tables.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Transship => "transship",
            Self::Qemu => "QEMU",
        }
    }

    /// Its bars.
    pub(crate) fn side(self) -> Side {
        match self {
            Self::Transship => Side::Ours,
            Self::Qemu => Side::Qemu,
        }
    }
}

impl Case {
    /// The programs that can do it. Of the moment of the call, transship writes no stream, since its pages come in any
    /// order; and QEMU nothing else: it refuses channels, and so direct I/O. It does not refuse mapped files, but
    /// leaves their bitmaps empty and does not load them (tried with 10.0).
    pub(crate) fn sides(self) -> &'static [By] {
        match (self.guest, self.layout) {
            (Guest::Background, Layout::Plain) => &[By::Qemu],
            (Guest::Background, _) => &[By::Transship],
            _ => &[By::Transship, By::Qemu],
        }
    }

    /// As it is called in messages: `live, mapped, 4 channels`.
    pub(crate) fn title(self, channels: u8) -> String {
        format!("{}, {}", self.guest.title(), self.layout.title(channels))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_guest_is_saved_in_every_way_that_there_is_for_it() {
        let count = |guest: Guest| guest.cases().count();
        assert_eq!([Guest::Sparse, Guest::Paused, Guest::Live, Guest::Background].map(count), [1, 4, 4, 3]);
        let case = Case { guest: Guest::Background, layout: Layout::Direct };
        assert_eq!(case.title(1), "background, mapped, 1 channel, direct I/O");
        assert_eq!(case.sides(), [By::Transship]);
        assert_eq!(Case { layout: Layout::Plain, ..case }.sides(), [By::Qemu]);
        assert_eq!(Case { guest: Guest::Live, ..case }.sides(), [By::Transship, By::Qemu]);
        assert_eq!((Layout::Mapped.threads(4), Layout::Channels.threads(4)), (1, 4));
    }
}
