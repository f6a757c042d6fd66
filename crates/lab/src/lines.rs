//! Lines that another process writes, kept in order, and a way to wait for one.
use crate::{LabError, PATIENCE, Result};
use std::io::{BufRead, BufReader, Read};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Everything that came out of a serial port or a process so far. A thread reads it, so the writer never waits for us.
#[derive(Debug, Clone)]
pub struct Lines {
    source: &'static str,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    grown: Condvar,
}

#[derive(Debug, Default)]
struct State {
    lines: Vec<String>,
    /// When each of them was complete.
    times: Vec<Instant>,
    closed: bool,
}

/// A place in the output: lines behind it are newer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark(usize);

impl Mark {
    /// The beginning.
    pub const START: Self = Self(0);
}

impl Lines {
    /// Reads `stream` until it closes. `source` names it in errors.
    pub fn of(source: &'static str, stream: impl Read + Send + 'static) -> Self {
        let shared = Arc::new(Shared::default());
        let written = Arc::clone(&shared);
        std::thread::spawn(move || written.follow(stream));
        Self { source, shared }
    }

    /// Everything so far.
    pub fn all(&self) -> Vec<String> {
        self.shared.lock().lines.clone()
    }

    /// When the lines for which `is_wanted` holds came in, in their order.
    pub fn times(&self, is_wanted: impl Fn(&str) -> bool) -> Vec<Instant> {
        let state = self.shared.lock();
        state.lines.iter().zip(&state.times).filter(|(line, _)| is_wanted(line)).map(|(_, time)| *time).collect()
    }

    /// Everything, once the writer has closed its end.
    ///
    /// # Errors
    /// It has not in `PATIENCE`.
    pub fn to_the_end(&self) -> Result<Vec<String>> {
        let state = self.shared.lock();
        let waited = self.shared.grown.wait_timeout_while(state, PATIENCE, |state| !state.closed);
        let (state, _) = waited.expect("nobody panics with the lock held");
        match state.closed {
            true => Ok(state.lines.clone()),
            false => Err(LabError(format!("{}: still open after {PATIENCE:?}", self.source))),
        }
    }

    /// The end of what has come so far.
    pub fn mark(&self) -> Mark {
        Mark(self.shared.lock().lines.len())
    }

    /// The first line behind `mark` for which `read` gives something, and the place behind it.
    ///
    /// # Errors
    /// None came in `PATIENCE`, or the writer closed its end.
    pub fn wait<T>(&self, mark: Mark, what: &str, read: impl FnMut(&str) -> Option<T>) -> Result<(T, Mark)> {
        self.wait_for(PATIENCE, mark, what, read)
    }

    /// Like [`Lines::wait`], with a time limit.
    ///
    /// # Errors
    /// None came in `patience`, or the writer closed its end.
    pub fn wait_for<T>(
        &self,
        patience: Duration,
        mark: Mark,
        what: &str,
        mut read: impl FnMut(&str) -> Option<T>,
    ) -> Result<(T, Mark)> {
        let deadline = Instant::now() + patience;
        let mut next = mark.0;
        let mut state = self.shared.lock();
        loop {
            while let Some(line) = state.lines.get(next) {
                next += 1;
                if let Some(found) = read(line) {
                    return Ok((found, Mark(next)));
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || state.closed {
                let why = if state.closed { "it was closed".into() } else { format!("not in {patience:?}") };
                return Err(LabError(format!("{}: waiting for {what}: {why}\n{}", self.source, state.tail())));
            }
            state = self.shared.grown.wait_timeout(state, left).expect("nobody panics with the lock held").0;
        }
    }

    /// The last lines, for error messages.
    pub fn tail(&self) -> String {
        self.shared.lock().tail()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics with the lock held")
    }

    fn follow(&self, stream: impl Read) {
        let mut stream = BufReader::new(stream);
        let mut line = Vec::new();
        // Any byte may come: a boot loader's escape codes, a guest's memory.
        while matches!(stream.read_until(b'\n', &mut line), Ok(1..)) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            let mut state = self.lock();
            state.lines.push(text);
            state.times.push(Instant::now());
            drop(state);
            self.grown.notify_all();
            line.clear();
        }
        self.lock().closed = true;
        self.grown.notify_all();
    }
}

impl State {
    fn tail(&self) -> String {
        let from = self.lines.len().saturating_sub(15);
        self.lines[from..].iter().map(|line| format!("    | {line}\n")).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_line_is_found_once_and_only_behind_the_mark() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let lines = Lines::of("pipe", reader);
        writer.write_all(b"one\ntwo\none\n").unwrap();
        let one = |line: &str| (line == "one").then_some(());
        let ((), first) = lines.wait(Mark::START, "one", one).unwrap();
        let ((), second) = lines.wait(first, "one", one).unwrap();
        assert!(second > first);
        drop(writer);
        assert_eq!(lines.to_the_end().unwrap(), ["one", "two", "one"]);
        let error = lines.wait(second, "a third", one).unwrap_err().to_string();
        assert!(error.contains("pipe: waiting for a third: it was closed"), "{error}");
    }
}
