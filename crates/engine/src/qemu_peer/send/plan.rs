//! What follows from the machine and the options: how the two streams of a multifd migration are kept in step, and how
//! pages that are zero are told. The destination says nothing of this; both sides take it from the machine type.
use transship_wire::qemu::Name;

use super::QemuSendOptions;
use crate::{Error, Misfit, ZeroPages};

/// From this machine type on multifd's barriers belong to rounds; before, to sections.
const BARRIERS_BY_ROUNDS: (u32, u32) = (8, 1);
/// From this machine type on a destination, which must be as new, reads zero pages in packets. Older ones skip them.
const ZEROS_IN_PACKETS: (u32, u32) = (9, 0);
/// Before this machine type a stream has neither configuration nor footers.
const OLDEST: (u32, u32) = (2, 4);

/// Which record of the main stream is its half of a barrier with the channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Barriers {
    /// There are no channels.
    None,
    /// The end of each section.
    BySections,
    /// A record of its own.
    ByRounds,
}

/// How a page that is zero is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Zeros {
    /// In packets, which does not clear memory that the destination has not received before; so that is not told at
    /// all.
    InPackets,
    /// By a record on the main stream, which clears whatever was there; so every page is told once.
    OnMain,
}

/// What the stream will be like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StreamPlan {
    pub(crate) machine: Name,
    pub(crate) barriers: Barriers,
    pub(crate) zeros: Zeros,
}

impl StreamPlan {
    /// # Errors
    /// A machine for which it can't be known.
    pub(crate) fn new(machine: Name, options: &QemuSendOptions) -> Result<Self, Error> {
        let version = version(&machine);
        if version.is_some_and(|version| version < OLDEST) {
            let (major, minor) = OLDEST;
            return Err(Misfit::Machine.unfit(format!(
                "the machine {machine} is too old to be sent to a QEMU: streams of machine types before \
                 {major}.{minor} do not say what they are"
            )));
        }
        if options.channels == 0 {
            return Ok(Self { machine, barriers: Barriers::None, zeros: Zeros::OnMain });
        }
        let Some(version) = version else {
            return Err(Misfit::Machine.unfit(format!(
                "the machine {machine} has no version in its name, and multifd channels depend on that version; leave \
                 out --channels on both sides (multifd off), which works with every machine"
            )));
        };
        let barriers = if version >= BARRIERS_BY_ROUNDS { Barriers::ByRounds } else { Barriers::BySections };
        let zeros = match options.terms.zero_pages {
            ZeroPages::Channels | ZeroPages::Off if version >= ZEROS_IN_PACKETS => Zeros::InPackets,
            _ => Zeros::OnMain,
        };
        Ok(Self { machine, barriers, zeros })
    }
}

/// The version at the end of a machine type's name: `pc-q35-10.0`.
fn version(machine: &str) -> Option<(u32, u32)> {
    let (major, minor) = machine.rsplit_once('-')?.1.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::MoveTerms;

    fn plan(machine: &str, channels: u8, zero_pages: ZeroPages) -> Result<(Barriers, Zeros), Error> {
        let terms = MoveTerms { zero_pages, ..MoveTerms::default() };
        let options = QemuSendOptions { channels, terms, ..QemuSendOptions::default() };
        StreamPlan::new(Name::new(machine).unwrap(), &options).map(|plan| (plan.barriers, plan.zeros))
    }

    #[test]
    fn barriers_and_zeros_follow_from_the_machine() {
        use {Barriers::*, Zeros::*};
        for (machine, barriers, zeros) in [
            ("pc-i440fx-7.2", BySections, OnMain),
            ("pc-q35-8.0", BySections, OnMain),
            ("pc-q35-8.1", ByRounds, OnMain),
            ("pc-q35-8.2", ByRounds, OnMain),
            ("pc-q35-9.0", ByRounds, InPackets),
            ("pc-q35-10.0", ByRounds, InPackets),
            ("virt-11.1", ByRounds, InPackets),
        ] {
            assert_eq!(plan(machine, 2, ZeroPages::Channels).unwrap(), (barriers, zeros), "{machine}");
            assert_eq!(plan(machine, 2, ZeroPages::Main).unwrap(), (barriers, OnMain), "{machine}");
            assert_eq!(plan(machine, 0, ZeroPages::Channels).unwrap(), (None, OnMain), "{machine}");
        }
    }

    #[test]
    fn a_machine_without_a_version_goes_without_channels() {
        for machine in ["microvm", "pc-q35-rhel9.4.0", "isapc", "x-remote"] {
            let error = plan(machine, 2, ZeroPages::Channels).unwrap_err();
            assert_eq!(error.misfit(), Some(Misfit::Machine), "{error}");
            assert!(error.to_string().contains("leave out --channels"), "what helps is named: {error}");
            assert!(plan(machine, 0, ZeroPages::Channels).is_ok());
        }
        let too_old = plan("pc-i440fx-2.3", 0, ZeroPages::Channels).unwrap_err();
        assert_eq!(too_old.misfit(), Some(Misfit::Machine), "{too_old}");
    }
}
