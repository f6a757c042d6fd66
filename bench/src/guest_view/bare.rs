//! A guest's blackout where nothing but two QEMUs is waited for: they have the same memory, so no page is sent, and
//! nobody asks anything. Whoever moves a guest from outside is not quicker than that.
use std::{
    fs,
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Instant,
};

use serde_json::{Value, json};
use transship_lab::{
    Qemu,
    beats::{Heard, heard, wait_for_beats},
};

use super::BEATS_BESIDE;
use crate::{
    content::SourceMemory,
    pair::{Recipe, text},
    units::millis,
};

/// The guest's silence in ms. Its QEMU saves what is not memory, and the other one loads it as soon as it is saved.
pub(super) fn once(recipe: &Recipe<'_>, memory: &SourceMemory) -> Result<f64, String> {
    let source = recipe.source(memory)?;
    let home = memory.path().parent().ok_or("guest memory without a folder")?;
    // What QEMU saves alone does not begin with what its settings are.
    let destination = recipe.waiting(home, memory.bytes())?.args(["-global", "migration.send-configuration=off"]);
    let destination = destination.start().map_err(text)?;
    let mut ear = listening(&destination)?;
    let state = source.folder().join("state");
    let mut questions = Questions::new(&source)?;
    // The last beat before the stop counts: it comes at once.
    let since = Instant::now();
    wait_for_beats(&source, BEATS_BESIDE).map_err(text)?;
    let save = json!({ "filename": state, "live": true });
    questions.ask(&[("stop", json!({})), ("xen-save-devices-state", save)])?;
    let saved = fs::read(&state).map_err(|error| format!("{}: {error}", state.display()))?;
    ear.write_all(&saved).map_err(text)?;
    drop(ear);
    wait_for_beats(&destination, BEATS_BESIDE).map_err(text)?;
    let Heard { silence, .. } = heard(&source, &destination, since).map_err(text)?;
    let swept = destination.sweep().map_err(text)?;
    match swept.errors {
        0 => Ok(millis(silence)),
        errors => Err(format!("{errors} of {} pages are not what the guest has written", swept.pages)),
    }
}

/// The destination's socket, from which it loads whatever comes.
fn listening(destination: &Qemu) -> Result<UnixStream, String> {
    let path = destination.folder().join("state");
    destination.qmp("migrate-incoming", json!({ "uri": format!("unix:{}", path.display()) })).map_err(text)?;
    connected(&path)
}

fn connected(path: &Path) -> Result<UnixStream, String> {
    UnixStream::connect(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// A QMP connection on which several commands go at once.
struct Questions {
    stream: UnixStream,
    heard: Vec<u8>,
}

impl Questions {
    fn new(qemu: &Qemu) -> Result<Self, String> {
        let mut new = Self { stream: connected(&qemu.qmp_path())?, heard: Vec::new() };
        new.answer(|line| line.get("QMP").is_some())?;
        new.ask(&[("qmp_capabilities", json!({}))])?;
        Ok(new)
    }

    /// Sends all of them in one piece, and waits until all are done.
    fn ask(&mut self, commands: &[(&str, Value)]) -> Result<(), String> {
        let line = |(name, arguments): &(&str, Value)| json!({ "execute": name, "arguments": arguments }).to_string();
        let lines: Vec<_> = commands.iter().map(line).collect();
        self.stream.write_all(format!("{}\n", lines.join("\n")).as_bytes()).map_err(text)?;
        commands.iter().try_for_each(|_| self.answer(|line| line.get("return").is_some()))
    }

    /// Waits for a line that is `wanted`; events come in between.
    fn answer(&mut self, wanted: impl Fn(&Value) -> bool) -> Result<(), String> {
        loop {
            while let Some(end) = self.heard.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.heard.drain(..=end).collect();
                let line: Value = serde_json::from_slice(&line).map_err(text)?;
                if wanted(&line) {
                    return Ok(());
                }
                if line.get("error").is_some() {
                    return Err(format!("QEMU refuses: {line}"));
                }
            }
            let mut piece = [0; 4096];
            match self.stream.read(&mut piece).map_err(text)? {
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).to_string()),
                read => self.heard.extend_from_slice(&piece[..read]),
            }
        }
    }
}
