//! How compression threads are fed where every thread has a lock: kept to be measured against.
//!
//! A thread has room for one request, a mutex and a condition variable of its own. The submitter looks for a thread
//! that is idle, under one more lock, collects what it made last, hands it the next request and wakes it; when none is
//! idle it waits for one.
use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::{Scope, ScopedJoinHandle},
};

use super::encoding::Encoding;

/// The submitter's end.
pub(super) struct OldModel<'scope> {
    shared: Arc<Shared>,
    threads: Vec<ScopedJoinHandle<'scope, ()>>,
    /// Encoded bytes that were collected.
    bytes: u64,
}

struct Shared {
    slots: Vec<Slot>,
    idle: Mutex<Vec<bool>>,
    became_idle: Condvar,
}

#[derive(Default)]
struct Slot {
    state: Mutex<State>,
    asked: Condvar,
}

#[derive(Default)]
struct State {
    request: Option<Request>,
    made: Vec<u8>,
}

enum Request {
    Encode(usize),
    Quit,
}

impl<'scope> OldModel<'scope> {
    pub(super) fn start<'env>(scope: &'scope Scope<'scope, 'env>, encodings: Vec<Encoding<'env>>) -> Self {
        let shared = Arc::new(Shared {
            slots: encodings.iter().map(|_| Slot::default()).collect(),
            idle: Mutex::new(vec![true; encodings.len()]),
            became_idle: Condvar::new(),
        });
        let start = |(number, encoding)| {
            let shared = Arc::clone(&shared);
            scope.spawn(move || shared.serve(number, encoding))
        };
        let threads = encodings.into_iter().enumerate().map(start).collect();
        Self { shared, threads, bytes: 0 }
    }

    /// Hands a packet to a thread that is idle, if one is.
    pub(super) fn try_submit(&mut self, packet: usize) -> bool {
        let idle = take(&mut lock(&self.shared.idle));
        idle.map(|number| self.hand_over(number, packet)).is_some()
    }

    /// As `try_submit`, but waits for one.
    pub(super) fn submit(&mut self, packet: usize) {
        let mut idle = lock(&self.shared.idle);
        let number = loop {
            match take(&mut idle) {
                Some(number) => break number,
                None => idle = self.shared.became_idle.wait(idle).unwrap_or_else(|e| e.into_inner()),
            }
        };
        drop(idle);
        self.hand_over(number, packet);
    }

    /// Waits for all of them, and gives the number of bytes that they have made.
    pub(super) fn finish(mut self) -> u64 {
        for slot in &self.shared.slots {
            let mut state = lock(&slot.state);
            // One that works on its last request has not taken the next yet: it is there to be found.
            while state.request.is_some() {
                drop(state);
                std::thread::yield_now();
                state = lock(&slot.state);
            }
            state.request = Some(Request::Quit);
            slot.asked.notify_one();
        }
        for thread in self.threads.drain(..) {
            thread.join().expect("it only encodes");
        }
        self.bytes + self.shared.slots.iter().map(|slot| lock(&slot.state).made.len() as u64).sum::<u64>()
    }

    fn hand_over(&mut self, number: usize, packet: usize) {
        let slot = &self.shared.slots[number];
        let mut state = lock(&slot.state);
        self.bytes += state.made.len() as u64;
        state.made.clear();
        state.request = Some(Request::Encode(packet));
        drop(state);
        slot.asked.notify_one();
    }
}

impl Shared {
    /// The life of a thread.
    fn serve(&self, number: usize, mut encoding: Encoding<'_>) {
        let slot = &self.slots[number];
        let mut state = lock(&slot.state);
        loop {
            match state.request.take() {
                None => state = slot.asked.wait(state).unwrap_or_else(|e| e.into_inner()),
                Some(Request::Quit) => return,
                Some(Request::Encode(packet)) => {
                    let mut made = std::mem::take(&mut state.made);
                    drop(state);
                    encoding.encode(packet, &mut made);
                    state = lock(&slot.state);
                    state.made = made;
                    lock(&self.idle)[number] = true;
                    self.became_idle.notify_one();
                }
            }
        }
    }
}

fn take(idle: &mut [bool]) -> Option<usize> {
    let number = idle.iter().position(|&idle| idle)?;
    idle[number] = false;
    Some(number)
}

/// Each statement leaves what is behind these locks whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
