//! What is asked of whoever makes libvirt's calls, and how it answers: lines over a pair of sockets. At the other end
//! is a thread of this process, or another process that has kept the right to reach libvirt ([`super::serving`]).
use std::{
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    sync::{Mutex, OnceLock, PoisonError},
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use transship_lines::{Line, LineError, LineSocket};

use super::{Address, Purpose, serving};

/// The most bytes of one answer: more than libvirt takes from a QEMU.
const ANSWER_BYTES_MAX: usize = 32 << 20;
/// What of an answer goes into one line, where each byte may become six.
const PART_BYTES: usize = 8 << 10;
/// How long the other end may take to end.
const END_WAIT: Duration = Duration::from_secs(30);

/// What may be asked.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Call {
    /// Which domain it is.
    Uuid,
    /// Nothing, if libvirt itself has nothing under way for the domain.
    CheckIdle,
    /// Has the other end keep the descriptor that comes with this for as long as it lives.
    Keep,
    /// Has QEMU execute something, with a descriptor if one comes with this.
    Command {
        name: String,
        arguments: Value,
    },
    /// The domain's definition as libvirt keeps it in what it saves, with passwords.
    Lasting,
    /// The same as the domain runs.
    Live,
    /// Which overlays its disks would have: in this folder, or beside them.
    PlanDisks {
        folder: Option<PathBuf>,
    },
    /// Makes their files.
    MakeOverlays,
    /// Has the domain, which stands still, write to them.
    UseOverlays,
    Suspend,
    Resume,
    /// What QEMU has said by itself under this name.
    TakeEvents {
        name: String,
    },
    /// Puts back a domain that somebody left by dying: its will, and whether the guest is to run.
    Settle {
        will: String,
        run: bool,
    },
}

/// The party that can act where there is no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Why {
    /// libvirt refuses, or QEMU behind it.
    Refused,
    /// libvirt went away; what was asked for may have been done or not.
    Lost,
    /// The user.
    Unfit,
}

/// Why there is no result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Failure {
    pub(super) kind: Why,
    pub(super) text: String,
}

impl Failure {
    pub(super) fn unfit(text: impl ToString) -> Self {
        Self { kind: Why::Unfit, text: text.to_string() }
    }
}

pub(super) type Answer = Result<String, Failure>;

#[derive(Debug, Serialize, Deserialize)]
struct Asked {
    number: u64,
    call: Call,
}

/// A part of an answer, the last of which says so.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Part {
    number: u64,
    text: String,
    more: bool,
    failure: Option<Failure>,
}

/// Why nothing came.
#[derive(Debug)]
pub(super) enum Silence {
    TimedOut,
    /// The other end is gone, or says what it can't say.
    Ended(String),
}

/// The other process, until somebody attaches to the domain.
static OTHER: OnceLock<Mutex<Option<UnixStream>>> = OnceLock::new();

/// From now on the process at the other end makes libvirt's calls for this one ([`super::serve_domain`]), which may not
/// make them by itself any more. There is one such process.
pub fn by(other: UnixStream) {
    let _ = OTHER.set(Mutex::new(Some(other)));
}

/// Whether this process reaches libvirt only by another one.
pub(super) fn are_made_elsewhere() -> bool {
    OTHER.get().is_some()
}

/// The end that asks.
pub(super) struct Caller {
    line: LineSocket,
    next: u64,
}

impl Caller {
    /// To a process that makes the calls, or a thread of this one that does from now on.
    pub(super) fn reach(address: &Address) -> Result<Self, String> {
        if let Some(other) = OTHER.get() {
            let stream = other.lock().unwrap_or_else(PoisonError::into_inner).take();
            let stream = stream.ok_or("the process that reaches libvirt speaks to somebody else already")?;
            return Ok(Self::over(stream));
        }
        let (ours, theirs) = UnixStream::pair().map_err(|e| format!("can't make a pair of sockets: {e}"))?;
        let address = address.clone();
        // It ends with us, unless libvirt never answers it.
        thread::Builder::new()
            .name("libvirt calls".into())
            .spawn(move || serving::serve(theirs, &address, &Purpose::Anything))
            .map_err(|e| format!("can't start a thread: {e}"))?;
        Ok(Self::over(ours))
    }

    fn over(stream: UnixStream) -> Self {
        Self { line: LineSocket::new(stream), next: 0 }
    }

    /// Asks, and waits for the answer until the deadline.
    pub(super) fn call(&mut self, call: Call, fd: Option<BorrowedFd<'_>>, by: Instant) -> Result<Answer, Silence> {
        self.next += 1;
        let asked = Asked { number: self.next, call };
        let text = serde_json::to_vec(&asked).map_err(|e| Silence::Ended(e.to_string()))?;
        let fds: Vec<_> = fd.into_iter().collect();
        self.line.send(&text, &fds, by).map_err(silence)?;
        let mut answer = String::new();
        loop {
            let Line { text, .. } = self.line.receive(by).map_err(silence)?;
            let part: Part = serde_json::from_slice(&text).map_err(|e| Silence::Ended(e.to_string()))?;
            match part {
                // To a call for which nobody waits any more.
                Part { number, .. } if number != self.next => {}
                Part { failure: Some(failure), .. } => return Ok(Err(failure)),
                Part { text, more, .. } => {
                    answer.push_str(&text);
                    if answer.len() > ANSWER_BYTES_MAX {
                        return Err(Silence::Ended(format!("an answer of more than {ANSWER_BYTES_MAX} bytes")));
                    }
                    if !more {
                        return Ok(Ok(answer));
                    }
                }
            }
        }
    }
}

fn silence(error: LineError) -> Silence {
    match error {
        LineError::TimedOut => Silence::TimedOut,
        other => Silence::Ended(other.to_string()),
    }
}

/// What the other end leaves behind is gone when this is; so is its claim to the domain.
impl Drop for Caller {
    fn drop(&mut self) {
        let _ = self.line.stream().shutdown(std::net::Shutdown::Write);
        let deadline = Instant::now() + END_WAIT;
        while self.line.receive(deadline).is_ok() {}
    }
}

/// The end that answers. None: there is nobody left to answer, or what came is no call.
pub(super) fn next(line: &mut LineSocket, by: Instant) -> Option<(u64, Call, Option<OwnedFd>)> {
    let Line { text, fds } = line.receive(by).ok()?;
    let Asked { number, call } = serde_json::from_slice(&text).ok()?;
    Some((number, call, fds.into_iter().next()))
}

/// Says what came of a call.
pub(super) fn answer(line: &LineSocket, number: u64, answer: Answer, by: Instant) -> Result<(), LineError> {
    let send = |part: &Part| -> Result<(), LineError> {
        let text = serde_json::to_vec(part).map_err(std::io::Error::other)?;
        line.send(&text, &[], by)
    };
    let text = match answer {
        Ok(text) => text,
        Err(failure) => return send(&Part { number, failure: Some(failure), ..Part::default() }),
    };
    let mut rest = text.as_str();
    loop {
        let (now, later) = rest.split_at(part_of(rest));
        send(&Part { number, text: now.to_owned(), more: !later.is_empty(), failure: None })?;
        if later.is_empty() {
            return Ok(());
        }
        rest = later;
    }
}

/// Where a part of it ends, between two characters.
fn part_of(text: &str) -> usize {
    let most = text.len().min(PART_BYTES);
    (0..=most).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(most)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    /// Answers the calls of one end in turn.
    fn answering(answers: Vec<Answer>) -> (Caller, thread::JoinHandle<Vec<Call>>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let answering = thread::spawn(move || {
            let mut line = LineSocket::new(theirs);
            let mut heard = Vec::new();
            for one in answers {
                let (number, call, _) = next(&mut line, soon()).unwrap();
                // To a call before: nobody waits for it any more.
                answer(&line, number - 1, Ok("old".into()), soon()).unwrap();
                answer(&line, number, one, soon()).unwrap();
                heard.push(call);
            }
            heard
        });
        (Caller::over(ours), answering)
    }

    #[test]
    fn answers_of_any_length_come_as_they_were_said() {
        let long = "\u{1}ä€\n\"".repeat(100_000);
        let failure = Failure { kind: Why::Lost, text: "gone".into() };
        let (mut caller, other) = answering(vec![Ok(long.clone()), Ok(String::new()), Err(failure.clone())]);
        assert_eq!(caller.call(Call::Live, None, soon()).unwrap().unwrap(), long);
        assert_eq!(caller.call(Call::Suspend, None, soon()).unwrap().unwrap(), "");
        assert_eq!(caller.call(Call::Resume, None, soon()).unwrap().unwrap_err(), failure);
        assert!(matches!(other.join().unwrap()[..], [Call::Live, Call::Suspend, Call::Resume]));
        assert!(matches!(caller.call(Call::Uuid, None, soon()), Err(Silence::Ended(_))));
    }

    #[test]
    fn nobody_waits_for_ever() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut caller = Caller::over(ours);
        assert!(matches!(caller.call(Call::Uuid, None, Instant::now()), Err(Silence::TimedOut)));
        // Dropping the caller waits for the end of the other.
        drop(theirs);
    }
}
