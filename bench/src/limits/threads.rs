//! Work that threads share, and how long it takes them.
use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    thread,
    time::Instant,
};

use crate::units::millis;

/// Has threads do all of so many pieces of work, and gives the time and the results in their order.
pub(super) fn on_all<T: Send, W: FnMut(usize) -> Result<T, String> + Send>(
    count: usize,
    threads: usize,
    worker: impl Fn() -> W,
) -> Result<(f64, Vec<T>), String> {
    let next = AtomicUsize::new(0);
    let begin = Instant::now();
    let mut done: Vec<(usize, T)> = thread::scope(|scope| {
        let next = &next;
        let all: Vec<_> = (0..threads)
            .map(|_| {
                let mut work = worker();
                scope.spawn(move || {
                    // A counter: nothing else is published by it.
                    let numbers =
                        std::iter::from_fn(|| Some(next.fetch_add(1, Relaxed)).filter(|number| *number < count));
                    numbers.map(|number| Ok((number, work(number)?))).collect::<Result<Vec<_>, String>>()
                })
            })
            .collect();
        let mut done = Vec::new();
        for thread in all {
            done.extend(thread.join().map_err(|_| "a thread of a limit panicked")??);
        }
        Ok::<_, String>(done)
    })?;
    let ms = millis(begin.elapsed());
    done.sort_by_key(|(number, _)| *number);
    Ok((ms, done.into_iter().map(|(_, result)| result).collect()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_the_order_of_the_work() {
        let (_, squares) = on_all(100, 4, || |number| Ok(number * number)).unwrap();
        assert_eq!(squares, (0..100).map(|number| number * number).collect::<Vec<_>>());
        let failed = on_all(9, 2, || |number| if number == 7 { Err("seven".to_owned()) } else { Ok(()) });
        assert_eq!(failed.unwrap_err(), "seven");
    }
}
