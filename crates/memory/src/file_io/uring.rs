//! Many requests in flight from one thread, by io_uring.

use std::{
    io, mem,
    os::fd::{AsRawFd, BorrowedFd},
    thread,
};

use io_uring::{IoUring, opcode, squeue::Entry, types::Fd};
use rustix::io::Errno;

use super::{
    buffer::Spare,
    plain,
    request::{Direction, Next, Request, RequestFailure},
};
use crate::GuestMemory;

/// A ring of its own, and the requests that the kernel works on.
///
/// The kernel uses the memory of a request from the moment when it is pushed until its completion has been taken. So
/// long it stays in its place here, untouched, and `memory` keeps the mappings. Dropping waits for all of them.
pub(super) struct Ring {
    ring: IoUring,
    memory: GuestMemory,
    /// What the kernel works on; the index is the request's number there.
    places: Vec<Option<Request>>,
    free: Vec<usize>,
    spare: Spare,
}

impl Ring {
    /// # Errors
    /// The kernel has no io_uring, or does not let us.
    pub(super) fn new(memory: GuestMemory, depth: u16) -> io::Result<Self> {
        let ring = IoUring::new(depth.into())?;
        let depth = usize::from(depth);
        Ok(Self {
            ring,
            memory,
            places: (0..depth).map(|_| None).collect(),
            free: (0..depth).collect(),
            spare: Spare::default(),
        })
    }

    /// Buffers of requests that have ended.
    pub(super) fn spare(&mut self) -> &mut Spare {
        &mut self.spare
    }

    /// Gives the request to the kernel; waits for a place if there is none.
    ///
    /// # Errors
    /// Of a request before, which has ended meanwhile. This one is then not begun.
    pub(super) fn start(&mut self, file: BorrowedFd<'_>, mut request: Request) -> Result<(), RequestFailure> {
        while self.free.is_empty() {
            self.wait(file)?;
        }
        request.get_ready(&self.memory, file, &mut self.spare)?;
        let is_write = request.direction() == Direction::Write;
        let place = self.free.pop().expect("seen above");
        self.places[place] = Some(request);
        self.push(file, place);
        self.enter(0).map_err(RequestFailure::of_ring)?;
        // Buffers that were written are used again while they are in the processor's cache.
        if is_write { self.take_completed(file).map(|_| ()) } else { Ok(()) }
    }

    /// Waits until nothing in flight is for bytes of the file that this request is for.
    ///
    /// # Errors
    /// As [`Ring::start`].
    pub(super) fn wait_for_place(&mut self, file: BorrowedFd<'_>, request: &Request) -> Result<(), RequestFailure> {
        while self.places.iter().flatten().any(|other| other.overlaps(request)) {
            self.wait(file)?;
        }
        Ok(())
    }

    /// Waits until one of those in flight has ended, if there are any.
    ///
    /// # Errors
    /// As [`Ring::start`].
    pub(super) fn wait_for_one(&mut self, file: BorrowedFd<'_>) -> Result<(), RequestFailure> {
        if self.free.len() < self.places.len() { self.wait(file) } else { Ok(()) }
    }

    /// Waits until nothing is in flight.
    ///
    /// # Errors
    /// The first of those that were in flight; all have ended nevertheless.
    pub(super) fn finish(&mut self, file: BorrowedFd<'_>) -> Result<(), RequestFailure> {
        let mut result = Ok(());
        while self.free.len() < self.places.len() {
            let step = self.wait(file);
            let broken = matches!(&step, Err(failure) if failure.is_of_ring());
            result = result.and(step);
            if broken {
                break;
            }
        }
        result
    }

    /// Waits until at least one request has ended, and sees to what has.
    fn wait(&mut self, file: BorrowedFd<'_>) -> Result<(), RequestFailure> {
        while !self.take_completed(file)? {
            self.enter(1).map_err(RequestFailure::of_ring)?;
        }
        Ok(())
    }

    /// Sees to requests that have ended, if there are any: all that were written, but one only that was read. To put
    /// its pages into place takes as long as the disk needs for more, so its place is to be taken before the next one
    /// has its turn. Else the disk would have nothing to do for as long as all those take that it answers together.
    fn take_completed(&mut self, file: BorrowedFd<'_>) -> Result<bool, RequestFailure> {
        let (mut result, mut any) = (Ok(()), false);
        loop {
            let next = self.ring.completion().next();
            let Some(completed) = next else { break };
            let place = completed.user_data() as usize;
            let was_read = self.places[place].as_ref().is_some_and(|request| request.direction() == Direction::Read);
            result = result.and(self.completed(file, place, answer(completed.result())));
            any = true;
            if was_read {
                break;
            }
        }
        result.map(|()| any)
    }

    /// The kernel has let go of the request in this place.
    fn completed(
        &mut self,
        file: BorrowedFd<'_>,
        place: usize,
        answer: Result<usize, Errno>,
    ) -> Result<(), RequestFailure> {
        let mut request = self.places[place].take().expect("a request that is in flight");
        let next = match answer {
            // The thread that asked has ended, or the kernel had no room to wait for it: it is done here and now.
            Err(Errno::CANCELED | Errno::AGAIN) => match plain::transfer(&self.memory, file, &mut request, None) {
                Ok(()) => Next::Done,
                Err(failure) => Next::Failed(failure),
            },
            answer => request.answered(answer, &self.memory, file),
        };
        let result = match next {
            Next::Again => {
                self.places[place] = Some(request);
                self.push(file, place);
                return self.enter(0).map_err(RequestFailure::of_ring);
            }
            Next::Done => Ok(()),
            Next::Failed(failure) => Err(failure),
        };
        self.spare.give(request.into_spare());
        self.free.push(place);
        result
    }

    /// Makes what is left of the request in this place known to the kernel, which looks at it when it is entered.
    fn push(&mut self, file: BorrowedFd<'_>, place: usize) {
        let request = self.places[place].as_mut().expect("a request to be pushed");
        let entry = entry(file, request, &self.memory).user_data(place as u64);
        // SAFETY: the memory of the request stays as it is until its completion is taken, see the type; the descriptor
        // is open when the kernel is entered, which is before our caller has it back, and the kernel keeps the file
        // from then on.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.expect("a place in the kernel's queue for each of ours");
    }

    /// Lets the kernel look at what was pushed, and waits until `wanted` requests have ended.
    fn enter(&mut self, wanted: usize) -> io::Result<()> {
        loop {
            match self.ring.submit_and_wait(wanted) {
                Ok(_) if self.ring.submission().is_empty() => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The kernel lacks memory for a moment. What is in flight frees some.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => thread::yield_now(),
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        while self.free.len() < self.places.len() {
            if self.enter(1).is_err() {
                // Nobody can say what the kernel still uses. It must stay, for ever.
                mem::forget(self.memory.clone());
                mem::forget(mem::take(&mut self.places));
                return;
            }
            while let Some(completed) = self.ring.completion().next() {
                let place = completed.user_data() as usize;
                self.places[place] = None;
                self.free.push(place);
            }
        }
    }
}

/// What the kernel is to do for what is left of a request.
fn entry(file: BorrowedFd<'_>, request: &mut Request, memory: &GuestMemory) -> Entry {
    // Of more it would do a part, as it says; what is left is then asked for again.
    const MOST: usize = 1 << 30;
    let (direction, offset) = (request.direction(), request.offset());
    let (start, len) = request.rest(memory);
    let (file, len) = (Fd(file.as_raw_fd()), len.min(MOST) as u32);
    match direction {
        Direction::Write => opcode::Write::new(file, start, len).offset(offset).build(),
        Direction::Read => opcode::Read::new(file, start, len).offset(offset).build(),
    }
}

/// As a system call answers.
fn answer(result: i32) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| Errno::from_raw_os_error(-result))
}
