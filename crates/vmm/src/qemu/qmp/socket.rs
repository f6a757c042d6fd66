//! A client of QEMU's own QMP socket.
//!
//! The last of the commands that are given together has an id, which its answer carries. Those before it have none, as
//! QEMU reads a byte at a time: it answers in order, and an id out of order ends the connection. So the late answer to
//! a command that timed out is never taken for the next one's. Lines, and the events that nobody has asked for yet, are
//! bounded.
mod ahead;
mod typed;

use std::{
    collections::VecDeque,
    io::{self, Read},
    ops::Range,
    os::{
        fd::{AsRawFd, BorrowedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SendFlags;
use serde_json::{Map, Value, json};
use transship_lines::send_with_fds;

use super::{super::holder, COMMAND_WAIT, Carrier, Command, Event, Keeper, QmpError, Question, WithStop};
use crate::connecting::{connect, has_hung_up};

/// How long the greeting may take. QEMU sends it at once, unless another client holds the socket.
const GREETING_WAIT: Duration = Duration::from_secs(5);
/// How long we stay for a command whose answer nobody wanted.
const GIVEN_AWAY_WAIT: Duration = Duration::from_secs(2);
/// The longest line that QEMU may send. A list of all block nodes of a large guest stays below 1 MiB.
pub(super) const LINE_BYTES_MAX: usize = 8 << 20;
/// Events that are kept until somebody asks for them; beyond, the oldest goes.
const EVENTS_MAX: usize = 256;

/// A connection on which commands may be given.
pub(super) struct Socket {
    stream: UnixStream,
    path: PathBuf,
    pid: i32,
    version: (u64, u64),
    /// Bytes that came and are no whole line yet.
    pending: Vec<u8>,
    events: VecDeque<Event>,
    asked: Vec<ahead::Asked>,
    /// Numbers of the commands that were given without an id and are not answered yet.
    unnamed: VecDeque<u64>,
    /// What QEMU has read of the next command.
    typed: Option<typed::Typed>,
    /// The last command whose answer nobody wanted, if it has not come.
    given_away: Option<u64>,
    next_id: u64,
    answered: Option<Instant>,
}

impl Socket {
    /// Connects, waits for the greeting and leaves the negotiation mode.
    pub(super) fn connect(path: &Path) -> Result<Self, QmpError> {
        let stream = open(path)?;
        let pid = peer_of(&stream).map_err(|why| {
            QmpError::Connection(format!("can't identify the process that listens at {}: {why}", path.display()))
        })?;
        let mut socket = Self {
            stream,
            path: path.to_owned(),
            pid,
            version: (0, 0),
            pending: Vec::new(),
            events: VecDeque::new(),
            asked: Vec::new(),
            unnamed: VecDeque::new(),
            typed: None,
            given_away: None,
            next_id: 1,
            answered: None,
        };
        socket.greet()?;
        // Without commands out of band (oob), with which QEMU would read on while it does what it was told. It dies if
        // it reads the byte behind a command just when that takes the descriptor that came with it (seen with 10.0).
        //
        // A QEMU that has just been started greets before its machine is there, and answers when it is.
        socket.execute("qmp_capabilities", json!({}), None, COMMAND_WAIT)?;
        socket.answered = Some(Instant::now());
        Ok(socket)
    }

    fn greet(&mut self) -> Result<(), QmpError> {
        let greeting = match self.message(Instant::now() + GREETING_WAIT) {
            Ok(Some(greeting)) => greeting,
            Ok(None) => return Err(busy(&self.path)),
            Err(e) => return Err(e),
        };
        let version = &greeting["QMP"]["version"]["qemu"];
        let (Some(major), Some(minor)) = (version["major"].as_u64(), version["minor"].as_u64()) else {
            return Err(self.protocol("a greeting without a version"));
        };
        self.version = (major, minor);
        Ok(())
    }

    /// Waits until QEMU says something or has written there. One that has closed it again has something to say.
    fn is_written(&self, output: BorrowedFd<'_>, deadline: Instant) -> Result<bool, QmpError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut ready = [PollFd::new(&self.stream, PollFlags::IN), PollFd::from_borrowed_fd(output, PollFlags::IN)];
        match poll(&mut ready, Some(&left)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(ready[1].revents() == PollFlags::IN),
            Err(why) => Err(QmpError::Connection(format!("can't wait for QEMU at {}: {why}", self.path.display()))),
        }
    }

    /// Sends commands together; their numbers. A descriptor goes with the first.
    fn give(&mut self, commands: &[(&str, &Value)], fd: Option<BorrowedFd<'_>>) -> Result<Range<u64>, QmpError> {
        let named = commands.first().map_or("nothing", |(command, _)| command);
        let (mut lines, mut whole) = (String::new(), commands.iter());
        let typed = self.end_typed(commands.first().filter(|_| fd.is_none()))?;
        if typed.is_some() {
            lines.push_str(typed::END);
            whole.next();
        }
        let first = typed.unwrap_or(self.next_id);
        while let Some((command, arguments)) = whole.next() {
            lines.push_str(&self.line(command, arguments, whole.len() == 0));
        }
        self.write(lines.as_bytes(), fd, named)?;
        Ok(first..self.next_id)
    }

    /// A command with a number of its own, which QEMU is told if it is `named`.
    fn line(&mut self, command: &str, arguments: &Value, named: bool) -> String {
        let id = self.next_id;
        self.next_id += 1;
        tracing::debug!(pid = self.pid, command, "qmp");
        // QEMU reads a byte at a time, and its main loop goes round for each: some 4 µs. So nothing that need not be.
        let mut line = json!({ "execute": command });
        if !arguments.as_object().is_some_and(Map::is_empty) {
            line["arguments"] = arguments.clone();
        }
        match named {
            true => line["id"] = json!(id),
            false => self.unnamed.push_back(id),
        }
        format!("{line}\n")
    }

    /// The result of a command, if the message is its answer. Any other is sorted.
    fn answer(&mut self, id: u64, command: &str, message: Value) -> Result<Option<Value>, QmpError> {
        if message["id"] == json!(id) {
            return ahead::result_of(command, message).map(Some);
        }
        self.sort(message)?;
        Ok(None)
    }

    fn keep(&mut self, mut message: Value) {
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        let name = message["event"].as_str().unwrap_or_default().to_owned();
        self.events.push_back(Event { name, data: message["data"].take() });
    }

    /// The next line as JSON, or none at the deadline.
    fn message(&mut self, deadline: Instant) -> Result<Option<Value>, QmpError> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.pending[searched..].iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=searched + end).collect();
                if line.trim_ascii().is_empty() {
                    searched = 0;
                    continue;
                }
                let Ok(mut value @ Value::Object(_)) = serde_json::from_slice(&line) else {
                    return Err(self.protocol("a line that is not a JSON object"));
                };
                self.name(&mut value)?;
                self.given_away = self.given_away.filter(|id| value["id"] != *id);
                return Ok(Some(value));
            }
            searched = self.pending.len();
            if searched > LINE_BYTES_MAX {
                return Err(self.protocol("a line of more than 8 MiB"));
            }
            if !self.read_some(deadline)? {
                return Ok(None);
            }
        }
    }

    /// Gives an answer that has no id the number of its command.
    fn name(&mut self, message: &mut Value) -> Result<(), QmpError> {
        let is_answer = message.get("return").or(message.get("error")).is_some();
        match (message["id"].as_u64(), self.unnamed.front()) {
            (Some(id), Some(first)) if *first < id => Err(self.protocol("an answer before an earlier one")),
            (None, Some(first)) if is_answer => {
                message["id"] = json!(first);
                self.unnamed.pop_front();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The answer to the command of this id.
    fn await_answer(&mut self, id: u64, command: &str, deadline: Instant, limit: Duration) -> Result<Value, QmpError> {
        loop {
            let Some(message) = self.message(deadline)? else { return Err(self.timeout(command, limit)) };
            if let Some(result) = self.answer(id, command, message)? {
                return Ok(result);
            }
        }
    }

    /// Reads what is there; false if nothing came until the deadline.
    fn read_some(&mut self, deadline: Instant) -> Result<bool, QmpError> {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let mut chunk = [0; 16 << 10];
        let read = self.stream.set_read_timeout(Some(left)).and_then(|()| self.stream.read(&mut chunk));
        match read {
            Ok(0) => Err(self.closed()),
            Ok(count) => {
                self.pending.extend_from_slice(&chunk[..count]);
                Ok(true)
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Instant::now() < deadline),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(true),
            Err(_) => Err(self.closed()),
        }
    }

    /// Writes the line; `fd` goes with its first byte.
    fn write(&self, line: &[u8], fd: Option<BorrowedFd<'_>>, command: &str) -> Result<(), QmpError> {
        let (mut rest, mut with) = (line, fd.as_slice());
        while !rest.is_empty() {
            match send_with_fds(&self.stream, rest, with, SendFlags::empty()) {
                Ok(count) => (rest, with) = (&rest[count..], &[]),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Err(self.timeout(command, COMMAND_WAIT)),
                Err(_) => return Err(self.closed()),
            }
        }
        Ok(())
    }

    fn timeout(&self, command: &str, limit: Duration) -> QmpError {
        QmpError::Timeout { path: self.path.clone(), command: command.to_owned(), seconds: limit.as_secs() }
    }

    fn closed(&self) -> QmpError {
        QmpError::Closed { path: self.path.clone(), pid: self.pid }
    }

    fn protocol(&self, what: &str) -> QmpError {
        QmpError::Protocol { path: self.path.clone(), what: what.to_owned() }
    }
}

impl Carrier for Socket {
    /// The process that listens.
    fn pid(&self) -> i32 {
        self.pid
    }

    fn version(&self) -> (u64, u64) {
        self.version
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn answered(&self) -> Option<Instant> {
        self.answered
    }

    fn keeper(&self) -> Keeper {
        Keeper::Nobody
    }

    fn cont_by_hand(&self) -> String {
        crate::qemu::cont_by_hand(&self.path)
    }

    fn execute(
        &mut self,
        command: &str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> Result<Value, QmpError> {
        if let Some(answer) = self.answered(command, &arguments, limit) {
            return answer;
        }
        let id = self.give(&[(command, &arguments)], fd)?.start;
        self.await_answer(id, command, Instant::now() + limit, limit)
    }

    fn check_alive(&self) -> Result<(), QmpError> {
        if has_hung_up(&self.stream) { Err(self.closed()) } else { Ok(()) }
    }

    fn ask_ahead(&mut self, questions: &[Question]) -> Result<(), QmpError> {
        Self::ask_ahead(self, questions)
    }

    fn forget_answers(&mut self) {
        Self::forget_answers(self);
    }

    fn forget_answers_to(&mut self, questions: &[Question]) {
        Self::forget_answers_to(self, questions);
    }

    fn type_ahead(&mut self, command: &Command) -> Result<bool, QmpError> {
        Self::type_ahead(self, command).map(|()| true)
    }

    fn execute_all(&mut self, commands: &[Command], questions: &[Question], limit: Duration) -> Result<(), QmpError> {
        self.give_all(commands, questions, limit)?.into_iter().try_for_each(|result| result.map(drop))
    }

    fn add_fd(&mut self, fd: BorrowedFd<'_>, questions: &[Question], limit: Duration) -> Result<Value, QmpError> {
        self.give_and_ask("add-fd", Some(fd), ahead::Beside { behind: questions, ..Default::default() }, limit)
    }

    fn stop_with(&mut self, with: &WithStop, limit: Duration) -> Result<(), QmpError> {
        let beside = ahead::Beside { before: &with.before, behind: &with.questions, next: with.next.as_ref() };
        self.give_and_ask("stop", None, beside, limit).map(drop)
    }

    fn give_away(&mut self, command: &'static str, arguments: Value, _limit: Duration) -> Result<(), QmpError> {
        self.given_away = Some(self.give(&[(command, &arguments)], None)?.start);
        Ok(())
    }

    fn execute_until_written(
        &mut self,
        command: &str,
        arguments: Value,
        output: BorrowedFd<'_>,
        limit: Duration,
    ) -> Result<(), QmpError> {
        let id = self.give(&[(command, &arguments)], None)?.start;
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            if self.is_written(output, deadline)? {
                return Ok(());
            }
            while let Some(message) = self.message(Instant::now())? {
                if self.answer(id, command, message)?.is_some() {
                    return Ok(());
                }
            }
        }
        Err(self.timeout(command, limit))
    }

    fn wait_event(&mut self, name: &str, deadline: Instant) -> Result<Option<Event>, QmpError> {
        loop {
            if let Some(at) = self.events.iter().position(|event| event.name == name) {
                return Ok(self.events.remove(at));
            }
            let Some(message) = self.message(deadline)? else { return Ok(None) };
            self.sort(message)?;
        }
    }

    fn take_events(&mut self, name: &str) -> Result<Vec<Event>, QmpError> {
        self.await_asked()?;
        let (taken, left): (Vec<_>, Vec<_>) = self.events.drain(..).partition(|event| event.name == name);
        self.events = left.into();
        Ok(taken)
    }

    fn forget_events(&mut self) {
        // Whoever waits for one is told if QEMU is gone.
        let _ = self.await_asked();
        self.events.clear();
    }
}

impl Drop for Socket {
    /// QEMU may not carry out what it has not read when we hang up.
    fn drop(&mut self) {
        let deadline = Instant::now() + GIVEN_AWAY_WAIT;
        while self.given_away.is_some() && matches!(self.message(deadline), Ok(Some(_))) {}
    }
}

/// The process that listens on a socket, whether it answers or not.
pub(in crate::qemu) fn listener(path: &Path) -> Result<i32, QmpError> {
    peer_of(&open(path)?).map_err(|why| {
        QmpError::Connection(format!("can't identify the process that listens at {}: {why}", path.display()))
    })
}

fn open(path: &Path) -> Result<UnixStream, QmpError> {
    let failed = |e: io::Error| {
        QmpError::Connection(match e.kind() {
            io::ErrorKind::WouldBlock => return busy(path),
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => format!(
                "{}: {e}: no QEMU listens there; start it with -qmp unix:{},server=on,wait=off",
                path.display(),
                path.display()
            ),
            _ => format!("{}: {e}", path.display()),
        })
    };
    let stream = connect(path).and_then(|stream| {
        stream.set_write_timeout(Some(COMMAND_WAIT))?;
        Ok(stream)
    });
    stream.map_err(failed)
}

/// The process at the other end: the one that listens, or the one that has connected. (rustix's own call has a type
/// without room for the 0 of a process that we can't see.)
pub(in crate::qemu) fn peer_of(stream: &UnixStream) -> Result<i32, String> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `peer` is a writable ucred and `length` its size, so the kernel writes within it.
    let result = unsafe {
        libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &mut length)
    };
    match (result, peer.pid) {
        (0, 0) => Err("a process in another container (PID namespace); run transship there".to_owned()),
        (0, pid) => Ok(pid),
        _ => Err(io::Error::last_os_error().to_string()),
    }
}

fn busy(path: &Path) -> QmpError {
    let holders = holder::holders(path);
    let who = if holders.is_empty() { "another client".to_owned() } else { holders.join(" and ") };
    let verb = if holders.len() > 1 { "hold" } else { "holds" };
    let patience = GREETING_WAIT.as_secs();
    QmpError::Connection(format!(
        "{}: no greeting within {patience} s: {who} {verb} this QMP socket, which serves one client at a time; give \
         QEMU a second one (-qmp unix:PATH2,server=on,wait=off), or have that client disconnect",
        path.display(),
    ))
}
