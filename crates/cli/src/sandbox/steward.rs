//! A second process beside a confined one, which keeps the rights. It does a few things that the command line named,
//! and nothing else: it makes connections to one address, and removes what the first process leaves behind. All that it
//! ever reads is one word, and the end of its input.
use std::{
    ffi::OsString,
    fs,
    io::{self, Read},
    net::Shutdown,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            fs::{FileTypeExt, MetadataExt},
            net::UnixStream,
            process::CommandExt,
        },
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use transship_engine::{Uri, connect, connect_by};
use transship_lines::{Line, LineSocket};

use crate::{failure::Failure, signals};

/// This program, also when its file was replaced or removed since it was started.
const OURSELVES: &str = "/proc/self/exe";
/// What a connection may take: a name may have several addresses, and each of them its time.
const CONNECT_WAIT: Duration = Duration::from_secs(120);
const CONNECT: &[u8] = b"connect";

/// What a steward is to do.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Errands<'a> {
    /// Connects there, as often as it is asked.
    pub(crate) connect: Option<&'a Uri>,
    /// A socket to be removed at the end.
    pub(crate) socket: Option<&'a Path>,
    /// A folder of ours, the same.
    pub(crate) folder: Option<&'a Path>,
}

impl<'a> Errands<'a> {
    /// Of a process that listens there.
    pub(crate) fn of_listener(at: &'a Uri) -> Self {
        match at {
            Uri::Unix(path) => Self { socket: Some(path), ..Self::default() },
            Uri::Tcp { .. } => Self::default(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.connect.is_none() && self.socket.is_none() && self.folder.is_none()
    }

    fn arguments(&self) -> Vec<OsString> {
        let flag = |name: &str, value: OsString| [OsString::from(name), value];
        let connect = self.connect.map(|uri| flag("--connect", uri.to_string().into()));
        let socket = self.socket.map(|path| flag("--socket", path.into()));
        let folder = self.folder.map(|path| flag("--folder", path.into()));
        [connect, socket, folder].into_iter().flatten().flatten().collect()
    }
}

/// The second process, as the first has it. When it is dropped, all that was to be removed has been.
pub(crate) struct Steward {
    socket: UnixStream,
}

impl Steward {
    /// Starts it. From now on new connections of this process come from it, if it has an address.
    pub(super) fn start(errands: Errands<'_>) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        Command::new(OURSELVES)
            .arg0("transship")
            .arg("steward")
            .args(errands.arguments())
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            // A Ctrl-C in the terminal, and a kill of our group, are not for it.
            .process_group(0)
            .spawn()?;
        if let Some(only) = errands.connect.cloned() {
            let line = Mutex::new(LineSocket::new(ours.try_clone()?));
            connect_by(move |uri| match *uri == only {
                true => ask(&mut line.lock().unwrap_or_else(PoisonError::into_inner)),
                false => Err(io::ErrorKind::PermissionDenied.into()),
            });
        }
        Ok(Self { socket: ours })
    }
}

impl Drop for Steward {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Write);
        // It says nothing more; its end is the end of this.
        let _ = self.socket.read_to_end(&mut Vec::new());
    }
}

/// How a connection came out; one that did has its socket beside it.
#[derive(Serialize, Deserialize)]
struct Answer {
    /// Why there is none.
    error: Option<String>,
    /// The system's number for that.
    number: Option<i32>,
}

fn ask(line: &mut LineSocket) -> io::Result<OwnedFd> {
    let deadline = Instant::now() + CONNECT_WAIT;
    line.send(CONNECT, &[], deadline).map_err(io::Error::other)?;
    let Line { text, mut fds } = line.receive(deadline).map_err(io::Error::other)?;
    let answer: Answer = serde_json::from_slice(&text)?;
    match (fds.pop(), answer) {
        (Some(socket), Answer { error: None, .. }) => Ok(socket),
        (_, Answer { number: Some(number), .. }) => Err(io::Error::from_raw_os_error(number)),
        (_, Answer { error, .. }) => Err(io::Error::other(error.unwrap_or_else(|| "no socket came".into()))),
    }
}

/// `transship steward`.
///
/// # Errors
/// It was not started by a process of ours.
pub(crate) fn run(to: Option<&str>, socket: Option<PathBuf>, folder: Option<PathBuf>) -> Result<(), Failure> {
    let unusable = |what: &dyn std::fmt::Display| {
        Failure::Failed(format!("this process is started by other commands of transship: {what}"))
    };
    // Whoever ends a whole service ends the process that this one is for, which ends this one.
    signals::outlive_requests_to_end()?;
    let to: Option<Uri> = to.map(str::parse).transpose().map_err(|why: String| unusable(&why))?;
    let stdin = io::stdin().as_fd().try_clone_to_owned().map_err(|e| unusable(&e))?;
    // Somebody else may have put another one there when it is to be removed.
    let socket = socket.and_then(|path| Some((identity(&path)?, path)));
    let mut line = LineSocket::new(UnixStream::from(stdin));
    if let Some(to) = to {
        while let Ok(Line { text, .. }) = line.receive(Instant::now() + FOREVER) {
            if text != CONNECT || answer(&line, connect(&to)).is_err() {
                break;
            }
        }
    } else {
        while line.stream().read(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::Interrupted) {}
    }
    if let Some((_, path)) = socket.filter(|(id, path)| identity(path) == Some(*id)) {
        let _ = fs::remove_file(path);
    }
    if let Some(path) = folder {
        let _ = fs::remove_dir_all(path);
    }
    Ok(())
}

/// Longer than anything runs.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

fn answer(line: &LineSocket, made: io::Result<OwnedFd>) -> io::Result<()> {
    let (answer, socket) = match made {
        Ok(socket) => (Answer { error: None, number: None }, Some(socket)),
        Err(error) => (Answer { number: error.raw_os_error(), error: Some(error.to_string()) }, None),
    };
    let text = serde_json::to_vec(&answer)?;
    let sockets: Vec<_> = socket.iter().map(|socket| socket.as_fd()).collect();
    line.send(&text, &sockets, Instant::now() + CONNECT_WAIT).map_err(io::Error::other)
}

/// Of a socket's file: device and number.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let there = fs::symlink_metadata(path).ok()?;
    there.file_type().is_socket().then(|| (there.dev(), there.ino()))
}
