//! A table as `transship bench` reads it from a command line, for the tests of each.
use clap::{Args, Command, Error};

/// The arguments behind the table's name.
pub(crate) fn parsed<T: Args>(arguments: &[&str]) -> Result<T, Error> {
    let command = T::augment_args(Command::new("bench"));
    let matches = command.try_get_matches_from([&["bench"], arguments].concat())?;
    T::from_arg_matches(&matches)
}
