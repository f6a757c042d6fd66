//! A command that QEMU has read but for its end. It reads a byte at a time, so a command that is known beforehand takes
//! a fraction of its time when its moment comes.
use serde_json::Value;

use super::{
    super::{Command, QmpError},
    Socket,
};

/// The end of every command.
pub(super) const END: &str = "}\n";
/// An end with which QEMU refuses any command, since none has such a member. Nobody waits for its answer.
const WITHDRAWN: &str = ",\"withdrawn\":true}\n";

/// QEMU has read this command, but for its end.
pub(super) struct Typed {
    id: u64,
    command: &'static str,
    arguments: Value,
}

impl Socket {
    /// Sends a command but for its end. If we hang up, QEMU forgets what it has read of it.
    ///
    /// # Errors
    /// QEMU is gone, or does not read.
    pub(super) fn type_ahead(&mut self, (command, arguments): &Command) -> Result<(), QmpError> {
        self.end_typed(None)?;
        let id = self.next_id;
        let line = self.line(command, arguments, true);
        let begin = line.strip_suffix(END).unwrap_or(&line);
        self.write(begin.as_bytes(), None, command)?;
        self.typed = Some(Typed { id, command, arguments: arguments.clone() });
        Ok(())
    }

    /// The number of the command that QEMU has read but for its end, if it is this one. Any other is withdrawn.
    ///
    /// # Errors
    /// As [`Socket::type_ahead`].
    pub(super) fn end_typed(&mut self, next: Option<&(&str, &Value)>) -> Result<Option<u64>, QmpError> {
        let Some(Typed { id, command, arguments }) = self.typed.take() else { return Ok(None) };
        if next.is_some_and(|(name, with)| command == *name && arguments == **with) {
            return Ok(Some(id));
        }
        self.write(WITHDRAWN.as_bytes(), None, command).map(|()| None)
    }
}
