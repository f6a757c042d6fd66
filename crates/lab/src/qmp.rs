//! A small QMP client of the lab's own: it checks what the product's client does, so they share nothing.
use crate::{LabError, PATIENCE, Result, failed};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant, SystemTime};

/// A QMP connection after the handshake.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
    events: Vec<Value>,
}

impl Qmp {
    /// Takes over a connection to a QMP server that has just been made.
    ///
    /// # Errors
    /// The other end is no QMP server.
    pub fn new(stream: UnixStream) -> Result<Self> {
        stream.set_read_timeout(Some(PATIENCE)).map_err(failed("qmp: can't set a timeout"))?;
        let mut qmp = Self { stream: BufReader::new(stream), events: Vec::new() };
        let greeting = qmp.read()?;
        if greeting.get("QMP").is_none() {
            return Err(LabError(format!("qmp: not a greeting: {greeting}")));
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and returns what it returns.
    ///
    /// # Errors
    /// QEMU refuses, is gone, or does not answer.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.give(&[(command, arguments)])?;
        self.answer(command)
    }

    /// Sends all of these in one piece, and waits until QEMU has run each.
    ///
    /// # Errors
    /// As [`Qmp::execute`]: of the first that fails. What is behind it is run all the same.
    pub fn execute_together(&mut self, commands: &[(&str, Value)]) -> Result<()> {
        self.give(commands)?;
        commands.iter().try_for_each(|(command, _)| self.answer(command).map(drop))
    }

    fn give(&mut self, commands: &[(&str, Value)]) -> Result<()> {
        // QEMU reads a byte at a time, so what says nothing is left out.
        let line = |(command, arguments): &(&str, Value)| match arguments.as_object() {
            Some(none) if none.is_empty() => json!({ "execute": command }),
            _ => json!({ "execute": command, "arguments": arguments }),
        };
        let lines: String = commands.iter().map(|command| format!("{}\n", line(command))).collect();
        let first = commands.first().map_or("nothing", |(command, _)| *command);
        self.stream.get_mut().write_all(lines.as_bytes()).map_err(failed(format!("qmp: {first}")))
    }

    fn answer(&mut self, command: &str) -> Result<Value> {
        loop {
            let mut answer = self.read().map_err(failed(command))?;
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = answer.get("error") {
                return Err(LabError(format!("qmp: {command}: {}", error["desc"].as_str().unwrap_or("refused"))));
            }
            self.events.push(answer);
        }
    }

    /// The names of the events that came so far. They are read only while a command waits for its answer.
    pub fn events(&self) -> Vec<String> {
        self.events.iter().filter_map(|e| e["event"].as_str().map(str::to_owned)).collect()
    }

    /// The data of the first event of this name that is `wanted`, of those that were not waited for yet.
    ///
    /// # Errors
    /// None comes in time, or QEMU is gone.
    pub fn wait_event(&mut self, name: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        Ok(self.wait(name, |event| wanted(&event["data"]))?["data"].take())
    }

    /// The same for so long at most; none: it did not come.
    ///
    /// # Errors
    /// QEMU is gone.
    pub fn wait_event_within(
        &mut self,
        time: Duration,
        name: &str,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<Option<Value>> {
        let end = Instant::now() + time;
        loop {
            if let Some(mut event) = self.take(name, |event| wanted(&event["data"])) {
                return Ok(Some(event["data"].take()));
            }
            if !self.comes_until(end)? {
                return Ok(None);
            }
            self.read_event(name)?;
        }
    }

    /// When the first such event happened, by QEMU's own clock, that is not older than `since`.
    ///
    /// # Errors
    /// As [`Qmp::wait_event`].
    pub fn wait_event_time(
        &mut self,
        name: &str,
        since: SystemTime,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<SystemTime> {
        let event = self.wait(name, |event| time_of(event) >= since && wanted(&event["data"]))?;
        Ok(time_of(&event))
    }

    fn wait(&mut self, name: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        loop {
            if let Some(event) = self.take(name, &wanted) {
                return Ok(event);
            }
            self.read_event(name)?;
        }
    }

    /// The first such event of those that came.
    fn take(&mut self, name: &str, wanted: impl Fn(&Value) -> bool) -> Option<Value> {
        let at = self.events.iter().position(|event| event["event"] == name && wanted(event))?;
        Some(self.events.remove(at))
    }

    /// One more event, for whoever waits for this one.
    fn read_event(&mut self, name: &str) -> Result<()> {
        let event = self.read().map_err(failed(format!("can't wait for the event {name}")))?;
        self.events.push(event);
        Ok(())
    }

    /// Whether something is to be read before `end`.
    fn comes_until(&self, end: Instant) -> Result<bool> {
        if !self.stream.buffer().is_empty() {
            return Ok(true);
        }
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(failed("qmp: can't wait for so long"))?;
        let mut here = [PollFd::new(self.stream.get_ref(), PollFlags::IN)];
        Ok(poll(&mut here, Some(&left)).map_err(failed("qmp: can't wait"))? > 0)
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Ok(0) => Err(LabError("qmp: QEMU closed the connection".into())),
            Ok(_) => serde_json::from_str(&line).map_err(failed(format!("qmp: {}", line.trim()))),
            Err(error) => Err(failed("qmp: no answer")(error)),
        }
    }
}

fn time_of(event: &Value) -> SystemTime {
    let part = |name: &str| event["timestamp"][name].as_u64().unwrap_or(0);
    SystemTime::UNIX_EPOCH + Duration::from_secs(part("seconds")) + Duration::from_micros(part("microseconds"))
}
