//! A bounded ring from any threads to any threads (after Dmitry Vyukov's bounded queue).
use crate::sync::{Acquire, AtomicUsize, Padded, Relaxed, Release, UnsafeCell};
use std::mem::MaybeUninit;

/// A ring that threads share by reference.
///
/// Each place carries a turn. With position `p` of a `capacity`-sized ring: turn `p` means "free for the push at
/// position p", turn `p + 1` "holds the value of position p", turn `p + capacity` "free again, for the next lap". The
/// thread that moves `tail` (or `head`) past a position owns the place until it sets the next turn.
///
/// A pop may find nothing although a later push is done: an earlier one has taken its position and not yet filled it.
/// That push's own wake-up comes after it has filled the place, so nobody who waits behind it sleeps for ever; but a
/// waker that wakes one thread must be followed by that thread looking for more (see `Results::next_result`).
pub struct Ring<T> {
    places: Box<[Slot<T>]>,
    /// The next position to push. Relaxed: it only shares positions out; the turns publish the values.
    tail: Padded<AtomicUsize>,
    /// The next position to pop. Relaxed, for the same reason.
    head: Padded<AtomicUsize>,
}

struct Slot<T> {
    /// Stored with Release after the value was written (push) or read (pop). The Acquire load of the pop makes the
    /// value visible; that of the push on the next lap makes sure that it overwrites the value after it was read.
    turn: AtomicUsize,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: a place is used by one thread at a time, as its turn says; values move between threads, so T must be Send.
unsafe impl<T: Send> Send for Ring<T> {}
// SAFETY: as above; no reference to a value is handed out through &Ring, so T need not be Sync.
unsafe impl<T: Send> Sync for Ring<T> {}

impl<T> Ring<T> {
    /// A ring with `capacity` places.
    ///
    /// # Panics
    /// When `capacity` is no power of two or below 2 (with one place "filled" and "free for the next lap" would be
    /// one turn).
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        assert!(capacity.is_power_of_two() && capacity >= 2, "a shared ring has 2, 4, 8… places, not {capacity}");
        let place = |turn| Slot { turn: AtomicUsize::new(turn), value: UnsafeCell::new(MaybeUninit::uninit()) };
        Self {
            places: (0..capacity).map(place).collect(),
            tail: Padded(AtomicUsize::new(0)),
            head: Padded(AtomicUsize::new(0)),
        }
    }

    /// Puts `value` in.
    ///
    /// # Errors
    /// The ring is full; the value comes back.
    pub fn push(&self, value: T) -> Result<(), T> {
        let Some((position, place)) = self.claim(&self.tail.0, 0) else { return Err(value) };
        // SAFETY: claim() moved tail past this position while its turn said "free": the place is ours until the turn
        // is set.
        place.value.with_mut(|slot| unsafe { (*slot).write(value) });
        place.turn.store(position.wrapping_add(1), Release);
        Ok(())
    }

    /// Takes the oldest value; none if the ring is empty.
    pub fn pop(&self) -> Option<T> {
        let (position, place) = self.claim(&self.head.0, 1)?;
        // SAFETY: claim() moved head past this position while its turn said "holds a value": it is ours until the
        // turn is set, and as no other pop gets this position it is read once.
        let value = place.value.with_mut(|slot| unsafe { (*slot).assume_init_read() });
        place.turn.store(position.wrapping_add(self.places.len()), Release);
        Some(value)
    }

    /// Whether a pop would find nothing. With other threads about, only a hint.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let head = self.head.0.load(Relaxed);
        self.place(head).turn.load(Acquire) != head.wrapping_add(1)
    }

    /// Places of the ring.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.places.len()
    }

    fn place(&self, position: usize) -> &Slot<T> {
        &self.places[position & (self.places.len() - 1)]
    }

    /// Takes the next position of `counter` if its place has the turn `position + offset`; none if it has not come to
    /// that.
    fn claim(&self, counter: &AtomicUsize, offset: usize) -> Option<(usize, &Slot<T>)> {
        let mut position = counter.load(Relaxed);
        loop {
            let place = self.place(position);
            let turn = place.turn.load(Acquire);
            let ahead = turn.wrapping_sub(position.wrapping_add(offset)).cast_signed();
            match ahead {
                0 => match counter.compare_exchange_weak(position, position.wrapping_add(1), Relaxed, Relaxed) {
                    Ok(_) => return Some((position, place)),
                    Err(now) => position = now,
                },
                // The place is a lap behind: full (push) or empty (pop).
                ..0 => return None,
                // Others were faster; the turn they set was read with Acquire, so the counter they moved before it is
                // seen.
                1.. => position = counter.load(Relaxed),
            }
        }
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        // Nobody is inside a push or pop (&mut), so what is left is what pop finds.
        while self.pop().is_some() {}
    }
}

impl<T> std::fmt::Debug for Ring<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("capacity", &self.capacity()).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;
    use std::sync::atomic::{AtomicUsize as Count, Ordering::SeqCst};

    #[test]
    #[should_panic(expected = "2, 4, 8")]
    fn one_place_is_refused() {
        let _ = Ring::<u8>::new(1);
    }

    #[test]
    fn values_left_in_the_ring_are_dropped_once() {
        let value = std::sync::Arc::new(());
        let ring = Ring::new(4);
        for _ in 0..4 {
            ring.push(std::sync::Arc::clone(&value)).unwrap();
        }
        assert!(ring.push(std::sync::Arc::clone(&value)).is_err());
        drop(ring.pop());
        assert_eq!(std::sync::Arc::strong_count(&value), 4);
        drop(ring);
        assert_eq!(std::sync::Arc::strong_count(&value), 1);
    }

    /// Three threads put in, three take out; each value comes out once, and those of one thread in order.
    #[test]
    fn every_value_comes_out_once() {
        const EACH: usize = 20_000;
        let (ring, taken) = (Ring::new(8), Count::new(0));
        let mut seen: Vec<(usize, usize)> = std::thread::scope(|scope| {
            for thread in 0..3 {
                let ring = &ring;
                scope.spawn(move || {
                    for i in 0..EACH {
                        let mut value = Box::new((thread, i));
                        while let Err(back) = ring.push(value) {
                            value = back;
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let takers: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        let mut seen = Vec::new();
                        while taken.load(SeqCst) < 3 * EACH {
                            if let Some(value) = ring.pop() {
                                taken.fetch_add(1, SeqCst);
                                seen.push(*value);
                            } else {
                                std::thread::yield_now();
                            }
                        }
                        for thread in 0..3 {
                            assert!(seen.iter().filter(|v| v.0 == thread).is_sorted());
                        }
                        seen
                    })
                })
                .collect();
            takers.into_iter().flat_map(|taker| taker.join().unwrap()).collect()
        });
        seen.sort_unstable();
        assert_eq!(seen, (0..3).flat_map(|t| (0..EACH).map(move |i| (t, i))).collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn it_is_a_bounded_queue(bits in 1u32..5, pushes in proptest::collection::vec(any::<bool>(), 0..200)) {
            let ring = Ring::new(1 << bits);
            let mut model = VecDeque::new();
            for (i, push) in pushes.into_iter().enumerate() {
                if push {
                    let fits = model.len() < ring.capacity();
                    if fits {
                        model.push_back(i);
                    }
                    prop_assert_eq!(ring.push(i), if fits { Ok(()) } else { Err(i) });
                } else {
                    prop_assert_eq!(ring.pop(), model.pop_front());
                }
                prop_assert_eq!(ring.is_empty(), model.is_empty());
            }
        }
    }
}
