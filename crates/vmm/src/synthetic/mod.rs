//! A guest without a VMM, for trying things and for tests: memory, threads that write it, and a check of every page.
//!
//! Each written page holds its number, its version and a pattern that both determine; how often each page was written
//! is the guest's device state. After a move the guest therefore knows what every page must hold: one that is old, torn
//! or somebody else's is found. It hands itself over by the protocol of [`crate::handoff`].

mod arrival;
mod content;
mod guest;
mod machine;
#[allow(unsafe_code)]
mod mapping;
mod options;
mod pattern;
mod state;
mod writers;

#[cfg(test)]
mod tests;

pub use guest::MACHINE;
pub use options::{Content, SyntheticOptions, WriteRate};

use std::{
    fmt, io,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard},
    time::Instant,
};

use transship_lines::{GuestSocket, Shutdown, SocketError};
use transship_memory::PageCount;

use crate::handoff::{CheckResult, GuestState, serve};
use guest::SyntheticGuest;
use machine::Machine;
use mapping::Ram;

/// Why there is no synthetic guest.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The options can't be.
    #[error("{0}")]
    Options(String),
    /// It can't listen.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The system refused.
    #[error("can't {what}: {source}")]
    System {
        /// To do what, to what.
        what: String,
        /// Why.
        source: io::Error,
    },
}

/// What happens to a guest, for who watches it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// It answers at this socket from now on.
    Listening(PathBuf),
    /// Memory and state have been brought.
    Loaded,
    /// The writers write.
    Running,
    /// They stand still.
    Stopped,
    /// All pages have been checked: after a move, or because a client asked.
    Checked(CheckResult),
}

/// Receives what happens; called from any thread.
pub type Events = Arc<dyn Fn(Event) + Send + Sync>;

/// What there is to say at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    /// What the guest did last.
    pub state: GuestState,
    /// Pages written in all its life, here and elsewhere.
    pub writes: u64,
    /// What the last check found.
    pub check: Option<CheckResult>,
}

/// Is a synthetic guest until `shutdown` is requested or its time is over.
///
/// # Errors
/// The options can't be, the memory can't be had, the socket can't be listened on.
pub fn run(options: &SyntheticOptions, shutdown: &Shutdown, events: &Events) -> Result<Summary, Error> {
    options.check()?;
    GuestSocket::make_way(&options.listen)?;
    let ram: Arc<[Ram]> = memory(options)?.into();
    let (mut guest, state) = if options.incoming {
        (SyntheticGuest::waiting(ram, events.clone()), GuestState::Waiting)
    } else {
        let machine = Machine::fill(ram, options, shutdown)?;
        let threads = |source| Error::System { what: "start the writers".into(), source };
        (SyntheticGuest::going(machine, events.clone()).map_err(threads)?, GuestState::Running)
    };
    let socket = GuestSocket::listen(&options.listen)?;
    events(Event::Listening(options.listen.clone()));
    let deadline = options.duration.and_then(|duration| Instant::now().checked_add(duration));
    let state = serve(&socket, &mut guest, state, shutdown, deadline)
        .map_err(|source| Error::System { what: format!("listen at {}", options.listen.display()), source })?;
    Ok(Summary { state, writes: guest.writes(), check: guest.last_check() })
}

/// Prints what happens, a line each, to standard output.
pub fn print_events() -> Events {
    Arc::new(|event| {
        use io::Write;
        // A reader that went away is no reason to end a guest.
        let _ = writeln!(io::stdout().lock(), "{event}");
    })
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listening(path) => write!(f, "listening on handoff:{}", path.display()),
            Self::Loaded => f.write_str("memory and state are loaded"),
            Self::Running => f.write_str("running"),
            Self::Stopped => f.write_str("stopped"),
            Self::Checked(result) => result.fmt(f),
        }
    }
}

fn memory(options: &SyntheticOptions) -> Result<Vec<Ram>, Error> {
    let region = |i| Ram::new(format!("ram{i}"), PageCount::new(options.region_pages()), options.huge.as_deref());
    (0..options.regions).map(region).collect()
}

/// Threads that filling and checking use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// What is behind these locks is whole after every statement: a panic elsewhere does not spoil it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
