//! The serial port of a guest that runs one of the programs in guest/.
use crate::lines::{Lines, Mark};
use crate::workload::{Count, Sweep, read_ready};
use crate::{Result, failed};
use std::io::Write;
use std::os::unix::net::UnixStream;

/// A serial port.
#[derive(Debug)]
pub struct Serial {
    lines: Lines,
    port: UnixStream,
}

impl Serial {
    /// Listens to the port until it closes.
    ///
    /// # Errors
    /// The connection can't be shared with the reading thread.
    pub fn new(port: UnixStream) -> Result<Self> {
        let reading = port.try_clone().map_err(failed("serial port"))?;
        Ok(Self { lines: Lines::of("serial port", reading), port })
    }

    /// What the guest said.
    pub fn lines(&self) -> &Lines {
        &self.lines
    }

    /// Types a line.
    ///
    /// # Errors
    /// The guest's QEMU is gone.
    pub fn type_line(&self, line: &str) -> Result<()> {
        (&self.port).write_all(format!("{line}\n").as_bytes()).map_err(failed("serial port: can't write"))
    }

    /// Waits until the workload has filled its memory; gives the number of its pages.
    ///
    /// # Errors
    /// It does not in time.
    pub fn ready(&self) -> Result<u64> {
        Ok(self.lines.wait(Mark::START, "the workload", read_ready)?.0)
    }

    /// The next count that the guest reports.
    ///
    /// # Errors
    /// It does not in time: it stands still or is gone.
    pub fn next_count(&self) -> Result<Count> {
        Ok(self.lines.wait(self.lines.mark(), "a count", Count::read)?.0)
    }

    /// Has the guest check all its pages, from now on, and gives the result.
    ///
    /// # Errors
    /// It does not in time: it stands still or is gone.
    pub fn sweep(&self) -> Result<Sweep> {
        let mark = self.lines.mark();
        self.type_line("check")?;
        // The first sweep to end may have been half done when we asked; the one after it was not.
        let (_, mark) = self.lines.wait(mark, "a sweep", Sweep::read)?;
        self.type_line("check")?;
        Ok(self.lines.wait(mark, "a second sweep", Sweep::read)?.0)
    }
}
