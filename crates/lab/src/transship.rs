//! Runs of the command itself.
use crate::lines::{Lines, Mark};
use crate::process::in_words;
use crate::{LabError, PATIENCE, Process, Result, root};
use rustix::process::Signal;
use serde_json::Value;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::time::Duration;

/// The built command: `TRANSSHIP_BIN`, or the one beside the running program (`target/PROFILE/transship`).
///
/// # Errors
/// It was not built.
pub fn binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("TRANSSHIP_BIN") {
        return Ok(path.into());
    }
    let here = std::env::current_exe().map_err(crate::failed("this program's own path"))?;
    // Tests lie one folder deeper, in deps/.
    let candidates = here.ancestors().skip(1).take(2).map(|folder| folder.join("transship"));
    candidates.into_iter().find(|path| path.is_file()).ok_or_else(|| {
        let target = here.parent().unwrap_or(&here).display().to_string();
        let build = "cargo build -p transship --features fail-points";
        LabError(format!("no transship near {target}: run `{build}` in {}, or set TRANSSHIP_BIN", root().display()))
    })
}

/// One run of the command that is under way.
#[derive(Debug)]
pub struct Transship {
    process: Process,
}

/// A run that is being put together.
#[derive(Debug, Clone)]
pub struct TransshipBuilder {
    prefix: Vec<String>,
    args: Vec<OsString>,
    environment: Vec<(String, OsString)>,
}

/// A run that has ended.
#[derive(Debug, Clone)]
pub struct Finished {
    /// How.
    pub status: ExitStatus,
    /// Everything on standard output.
    pub stdout: String,
    /// Everything on standard error.
    pub stderr: String,
}

impl TransshipBuilder {
    /// Runs it by another command, such as [`crate::SlowLink::source`].
    pub fn prefix(mut self, prefix: &[String]) -> Self {
        self.prefix = prefix.to_vec();
        self
    }

    /// More arguments.
    pub fn args<S: Into<OsString>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets a variable of its environment.
    pub fn env(mut self, key: &str, value: impl Into<OsString>) -> Self {
        self.environment.push((key.into(), value.into()));
        self
    }

    /// Starts it.
    ///
    /// # Errors
    /// The command was not built or can't be started.
    pub fn start(self) -> Result<Transship> {
        let program = binary()?;
        let mut command = match self.prefix.split_first() {
            Some((first, rest)) => {
                let mut command = Command::new(first);
                command.args(rest).arg(program);
                command
            }
            None => Command::new(program),
        };
        command.args(self.args).envs(self.environment);
        Ok(Transship { process: Process::start(command)? })
    }

    /// Runs it to its end.
    ///
    /// # Errors
    /// As [`TransshipBuilder::start`] and [`Transship::wait`].
    pub fn run(self) -> Result<Finished> {
        self.start()?.wait()
    }
}

impl Transship {
    /// Any run of the command.
    pub fn command<S: Into<OsString>>(args: impl IntoIterator<Item = S>) -> TransshipBuilder {
        let args = args.into_iter().map(Into::into).collect();
        TransshipBuilder { prefix: Vec::new(), args, environment: Vec::new() }
    }

    /// `transship move --vm VM --to URI --json`
    pub fn moving(vm: &str, to: &str) -> TransshipBuilder {
        Self::command(["move", "--vm", vm, "--to", to, "--json"]).args(in_clear(to))
    }

    /// `transship receive --vm VM --listen URI --json`
    pub fn receiving(vm: &str, listen: &str) -> TransshipBuilder {
        Self::command(["receive", "--vm", vm, "--listen", listen, "--json"]).args(in_clear(listen))
    }

    /// Of a `receive`: waits until it listens, and gives the address to move to (a `tcp:` one has the chosen port).
    ///
    /// # Errors
    /// It ends before that; the error has what it said.
    pub fn listening(&self) -> Result<String> {
        let address = |line: &str| line.split_once("listening at ").map(|(_, uri)| uri.trim().to_owned());
        Ok(self.stderr().wait(Mark::START, "\"listening at\"", address)?.0)
    }

    /// Of a `receive` or `relay` with `--json` that wants a token: waits until it has printed it.
    ///
    /// # Errors
    /// It ends before that; the error has what it said.
    pub fn token(&self) -> Result<String> {
        let token = |line: &str| Some(serde_json::from_str::<Value>(line).ok()?["token"].as_str()?.to_owned());
        Ok(self.process.stdout().wait(Mark::START, "a token", token)?.0)
    }

    /// What it says.
    pub fn stderr(&self) -> &Lines {
        self.process.stderr()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Its process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Sends it a signal, such as that of Ctrl-C (`Signal::INT`).
    ///
    /// # Errors
    /// It has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.process.signal(signal)
    }

    /// Ends it as `kill -9` does.
    pub fn kill9(&mut self) {
        self.process.kill9();
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It still runs after `PATIENCE`; then it is killed, and the error has what it said.
    pub fn wait(self) -> Result<Finished> {
        self.wait_for(PATIENCE)
    }

    /// Like [`Transship::wait`], with a time limit.
    ///
    /// # Errors
    /// It still runs after `patience`; then it is killed, and the error has what it said.
    pub fn wait_for(mut self, patience: Duration) -> Result<Finished> {
        let status = self.process.wait(patience)?;
        let stdout = self.process.stdout().to_the_end()?.join("\n");
        let stderr = self.process.stderr().to_the_end()?.join("\n");
        Ok(Finished { status, stdout, stderr })
    }
}

/// On a link of the lab ([`crate::SlowLink`]) is nobody else.
fn in_clear(uri: &str) -> Option<&'static str> {
    ["tcp:192.0.2.", "tcp:0.0.0.0:"].iter().any(|start| uri.starts_with(start)).then_some("--insecure")
}

impl Finished {
    /// The exit code; none: a signal ended it.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// The JSON object that `--json` prints: the last one. A receiver that wants a token prints one before it.
    ///
    /// # Errors
    /// Standard output is something else.
    pub fn report(&self) -> Result<Value> {
        let objects: std::result::Result<Vec<Value>, _> = self.stdout.lines().map(serde_json::from_str).collect();
        let last = objects.map_err(|e| LabError(format!("no report ({e}): {self}")))?.pop();
        last.ok_or_else(|| LabError(format!("no report: {self}")))
    }

    /// Itself, if it ended with this code.
    ///
    /// # Errors
    /// It ended otherwise; the error has all that it said.
    pub fn expect_code(self, code: i32) -> Result<Self> {
        match self.code() == Some(code) {
            true => Ok(self),
            false => Err(LabError(format!("expected exit code {code}: {self}"))),
        }
    }

    /// Itself, if it failed with this code, and this is the `error_kind` in its report.
    ///
    /// # Errors
    /// It ended otherwise; the error has all that it said.
    pub fn expect_error(self, code: i32, kind: &str) -> Result<Self> {
        let ended = self.expect_code(code)?;
        match ended.report()?["error_kind"] == kind {
            true => Ok(ended),
            false => Err(LabError(format!("expected an error of the kind {kind}: {ended}"))),
        }
    }
}

/// Everything, for a failing test.
impl std::fmt::Display for Finished {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { status, stdout, stderr } = self;
        write!(f, "{}\n--- stdout\n{stdout}\n--- stderr\n{stderr}", in_words(*status))
    }
}
