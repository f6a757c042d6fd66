//! Every interleaving of small cases, by loom. A lost wake-up is a deadlock there, and loom reports it.
use crate::{Parker, mpmc, pool, spsc};
use loom::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

/// All interleavings with at most `preemptions` forced switches. Each model has as many as it takes to find the
/// mistakes that it is for: weaker orderings, a load instead of a read-modify-write, a wake-up left out.
fn model(preemptions: usize, f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(f);
}

#[test]
fn spsc_loses_and_doubles_nothing() {
    model(3, || {
        let (mut producer, mut consumer) = spsc::ring(2);
        let parkers = Arc::new((Parker::new(), Parker::new()));
        let (full, filled) = (Arc::clone(&parkers), parkers);
        let putting = thread::spawn(move || {
            for value in 0..3 {
                let value = Box::new(value);
                full.0.wait(|| producer.has_room().then_some(()));
                producer.push(value).unwrap();
                full.1.wake_one();
            }
            drop(producer);
            full.1.wake_one();
        });
        let mut seen = Vec::new();
        while let Some(value) = filled.1.wait(|| match consumer.pop() {
            Ok(value) => Some(Some(value)),
            Err(spsc::PopError::Empty) => None,
            Err(spsc::PopError::Gone) => Some(None),
        }) {
            filled.0.wake_one();
            seen.push(*value);
        }
        putting.join().unwrap();
        assert_eq!(seen, [0, 1, 2]);
    });
}

#[test]
fn spsc_drops_what_was_left() {
    model(3, || {
        let value = Arc::new(());
        let (mut producer, mut consumer) = spsc::ring(2);
        let inside = Arc::clone(&value);
        let putting = thread::spawn(move || {
            let _ = producer.push(Arc::clone(&inside));
            let _ = producer.push(inside);
        });
        drop(consumer.pop());
        drop(consumer);
        putting.join().unwrap();
        assert_eq!(Arc::strong_count(&value), 1);
    });
}

#[test]
fn mpmc_two_put_two_take() {
    model(2, || {
        let ring = Arc::new(mpmc::Ring::new(2));
        let putting: Vec<_> = (1..=2)
            .map(|value| {
                let ring = Arc::clone(&ring);
                thread::spawn(move || ring.push(Box::new(value)).expect("two fit"))
            })
            .collect();
        let taking = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || ring.pop())
        };
        let mut seen: Vec<i32> = ring.pop().into_iter().map(|v| *v).collect();
        seen.extend(taking.join().unwrap().map(|v| *v));
        putting.into_iter().for_each(|thread| thread.join().unwrap());
        seen.extend(std::iter::from_fn(|| ring.pop()).map(|v| *v));
        seen.sort_unstable();
        assert_eq!(seen, [1, 2]);
    });
}

/// Puts more than fits while another takes, so that places are used on a second lap.
#[test]
fn mpmc_goes_round() {
    model(3, || {
        let ring = Arc::new(mpmc::Ring::new(2));
        let putting = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || (0..4).filter(|value| ring.push(Box::new(*value)).is_ok()).collect::<Vec<i32>>())
        };
        let mut seen: Vec<i32> = (0..2).filter_map(|_| ring.pop()).map(|v| *v).collect();
        let put = putting.join().unwrap();
        seen.extend(std::iter::from_fn(|| ring.pop()).map(|v| *v));
        assert_eq!(seen, put);
    });
}

#[test]
fn parker_loses_no_wake_up() {
    model(3, || {
        let shared = Arc::new((Parker::new(), AtomicUsize::new(0)));
        let other = Arc::clone(&shared);
        let waking = thread::spawn(move || {
            // Relaxed on purpose: the parker alone has to make it visible.
            other.1.store(1, Relaxed);
            other.0.wake_one();
            other.1.store(2, Relaxed);
            other.0.wake_one();
        });
        shared.0.wait(|| (shared.1.load(Relaxed) == 2).then_some(()));
        waking.join().unwrap();
    });
}

#[test]
fn parker_wakes_each_of_two() {
    model(2, || {
        let shared = Arc::new((Parker::new(), mpmc::Ring::new(2)));
        let waiting: Vec<_> = (0..2)
            .map(|_| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.0.wait(|| shared.1.pop()))
            })
            .collect();
        for value in 0..2 {
            shared.1.push(value).unwrap();
            shared.0.wake_one();
        }
        let mut seen: Vec<i32> = waiting.into_iter().map(|thread| thread.join().unwrap()).collect();
        seen.sort_unstable();
        assert_eq!(seen, [0, 1]);
    });
}

#[test]
fn pool_one_worker_full_rings() {
    model(2, || {
        let (mut submitter, mut workers, results) = pool::<u8, u8>(1, 1, 2);
        let mut worker = workers.pop().unwrap();
        let working = thread::spawn(move || {
            while let Some(job) = worker.next_job() {
                worker.deliver(job).unwrap();
            }
        });
        for job in 0..2 {
            submitter.submit(job).unwrap();
        }
        drop(submitter);
        assert_eq!(std::iter::from_fn(|| results.next_result()).collect::<Vec<_>>(), [0, 1]);
        working.join().unwrap();
    });
}

#[test]
fn pool_two_workers() {
    model(2, || {
        let (mut submitter, workers, results) = pool::<u8, u8>(2, 1, 2);
        let working: Vec<_> = workers
            .into_iter()
            .map(|mut worker| {
                thread::spawn(move || {
                    while let Some(job) = worker.next_job() {
                        worker.deliver(job).unwrap();
                    }
                })
            })
            .collect();
        for job in 0..2 {
            submitter.submit(job).unwrap();
        }
        drop(submitter);
        let mut seen: Vec<_> = std::iter::from_fn(|| results.next_result()).collect();
        seen.sort_unstable();
        assert_eq!(seen, [0, 1]);
        working.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Two who deliver, two who take: no taker may sleep on while a result is left.
#[test]
fn pool_two_takers() {
    model(3, || {
        let (submitter, mut workers, results) = pool::<(), u8>(2, 1, 2);
        let (first, second) = (workers.pop().unwrap(), workers.pop().unwrap());
        let delivering = thread::spawn(move || second.deliver(2).unwrap());
        let taking = {
            let results = results.clone();
            thread::spawn(move || results.next_result())
        };
        first.deliver(1).unwrap();
        let mut seen = [results.next_result(), taking.join().unwrap()];
        delivering.join().unwrap();
        seen.sort_unstable();
        assert_eq!(seen, [Some(1), Some(2)]);
        drop((submitter, first));
    });
}
