//! Finding the moves and saves that run, and speaking to them.
use std::{
    fs, io,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde_json::Value;
use transship_lines::LineSocket;

use super::{Call, Request, State, message::Answer, name};
use crate::{failure::Failure, runtime::Folder};

/// An answer takes no work, so one that takes longer does not come.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
const STATUS: Request = Request { call: Call::Status, early: false };

/// Something that runs, and is connected to.
pub(crate) struct Found {
    pub(crate) socket: PathBuf,
    line: LineSocket,
    /// How it did when it was found.
    pub(crate) state: State,
}

impl Found {
    fn at(path: &Path) -> Result<Self, Why> {
        let stream = UnixStream::connect(path).map_err(|error| match error.kind() {
            io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => Why::Gone,
            _ => Why::Failed(error.to_string()),
        })?;
        let (socket, state) = (path.to_path_buf(), State::default());
        let mut found = Self { socket, line: LineSocket::new(stream), state };
        found.tell(STATUS).map_err(Why::Failed)?;
        let state = found.answer().map_err(Why::Failed)?;
        found.state = serde_json::from_value(state).map_err(|error| Why::Failed(error.to_string()))?;
        Ok(found)
    }

    /// Asks, without waiting for the answer.
    ///
    /// # Errors
    /// It is gone, or does not listen. The text says why.
    pub(crate) fn tell(&mut self, request: Request) -> Result<(), String> {
        let text = serde_json::to_vec(&request).map_err(|error| error.to_string())?;
        self.line.send(&text, &[], Instant::now() + ANSWER_TIMEOUT).map_err(|error| error.to_string())
    }

    /// Waits for the answer.
    ///
    /// # Errors
    /// It refuses, or is gone. The text says why.
    pub(crate) fn answer(&mut self) -> Result<Value, String> {
        let line = self.line.receive(Instant::now() + ANSWER_TIMEOUT).map_err(|error| error.to_string())?;
        match serde_json::from_slice::<Answer>(&line.text) {
            Ok(Answer { ok: Some(ok), error: None }) => Ok(ok),
            Ok(Answer { ok: None, error: Some(why) }) => Err(why),
            _ => Err("it sent something other than an answer".into()),
        }
    }

    /// Whether a person may call it so.
    fn is(&self, which: &str) -> bool {
        let name = name::short(&self.state.vm);
        let stem = Path::new(&name).file_stem().and_then(|stem| stem.to_str());
        self.state.pid.to_string() == which || self.state.vm == which || name == which || stem == Some(which)
    }
}

enum Why {
    /// Nobody listens there.
    Gone,
    Failed(String),
}

/// All that run for this user, in the order of their processes. Sockets that dead ones have left behind are removed.
///
/// # Errors
/// The folder can't be read. One that does not answer is no error: `failed` gets a line for it.
pub(crate) fn all(failed: &mut Vec<String>) -> Result<Vec<Found>, Failure> {
    let folder = Folder::Control.path().map_err(Failure::Failed)?;
    let entries = match fs::read_dir(&folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(|error| Failure::Failed(format!("can't read {}: {error}", folder.display())))?,
    };
    let mut found = Vec::new();
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        // Those that begin with a dot are just being made.
        if path.file_name().and_then(|name| name.to_str()).is_none_or(|name| name.starts_with('.')) {
            continue;
        }
        match Found::at(&path) {
            Ok(one) => found.push(one),
            // Another one may have removed it already.
            Err(Why::Gone) => drop(fs::remove_file(&path)),
            Err(Why::Failed(why)) => failed.push(format!("{}: {why}", path.display())),
        }
    }
    found.sort_by(|one, other| (one.state.pid, &one.socket).cmp(&(other.state.pid, &other.socket)));
    Ok(found)
}

/// The one that a person means.
///
/// # Errors
/// There is none, or more than one.
pub(crate) fn one(which: &str) -> Result<Found, Failure> {
    let is_vm = ["qemu:", "libvirt:", "handoff:"].iter().any(|kind| which.starts_with(kind));
    if which.contains('/') && !is_vm {
        return Found::at(Path::new(which)).map_err(|why| match why {
            Why::Gone => Failure::Failed(format!("{which}: nothing listens there; it may have ended")),
            Why::Failed(why) => Failure::Failed(format!("{which}: {why}")),
        });
    }
    let mut failed = Vec::new();
    let mut found: Vec<_> = all(&mut failed)?.into_iter().filter(|found| found.is(which)).collect();
    match (found.pop(), found.len()) {
        (Some(one), 0) => Ok(one),
        (Some(_), more) => Err(Failure::Failed(format!(
            "{which:?} is {} moves or saves; name one by its process, as `transship status` shows it",
            more + 1
        ))),
        (None, _) => {
            let but = failed.iter().map(|why| format!("; {why}")).collect::<String>();
            Err(Failure::Failed(format!(
                "no move or save of {which:?} runs for this user; see `transship status`{but}"
            )))
        }
    }
}
