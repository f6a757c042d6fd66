//! What waits to be sent to a client. Bounded, whatever the guest does and however slow the client is.
use std::{os::fd::OwnedFd, sync::Arc};

use crate::{message::Line, table::Piece};

/// Ranges that may wait. More are dropped: a hint that is lost is memory that is sent, no more.
const MAX_HINTS: usize = 1 << 16;
/// Ranges in a line: they stay far below the longest line.
const HINTS_PER_LINE: usize = 1024;

/// Lines to a client that are not sent yet.
#[derive(Debug)]
pub(crate) struct Outbox {
    /// An eventfd: something is here.
    wake: Arc<OwnedFd>,
    command: u32,
    hints: Vec<(usize, u64, u64)>,
    named_all: bool,
    lost: Option<String>,
}

impl Outbox {
    pub(crate) fn new(wake: Arc<OwnedFd>) -> Self {
        Self { wake, command: 0, hints: Vec::new(), named_all: false, lost: None }
    }

    /// What is here answers to an older command.
    pub(crate) fn begin(&mut self, command: u32) {
        self.command = command;
        self.hints.clear();
        self.named_all = false;
    }

    pub(crate) fn hint(&mut self, piece: Piece) {
        let full = self.hints.len() >= MAX_HINTS;
        match self.hints.last_mut() {
            Some((entry, offset, bytes)) if *entry == piece.entry && *offset + *bytes == piece.offset => {
                *bytes += piece.bytes;
            }
            _ if full => {}
            _ => self.hints.push((piece.entry, piece.offset, piece.bytes)),
        }
        self.wake();
    }

    pub(crate) fn named_all(&mut self) {
        self.named_all = true;
        self.wake();
    }

    /// There is nothing more to hope for; only the first reason is told.
    pub(crate) fn lost(&mut self, why: &str) {
        self.lost.get_or_insert_with(|| why.to_owned());
        self.wake();
    }

    /// All that is here.
    pub(crate) fn take(&mut self) -> Vec<Line> {
        let command = self.command;
        let hints = std::mem::take(&mut self.hints);
        let mut lines: Vec<_> =
            hints.chunks(HINTS_PER_LINE).map(|hints| Line::Hints { command, hints: hints.to_vec() }).collect();
        if std::mem::take(&mut self.named_all) {
            lines.push(Line::NamedAll { command, named_all: true });
        }
        lines.extend(self.lost.take().map(|lost| Line::Lost { lost }));
        lines
    }

    fn wake(&self) {
        // It can fail only when the counter is full: then it is readable.
        let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn what_waits_is_bounded_and_neighbours_are_one() {
        let mut outbox = Outbox::new(Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()));
        outbox.begin(7);
        let page = |number: u64| Piece { entry: 0, offset: number * 4096, bytes: 4096 };
        (0..1000).for_each(|number| outbox.hint(page(number)));
        outbox.named_all();
        let lines = outbox.take();
        assert!(
            matches!(&lines[..], [Line::Hints { command: 7, hints }, Line::NamedAll { command: 7, .. }]
            if hints[..] == [(0, 0, 1000 * 4096)]),
            "{lines:?}"
        );

        (0..2 * MAX_HINTS as u64).for_each(|number| outbox.hint(page(number * 2)));
        outbox.lost("gone");
        let lines = outbox.take();
        assert_eq!(lines.len(), MAX_HINTS / HINTS_PER_LINE + 1);
        assert!(outbox.take().is_empty());

        outbox.hint(page(1));
        outbox.begin(8);
        assert!(outbox.take().is_empty(), "it answered to the command before");
    }
}
