//! A bounded ring from one thread to one other.
use crate::sync::{Acquire, Arc, AtomicBool, AtomicUsize, Padded, Relaxed, Release, UnsafeCell};
use std::mem::MaybeUninit;

/// Places of a ring unless said otherwise: enough to keep a worker busy while the submitter looks elsewhere, few enough
/// that a packet does not wait behind many.
pub const CAPACITY: usize = 4;

/// A ring with `capacity` places.
///
/// # Panics
/// When `capacity` is no power of two.
#[must_use]
pub fn ring<T>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    assert!(capacity.is_power_of_two(), "a ring has a power of two of places, not {capacity}");
    let shared = Arc::new(Shared {
        places: (0..capacity).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect(),
        head: Padded(AtomicUsize::new(0)),
        tail: Padded(AtomicUsize::new(0)),
        producer_gone: AtomicBool::new(false),
        consumer_gone: AtomicBool::new(false),
    });
    (Producer { shared: Arc::clone(&shared), tail: 0, head_seen: 0 }, Consumer { shared, head: 0, tail_seen: 0 })
}

/// Why a value was not taken; it comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PushError<T> {
    /// No place is free now.
    Full(T),
    /// The consumer is gone: nobody will ever take it.
    Gone(T),
}

/// Why there is no value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PopError {
    /// None now.
    Empty,
    /// None now and none will come: the producer is gone and everything was taken.
    Gone,
}

/// Positions count up without end (they wrap at the word size); a position's place is its remainder by the capacity.
/// `head <= tail <= head + capacity`. The places `head..tail` hold values and belong to the consumer; the others are
/// uninitialised and belong to the producer.
struct Shared<T> {
    places: Box<[UnsafeCell<MaybeUninit<T>>]>,
    /// Written by the consumer with Release when it has emptied a place; the producer's Acquire load makes sure that
    /// it overwrites the place after the value was read.
    head: Padded<AtomicUsize>,
    /// Written by the producer with Release when it has filled a place; the consumer's Acquire load makes the value
    /// visible.
    tail: Padded<AtomicUsize>,
    /// Written with Release when the producer goes, after its last `tail`; the consumer's Acquire load and a second
    /// look at `tail` tell "empty" from "nothing more comes".
    producer_gone: AtomicBool,
    /// Written with Release when the consumer goes; the producer's Acquire load. It publishes nothing else.
    consumer_gone: AtomicBool,
}

// SAFETY: each place is used by one side at a time, as head and tail say; values move between threads, so T must be
// Send.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above; no reference to a value is ever handed out through &Shared, so T need not be Sync.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    fn place(&self, position: usize) -> &UnsafeCell<MaybeUninit<T>> {
        &self.places[position & (self.places.len() - 1)]
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // Both sides are gone (&mut): Relaxed is enough, the Arc's own counting ordered their last steps before this.
        let (mut head, tail) = (self.head.0.load(Relaxed), self.tail.0.load(Relaxed));
        while head != tail {
            // SAFETY: places in head..tail hold values that nobody took, and nobody else can see the ring any more.
            self.place(head).with_mut(|place| unsafe { (*place).assume_init_drop() });
            head = head.wrapping_add(1);
        }
    }
}

/// The side that puts values in.
pub struct Producer<T> {
    shared: Arc<Shared<T>>,
    /// The value of `shared.tail`, which only this side writes.
    tail: usize,
    /// A head that was read earlier: the real one is at or past it, so there is at least as much room as it says.
    head_seen: usize,
}

impl<T> Producer<T> {
    /// Puts `value` in, if there is a free place.
    ///
    /// # Errors
    /// No place, or no consumer; both give the value back.
    pub fn push(&mut self, value: T) -> Result<(), PushError<T>> {
        if self.shared.consumer_gone.load(Acquire) {
            return Err(PushError::Gone(value));
        }
        if !self.has_room() {
            return Err(PushError::Full(value));
        }
        // SAFETY: has_room() says that this position's place is outside head..tail: it is the producer's, and there
        // is one producer.
        self.shared.place(self.tail).with_mut(|place| unsafe { (*place).write(value) });
        self.tail = self.tail.wrapping_add(1);
        self.shared.tail.0.store(self.tail, Release);
        Ok(())
    }

    /// Whether a place is free. Only this side fills places, so a yes stays true until the next `push`.
    pub fn has_room(&mut self) -> bool {
        if self.tail.wrapping_sub(self.head_seen) < self.capacity() {
            return true;
        }
        self.head_seen = self.shared.head.0.load(Acquire);
        self.tail.wrapping_sub(self.head_seen) < self.capacity()
    }

    /// Whether the consumer is gone.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.shared.consumer_gone.load(Acquire)
    }

    /// Places of the ring.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.shared.places.len()
    }
}

impl<T> Drop for Producer<T> {
    fn drop(&mut self) {
        self.shared.producer_gone.store(true, Release);
    }
}

/// The side that takes values out, in the order in which they were put in.
pub struct Consumer<T> {
    shared: Arc<Shared<T>>,
    /// The value of `shared.head`, which only this side writes.
    head: usize,
    /// A tail that was read earlier: the real one is at or past it, so there are at least as many values as it says.
    tail_seen: usize,
}

impl<T> Consumer<T> {
    /// Takes the oldest value.
    ///
    /// # Errors
    /// There is none, now or for ever.
    pub fn pop(&mut self) -> Result<T, PopError> {
        if !self.has_value() {
            // The order matters: a value that was put in before the producer went is seen by the second look.
            let gone = self.shared.producer_gone.load(Acquire);
            if !self.has_value() {
                return Err(if gone { PopError::Gone } else { PopError::Empty });
            }
        }
        // SAFETY: has_value() says that this place is inside head..tail: it holds a value, it is the consumer's, and
        // there is one consumer, which moves head past it right below, so that the value is read once.
        let value = self.shared.place(self.head).with_mut(|place| unsafe { (*place).assume_init_read() });
        self.head = self.head.wrapping_add(1);
        self.shared.head.0.store(self.head, Release);
        Ok(value)
    }

    fn has_value(&mut self) -> bool {
        if self.head != self.tail_seen {
            return true;
        }
        self.tail_seen = self.shared.tail.0.load(Acquire);
        self.head != self.tail_seen
    }
}

impl<T> Drop for Consumer<T> {
    fn drop(&mut self) {
        self.shared.consumer_gone.store(true, Release);
    }
}

impl<T> std::fmt::Debug for Producer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Producer").field("tail", &self.tail).field("capacity", &self.capacity()).finish_non_exhaustive()
    }
}

impl<T> std::fmt::Debug for Consumer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Consumer").field("head", &self.head).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[test]
    #[should_panic(expected = "power of two")]
    fn three_places_are_refused() {
        let _ = ring::<u8>(3);
    }

    #[test]
    fn values_left_in_the_ring_are_dropped_once() {
        let value = std::sync::Arc::new(());
        let (mut producer, mut consumer) = ring(4);
        for _ in 0..4 {
            producer.push(std::sync::Arc::clone(&value)).unwrap();
        }
        drop(consumer.pop().unwrap());
        producer.push(std::sync::Arc::clone(&value)).unwrap();
        assert_eq!(std::sync::Arc::strong_count(&value), 5);
        drop((producer, consumer));
        assert_eq!(std::sync::Arc::strong_count(&value), 1);
    }

    #[test]
    fn a_side_that_went_is_noticed_after_its_values() {
        let (mut producer, mut consumer) = ring(2);
        producer.push(1).unwrap();
        drop(producer);
        assert_eq!((consumer.pop(), consumer.pop()), (Ok(1), Err(PopError::Gone)));
        let (mut producer, consumer) = ring(2);
        drop(consumer);
        assert_eq!(producer.push(1), Err(PushError::Gone(1)));
    }

    #[test]
    fn every_value_crosses_threads_in_order() {
        const VALUES: usize = 100_000;
        let (mut producer, mut consumer) = ring(CAPACITY);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for value in 0..VALUES {
                    while producer.push(Box::new(value)).is_err() {
                        std::thread::yield_now();
                    }
                }
            });
            let mut expected = 0;
            loop {
                match consumer.pop() {
                    Ok(value) => {
                        assert_eq!(*value, expected);
                        expected += 1;
                    }
                    Err(PopError::Empty) => std::thread::yield_now(),
                    Err(PopError::Gone) => break,
                }
            }
            assert_eq!(expected, VALUES);
        });
    }

    proptest! {
        /// Any order of operations does what a queue with a bound does.
        #[test]
        fn it_is_a_bounded_queue(bits in 0u32..5, pushes in proptest::collection::vec(any::<bool>(), 0..200)) {
            let capacity = 1 << bits;
            let (mut producer, mut consumer) = ring(capacity);
            let mut model = VecDeque::new();
            for (i, push) in pushes.into_iter().enumerate() {
                if push {
                    let fits = model.len() < capacity;
                    prop_assert_eq!(producer.has_room(), fits);
                    if fits {
                        model.push_back(i);
                    }
                    prop_assert_eq!(producer.push(i), if fits { Ok(()) } else { Err(PushError::Full(i)) });
                } else {
                    prop_assert_eq!(consumer.pop(), model.pop_front().ok_or(PopError::Empty));
                }
            }
        }
    }
}
