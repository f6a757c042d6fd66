//! The connections to a transship that receives, and what a round is on them.
use std::{sync::Arc, time::Duration};

use transship_wire::{Message, Role, SessionId};

use super::{
    channels::{self, Channels, Setup, Watch},
    give_way::is_full,
};
use crate::{
    Error, MoveOptions, Progress, Report, Rule, Uri, ZeroPages,
    channels::{RoundWork, Sent},
    control::Control,
    fail_point,
    forecast::carried_bytes_per_s,
    free::FreePages,
    guest::{RegionPages, SourceGuest},
    page_map::PageMap,
    rounds::Link,
    transport::STALL_TIMEOUT,
};

/// The connections.
pub(crate) struct MoveSession {
    pub(crate) control: Control,
    channels: Channels,
    /// The main thread looks for zero pages.
    looks: bool,
    progress: Arc<Progress>,
    pub(crate) id: SessionId,
}

impl MoveSession {
    /// Connects, and has the destination agree to the guest.
    pub(crate) fn open(
        guest: &dyn SourceGuest,
        to: &Uri,
        options: &MoveOptions,
        progress: &Arc<Progress>,
    ) -> Result<Self, Error> {
        let description = guest.description();
        description
            .check()
            .map_err(|error| Error::unfit(format!("can't describe this guest to a destination: {error}")))?;
        let (mut control, id) = channels::connect_control(to, options.terms.caller.as_ref())?;
        let (verify, post_copy) = (options.verify, options.post_copy.is_some());
        let hello = Message::Hello { channels: options.channels, verify, post_copy, guest: description };
        control.send_or_hear(&hello)?;
        fail_point::reach("source.hello")?;
        let answer = control.receive("its Welcome", STALL_TIMEOUT * 2, progress);
        match answer.map_err(|error| too_old(error, post_copy))? {
            Message::Welcome => {}
            other => return Err(control.unexpected(&other, "in answer to Hello")),
        }
        fail_point::reach("source.welcome")?;
        let channels = channels::connect_channels(to, Setup::new(id, guest.memory()), Role::Data, options, progress)?;
        fail_point::reach("source.connected")?;
        let looks = options.terms.zero_pages == ZeroPages::Main;
        Ok(Self { control, channels, looks, progress: Arc::clone(progress), id })
    }

    /// Bytes a second that the link carries, if the rounds so far have filled it.
    pub(super) fn carries(&self, report: &Report) -> Option<f64> {
        let connections = self.channels.connections().ok()?;
        let carries = carried_bytes_per_s(&report.rounds).filter(|_| is_full(&connections));
        tracing::debug!(?carries, "bytes a second of the link, if the rounds have filled it");
        carries
    }
}

/// A receiver that does not know post-copy takes its flag for a mistake.
fn too_old(error: Error, post_copy: bool) -> Error {
    match error {
        Error::Refused(why) if post_copy && why.contains("Hello flags") => Error::unfit(format!(
            "the receiver is too old for post-copy: use the same transship on both sides, or leave out --converge postcopy \
             ({why})"
        )),
        other => other,
    }
}

impl Link for MoveSession {
    fn content(&self) -> &[PageMap] {
        self.channels.content()
    }

    fn send(&mut self, work: &RoundWork<'_>, free: &mut FreePages) -> Result<(Sent, Vec<RegionPages>), Error> {
        let shared = Arc::clone(self.channels.shared());
        let watch = Watch { control: &self.control, shared: &shared, looks: self.looks };
        self.channels.run_round(work, free, &watch)
    }

    fn confirm(&mut self, round: u32, sent: &Sent, patience: Duration) -> Result<(), Error> {
        let expected = Message::RoundDone { round, pages: sent.normal.get(), zero: sent.zero_sent.get() };
        let control = &self.control;
        match control.receive("its RoundDone", patience, &self.progress)? {
            done if done == expected => Ok(()),
            other @ Message::RoundDone { .. } => {
                let what = format!("confirmed {other:?}, but {expected:?} was sent");
                Err(Error::breach(&control.peer, Rule::Count, what))
            }
            other => Err(control.unexpected(&other, "where RoundDone was due")),
        }
    }

    fn check_silence(&mut self) -> Result<(), Error> {
        self.control.check_silence()
    }

    fn report(&self, report: &mut Report) {
        self.channels.report(report);
    }

    fn name(&self) -> &'static str {
        "source"
    }
}
