//! The client's end of a connection to a guest process: one call after the other.
use std::{
    fs, io,
    os::fd::{BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    fs::{Mode, OFlags},
    net::sockopt::socket_peercred,
};
use serde::de::DeserializeOwned;
use serde_json::Value;
use transship_guest::GuestError;

use transship_lines::{Line, LineError, LineSocket};

use super::{
    maps::check_mapped,
    message::{Answer, CheckResult, CheckedDescription, Description, Request, one_line},
};
use crate::connecting::{connect, has_hung_up};

/// For calls that a guest answers at once.
pub(super) const SHORT: Duration = Duration::from_secs(30);
/// For calls that wait for the guest's devices, and for device state that does not move.
pub(super) const LONG: Duration = Duration::from_secs(60);
/// A guest that checks all of its memory reads all of it.
const CHECK: Duration = Duration::from_secs(600);

/// What each of our own descriptors is.
const DESCRIPTORS: &str = "/proc/self/fd";

/// A connection. An answer that comes after its time limit is dropped when the next one is waited for.
#[derive(Debug)]
pub(super) struct Connection {
    lines: LineSocket,
    path: PathBuf,
    pid: i32,
    last_id: u64,
    broken: bool,
    /// The folder of our own descriptors.
    descriptors: Option<OwnedFd>,
}

impl Connection {
    pub(super) fn open(path: &Path) -> Result<Self, GuestError> {
        let fail = |what: String| GuestError::Unfit(format!("handoff:{}: {what}", path.display()));
        let stream = connect(path).map_err(|e| fail(format!("no guest listens there: {e}")))?;
        let peer = socket_peercred(&stream).map_err(|e| fail(format!("can't identify its process: {e}")))?;
        let pid = peer.pid.as_raw_nonzero().get();
        let lines = LineSocket::new(stream);
        Ok(Self { lines, path: path.into(), pid, last_id: 0, broken: false, descriptors: None })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether the connection itself failed, not a call that was answered or may still be answered.
    pub(super) fn is_broken(&self) -> bool {
        self.broken
    }

    pub(super) fn close(&mut self) {
        self.broken = true;
        // It fails only when the other side has closed already.
        let _ = self.lines.stream().shutdown(std::net::Shutdown::Both);
    }

    /// Whether the VMM has hung up, which it does when it ends.
    ///
    /// # Errors
    /// It has.
    pub(super) fn check_alive(&self) -> Result<(), GuestError> {
        match has_hung_up(self.lines.stream()) {
            true => Err(self.error("it has ended")),
            false => Ok(()),
        }
    }

    /// What the VMM or its guest did wrong; it names the guest.
    pub(super) fn error(&self, what: impl std::fmt::Display) -> GuestError {
        GuestError::vmm(self.about(what))
    }

    /// What the user asked of a guest that is not for it; it names the guest.
    pub(super) fn unfit(&self, what: impl std::fmt::Display) -> GuestError {
        GuestError::Unfit(self.about(what))
    }

    fn about(&self, what: impl std::fmt::Display) -> String {
        format!("handoff:{} (pid {}): {what}", self.path.display(), self.pid)
    }

    /// One call that is answered without file descriptors.
    pub(super) fn call<T: DeserializeOwned>(&mut self, call: &str, limit: Duration) -> Result<T, GuestError> {
        let id = self.request(call, &[])?;
        self.answer(call, id, limit)
    }

    /// Sends a request and returns its id, for [`Self::answer`].
    pub(super) fn request(&mut self, call: &str, fds: &[BorrowedFd<'_>]) -> Result<u64, GuestError> {
        self.last_id += 1;
        let request = Request { id: self.last_id, call: call.into() };
        let text = serde_json::to_vec(&request).map_err(|e| self.error(e))?;
        match self.lines.send(&text, fds, Instant::now() + SHORT) {
            Ok(()) => Ok(self.last_id),
            Err(e) => {
                self.broken = true;
                // It may have said why before it closed.
                Err(self.refusal().unwrap_or_else(|| self.error(format!("can't send {call}: {e}"))))
            }
        }
    }

    /// Waits for the answer to a request.
    pub(super) fn answer<T: DeserializeOwned>(
        &mut self,
        call: &str,
        id: u64,
        limit: Duration,
    ) -> Result<T, GuestError> {
        let (value, fds) = self.answer_with_fds(call, id, limit)?;
        if !fds.is_empty() {
            return Err(self.error(format!("{} file descriptors came with the answer to {call}", fds.len())));
        }
        Ok(value)
    }

    fn answer_with_fds<T: DeserializeOwned>(
        &mut self,
        call: &str,
        id: u64,
        limit: Duration,
    ) -> Result<(T, Vec<OwnedFd>), GuestError> {
        let (value, fds) = self.value(call, id, limit)?;
        let value = serde_json::from_value(value)
            .map_err(|e| self.error(format!("can't understand its answer to {call}: {e}")))?;
        Ok((value, fds))
    }

    fn value(&mut self, call: &str, id: u64, limit: Duration) -> Result<(Value, Vec<OwnedFd>), GuestError> {
        let deadline = Instant::now() + limit;
        loop {
            let line = self.lines.receive(deadline).map_err(|e| {
                self.broken |= !matches!(e, LineError::TimedOut);
                self.error(format!("no answer to {call}: {e}"))
            })?;
            let answer = Answer::parse(&line).map_err(|e| {
                self.broken = true;
                self.error(e)
            })?;
            match answer {
                Answer { id: 0, error: Some(error), .. } => {
                    self.broken = true;
                    return Err(self.error(one_line(&error)));
                }
                Answer { id: late, .. } if late != 0 && late < id => {}
                Answer { id: other, .. } if other != id => {
                    self.broken = true;
                    return Err(self.error(format!("it answered request {other}, but {call} was request {id}")));
                }
                Answer { error: Some(error), .. } => {
                    return Err(self.error(format!("{call} failed there: {}", one_line(&error))));
                }
                Answer { ok, .. } => return Ok((ok.unwrap_or(Value::Null), line.fds)),
            }
        }
    }

    /// What a server says that closes the connection without being asked: `{"id":0,"error":"…"}`.
    fn refusal(&mut self) -> Option<GuestError> {
        let Line { text, fds } = self.lines.receive(Instant::now()).ok()?;
        let error = Answer::parse(&Line { text, fds }).ok()?.error?;
        Some(self.error(one_line(&error)))
    }

    pub(super) fn describe(&mut self) -> Result<CheckedDescription, GuestError> {
        let id = self.request("describe", &[])?;
        let (description, fds) = self.answer_with_fds::<Description>("describe", id, SHORT)?;
        CheckedDescription::new(description, fds).map_err(|e| self.error(e))
    }

    /// The pagemap of the guest process.
    pub(super) fn open_pagemap(&self) -> Result<OwnedFd, GuestError> {
        let path = format!("/proc/{}/pagemap", self.pid);
        rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(|e| self.unreadable(e.into()))
    }

    /// From now on descriptors that come are told from each other even if no path leads anywhere any more.
    pub(super) fn look_without_paths(&mut self) -> Result<(), GuestError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(DESCRIPTORS, flags, Mode::empty());
        self.descriptors = Some(opened.map_err(|e| self.error(format!("can't open {DESCRIPTORS}: {e}")))?);
        Ok(())
    }

    /// Whether it maps the regions where it says so.
    pub(super) fn check_maps(&self, guest: &CheckedDescription) -> Result<(), GuestError> {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid)).map_err(|e| self.unreadable(e))?;
        guest.regions.iter().try_for_each(|region| check_mapped(&maps, region)).map_err(|e| self.error(e))
    }

    fn unreadable(&self, e: io::Error) -> GuestError {
        self.error(format!("can't read /proc/{}: {e}; run as the guest's user or as root", self.pid))
    }

    /// Asks, by this call, for a userfaultfd of the guest process, not yet used.
    pub(super) fn userfaultfd(&mut self, call: &str) -> Result<OwnedFd, GuestError> {
        let id = self.request(call, &[])?;
        let (_, mut fds) = self.answer_with_fds::<Value>(call, id, SHORT)?;
        match (fds.pop(), fds.is_empty()) {
            (Some(uffd), true) if self.is_userfaultfd(&uffd) => Ok(uffd),
            (Some(_), true) => Err(self.error(format!("what came with the answer to {call} is not a userfaultfd"))),
            (None, _) => Err(self.error(format!("no userfaultfd came with the answer to {call}"))),
            (Some(_), false) => {
                Err(self.error(format!("{} file descriptors came instead of a userfaultfd", fds.len() + 1)))
            }
        }
    }

    /// ioctls go only to what they are meant for.
    fn is_userfaultfd(&self, fd: &OwnedFd) -> bool {
        use std::os::fd::AsRawFd;
        let number = fd.as_raw_fd().to_string();
        let link = match &self.descriptors {
            Some(folder) => rustix::fs::readlinkat(folder, number, Vec::new()),
            None => rustix::fs::readlink(format!("{DESCRIPTORS}/{number}"), Vec::new()),
        };
        link.is_ok_and(|target| target.as_bytes() == b"anon_inode:[userfaultfd]")
    }
}

impl Drop for Connection {
    /// The VMM has room for the next client from now on, also if another thread is just starting a process, which has
    /// all our descriptors for a moment.
    fn drop(&mut self) {
        self.close();
    }
}

/// A command line that makes one call by hand.
pub(super) fn by_hand(call: &str, path: &Path) -> String {
    let path = path.display().to_string();
    let plain = path.chars().all(|c| c.is_ascii_alphanumeric() || "/._-+=:@".contains(c));
    // socat takes ',' and ':' in an address as its own, the shell nearly everything else.
    let path = if plain { path } else { format!("'{}'", path.replace('\'', r"'\''")) };
    format!(r#"echo '{{"id":1,"call":"{call}"}}' | socat -t 60 - UNIX-CONNECT:{path}"#)
}

/// Asks a guest that can check itself whether its memory is what it must be. The guest stands still meanwhile.
///
/// # Errors
/// No such guest, a guest that has no such check, the connection's own.
pub fn check(path: &Path) -> Result<CheckResult, GuestError> {
    Connection::open(path)?.call("check", CHECK)
}
