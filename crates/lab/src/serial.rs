//! The serial port of a guest that runs one of the programs in guest/.
use crate::lines::{Lines, Mark};
use crate::workload::{
    Count, Sweep, read_dropped, read_fresh, read_old_data, read_random, read_reads, read_ready, read_received,
    read_rest, read_units,
};
use crate::{Result, failed};
use std::io::{Cursor, Read, Write};
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
        Self::behind(String::new(), port)
    }

    /// The port of a guest that has said something before it was connected here.
    ///
    /// # Errors
    /// As [`Serial::new`].
    pub(crate) fn behind(greeting: String, port: UnixStream) -> Result<Self> {
        let reading = port.try_clone().map_err(failed("serial port"))?;
        Ok(Self { lines: Lines::of("serial port", Cursor::new(greeting).chain(reading)), port })
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
        // One that was not asked for may have been half done before that.
        let asked = |line: &str| if line.ends_with(" asked") { Sweep::read(line) } else { None };
        Ok(self.lines.wait(mark, "a sweep", asked)?.0)
    }

    /// Has the Linux guest write nearly all its free memory and give it back, and gives the number of MiB.
    ///
    /// # Errors
    /// It does not in time: it stands still or is gone, or its image is an old one.
    pub fn leave_old_data(&self) -> Result<u64> {
        let mark = self.lines.mark();
        self.type_line("old")?;
        Ok(self.lines.wait(mark, "old data", read_old_data)?.0)
    }

    /// Has the Linux guest give back what it has held since its start (`workload.hold`), and gives the number of MiB.
    ///
    /// # Errors
    /// It does not in time: it stands still or is gone, or its image is an old one.
    pub fn drop_held(&self) -> Result<u64> {
        let mark = self.lines.mark();
        self.type_line("drop")?;
        Ok(self.lines.wait(mark, "word that memory was given back", read_dropped)?.0)
    }

    /// Has the Linux guest take nearly all its free memory: how many MiB it got, and in how many pages of it something
    /// was not zero.
    ///
    /// # Errors
    /// It does not in time: it stands still or is gone, or its image is an old one.
    pub fn take_fresh(&self) -> Result<(u64, u64)> {
        let mark = self.lines.mark();
        self.type_line("fresh")?;
        Ok(self.lines.wait(mark, "fresh memory", read_fresh)?.0)
    }

    /// Has the Linux guest's kernel draw 16 random bytes, and gives them as hexadecimal digits.
    ///
    /// # Errors
    /// It does not in time: it stands still or is gone, or its image is an old one.
    pub fn random(&self) -> Result<String> {
        let mark = self.lines.mark();
        self.type_line("random")?;
        Ok(self.lines.wait(mark, "random bytes", read_random)?.0)
    }

    /// Waits until the Linux guest has read its disk or file into memory `more` times (`workload.slots`), counted from
    /// now on.
    ///
    /// # Errors
    /// It has not in time: it reads none, stands still or is gone.
    pub fn read_on(&self, more: u64) -> Result<()> {
        let (first, mark) = self.lines.wait(self.lines.mark(), "a count of reads", read_reads)?;
        let enough = |line: &str| (read_reads(line)? >= first + more).then_some(());
        self.lines.wait(mark, "more reads", enough).map(drop)
    }

    /// Waits until so many `more` datagrams have come back to the Linux guest (`workload.net`), counted from now on.
    ///
    /// # Errors
    /// They have not in time: the network is dead, or the guest stands still or is gone.
    pub fn hear_on(&self, more: u64) -> Result<()> {
        let (first, mark) = self.lines.wait(self.lines.mark(), "a count of datagrams", read_received)?;
        let enough = |line: &str| (read_received(line)? >= first + more).then_some(());
        self.lines.wait(mark, "more datagrams", enough).map(drop)
    }

    /// Has the Linux guest compile, from now on, and gives the first count that it reports.
    ///
    /// # Errors
    /// It does not in time: it stands still or is gone.
    pub fn compile(&self) -> Result<u64> {
        self.type_line("compile")?;
        self.next_units()
    }

    /// The next count of compiled functions that the guest reports.
    ///
    /// # Errors
    /// It does not in time: it does not compile, stands still or is gone.
    pub fn next_units(&self) -> Result<u64> {
        Ok(self.lines.wait(self.lines.mark(), "a count of compiled functions", read_units)?.0)
    }

    /// Ends it, and waits until nothing is compiled any more.
    ///
    /// # Errors
    /// It does not in time: it stands still or is gone.
    pub fn rest(&self) -> Result<()> {
        let mark = self.lines.mark();
        self.type_line("rest")?;
        self.lines.wait(mark, "rest", read_rest).map(drop)
    }
}
