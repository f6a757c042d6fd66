//! What is to happen: made from a seed and the number of a step, and from nothing else. So a failure comes again with
//! the same seed, as far as the machine's own timing lets it.
use std::time::Duration;

/// A QEMU. All of them have the machine type [`MACHINE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Version {
    /// The oldest that is supported.
    V7_2,
    /// The installed one.
    Installed,
    /// The newest, which also has the device type of our balloon.
    V11_1,
}

/// What the guest's memory is, and with it how its disk is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    /// A shared named file, and a disk by way of the page cache.
    SharedFile,
    /// Private memory of QEMU, and a disk past the page cache: as most managers start it.
    Own,
}

impl Memory {
    /// In a QEMU of this version. The oldest does not say where its memory is, and the newest shares it with a balloon.
    pub(crate) fn of(version: Version) -> Self {
        if version == Version::Installed { Self::Own } else { Self::SharedFile }
    }
}

/// The oldest QEMU's, so that a guest can go from each to each.
pub(crate) const MACHINE: &str = "pc-q35-7.2";

/// One step: the guest is elsewhere afterwards if all goes well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) number: u64,
    /// The QEMU that takes the guest.
    pub(crate) to: Version,
    pub(crate) way: Way,
    pub(crate) blow: Blow,
}

/// How the guest gets there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Over a link.
    Move {
        compress: &'static str,
        channels: &'static str,
        /// Asked for what is free, if its QEMU has that device.
        balloon: bool,
        converge: Converge,
    },
    /// Through a file.
    Snapshot { save: &'static str, lazy: bool },
}

/// What is done that it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Converge {
    Never,
    /// Writers are held.
    Pace,
    /// It runs before its pages.
    PostCopy,
}

impl Converge {
    /// For `transship move`.
    pub(crate) fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Never => &[],
            Self::Pace => &["--converge", "pace"],
            Self::PostCopy => &["--converge", "postcopy", "--postcopy-after", "0"],
        }
    }
}

/// Who is hurt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Victim {
    Nobody,
    Move,
    Receive,
    Guard,
    SourceQemu,
    DestinationQemu,
    Link,
    Save,
    Restore,
    StandIn,
}

/// What is done to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Harm {
    /// `kill -9`; of the link: all connections end.
    Kill,
    /// It stands still for a second.
    Hold,
}

/// The random moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// At this step of the program.
    At(&'static str),
    /// So long after its start.
    After(Duration),
}

/// Who, what and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Blow {
    pub(crate) victim: Victim,
    pub(crate) harm: Harm,
    pub(crate) moment: Moment,
}

/// The steps of a move; the side that stalls there is the first word.
const MOVING: [&str; 14] = [
    "source.hello",
    "destination.hello",
    "source.tracking",
    "source.round-sent",
    "destination.round",
    "source.round",
    "source.stopped",
    "source.last-round",
    "source.state-sent",
    "destination.loaded",
    "source.loaded",
    "source.go-sent",
    "destination.go",
    "destination.started",
];
/// The steps of a move whose guest runs before its pages, but for those of the others that it may not come to.
const FOLLOWED: [&str; 12] = [
    "source.owed",
    "source.line",
    "source.stopped",
    "source.state-sent",
    "source.loaded",
    "source.go-sent",
    "destination.dropped",
    "destination.missing",
    "destination.line",
    "destination.loaded",
    "destination.go",
    "destination.started",
];
/// Those at which there is a guard.
const GUARDED: [&str; 5] =
    ["source.stopped", "source.last-round", "source.state-sent", "destination.loaded", "source.loaded"];
const SAVING: [&str; 9] = [
    "save.created",
    "save.tracking",
    "save.round",
    "save.stopped",
    "save.last-round",
    "save.state",
    "save.tail",
    "save.synced",
    "save.renamed",
];
const SAVING_BACKGROUND: [&str; 7] =
    ["save.created", "save.protecting", "save.stopped", "save.state", "save.protected", "save.background", "save.tail"];
const SAVING_GUARDED: [&str; 2] = ["save.stopped", "save.state"];
const RESTORING: [&str; 2] = ["restore.pages", "restore.loaded"];
const RESTORING_LAZILY: [&str; 3] = ["restore.missing", "restore.loaded", "restore.started"];

/// One move in so many is asked for what is free, where it can be: the guest takes five seconds to let go of a device.
const BALLOON_ONE_IN: u8 = 8;
const POST_COPY_ONE_IN: u8 = 5;
const SNAPSHOT_ONE_IN: u8 = 6;
const NOBODY_ONE_IN: u8 = 5;
/// About as long as a move or a save takes.
const LONGEST_MS: u64 = 400;

impl Step {
    /// What the QEMU that takes the guest has for it. Pages that come after a moved guest need shared memory.
    pub(crate) fn memory(&self) -> Memory {
        match self.way {
            Way::Move { converge: Converge::PostCopy, .. } => Memory::SharedFile,
            _ => Memory::of(self.to),
        }
    }

    /// The step of this number. `wanted`: who may be hurt; in the place of others nobody is.
    pub(crate) fn of(seed: u64, number: u64, wanted: &[Victim]) -> Self {
        let mut random = fastrand::Rng::with_seed(seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let to = pick(&mut random, &[Version::V7_2, Version::Installed, Version::V11_1]);
        let way = way(&mut random);
        let mut blow = blow(&mut random, way);
        if !wanted.is_empty() && !wanted.contains(&blow.victim) {
            blow.victim = Victim::Nobody;
        }
        Self { number, to, way, blow }
    }
}

fn pick<T: Copy>(random: &mut fastrand::Rng, from: &[T]) -> T {
    from[random.usize(..from.len())]
}

fn way(random: &mut fastrand::Rng) -> Way {
    match random.u8(..SNAPSHOT_ONE_IN) {
        0 => Way::Snapshot { save: pick(random, &["--live", "--background", "--paused"]), lazy: random.bool() },
        _ => {
            let (compress, channels) = (pick(random, &["none", "zstd", "auto"]), pick(random, &["1", "2", "4"]));
            let balloon = random.u8(..BALLOON_ONE_IN) == 0;
            let converge = match random.u8(..POST_COPY_ONE_IN) {
                0 if !balloon => Converge::PostCopy,
                1 => Converge::Pace,
                _ => Converge::Never,
            };
            Way::Move { compress, channels, balloon, converge }
        }
    }
}

fn blow(random: &mut fastrand::Rng, way: Way) -> Blow {
    let victim = victim(random, way);
    let harm = if random.u8(..3) == 0 { Harm::Hold } else { Harm::Kill };
    let steps = steps(way, victim);
    let at = Moment::At(pick(random, steps));
    let after = Moment::After(Duration::from_millis(random.u64(..LONGEST_MS)));
    let named = matches!(victim, Victim::Guard | Victim::StandIn) || random.bool();
    Blow { victim, harm, moment: if named { at } else { after } }
}

fn victim(random: &mut fastrand::Rng, way: Way) -> Victim {
    use Victim::{DestinationQemu, Guard, Link, Move, Nobody, Receive, Restore, Save, SourceQemu, StandIn};
    if random.u8(..NOBODY_ONE_IN) == 0 {
        return Nobody;
    }
    match way {
        Way::Move { .. } => pick(random, &[Move, Receive, Guard, SourceQemu, DestinationQemu, Link]),
        Way::Snapshot { lazy: true, .. } => pick(random, &[Save, Guard, SourceQemu, DestinationQemu, Restore, StandIn]),
        Way::Snapshot { .. } => pick(random, &[Save, Guard, SourceQemu, DestinationQemu, Restore]),
    }
}

/// Where this victim may be hurt by name.
fn steps(way: Way, victim: Victim) -> &'static [&'static str] {
    match (way, victim) {
        (Way::Move { .. }, Victim::Guard) => &GUARDED,
        (Way::Move { converge: Converge::PostCopy, .. }, _) => &FOLLOWED,
        (Way::Move { .. }, _) => &MOVING,
        (_, Victim::Guard) => &SAVING_GUARDED,
        (Way::Snapshot { lazy: true, .. }, Victim::Restore | Victim::StandIn | Victim::DestinationQemu) => {
            &RESTORING_LAZILY
        }
        (_, Victim::Restore | Victim::StandIn | Victim::DestinationQemu) => &RESTORING,
        (Way::Snapshot { save: "--background", .. }, _) => &SAVING_BACKGROUND,
        _ => &SAVING,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps_of(seed: u64) -> Vec<Step> {
        (0..500).map(|number| Step::of(seed, number, &[])).collect()
    }

    #[test]
    fn the_same_seed_makes_the_same_choices() {
        assert_eq!(steps_of(7), steps_of(7));
        assert_ne!(steps_of(7), steps_of(8));
        // No step depends on the one before.
        assert_eq!(steps_of(7)[321], Step::of(7, 321, &[]));
    }

    #[test]
    fn every_choice_comes() {
        let all = steps_of(1);
        for victim in [
            Victim::Nobody,
            Victim::Move,
            Victim::Receive,
            Victim::Guard,
            Victim::SourceQemu,
            Victim::DestinationQemu,
            Victim::Link,
            Victim::Save,
            Victim::Restore,
            Victim::StandIn,
        ] {
            assert!(all.iter().any(|step| step.blow.victim == victim), "{victim:?}");
        }
        for step in MOVING.into_iter().chain(FOLLOWED) {
            assert!(all.iter().any(|each| each.blow.moment == Moment::At(step)), "{step}");
        }
        for version in [Version::V7_2, Version::Installed, Version::V11_1] {
            assert!(all.iter().any(|step| step.to == version), "{version:?}");
        }
    }

    #[test]
    fn who_is_not_wanted_is_left_alone() {
        let wanted = [Victim::Link];
        let all: Vec<_> = (0..100).map(|number| Step::of(7, number, &wanted)).collect();
        assert!(all.iter().all(|step| matches!(step.blow.victim, Victim::Nobody | Victim::Link)));
        // The others of the plan stay as they were.
        assert!(all.iter().zip(steps_of(7)).all(|(some, full)| (some.to, some.way) == (full.to, full.way)));
    }
}
