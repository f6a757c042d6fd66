//! One thread hands jobs out, workers do them, anybody takes the results.
use crate::sync::{AcqRel, Acquire, Arc, AtomicUsize, Relaxed};
use crate::{Parker, mpmc, spsc};
use std::time::Duration;

/// A pool of `workers` with `capacity` places each, and a shared ring for `results`; both a power of two, `results`
/// at least 2.
///
/// Threads are the caller's: give each [`Worker`] to one. Nothing is lost while all live: each job goes to one
/// worker, each result to one taker. When the [`Submitter`] goes, workers finish what is in their rings and then see
/// the end; when the last worker goes, takers empty the ring and then see the end. When a worker goes early (its
/// thread panicked), the jobs in its ring go with it, and the submitter gets [`TrySubmitError::Gone`] when it comes
/// to that ring: the caller has to give the whole undertaking up. Whoever needs to be sure counts: jobs in, results
/// out.
///
/// # Panics
/// On sizes that are not as said.
#[must_use]
pub fn pool<J, R>(workers: usize, capacity: usize, results: usize) -> (Submitter<J>, Vec<Worker<J, R>>, Results<R>) {
    assert!(workers > 0, "a pool needs a worker");
    let inbox = Arc::new(Inbox { work: (0..workers).map(|_| Parker::new()).collect(), room: Parker::new() });
    let outbox = Arc::new(Outbox {
        results: mpmc::Ring::new(results),
        ready: Parker::new(),
        space: Parker::new(),
        workers: AtomicUsize::new(workers),
        takers: AtomicUsize::new(1),
    });
    let (lanes, workers) = (0..workers)
        .map(|index| {
            let (lane, jobs) = spsc::ring(capacity);
            (lane, Worker { inbox: Arc::clone(&inbox), outbox: Arc::clone(&outbox), jobs: Some(jobs), index })
        })
        .unzip();
    (Submitter { inbox, lanes, next: 0 }, workers, Results { outbox })
}

/// The threads that sleep for jobs and for room; the jobs themselves are in the rings.
struct Inbox {
    /// A worker sleeps at its own.
    work: Box<[Parker]>,
    /// The submitter sleeps here when all rings are full.
    room: Parker,
}

struct Outbox<R> {
    results: mpmc::Ring<R>,
    /// Takers sleep here when the ring is empty.
    ready: Parker,
    /// Workers sleep here when it is full.
    space: Parker,
    /// Workers that live. The AcqRel decrement of the last one comes after its last push; a taker that loads 0 with
    /// Acquire and then finds the ring empty has seen everything.
    workers: AtomicUsize,
    /// Takers that live. The AcqRel decrement pairs with the workers' Acquire load; it publishes nothing else.
    takers: AtomicUsize,
}

/// Why a job was not taken; it comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrySubmitError<J> {
    /// Every ring is full.
    Busy(J),
    /// A worker is gone, and with it what was in its ring.
    Gone(J),
}

/// Where jobs go in. One thread holds it.
pub struct Submitter<J> {
    inbox: Arc<Inbox>,
    lanes: Vec<spsc::Producer<J>>,
    /// The worker to ask first: the one after the last that took a job.
    next: usize,
}

impl<J> Submitter<J> {
    /// Gives `job` to a worker with a free place, and says to which; looks at all of them before it gives up.
    ///
    /// # Errors
    /// All are busy, or one is gone.
    pub fn try_submit(&mut self, job: J) -> Result<usize, TrySubmitError<J>> {
        let mut job = job;
        let count = self.lanes.len();
        for index in (self.next..count).chain(0..self.next) {
            match self.lanes[index].push(job) {
                Ok(()) => {
                    self.inbox.work[index].wake_one();
                    self.next = (index + 1) % count;
                    return Ok(index);
                }
                Err(spsc::PushError::Full(back)) => job = back,
                Err(spsc::PushError::Gone(back)) => return Err(TrySubmitError::Gone(back)),
            }
        }
        Err(TrySubmitError::Busy(job))
    }

    /// As [`try_submit`](Self::try_submit), but sleeps while all are busy.
    ///
    /// # Errors
    /// A worker is gone; the job comes back.
    pub fn submit(&mut self, job: J) -> Result<usize, J> {
        let inbox = Arc::clone(&self.inbox);
        let mut job = Some(job);
        inbox.room.wait(|| match self.try_submit(job.take().expect("each refusal gives it back")) {
            Ok(worker) => Some(Ok(worker)),
            Err(TrySubmitError::Gone(back)) => Some(Err(back)),
            Err(TrySubmitError::Busy(back)) => {
                job = Some(back);
                None
            }
        })
    }

    /// As [`submit`](Self::submit), for at most `timeout`.
    ///
    /// # Errors
    /// All are busy still, or a worker is gone; the job comes back.
    pub fn submit_timeout(&mut self, job: J, timeout: Duration) -> Result<usize, TrySubmitError<J>> {
        let inbox = Arc::clone(&self.inbox);
        let mut job = Some(job);
        let submitted = inbox.room.wait_timeout(timeout, || {
            match self.try_submit(job.take().expect("each refusal gives it back")) {
                Err(TrySubmitError::Busy(back)) => {
                    job = Some(back);
                    None
                }
                other => Some(other),
            }
        });
        submitted.unwrap_or_else(|| Err(TrySubmitError::Busy(job.expect("given back by the last refusal"))))
    }

    /// How many workers there were at the beginning.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.lanes.len()
    }
}

impl<J> Drop for Submitter<J> {
    fn drop(&mut self) {
        self.lanes.clear();
        self.inbox.work.iter().for_each(Parker::wake_all);
    }
}

/// Where a worker gets jobs and leaves results. One thread holds it.
pub struct Worker<J, R> {
    inbox: Arc<Inbox>,
    outbox: Arc<Outbox<R>>,
    /// None only while it is dropped.
    jobs: Option<spsc::Consumer<J>>,
    index: usize,
}

impl<J, R> Worker<J, R> {
    /// The next job; sleeps while there is none. None when none will come.
    pub fn next_job(&mut self) -> Option<J> {
        let jobs = self.jobs.as_mut().expect("taken only in drop");
        let job = self.inbox.work[self.index].wait(|| match jobs.pop() {
            Ok(job) => Some(Some(job)),
            Err(spsc::PopError::Empty) => None,
            Err(spsc::PopError::Gone) => Some(None),
        });
        if job.is_some() {
            self.inbox.room.wake_one();
        }
        job
    }

    /// Leaves a result; sleeps while the ring is full.
    ///
    /// # Errors
    /// All takers are gone; the result comes back.
    pub fn deliver(&self, result: R) -> Result<(), R> {
        let outbox = &self.outbox;
        let mut result = Some(result);
        outbox.space.wait(|| {
            let value = result.take().expect("each refusal gives it back");
            if outbox.takers.load(Acquire) == 0 {
                return Some(Err(value));
            }
            match outbox.results.push(value) {
                Ok(()) => Some(Ok(())),
                Err(back) => {
                    result = Some(back);
                    None
                }
            }
        })?;
        outbox.ready.wake_one();
        Ok(())
    }

    /// Which worker this is, from 0; what [`Submitter::try_submit`] returned.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }
}

impl<J, R> Drop for Worker<J, R> {
    fn drop(&mut self) {
        self.jobs = None;
        self.inbox.room.wake_all();
        if self.outbox.workers.fetch_sub(1, AcqRel) == 1 {
            self.outbox.ready.wake_all();
        }
    }
}

/// Why there is no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextError {
    /// None within the time.
    Timeout,
    /// None, and none will come: all workers are gone.
    Gone,
}

/// Where results come out. Clone it for each thread that takes some.
pub struct Results<R> {
    outbox: Arc<Outbox<R>>,
}

impl<R> Results<R> {
    /// The next result; sleeps while there is none. None when none will come.
    #[must_use]
    pub fn next_result(&self) -> Option<R> {
        let result = self.outbox.ready.wait(|| self.look());
        self.took(result)
    }

    /// As [`next_result`](Self::next_result), for at most `timeout`.
    ///
    /// # Errors
    /// Time is up, or none will come.
    pub fn next_result_timeout(&self, timeout: Duration) -> Result<R, NextError> {
        let result = self.outbox.ready.wait_timeout(timeout, || self.look()).ok_or(NextError::Timeout)?;
        self.took(result).ok_or(NextError::Gone)
    }

    /// Leaves a result that no worker made; sleeps while the ring is full. Whoever calls this must not be the only
    /// taker.
    pub fn inject(&self, result: R) {
        let mut result = Some(result);
        self.outbox.space.wait(|| match self.outbox.results.push(result.take().expect("each refusal gives it back")) {
            Ok(()) => Some(()),
            Err(back) => {
                result = Some(back);
                None
            }
        });
        self.outbox.ready.wake_one();
    }

    /// As [`inject`](Self::inject), for at most `timeout`.
    ///
    /// # Errors
    /// The ring is full still; the result comes back.
    pub fn inject_timeout(&self, result: R, timeout: Duration) -> Result<(), R> {
        let mut result = Some(result);
        let pushed = self.outbox.space.wait_timeout(timeout, || {
            match self.outbox.results.push(result.take().expect("each refusal gives it back")) {
                Ok(()) => Some(()),
                Err(back) => {
                    result = Some(back);
                    None
                }
            }
        });
        match pushed {
            Some(()) => {
                self.outbox.ready.wake_one();
                Ok(())
            }
            None => Err(result.expect("given back by the last refusal")),
        }
    }

    /// A result if there is one now.
    #[must_use]
    pub fn try_next_result(&self) -> Option<R> {
        let result = self.outbox.results.pop();
        self.took(result)
    }

    /// Some(None) at the end.
    fn look(&self) -> Option<Option<R>> {
        if let Some(result) = self.outbox.results.pop() {
            return Some(Some(result));
        }
        // The order matters: what was left before the last worker went is found by the second look.
        let over = self.outbox.workers.load(Acquire) == 0;
        match self.outbox.results.pop() {
            Some(result) => Some(Some(result)),
            None => over.then_some(None),
        }
    }

    /// A place is free: one worker may go on. And whoever was woken passes it on when there is more, because a push
    /// that was overtaken wakes a taker for a result that another may have taken already.
    fn took(&self, result: Option<R>) -> Option<R> {
        if result.is_some() {
            self.outbox.space.wake_one();
            if !self.outbox.results.is_empty() {
                self.outbox.ready.wake_one();
            }
        }
        result
    }
}

impl<R> Clone for Results<R> {
    fn clone(&self) -> Self {
        // Relaxed: a taker is made from one that lives, so the count can't be 0 meanwhile, and it publishes nothing.
        self.outbox.takers.fetch_add(1, Relaxed);
        Self { outbox: Arc::clone(&self.outbox) }
    }
}

impl<R> Drop for Results<R> {
    fn drop(&mut self) {
        if self.outbox.takers.fetch_sub(1, AcqRel) == 1 {
            self.outbox.space.wake_all();
        }
    }
}

macro_rules! debug_by_name {
    ($($name:literal $type:ty, [$($generic:ident)*];)*) => {
        $(impl<$($generic),*> std::fmt::Debug for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct($name).finish_non_exhaustive()
            }
        })*
    };
}
debug_by_name! {
    "Submitter" Submitter<J>, [J];
    "Worker" Worker<J, R>, [J R];
    "Results" Results<R>, [R];
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn all_rings_are_looked_at_before_busy() {
        let (mut submitter, workers, _results) = pool::<u32, ()>(3, 2, 2);
        let given: Vec<_> = (0..6).map(|job| submitter.try_submit(job).unwrap()).collect();
        assert_eq!(given, [0, 1, 2, 0, 1, 2]);
        assert_eq!(submitter.try_submit(6), Err(TrySubmitError::Busy(6)));
        drop(workers);
    }

    #[test]
    fn every_job_becomes_one_result() {
        const JOBS: u64 = 30_000;
        for (workers, capacity) in [(1, 1), (2, 4), (5, 4)] {
            let (mut submitter, workers, results) = pool::<u64, u64>(workers, capacity, 2);
            let seen: Vec<u64> = std::thread::scope(|scope| {
                for mut worker in workers {
                    scope.spawn(move || {
                        while let Some(job) = worker.next_job() {
                            worker.deliver(job).unwrap();
                        }
                    });
                }
                let takers: Vec<_> = (0..2)
                    .map(|_| {
                        let results = results.clone();
                        scope.spawn(move || std::iter::from_fn(|| results.next_result()).collect::<Vec<_>>())
                    })
                    .collect();
                for job in 0..JOBS {
                    submitter.submit(job).unwrap();
                }
                drop(submitter);
                takers.into_iter().flat_map(|taker| taker.join().unwrap()).collect()
            });
            assert_eq!(seen.len() as u64, JOBS);
            assert_eq!(seen.into_iter().collect::<HashSet<_>>(), (0..JOBS).collect());
        }
    }

    /// The encoder's thread panicked with the submitter asleep because everything was full: it must wake up and be
    /// told.
    #[test]
    fn a_worker_that_dies_wakes_the_submitter() {
        let (mut submitter, mut workers, _results) = pool::<u8, ()>(2, 1, 2);
        while submitter.try_submit(1).is_ok() {}
        std::thread::scope(|scope| {
            let asleep = scope.spawn(move || submitter.submit(9));
            drop(workers.pop());
            assert_eq!(asleep.join().unwrap(), Err(9));
        });
    }

    #[test]
    fn takers_that_went_wake_the_workers() {
        let (submitter, mut workers, results) = pool::<(), u8>(1, 1, 2);
        let worker = workers.pop().unwrap();
        worker.deliver(1).unwrap();
        worker.deliver(2).unwrap();
        std::thread::scope(|scope| {
            let asleep = scope.spawn(move || worker.deliver(3));
            drop(results);
            assert_eq!(asleep.join().unwrap(), Err(3));
        });
        drop(submitter);
    }

    #[test]
    fn the_end_comes_after_the_last_result() {
        let (submitter, mut workers, results) = pool::<(), u8>(1, 1, 2);
        assert_eq!(results.next_result_timeout(Duration::from_millis(1)), Err(NextError::Timeout));
        workers.pop().unwrap().deliver(4).unwrap();
        assert_eq!((results.next_result(), results.next_result()), (Some(4), None));
        assert_eq!(results.next_result_timeout(Duration::from_secs(60)), Err(NextError::Gone));
        drop(submitter);
    }
}
