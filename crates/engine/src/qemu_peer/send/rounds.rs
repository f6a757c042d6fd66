//! Rounds to a QEMU that waits: the same scan as in a move between two of us, and its pong instead of our own word that all is in place.
use std::{
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

use super::session::Session;
use crate::{Error, Progress, Report, fail_point, free::FreePages, guest::SourceGuest, scan::Scanner};

/// The rounds.
pub(crate) struct Rounds {
    scanner: Scanner,
    free: FreePages,
    number: u32,
}

impl Rounds {
    /// Arms the tracking; the first round has everything that is not a hole.
    pub(crate) fn begin(guest: &mut dyn SourceGuest) -> Result<Self, Error> {
        let tracker = guest.track()?;
        let scanner = Scanner::begin(guest.memory(), tracker, guest.freeing())?;
        Ok(Self { scanner, free: FreePages::of(guest), number: 0 })
    }

    /// Asks the guest what the first round can leave out. `speed`: bytes a second that can be sent at most.
    pub(crate) fn ask_for_free_pages(&mut self, speed: Option<u64>, progress: &Progress) -> Result<(), Error> {
        self.scanner.leave_out(self.free.ask(speed, progress)?);
        Ok(())
    }

    /// Bytes of the pages that the next round sends.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.scanner.pending_bytes()
    }

    /// Looks which pages were written since the last scan. They are the next round.
    pub(crate) fn scan(&mut self, session: &Session, report: &mut Report, progress: &Progress) -> Result<(), Error> {
        self.scanner.scan(session.content(), report, progress)
    }

    /// The last look, with the guest standing still.
    pub(crate) fn scan_again(&mut self, session: &Session) -> Result<(), Error> {
        self.scanner.scan_again(session.content())
    }

    /// Sends what is pending and waits until the destination has it all in place, `patience` at most after the last byte was taken.
    pub(crate) fn send_pending(
        &mut self,
        session: &mut Session,
        patience: Duration,
        progress: &Progress,
        report: &mut Report,
    ) -> Result<(), Error> {
        let begin = Instant::now();
        progress.round.store(self.number + 1, Relaxed);
        let bytes = self.pending_bytes();
        progress.round_total.store(bytes, Relaxed);
        progress.round_left.store(bytes, Relaxed);

        let sent = session.send_round(self.scanner.pending())?;
        fail_point::reach("peer.round-sent")?;
        session.settle("put the pages of a round into place", patience)?;

        if self.number == 0 {
            self.scanner.not_seen(self.free.end().1);
        }
        let mut round = self.scanner.take_report();
        round.number = self.number + 1;
        round.zero = sent.zero;
        round.bytes = sent.bytes;
        round.ms = begin.elapsed().as_secs_f64() * 1e3;
        report.bytes.encoder_in = progress.encoding.bytes_in.load(Relaxed);
        report.bytes.encoder_out = progress.encoding.bytes_out.load(Relaxed);
        report.cpu.channels += sent.cpu_seconds;
        report.add_round(round, sent.normal, sent.resent);
        self.number += 1;
        Ok(())
    }
}
