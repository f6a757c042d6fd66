//! Where threads without work sleep.
use crate::sync::{AcqRel, Acquire, AtomicU32, Futex, Release};
use std::time::{Duration, Instant};

/// A place to sleep until a condition holds, for any number of threads (an event count).
///
/// The rule for users: *first make the condition true, then wake.* The condition itself lives elsewhere (a ring that
/// is no longer empty, a flag); the parker only makes sure that nobody sleeps through its change. Waking when nobody
/// sleeps costs one atomic operation and no system call.
///
/// Why no wake-up is lost: a waiter first counts itself in `waiting`, then reads `epoch`, then looks at the
/// condition, and only then sleeps, if `epoch` is unchanged. The waker, after its change, adds nothing to `waiting`:
/// two read-modify-writes of one variable have an order.
/// - The waker's comes first: the waiter's counting reads from it (or from a later one in its release sequence), so
///   the change is visible when the waiter looks.
/// - The waiter's comes first: the waker sees a count above zero, moves `epoch` and calls the futex. Either the waiter
///   had read the old epoch: it is woken, or does not fall asleep; or it reads the new one: then it also sees the
///   change.
#[derive(Debug)]
pub struct Parker {
    /// Threads between "counted" and "gone on". AcqRel on both sides: see the type's argument.
    waiting: AtomicU32,
    /// Moves with each wake-up that finds somebody waiting. The waker's Release pairs with the waiter's Acquire load
    /// before it looks at the condition. It may wrap: a waiter would have to be held up for exactly 2³² wake-ups,
    /// each a system call.
    epoch: Futex,
}

impl Default for Parker {
    fn default() -> Self {
        Self::new()
    }
}

impl Parker {
    /// Nobody sleeps here yet.
    #[must_use]
    pub fn new() -> Self {
        Self { waiting: AtomicU32::new(0), epoch: Futex::new(0) }
    }

    /// Sleeps until `ready` returns something. `ready` is called at once, and after each wake-up.
    pub fn wait<T>(&self, ready: impl FnMut() -> Option<T>) -> T {
        self.wait_until(None, ready).expect("without a deadline it ends only when ready")
    }

    /// As [`wait`](Self::wait), for at most `timeout`; none when it passed. After it `ready` is asked a last time.
    pub fn wait_timeout<T>(&self, timeout: Duration, ready: impl FnMut() -> Option<T>) -> Option<T> {
        // A time beyond what the clock can hold is no limit.
        self.wait_until(Instant::now().checked_add(timeout), ready)
    }

    fn wait_until<T>(&self, deadline: Option<Instant>, mut ready: impl FnMut() -> Option<T>) -> Option<T> {
        if let Some(value) = ready() {
            return Some(value);
        }
        let _counted = Counted::new(&self.waiting);
        loop {
            let epoch = self.epoch.value.load(Acquire);
            if let Some(value) = ready() {
                return Some(value);
            }
            let left = match deadline {
                None => None,
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    Some(left)
                }
            };
            self.epoch.wait(epoch, left);
        }
    }

    /// Wakes one of those who sleep, if any. All waiters must be able to do what the change allows.
    pub fn wake_one(&self) {
        self.wake(1);
    }

    /// Wakes all who sleep.
    pub fn wake_all(&self) {
        self.wake(i32::MAX as u32);
    }

    fn wake(&self, count: u32) {
        // Not a load: a read-modify-write can't miss a waiter that counted itself before (see the type).
        if self.waiting.fetch_add(0, AcqRel) > 0 {
            self.epoch.value.fetch_add(1, Release);
            self.epoch.wake(count);
        }
    }
}

/// Counts a thread as waiting, and out again, also when `ready` panics.
struct Counted<'a>(&'a AtomicU32);

impl<'a> Counted<'a> {
    fn new(waiting: &'a AtomicU32) -> Self {
        waiting.fetch_add(1, AcqRel);
        Self(waiting)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, AcqRel);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    #[test]
    fn what_is_ready_is_returned_without_waiting() {
        assert_eq!(Parker::new().wait(|| Some(5)), 5);
    }

    #[test]
    fn a_timeout_asks_a_last_time_and_returns() {
        let mut asked = 0;
        let parker = Parker::new();
        assert_eq!(
            parker.wait_timeout(Duration::from_millis(1), || {
                asked += 1;
                None::<()>
            }),
            None
        );
        assert!(asked >= 2, "asked {asked} times");
        assert_eq!(parker.waiting.load(SeqCst), 0);
    }

    #[test]
    fn a_panic_while_waiting_leaves_the_count_right() {
        let parker = Parker::new();
        let mut asked = 0;
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            parker.wait(|| {
                asked += 1;
                assert!(asked < 2, "as planned");
                None::<()>
            });
        }));
        assert!(result.is_err());
        assert_eq!(parker.waiting.load(SeqCst), 0);
    }

    /// Two threads wait for each other's step, so one lost wake-up stops the test.
    #[test]
    fn ping_pong_never_stops() {
        const STEPS: usize = 20_000;
        let (parker, step) = (Parker::new(), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for side in 0..2 {
                let (parker, step) = (&parker, &step);
                scope.spawn(move || {
                    for turn in (side..STEPS).step_by(2) {
                        parker.wait(|| (step.load(SeqCst) == turn).then_some(()));
                        step.store(turn + 1, SeqCst);
                        if turn % 3 == 0 { parker.wake_one() } else { parker.wake_all() }
                    }
                });
            }
        });
        assert_eq!(step.into_inner(), STEPS);
    }
}
