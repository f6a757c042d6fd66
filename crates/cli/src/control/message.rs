//! What is asked and answered on a control socket.
use std::sync::atomic::Ordering::Relaxed;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use transship_engine::{Held, Phase, Progress};
use transship_memory::PAGE;

use super::About;

/// What is asked. Fields that are not known are ignored: later versions may add some.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Request {
    pub(crate) call: Call,
    /// With `go`: also if it is not ready yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) early: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Call {
    /// How it does: [`State`].
    Status,
    /// End it; the guest stays.
    Cancel,
    /// Release it.
    Go,
}

/// What is answered: one of `ok` and `error`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ok: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
}

/// Whether it is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Hold {
    /// It goes on by itself.
    #[default]
    Never,
    /// It will be, when it has converged.
    NotYet,
    /// It could be stopped at any moment.
    Ready,
    /// It was ready, and must converge again.
    Converging,
    /// It was told to go on.
    Released,
}

/// How a move or save does.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) pid: u32,
    /// `move` or `save`.
    pub(crate) command: String,
    /// As it was given.
    pub(crate) vm: String,
    pub(crate) to: String,
    /// Such as `rounds`.
    pub(crate) phase: String,
    pub(crate) hold: Hold,
    /// Since it was ready for the first time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) held_ms: Option<u64>,
    pub(crate) elapsed_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) deadline_ms: Option<u64>,
    pub(crate) round: u32,
    /// Of the round.
    pub(crate) left_bytes: u64,
    /// So far.
    pub(crate) wire_bytes: u64,
    pub(crate) dirty_bytes_per_s: u64,
}

impl State {
    pub(super) fn of(about: &About, progress: &Progress) -> Self {
        let (phase, held) = (progress.phase(), progress.held());
        let hold = match held {
            Held::Never => Hold::Never,
            Held::NotYet => Hold::NotYet,
            Held::Since(_) if phase == Phase::Held => Hold::Ready,
            Held::Since(_) => Hold::Converging,
            Held::Released => Hold::Released,
        };
        let held_ms = match held {
            Held::Since(then) => Some(then.elapsed().as_millis() as u64),
            _ => None,
        };
        Self {
            pid: std::process::id(),
            command: about.command.to_owned(),
            vm: about.vm.clone(),
            to: about.to.clone(),
            phase: name(phase).to_owned(),
            hold,
            held_ms,
            elapsed_ms: about.begin.elapsed().as_millis() as u64,
            deadline_ms: progress.time_left().map(|left| left.as_millis() as u64),
            round: progress.round.load(Relaxed),
            left_bytes: progress.round_left.load(Relaxed),
            wire_bytes: progress.wire_bytes.load(Relaxed),
            dirty_bytes_per_s: progress.dirty_rate.load(Relaxed) * PAGE,
        }
    }
}

fn name(phase: Phase) -> &'static str {
    match phase {
        Phase::Connecting => "connecting",
        Phase::Rounds => "rounds",
        Phase::Held => "held",
        Phase::Switchover => "switchover",
        Phase::HandedOver => "handed-over",
        Phase::Completing => "completing",
        Phase::Reading => "reading",
        Phase::Loading => "loading",
        Phase::Filling => "filling",
        Phase::Relaying => "relaying",
        Phase::Done => "done",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_what_is_documented() {
        let read = |text: &str| serde_json::from_str::<Request>(text);
        assert!(read(r#"{"call":"go","early":true}"#).is_ok_and(|request| request.call == Call::Go && request.early));
        assert!(read(r#"{"call":"status","later":[1]}"#).is_ok_and(|request| request.call == Call::Status));
        for wrong in [r#"{"call":"stop"}"#, "{}", "go", r#"{"call":"go","early":1}"#, ""] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        let written = serde_json::to_string(&Request { call: Call::Cancel, early: false });
        assert_eq!(written.unwrap_or_default(), r#"{"call":"cancel"}"#);
    }
}
