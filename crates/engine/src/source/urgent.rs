//! The thread that serves those who wait for pages, over a connection of its own.
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use transship_memory::{GuestMemory, PageCount, PageRange, PageSet, Region, WindowBuffer, WindowPages};
use transship_wire::{Message, Pages, Refusal};

use super::{beside::Beside, standing::Standing};
use crate::{Error, Rule, control::Control, fail_point, pacer::Pacer};

/// What this thread slept too long, and may make up for.
const CREDIT: Duration = Duration::from_micros(200);

/// What the thread has.
pub(super) struct Server {
    control: Control,
    memory: GuestMemory,
    state: Arc<Standing>,
    /// Pages beside those that were waited for: sent when nobody waits.
    beside: Beside,
    /// What bounds all that goes. Pages that are waited for go at once, those beside them as fast as it allows, and the
    /// channels have what is left.
    pacer: Option<Arc<Pacer>>,
    /// When the next of those may go. The connection itself would take more at once, and this thread could not hear
    /// anybody until it has room again.
    next: Instant,
    /// By region: what has gone over this connection.
    sent: Vec<PageSet>,
    buffer: WindowBuffer,
}

impl Server {
    pub(super) fn new(control: Control, memory: GuestMemory, state: Arc<Standing>, pacer: Option<Arc<Pacer>>) -> Self {
        let sent = memory.regions().iter().map(|region| PageSet::empty(region.pages())).collect();
        let (beside, next, buffer) = (Beside::default(), Instant::now(), WindowBuffer::default());
        Self { control, memory, state, beside, pacer, next, sent, buffer }
    }

    /// The life of the thread: until the connection ends.
    pub(super) fn run(mut self) {
        let incoming = self.control.incoming.clone();
        let over = loop {
            match self.next(&incoming).and_then(|message| self.answer(message)) {
                Ok(true) => {}
                Ok(false) => break None,
                Err(error) => break Some(error),
            }
        };
        let reason = match &over {
            Some(error @ Error::Memory(_)) => Some(cant_read(error)),
            _ => self.state.told().last_word.take(),
        };
        if let Some(reason) = reason {
            // If it does not arrive the destination waits for another line.
            let _ = self.control.send(&Message::Abort(Refusal { reason }));
        }
        self.state.tell(|told| told.broken = Some(over));
    }

    /// What the destination says next; none: there is time for something else.
    fn next(&self, incoming: &Receiver<Result<Message, Error>>) -> Result<Option<Message>, Error> {
        let message = match self.beside.is_empty() {
            true => incoming.recv().map_err(|_| self.control.gone())?,
            false => match incoming.recv_deadline(self.next) {
                Ok(message) => message,
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => return Err(self.control.gone()),
            },
        };
        self.control.unless_abort(message?).map(Some)
    }

    /// False: all is done.
    fn answer(&mut self, message: Option<Message>) -> Result<bool, Error> {
        match message {
            None => self.send_beside()?,
            Some(Message::Want { region, page }) => self.send_wanted(region, page)?,
            Some(Message::Running) => self.state.tell(|told| told.runs = true),
            Some(Message::Complete) => {
                // If it does not arrive the destination waits for a moment, and ends all the same.
                let _ = self.control.send(&Message::Complete);
                self.state.tell(|told| told.is_complete = true);
                return Ok(false);
            }
            Some(other) => return Err(self.control.unexpected(&other, "on a supply line")),
        }
        Ok(true)
    }

    fn send_wanted(&mut self, region: u16, page: u64) -> Result<(), Error> {
        let index = usize::from(region);
        let pages = self.memory.get(index).map_or(PageCount::ZERO, Region::pages);
        if page >= pages.get() {
            let what = format!("wants page {page} of region {region}, which has {pages}");
            return Err(Error::breach(&self.control.peer, Rule::Bounds, what));
        }
        fail_point::reach("source.wanted")?;
        let wanted = PageRange::new(page, 1);
        // What is on its way here already comes before anything that is sent now. On its way with the rest it may be
        // behind much else: then it goes twice.
        if !self.sent[index].contains(wanted.first) {
            self.state.unsent[index].claim(WindowPages::within(wanted, wanted.first.window()));
            let bytes = self.send(region, wanted)?;
            if let Some(pacer) = &self.pacer {
                self.next = self.next.max(Instant::now()) + pacer.time_of(bytes);
            }
        }
        self.beside.note(region, page);
        Ok(())
    }

    /// A few pages beside those that were waited for.
    fn send_beside(&mut self) -> Result<(), Error> {
        let pages = |region: u16| self.memory.get(usize::from(region)).map_or(PageCount::ZERO, Region::pages);
        let Some((region, group)) = self.beside.take(self.state.room.at_once(), pages) else { return Ok(()) };
        let window = group.first.window();
        let unsent = self.state.unsent[usize::from(region)].claim(WindowPages::within(group, window));
        let from = Instant::now().checked_sub(CREDIT).map_or(self.next, |earliest| earliest.max(self.next));
        let bytes: u64 = unsent.runs().map(|run| self.send(region, run)).sum::<Result<_, _>>()?;
        let bounded = self.pacer.as_ref().map_or(Duration::ZERO, |pacer| pacer.time_of(bytes));
        self.next = from + self.state.room.time_of(unsent.count()).max(bounded);
        Ok(())
    }

    /// Pages of one window. Returns how many bytes they are.
    fn send(&mut self, region: u16, pages: PageRange) -> Result<u64, Error> {
        let memory = &self.memory.regions()[usize::from(region)];
        let window = pages.first.window();
        let wanted = WindowPages::within(pages, window);
        let read = memory.read_window(wanted, true, &mut self.buffer)?;
        for (these, is_zero) in [(read.present(), false), (wanted.with(read.zero_mask()), true)] {
            for run in these.runs() {
                let mut bytes = Vec::new();
                if !is_zero {
                    read.copy_out(WindowPages::within(run, window), &mut bytes);
                }
                let count = run.count.get() as u8; // at most as many as travel at once
                self.control.send(&Message::Page(Pages { region, first: run.first.get(), count, bytes }))?;
            }
        }
        let bytes = read.present().bytes();
        if let Some(pacer) = &self.pacer {
            pacer.note(bytes as usize); // a window's at most
        }
        self.sent[usize::from(region)].insert(pages);
        self.state.told().sent += pages.count.get();
        Ok(bytes)
    }
}

/// What a destination is told that waits for pages that nobody can read any more.
pub(super) fn cant_read(error: &Error) -> String {
    format!("the rest of the guest's memory can't be read at the source any more, and is lost: {error}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{io::Write, os::unix::net::UnixStream};

    use super::*;
    use crate::transport::Connection;

    /// Of 300 pages, all of which the destination lacks.
    fn server(connection: UnixStream, pacer: Option<Pacer>) -> Server {
        let file = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&file, &vec![1; 300 << 12]).unwrap();
        let bytes = transship_memory::ByteRange::sized(0, 300 << 12);
        let region = Region::map("ram", file, bytes, transship_memory::Access::Read).unwrap();
        let control = Control::new(Connection::Unix(connection), "peer".into()).unwrap();
        let state = Arc::new(Standing::new(&[PageSet::full(PageCount::new(300))]));
        Server::new(control, GuestMemory::new(vec![region]), state, pacer.map(Arc::new))
    }

    #[test]
    fn pages_that_the_guest_does_not_have_are_no_wish() {
        // A page further than the last one, and a region.
        for (region, page) in [(0, 300), (1, 0)] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let server = server(ours, None);
            let state = Arc::clone(&server.state);
            theirs.write_all(&Message::Want { region, page }.encode(1)).unwrap();
            drop(theirs);
            server.run();
            let error = state.check().unwrap_err();
            assert_eq!(error.rule(), Some(Rule::Bounds), "{error}");
        }
    }

    #[test]
    fn what_has_gone_over_this_connection_does_not_go_again() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let server = server(ours, None);
        let state = Arc::clone(&server.state);
        let mut control = Control::new(Connection::Unix(theirs), "source".into()).unwrap();
        let server = std::thread::spawn(move || server.run());
        // The last group of the region: what lies beside the page is sent, and nothing behind it.
        for page in [290, 299, 290, 288] {
            control.send(&Message::Want { region: 0, page }).unwrap();
        }
        let mut came = vec![0; 300];
        while came[288..].contains(&0) {
            match control.incoming.recv().unwrap().unwrap() {
                Message::Page(pages) => {
                    (0..u64::from(pages.count)).for_each(|at| came[(pages.first + at) as usize] += 1)
                }
                other => panic!("{}", other.name()),
            }
        }
        control.send(&Message::Complete).unwrap();
        assert!(matches!(control.incoming.recv().unwrap(), Ok(Message::Complete)), "more pages came");
        server.join().unwrap();
        assert!(came[..288].iter().all(|times| *times == 0) && came[288..].iter().all(|times| *times == 1), "{came:?}");
        assert_eq!(state.told().sent, 12);
    }

    #[test]
    fn what_goes_beside_is_bounded_and_what_is_waited_for_is_not() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let begin = Instant::now();
        // 50 pages a second: the rest of a group of 32 is sent in halves.
        let server = server(ours, Some(Pacer::new(50 << 12)));
        let mut line = theirs.try_clone().unwrap();
        let control = Control::new(Connection::Unix(theirs), "source".into()).unwrap();
        let server = std::thread::spawn(move || server.run());
        let mut came = 0;
        let mut next = |control: &Control| match control.incoming.recv().unwrap().unwrap() {
            Message::Page(pages) => {
                came += u64::from(pages.count);
                (pages, came)
            }
            other => panic!("{}", other.name()),
        };
        line.write_all(&Message::Want { region: 0, page: 70 }.encode(1)).unwrap();
        while next(&control).1 < 32 {}
        assert!(begin.elapsed() > Duration::from_millis(320), "{:?}", begin.elapsed());
        // Behind many that wait for their turn.
        let wants = [(0, 2), (150, 3), (200, 4)].map(|(page, number)| Message::Want { region: 0, page }.encode(number));
        line.write_all(&wants.concat()).unwrap();
        let waited_for = [0, 150, 200].map(|_| next(&control).0);
        assert_eq!(waited_for.map(|pages| (pages.first, pages.count)), [(0, 1), (150, 1), (200, 1)]);
        line.write_all(&Message::Complete.encode(5)).unwrap();
        while !matches!(control.incoming.recv().unwrap(), Ok(Message::Complete)) {}
        server.join().unwrap();
    }
}
