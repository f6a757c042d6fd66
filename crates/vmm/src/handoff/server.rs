//! The guest process's end: answers the calls of one client at a time.
use std::{
    io::{Read, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};
use serde_json::{Value, json};

use transship_lines::{GuestSocket, Line, LineError, LineSocket, Shutdown, wait_for_any};

use super::{
    message::{
        Answer, CheckResult, Description, MISSING, PROTECT, RegionEntry, Request, StateBytes, VERSION, one_line,
    },
    state_stream::StateStream,
    userfaultfd,
};

/// A client that does not take its answer for so long is dropped.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// For a client that is turned away; the few bytes fit the socket's buffer.
const REFUSAL_LIMIT: Duration = Duration::from_millis(100);

/// One memory region, as the guest process has it.
#[derive(Debug, Clone)]
pub struct GuestRegion<'a> {
    /// At most 255 bytes; equal on both sides of a move.
    pub name: String,
    /// A multiple of 4096.
    pub bytes: u64,
    /// The file that holds it; shared memory (a memfd, a file on tmpfs or hugetlbfs).
    pub file: BorrowedFd<'a>,
    /// Where it begins in the file.
    pub file_offset: u64,
    /// Where this process maps it, shared and writable.
    pub address: u64,
}

/// What the guest does now. Each call is valid in some states only, see [`HandoffGuest`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestState {
    /// It runs.
    Running,
    /// It was stopped and may be resumed.
    Stopped,
    /// A destination that has nothing yet.
    Waiting,
    /// A destination that has everything and may be started.
    Loaded,
}

/// A VMM's part. An error is a sentence for the user; the state stays as it was.
pub trait HandoffGuest {
    /// What machine this is; equal on both sides of a move. At most 255 bytes.
    fn machine(&self) -> String;
    /// The regions of guest memory, always the same ones in the same order.
    fn regions(&self) -> Vec<GuestRegion<'_>>;
    /// `Running` to `Stopped`. Stops the guest and returns when nothing writes to its memory any more.
    ///
    /// # Errors
    /// It can't be stopped; then it still runs.
    fn stop(&mut self) -> Result<(), String>;
    /// `Stopped` to `Running`, as if it had not been stopped.
    ///
    /// # Errors
    /// It can't be resumed; then it's still whole and stopped.
    fn resume(&mut self) -> Result<(), String>;
    /// In `Stopped` or `Loaded`: writes the device state. May be called again.
    ///
    /// # Errors
    /// Not all could be written.
    fn save_state(&mut self, to: &mut dyn Write) -> Result<(), String>;
    /// `Waiting` to `Loaded`. The memory has been filled in already. The stream's end does not prove that the state is
    /// complete: the guest must see that by itself.
    ///
    /// # Errors
    /// Not all could be loaded; the guest waits as before.
    fn load_state(&mut self, from: &mut dyn Read) -> Result<(), String>;
    /// `Loaded` to `Running`.
    ///
    /// # Errors
    /// It can't be started; then it is still loaded.
    fn start(&mut self) -> Result<(), String>;
    /// Whether a write to guest memory may have to wait for transship, so that a snapshot can be saved while the guest
    /// runs. Not if some writes go through other mappings than the described ones, or if a part of the VMM must never
    /// wait.
    fn may_wait_for_writes(&self) -> bool {
        true
    }
    /// Whether this guest may run before its memory is there, each page coming when somebody touches it. Not if some
    /// accesses go through other mappings than the described ones, or if a part of the VMM must never wait.
    fn may_wait_for_pages(&self) -> bool {
        false
    }
    /// In `Waiting`, with [`HandoffGuest::may_wait_for_pages`]: from now on holes in the memory files are pages that
    /// have not come yet.
    ///
    /// # Errors
    /// Not possible now; the guest waits as before.
    fn wait_for_pages(&mut self) -> Result<(), String> {
        Ok(())
    }
    /// In every state but `Waiting`: whether the memory is what it must be.
    ///
    /// # Errors
    /// This guest can't tell.
    fn check(&mut self) -> Result<CheckResult, String> {
        Err("this guest can't check its memory".into())
    }
}

/// Serves `guest`, which is in `state`, until `shutdown` is requested or `deadline` is reached. Returns its last state.
///
/// When a client goes, whatever it was doing, the guest stays in the state that it is in: a stopped guest stays
/// stopped, and the next client may resume it.
///
/// # Errors
/// The system's own, when waiting fails.
pub fn serve(
    socket: &GuestSocket,
    guest: &mut dyn HandoffGuest,
    state: GuestState,
    shutdown: &Shutdown,
    deadline: Option<Instant>,
) -> std::io::Result<GuestState> {
    let mut server = Server { guest, state };
    let mut client: Option<LineSocket> = None;
    loop {
        let mut fds = vec![
            PollFd::from_borrowed_fd(shutdown.event(), PollFlags::IN),
            PollFd::from_borrowed_fd(socket.fd(), PollFlags::IN),
        ];
        fds.extend(client.as_ref().map(|c| PollFd::from_borrowed_fd(c.stream().as_fd(), PollFlags::IN)));
        let ready = wait_for_any(&mut fds, deadline)?;
        let is_ready = |i: usize| fds.get(i).is_some_and(|fd| !fd.revents().is_empty());
        let (ended, newcomer, spoke) = (is_ready(0) || ready == 0, is_ready(1), is_ready(2));
        if ended {
            return Ok(server.state);
        }
        // First the client that is there, up to its end: when it has gone, there's room for the newcomer.
        if spoke {
            if client.as_mut().is_some_and(|c| server.answer_all(c).is_err()) {
                client = None;
            }
        } else if newcomer && let Some(stream) = socket.accept() {
            let newcomer = LineSocket::new(stream);
            match client {
                Some(_) => refuse(&newcomer, "another client is connected; one at a time"),
                None => client = Some(newcomer),
            }
        }
    }
}

/// Says why, as well as possible, and hangs up.
fn refuse(client: &LineSocket, why: &str) {
    let answer = Answer { id: 0, ok: None, error: Some(why.into()) };
    if let Ok(text) = serde_json::to_vec(&answer) {
        let _ = client.send(&text, &[], Instant::now() + REFUSAL_LIMIT);
    }
}

/// The client is to be dropped.
struct Gone;

struct Server<'a> {
    guest: &'a mut dyn HandoffGuest,
    state: GuestState,
}

/// What a call brings: a value, and file descriptors of the guest's own or made for the client.
#[derive(Default)]
struct Done {
    value: Option<Value>,
    made: Vec<OwnedFd>,
    regions: bool,
}

impl Server<'_> {
    /// Reads what has come, and answers each line that is complete.
    fn answer_all(&mut self, client: &mut LineSocket) -> Result<(), Gone> {
        let read = client.read_some();
        loop {
            match client.take_line() {
                Ok(Some(line)) => self.answer(client, line)?,
                Ok(None) => break,
                Err(e) => return Err(dismiss(client, &e)),
            }
        }
        read.map_err(|e| dismiss(client, &e))
    }

    fn answer(&mut self, client: &LineSocket, line: Line) -> Result<(), Gone> {
        let request: Request = match serde_json::from_slice(&line.text) {
            Ok(request) => request,
            Err(e) => {
                refuse(client, &format!("that was not a request: {e}"));
                return Err(Gone);
            }
        };
        tracing::debug!(call = %request.call, state = ?self.state, "asked");
        let done = self.call(&request.call, line.fds);
        let (answer, fds) = match done {
            Ok(done) => (Answer { id: request.id, ok: Some(done.value.unwrap_or_else(|| json!({}))), error: None }, {
                (done.made, done.regions)
            }),
            Err(error) => (Answer { id: request.id, ok: None, error: Some(one_line(&error)) }, (Vec::new(), false)),
        };
        let text = serde_json::to_vec(&answer).map_err(|_| Gone)?;
        let mut with: Vec<BorrowedFd<'_>> = fds.0.iter().map(AsFd::as_fd).collect();
        if fds.1 {
            with.extend(self.guest.regions().into_iter().map(|r| r.file));
        }
        client.send(&text, &with, Instant::now() + ANSWER_LIMIT).map_err(|_| Gone)
    }

    fn call(&mut self, call: &str, fds: Vec<OwnedFd>) -> Result<Done, String> {
        let value = match call {
            "save-state" => Some(self.save_state(one(fds)?)?),
            "load-state" => Some(self.load_state(one(fds)?)?),
            _ if !fds.is_empty() => return Err(format!("{call} takes no file descriptors, but {} came", fds.len())),
            "describe" => return Ok(Done { value: Some(self.describe()?), regions: true, ..Done::default() }),
            "track" => return Ok(Done { made: vec![userfaultfd::for_users()?], ..Done::default() }),
            PROTECT => return Ok(Done { made: vec![self.protect()?], ..Done::default() }),
            MISSING => return Ok(Done { made: vec![self.missing()?], ..Done::default() }),
            "stop" => self.stop()?,
            "resume" => self.resume()?,
            "start" => self.start()?,
            "check" => Some(self.check()?),
            _ => return Err(format!("there is no call {call:?}")),
        };
        Ok(Done { value, ..Done::default() })
    }

    fn describe(&self) -> Result<Value, String> {
        let region = |r: GuestRegion<'_>| RegionEntry {
            name: r.name,
            bytes: r.bytes,
            file_offset: r.file_offset,
            address: r.address,
        };
        let description = Description {
            version: VERSION,
            machine: self.guest.machine(),
            running: self.state == GuestState::Running,
            waiting: self.state == GuestState::Waiting,
            pid: std::process::id(),
            regions: self.guest.regions().into_iter().map(region).collect(),
            offers: self.offers(),
        };
        serde_json::to_value(description).map_err(|e| e.to_string())
    }

    fn offers(&self) -> Vec<String> {
        let (writes, pages) = (self.guest.may_wait_for_writes(), self.guest.may_wait_for_pages());
        let offers = [(PROTECT, writes), (MISSING, pages)];
        offers.into_iter().filter(|(_, offered)| *offered).map(|(call, _)| call.to_owned()).collect()
    }

    fn protect(&self) -> Result<OwnedFd, String> {
        if !self.guest.may_wait_for_writes() {
            return Err("this guest's writes can't wait".into());
        }
        userfaultfd::for_all()
    }

    fn missing(&mut self) -> Result<OwnedFd, String> {
        if !self.guest.may_wait_for_pages() {
            return Err("this guest can't wait for its pages".into());
        }
        if self.state != GuestState::Waiting {
            return Err(self.wrong_state(MISSING));
        }
        let uffd = userfaultfd::for_all()?;
        self.guest.wait_for_pages()?;
        Ok(uffd)
    }

    fn stop(&mut self) -> Result<Option<Value>, String> {
        match self.state {
            GuestState::Running => self.guest.stop()?,
            // Its client may have lost the answer: that it stands still is what was asked for.
            GuestState::Stopped | GuestState::Loaded => return Ok(None),
            GuestState::Waiting => return Err(self.wrong_state("stop")),
        }
        self.state = GuestState::Stopped;
        Ok(None)
    }

    fn resume(&mut self) -> Result<Option<Value>, String> {
        match self.state {
            GuestState::Stopped => self.guest.resume()?,
            GuestState::Running => return Ok(None),
            GuestState::Waiting | GuestState::Loaded => return Err(self.wrong_state("resume")),
        }
        self.state = GuestState::Running;
        Ok(None)
    }

    fn start(&mut self) -> Result<Option<Value>, String> {
        match self.state {
            GuestState::Loaded => self.guest.start()?,
            GuestState::Running => return Ok(None),
            GuestState::Waiting | GuestState::Stopped => return Err(self.wrong_state("start")),
        }
        self.state = GuestState::Running;
        Ok(None)
    }

    fn save_state(&mut self, to: OwnedFd) -> Result<Value, String> {
        if !matches!(self.state, GuestState::Stopped | GuestState::Loaded) {
            return Err(self.wrong_state("save-state"));
        }
        let mut stream = StateStream::new(to)?;
        self.guest.save_state(&mut stream)?;
        Ok(json!(StateBytes { bytes: stream.passed() }))
    }

    fn load_state(&mut self, from: OwnedFd) -> Result<Value, String> {
        if self.state != GuestState::Waiting {
            return Err(self.wrong_state("load-state"));
        }
        let mut stream = StateStream::new(from)?;
        self.guest.load_state(&mut stream)?;
        self.state = GuestState::Loaded;
        Ok(json!(StateBytes { bytes: stream.passed() }))
    }

    fn check(&mut self) -> Result<Value, String> {
        if self.state == GuestState::Waiting {
            return Err(self.wrong_state("check"));
        }
        Ok(json!(self.guest.check()?))
    }

    fn wrong_state(&self, call: &str) -> String {
        let now = match self.state {
            GuestState::Running => "runs",
            GuestState::Stopped => "is stopped (resume lets it run)",
            GuestState::Waiting => "waits for memory and device state",
            GuestState::Loaded => "is loaded and was not started (start lets it run)",
        };
        format!("{call} is not possible: the guest {now}")
    }
}

fn one(mut fds: Vec<OwnedFd>) -> Result<OwnedFd, String> {
    match (fds.pop(), fds.is_empty()) {
        (Some(fd), true) => Ok(fd),
        (Some(_), false) => Err(format!("one file descriptor is needed, but {} came", fds.len() + 1)),
        (None, _) => Err("a file descriptor for the device state is needed, but none came".into()),
    }
}

/// Drops a client that broke the rules, and tells it; one that just went needs no words.
fn dismiss(client: &LineSocket, error: &LineError) -> Gone {
    if !matches!(error, LineError::Closed) {
        tracing::warn!("turned away a client: {error}");
        refuse(client, &error.to_string());
    }
    Gone
}
