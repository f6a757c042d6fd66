//! transship's embedded guest, as a process of its own.
use crate::{LabError, PATIENCE, Process, Result, Scratch, binary, failed};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// How to start a synthetic guest. What is not set is left to the command's own defaults.
#[derive(Debug, Clone)]
pub struct SyntheticBuilder {
    args: Vec<String>,
    environment: Vec<(String, String)>,
}

/// A running synthetic guest.
#[derive(Debug)]
pub struct Synthetic {
    process: Process,
    folder: Scratch,
}

/// What the guest says of itself: the answer to `describe`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyntheticState {
    /// It runs.
    Running,
    /// It stands still with everything it has.
    Stopped,
    /// It waits for a guest to come.
    Waiting,
}

/// What it found when it checked its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SyntheticCheck {
    /// Pages looked at.
    pub pages: u64,
    /// Pages that don't hold what they must.
    pub wrong: u64,
    /// Pages written in all its life.
    pub writes: u64,
}

impl SyntheticBuilder {
    /// Sets a flag of `transship guest`: `("--mem", "256M")`.
    pub fn set(mut self, flag: &str, value: &str) -> Self {
        self.args.extend([flag.to_owned(), value.to_owned()]);
        self
    }

    /// Memory, such as `256M`.
    pub fn memory(self, size: &str) -> Self {
        self.set("--mem", size)
    }

    /// Share of the memory that is written at the start, such as `50%`.
    pub fn touched(self, share: &str) -> Self {
        self.set("--touched", share)
    }

    /// `random`, `zero` or `mixed`.
    pub fn content(self, content: &str) -> Self {
        self.set("--content", content)
    }

    /// How fast it writes, such as `50M`, or `max`.
    pub fn write_rate(self, rate: &str) -> Self {
        self.set("--write-rate", rate)
    }

    /// Memory that is written again and again, such as `16M`.
    pub fn hot_set(self, size: &str) -> Self {
        self.set("--hot-set", size)
    }

    /// It waits for a guest to come.
    pub fn incoming(mut self) -> Self {
        self.args.push("--incoming".into());
        self
    }

    /// Sets a variable of its environment.
    pub fn env(mut self, key: &str, value: &str) -> Self {
        self.environment.push((key.into(), value.into()));
        self
    }

    /// Starts it, and waits until it listens.
    ///
    /// # Errors
    /// It ends at once, or never listens.
    pub fn start(self) -> Result<Synthetic> {
        let folder = Scratch::new()?;
        let mut command = Command::new(binary()?);
        command.arg("guest").arg("--listen").arg(folder.join("guest")).args(self.args).envs(self.environment);
        let mut guest = Synthetic { process: Process::start(command)?, folder };
        guest.wait_until_it_listens()?;
        Ok(guest)
    }
}

impl Synthetic {
    /// With the command's own defaults.
    pub fn builder() -> SyntheticBuilder {
        SyntheticBuilder { args: Vec::new(), environment: Vec::new() }
    }

    /// How the command names it: `handoff:/path/to/its/socket`.
    pub fn vm(&self) -> String {
        format!("handoff:{}", self.socket().display())
    }

    /// Its socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("guest")
    }

    /// A folder that lives as long as this guest, for more sockets.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Its process, to signal or kill it or to wait for its end.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Has it check all its memory.
    ///
    /// # Errors
    /// It can't in its state, is attached to by somebody else, or is gone.
    pub fn check(&self) -> Result<SyntheticCheck> {
        let answer = self.call("check")?;
        let number =
            |name: &str| answer[name].as_u64().ok_or_else(|| LabError(format!("check: no {name} in {answer}")));
        Ok(SyntheticCheck { pages: number("pages")?, wrong: number("wrong")?, writes: number("writes")? })
    }

    /// Does it run?
    ///
    /// # Errors
    /// It is attached to by somebody else, or is gone.
    pub fn state(&self) -> Result<SyntheticState> {
        let answer = self.call("describe")?;
        match (answer["running"].as_bool(), answer["waiting"].as_bool()) {
            (Some(true), _) => Ok(SyntheticState::Running),
            (_, Some(true)) => Ok(SyntheticState::Waiting),
            (Some(false), Some(false)) => Ok(SyntheticState::Stopped),
            _ => Err(LabError(format!("describe: {answer}"))),
        }
    }

    /// One call of the hand-off protocol (docs/handoff.md), on a connection of its own. The guest has an ear for one
    /// client at a time, and a guard may have its for a moment after a command has ended: so whoever is turned away
    /// tries again.
    ///
    /// # Errors
    /// It refuses, is attached to by somebody else for good, or is gone.
    pub fn call(&self, call: &str) -> Result<Value> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.try_call(call)? {
                Some(answer) => return Ok(answer),
                None if Instant::now() > deadline => {
                    return Err(LabError(format!("handoff: {call}: another client is connected all the time")));
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Nothing if another client is connected: then the request was not taken.
    fn try_call(&self, call: &str) -> Result<Option<Value>> {
        let fail = || format!("handoff: {call}");
        let mut stream = UnixStream::connect(self.socket()).map_err(failed(fail()))?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(failed(fail()))?;
        let request = json!({ "id": 1, "call": call });
        match stream.write_all(format!("{request}\n").as_bytes()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(None),
            written => written.map_err(failed(fail()))?,
        }
        let mut line = String::new();
        let read = BufReader::new(&stream).read_line(&mut line);
        // Another test's child has this connection, too, from its fork until its exec. Closed here alone it would stay
        // open that long, and the guest would turn the next client away.
        let _ = stream.shutdown(Shutdown::Both);
        match read {
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(None),
            read => read.map_err(failed(fail()))?,
        };
        let answer: Value = serde_json::from_str(&line).map_err(failed(format!("{}: {line:?}", fail())))?;
        match answer.get("ok") {
            Some(ok) => Ok(Some(ok.clone())),
            None if answer["id"] == 0 => Ok(None),
            None => Err(LabError(format!("{}: {}", fail(), answer["error"].as_str().unwrap_or(&line)))),
        }
    }

    fn wait_until_it_listens(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !self.socket().exists() {
            if let Some(status) = self.process.ended()? {
                let said = self.process.stderr().to_the_end()?.join("\n");
                return Err(LabError(format!("guest ended at once ({}): {said}", crate::process::in_words(status))));
            }
            if Instant::now() > deadline {
                return Err(LabError(format!("guest does not listen: {}", self.process.stderr().tail())));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}
