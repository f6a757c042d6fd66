//! What is sent in each round: what the scan before it found.
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use transship_memory::{Freeing, PageSet};
use transship_wire::Message;

use super::channels::{Channels, RoundWork};
use crate::{
    Error, Progress, Report, control::Control, fail_point, free::FreePages, guest::SourceGuest, scan::Scanner,
};

/// The rounds of a move.
pub(crate) struct Rounds {
    scanner: Scanner,
    channels: Channels,
    free: FreePages,
    /// Whether memory may be given back while it is sent.
    freeing: Freeing,
    number: u32,
}

impl Rounds {
    /// Arms the tracking; the first round has everything that is not a hole.
    pub(crate) fn begin(guest: &mut dyn SourceGuest, channels: Channels) -> Result<Self, Error> {
        let tracker = guest.track()?;
        let scanner = Scanner::begin(guest.memory(), tracker, guest.freeing())?;
        Ok(Self { scanner, channels, free: FreePages::of(guest), freeing: guest.freeing(), number: 0 })
    }

    /// Asks the guest what the first round can leave out. `speed`: bytes a second that can be sent at most.
    pub(crate) fn ask_for_free_pages(&mut self, speed: Option<u64>, progress: &Progress) -> Result<(), Error> {
        self.scanner.leave_out(self.free.ask(speed, progress)?);
        Ok(())
    }

    /// By region: pages that were left out and not written since.
    pub(crate) fn dead(&self) -> &[PageSet] {
        self.scanner.dead()
    }

    /// Bytes of the pages that the next round sends.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.scanner.pending_bytes()
    }

    /// Looks which pages were written since the last scan. They are the next round.
    pub(crate) fn scan(&mut self, report: &mut Report, progress: &Progress) -> Result<(), Error> {
        self.scanner.scan(self.channels.content(), report, progress)
    }

    /// The last look, with the guest standing still.
    pub(crate) fn scan_again(&mut self) -> Result<(), Error> {
        self.freeing = Freeing::Never;
        self.scanner.scan_again(self.channels.content())
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

        let work = RoundWork { round: self.number, pending: self.scanner.pending(), freeing: self.freeing };
        let (sent, new_holes) = self.channels.run_round(&work, &mut self.free, control, progress)?;
        fail_point::reach("source.round-sent")?;
        self.await_done(control, patience, progress, sent.normal, sent.zero_sent)?;

        if self.number == 0 {
            let (left_out, unseen) = self.free.end();
            self.scanner.left_out(left_out);
            self.scanner.not_seen(unseen);
        }
        let mut round = self.scanner.take_report();
        round.number = self.number + 1;
        round.zero = sent.zero;
        round.hole += new_holes.iter().map(|place| place.pages.count).sum::<u64>();
        self.scanner.not_sent(new_holes);
        round.bytes = sent.bytes;
        round.ms = begin.elapsed().as_secs_f64() * 1e3;
        report.cpu.channels += sent.cpu_seconds;
        self.channels.report(report);
        report.add_round(round, sent.normal, sent.resent);
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
