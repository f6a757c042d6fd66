//! What is sent in each round.
//!
//! A round sends the pages that the scan before it reported. Order matters: the scan comes first, and re-arms the tracking; the
//! look at the holes comes second; reading pages comes last. A page that changes after its scan is reported by the next one, and
//! a page that becomes a hole after the look is seen by the next look, at the latest when the guest stands still.
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use transship_memory::{GuestMemory, Holes, PAGE_BYTES, PageSet, Region, Tracker};
use transship_wire::Message;

use super::channels::{Channels, RoundWork};
use crate::{Error, Progress, Report, RoundReport, control::Control, fail_point, guest::SourceGuest};

/// One region's part of a round.
pub(crate) struct Pending {
    /// To be sent: written, and not holes.
    pub(crate) send: PageSet,
    /// Sent with content in an earlier round, and holes now.
    pub(crate) gone: PageSet,
}

/// The rounds of a move.
pub(crate) struct Rounds {
    memory: GuestMemory,
    tracker: Box<dyn Tracker>,
    /// By region.
    holes: Vec<Holes>,
    channels: Channels,
    number: u32,
    pending: Vec<Pending>,
    /// What the pending round's report will say.
    next: RoundReport,
    last_scan: Instant,
}

impl Rounds {
    /// Arms the tracking; the first round has everything that is not a hole.
    pub(crate) fn begin(guest: &mut dyn SourceGuest, channels: Channels) -> Result<Self, Error> {
        let memory = guest.memory();
        let tracker = guest.track()?;
        let holes = memory.regions().iter().map(|_| Holes::new(guest.freeing())).collect();
        let (pending, next, last_scan) = (Vec::new(), RoundReport::default(), Instant::now());
        let mut rounds = Self { memory, tracker, holes, channels, number: 0, pending, next, last_scan };
        rounds.look(None)?;
        Ok(rounds)
    }

    /// Bytes of the pages that the next round sends.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.pending.iter().map(|pending| pending.send.count()).sum::<u64>() * PAGE_BYTES as u64
    }

    /// Looks which pages were written since the last scan. They are the next round.
    pub(crate) fn scan(&mut self, report: &mut Report, progress: &Progress) -> Result<(), Error> {
        self.look(None)?;
        let now = Instant::now();
        let seconds = now.duration_since(self.last_scan).as_secs_f64();
        self.last_scan = now;
        self.next.dirty_pages_per_s = self.next.written as f64 / seconds;
        if let Some(done) = report.rounds.last_mut() {
            done.dirty_pages_per_s = self.next.dirty_pages_per_s;
        }
        progress.dirty_rate.store(self.next.dirty_pages_per_s as u64, Relaxed);
        Ok(())
    }

    /// The last look, with the guest standing still: what the scan before it found and was not sent yet, and what came since.
    pub(crate) fn scan_again(&mut self) -> Result<(), Error> {
        let earlier = std::mem::take(&mut self.pending);
        let dirty_rate = self.next.dirty_pages_per_s;
        self.look(Some(earlier))?;
        self.next.dirty_pages_per_s = dirty_rate;
        Ok(())
    }

    /// Scans all regions, then looks for holes. `earlier`: what an earlier scan found and nobody has sent.
    fn look(&mut self, earlier: Option<Vec<Pending>>) -> Result<(), Error> {
        let mut earlier = earlier.into_iter().flatten();
        let mut pending = Vec::new();
        for (index, (region, holes)) in self.memory.regions().iter().zip(&mut self.holes).enumerate() {
            let mut send = self.tracker.scan(index)?;
            let data = holes.look(region, &send)?;
            if let Some(before) = earlier.next() {
                send.union_with(&before.send);
            }
            send.intersect_with(data);
            let mut gone = self.channels.content(index).to_set(region.pages());
            gone.subtract(data);
            pending.push(Pending { send, gone });
        }
        self.next = describe(&self.memory, &pending, self.number == 0);
        self.pending = pending;
        Ok(())
    }

    /// Sends what is pending and waits until the destination has it all in place, `patience` at most after the last byte was taken.
    pub(crate) fn send_pending(
        &mut self,
        control: &mut Control,
        patience: Duration,
        progress: &Arc<Progress>,
        report: &mut Report,
    ) -> Result<(), Error> {
        let begin = Instant::now();
        progress.round.store(self.number + 1, Relaxed);
        let bytes = self.pending_bytes();
        progress.round_total.store(bytes, Relaxed);
        progress.round_left.store(bytes, Relaxed);

        let work = RoundWork { round: self.number, pending: &self.pending };
        let sent = self.channels.run_round(&work, control, progress)?;
        fail_point::reach("source.round-sent")?;
        self.await_done(control, patience, progress, sent.normal, sent.zero_sent)?;

        let mut round = std::mem::take(&mut self.next);
        round.number = self.number + 1;
        round.zero = sent.zero;
        round.bytes = sent.bytes;
        round.ms = begin.elapsed().as_secs_f64() * 1e3;
        report.pages.normal += sent.normal;
        report.pages.zero += sent.zero;
        report.pages.hole += round.hole;
        report.pages.resent += sent.resent;
        report.bytes.wire += sent.bytes;
        report.cpu.channels += sent.cpu_seconds;
        self.channels.report(report);
        report.rounds.push(round);
        self.number += 1;
        Ok(())
    }

    fn await_done(
        &self,
        control: &Control,
        patience: Duration,
        progress: &Progress,
        pages: u64,
        zero: u64,
    ) -> Result<(), Error> {
        let expected = Message::RoundDone { round: self.number, pages, zero };
        match control.receive("its RoundDone", patience, progress)? {
            done if done == expected => Ok(()),
            other @ Message::RoundDone { .. } => {
                let what = format!("counts otherwise than we: {other:?} where {expected:?} was sent");
                Err(Error::Protocol { peer: control.peer.clone(), what })
            }
            other => Err(control.unexpected(&other, "where RoundDone was due")),
        }
    }
}

/// `first`: the scan reported everything, and what is not sent is a hole.
fn describe(memory: &GuestMemory, pending: &[Pending], first: bool) -> RoundReport {
    let all: u64 = memory.regions().iter().map(Region::pages).sum();
    let send: u64 = pending.iter().map(|p| p.send.count()).sum();
    let gone: u64 = pending.iter().map(|p| p.gone.count()).sum();
    RoundReport { scanned: all, written: send, hole: if first { all - send } else { gone }, ..RoundReport::default() }
}
