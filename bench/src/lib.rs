//! The tables of the README, measured here, beside stock QEMU.

/// What `transship bench` was asked for.
// Hidden from the help until there is a table.
#[derive(Debug, clap::Args)]
#[command(hide = true)]
pub struct Bench {
    /// The table to measure
    table: String,
}

impl Bench {
    /// Measures it and prints the table.
    ///
    /// # Errors
    /// One line for the user: what could not be measured, and why.
    pub fn run(&self) -> Result<(), String> {
        Err(format!("there is no table {:?} yet", self.table))
    }
}
