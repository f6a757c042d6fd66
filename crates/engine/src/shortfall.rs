//! Why a guest can't be handed over in time: the numbers, and what would help.
use std::{fmt, time::Duration};

use crate::Converge;

/// Where the pages go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    /// To another VMM.
    Link,
    /// Into a snapshot.
    File,
}

/// How far the last round was from what is allowed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shortfall {
    /// Rounds that were sent.
    pub rounds: usize,
    /// Where the pages go.
    pub medium: Medium,
    /// What the guest wrote during the last round: bytes a second, in whole pages.
    pub written_bytes_per_s: f64,
    /// What was carried meanwhile, of guest memory.
    pub carried_bytes_per_s: f64,
    /// What is left to be carried, of guest memory.
    pub rest_bytes: u64,
    /// How long the rest and the device state would stop the guest.
    pub stop: Duration,
    /// Of that, the device state.
    pub state: Duration,
    /// How long it may be stopped.
    pub downtime: Duration,
    /// How long it may be stopped rather than that it is given up, if that is longer.
    pub max_downtime: Duration,
    /// What was done to make it converge.
    pub converge: Converge,
}

impl Shortfall {
    /// Where the devices alone take longer than the guest may stand still, no pace of its writers helps.
    fn pace_would_help(&self) -> bool {
        self.state < self.downtime
    }

    /// What it writes and what is carried, how long the rest would stop it, and what would help.
    fn facts(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MB: f64 = 1e6;
        let carries = match self.medium {
            Medium::Link => "link carries",
            Medium::File => "disk takes",
        };
        write!(
            f,
            "after {} rounds it writes {:.1} MB/s, the {carries} {:.1} MB/s, and the rest of {:.1} MB would stop it \
             for {} ms, but {} allows {} ms; it runs on here. ",
            self.rounds,
            self.written_bytes_per_s / MB,
            self.carried_bytes_per_s / MB,
            self.rest_bytes as f64 / MB,
            self.stop.as_millis(),
            if self.max_downtime > self.downtime { "--max-downtime" } else { "--downtime" },
            self.max_downtime.max(self.downtime).as_millis(),
        )
    }

    fn cure(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pace = match self.converge {
            Converge::Never if self.pace_would_help() => {
                "Repeat the command with --converge pace, which slows its writers, or allow"
            }
            Converge::Never | Converge::Pace => "Allow",
        };
        let enough_ms = (self.stop.as_millis() * 5 / 4).max(1);
        let other = match self.medium {
            Medium::Link => "a faster link or more --bandwidth, or move it when it writes less",
            Medium::File => "use --background or --paused, or save it to a faster disk or when it writes less",
        };
        write!(f, "{pace} --downtime {enough_ms}ms or more, {other}")
    }
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let was_held = self.converge == Converge::Pace && self.pace_would_help();
        let although = if was_held { " although its writers were held" } else { "" };
        write!(f, "the guest does not converge{although}: ")?;
        self.facts(f)?;
        self.cure(f)
    }
}

/// How a deadline was missed.
#[derive(Debug, Clone, PartialEq)]
pub enum TooLate {
    /// Another round would end after it, and without one the guest would be stopped for too long.
    NoTimeForARound(Box<Shortfall>),
    /// It has passed.
    Passed {
        /// The deadline, from the start.
        after: Duration,
        /// What was going on then.
        reached: Reached,
    },
}

/// How far a move or a save had come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reached {
    /// Before the first round.
    Beginning,
    /// A round was sent.
    Round {
        /// From 1.
        number: u32,
        /// What was left of it.
        left_bytes: u64,
    },
    /// It was held, ready to switch over.
    Held,
    /// The guest was stopped for the rest.
    Switchover,
    /// The file was completed.
    Completing,
}

impl fmt::Display for Reached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Beginning => f.write_str("before the first round"),
            Self::Round { number, left_bytes } => {
                write!(f, "in round {number}, with {:.1} MB of it left", left_bytes as f64 / 1e6)
            }
            Self::Held => f.write_str("while it was held, ready to switch over"),
            Self::Switchover => f.write_str("while the guest was stopped for the rest"),
            Self::Completing => f.write_str("while the file was completed"),
        }
    }
}

impl fmt::Display for TooLate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoTimeForARound(shortfall) => {
                f.write_str("there is no time for another round before the deadline: ")?;
                shortfall.facts(f)?;
                f.write_str("Allow more time. ")?;
                shortfall.cure(f)
            }
            Self::Passed { after, reached } => write!(
                f,
                "the deadline, {} after the start, has passed {reached}; the guest runs on here. Allow more time, or \
                 a longer --downtime, or have it write less; --converge pace makes it",
                in_words(*after)
            ),
        }
    }
}

fn in_words(time: Duration) -> String {
    match time.subsec_millis() {
        0 => format!("{} s", time.as_secs()),
        _ => format!("{} ms", time.as_millis()),
    }
}
