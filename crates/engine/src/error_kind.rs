//! The names of errors, for scripts: `error_kind` in the report.
use transship_memory::Error as MemoryError;

use crate::{Error, Misfit, Rule, guest::GuestError};

impl Error {
    /// What went wrong, in a word that stays what it is when texts are changed. What no caller had to tell apart so far
    /// has the word of its variant; docs/architecture.md lists them.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Io { .. } => "system",
            Self::Connect { .. } => "no_connection",
            Self::Wire { .. } => "bad_bytes",
            Self::Breach { rule, .. } => rule.kind(),
            Self::Untrusted(_) => "untrusted",
            Self::Refused(_) => "refused",
            Self::Unfit { what, .. } => what.kind().unwrap_or("unfit"),
            Self::File { what, .. } => what.kind().unwrap_or("file"),
            Self::Damaged { .. } => "damaged",
            Self::Guest(error) => match error {
                GuestError::Unfit(_) => "unfit",
                GuestError::Vmm(_) => "vmm",
                GuestError::Memory(error) => of_memory(error),
                GuestError::Bug(_) => "bug",
                _ => "system",
            },
            Self::Memory(error) => of_memory(error),
            Self::Cancelled(_) => "cancelled",
            Self::NotConverging(_) => "not_converging",
            Self::TooLate(_) => "too_late",
            Self::Unknown(_) => "unknown",
            Self::Bug(_) => "bug",
        }
    }
}

fn of_memory(error: &MemoryError) -> &'static str {
    match error {
        MemoryError::Gone { .. } => "vmm_gone",
        MemoryError::FileEnds { .. } => "damaged",
        _ => "memory",
    }
}

impl Rule {
    fn kind(self) -> &'static str {
        match self {
            Self::Stays => "peer_left",
            Self::Answers => "peer_silent",
            Self::Turn | Self::Order | Self::Count | Self::Bounds => "protocol",
            Self::Encoding => "undecodable",
            Self::Digest => "digest",
            Self::Channels => "channels",
            Self::Abilities => "unsupported",
            Self::Perseverance => "peer_gave_up",
        }
    }
}

impl Misfit {
    fn kind(self) -> Option<&'static str> {
        Some(match self {
            Self::Machine => "other_machine",
            Self::Memory => "other_memory",
            Self::Vmm => "other_vmm",
            Self::LeftOut => "left_out",
            Self::NeedsAnswers => "needs_answers",
            Self::Command => "command",
            Self::CommandTime => "command_time",
            Self::Pace => "pace",
            Self::Attempts => "attempts",
            Self::Descriptor(_) => "descriptor",
            Self::NotRegular => "not_regular",
            Self::DirectIo => "direct_io",
            Self::Busy => "busy",
            Self::OwnMemory => "own_memory",
            Self::Unfinished => "bug",
            Self::Else => return None,
        })
    }
}
