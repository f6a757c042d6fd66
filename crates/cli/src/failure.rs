//! How the command ends when it does not end well: exit codes and the lines that explain them.
use std::{io, process::ExitCode};

use transship_engine::{Outcome, guest::GuestError};

use crate::output;

/// Why the command failed. The exit code is a promise to scripts: see [`Failure::code`].
#[derive(Debug)]
pub(crate) enum Failure {
    /// Wrong use, found before anything was touched; a line for each mistake.
    Usage(Vec<String>),
    /// It did not work. A guest that ran before still runs.
    Failed(String),
    /// What became of the guest can't be told from here; the text says what a person has to do.
    NeedsPerson(String),
    /// Whoever read our output has enough. That is no error.
    OutputClosed,
}

impl Failure {
    pub(crate) fn code(&self) -> u8 {
        match self {
            Failure::OutputClosed => 0,
            Failure::Failed(_) => 1,
            Failure::Usage(_) => 2,
            Failure::NeedsPerson(_) => 3,
        }
    }

    /// Says why on stderr and yields the exit code.
    pub(crate) fn report(&self) -> ExitCode {
        match self {
            Failure::Usage(mistakes) => mistakes.iter().for_each(|line| output::complain(line)),
            Failure::Failed(line) | Failure::NeedsPerson(line) => output::complain(line),
            Failure::OutputClosed => {}
        }
        self.code().into()
    }
}

impl From<&transship_engine::Error> for Failure {
    fn from(error: &transship_engine::Error) -> Self {
        match error.outcome() {
            Outcome::NothingLost => Failure::Failed(error.to_string()),
            Outcome::NeedsPerson => Failure::NeedsPerson(error.to_string()),
        }
    }
}

impl From<transship_engine::Error> for Failure {
    fn from(error: transship_engine::Error) -> Self {
        Self::from(&error)
    }
}

impl From<GuestError> for Failure {
    fn from(error: GuestError) -> Self {
        Failure::Failed(error.to_string())
    }
}

impl From<transship_memory::Error> for Failure {
    fn from(error: transship_memory::Error) -> Self {
        Failure::Failed(error.to_string())
    }
}

/// Only for what is written to stdout.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::OutputClosed,
            _ => Failure::Failed(format!("can't write the result to standard output: {error}")),
        }
    }
}
