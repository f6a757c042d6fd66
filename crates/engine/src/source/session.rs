//! The connections to a transship that receives, and what a round is on them.
use std::{sync::Arc, time::Duration};

use transship_memory::PageCount;
use transship_wire::{Message, Role, SessionId};

use super::{
    channels::{self, Channels, Setup, Watch},
    give_way::is_full,
    lending::Offer,
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
        let mut offer = Offer::of(guest.memory(), options, &control);
        let lends = offer.is_some();
        let hello = Message::Hello { channels: options.channels, verify, post_copy, lends, guest: description };
        control.send_or_hear(&hello)?;
        fail_point::reach("source.hello")?;
        let answer = control.receive("its Welcome", STALL_TIMEOUT * 2, progress);
        match answer.map_err(|error| too_old(error, &hello))? {
            Message::Welcome => offer = None,
            Message::Lend if lends => {}
            other => return Err(control.unexpected(&other, "in answer to Hello")),
        }
        if let Some(offer) = &mut offer {
            offer.tell(&mut control)?;
        }
        fail_point::reach("source.welcome")?;
        let setup = Setup::new(id, guest.memory());
        let mut channels = channels::connect_channels(to, setup, Role::Data, options, progress)?;
        if let Some(offer) = offer {
            let handed = offer.pass(channels.first(), &control.peer)?;
            match control.receive("its Borrowed", STALL_TIMEOUT * 2, progress)? {
                Message::Borrowed { is_readable: true } => handed.put_to_use(&mut channels),
                Message::Borrowed { is_readable: false } => {
                    tracing::info!("all pages are sent: there is somebody between the two sides");
                }
                other => return Err(control.unexpected(&other, "where Borrowed was due")),
            }
        }
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

/// A receiver that does not know a flag takes it for a mistake.
fn too_old(error: Error, hello: &Message) -> Error {
    let (Error::Refused(why), Message::Hello { post_copy, lends, .. }) = (&error, hello) else { return error };
    let without = match (post_copy, lends) {
        _ if !why.contains("Hello flags") => return error,
        (true, _) => "--converge postcopy",
        (_, true) => "lending, by --no-lending",
        _ => return error,
    };
    Error::unfit(format!(
        "the receiver is too old for this: use the same transship on both sides, or go without {without} ({why})"
    ))
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

    fn confirm(&mut self, round: u32, sent: &mut Sent, patience: Duration) -> Result<(), Error> {
        let expected = Message::RoundDone { round, pages: sent.normal.get(), zero: sent.zero_sent.get() };
        let control = &self.control;
        match control.receive("its RoundDone", patience, &self.progress)? {
            Message::RoundDone { round: theirs, pages, zero } if theirs == round && sent.is_settled_by(pages, zero) => {
                self.channels.shared().found(PageCount::new(pages), sent);
                Ok(())
            }
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
