//! Where words go: results to stdout, talk to stderr.
//!
//! Nothing here panics or gives up when stderr is closed or its terminal is gone: a move must not die of that.
use std::io::{self, IsTerminal, Write};

use serde::Serialize;

/// One line of talk on stderr, in one piece: the processes of a command share it.
pub(crate) fn say(line: &str) {
    let mut stderr = io::stderr().lock();
    // A progress bar may stand on this line; it draws itself again below.
    let clear = if stderr.is_terminal() { "\r\x1b[2K" } else { "" };
    // If nobody can read it, nobody can be told so either.
    let _ = stderr.write_all(format!("{clear}transship: {line}\n").as_bytes());
}

/// What went wrong, on exactly one line, whatever a peer or a VMM put into it.
pub(crate) fn complain(line: &str) {
    say(&one_line(line));
}

/// Says what is written to it, a line with each call.
pub(crate) struct Talk;

impl Write for Talk {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        complain(&String::from_utf8_lossy(line));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A result for people, or a part of it.
pub(crate) fn result(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// A result for programs: one object on one line.
pub(crate) fn json(value: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_string(value)?;
    text.push('\n');
    result(&text)
}

/// Control characters would let a peer's words move the cursor or add lines of their own.
pub(crate) fn one_line(text: &str) -> String {
    text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_peers_words_stay_on_their_line() {
        assert_eq!(super::one_line("no\x1b[2J\nroom\r\n"), "no [2J room");
    }
}
