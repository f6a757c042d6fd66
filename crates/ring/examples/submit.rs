//! What it costs to hand a job to a worker: `submit [WORKERS] [JOBS]`.
//!
//! First with workers that are busy all the time (what a loaded source sees), then one job at a time to workers that
//! sleep (what the first packet of a round sees: a futex wake-up each).
use std::time::{Duration, Instant};
use transship_ring::{TrySubmitError, pool, spsc};

/// As long as a packet of 512 KiB takes at 500 MB/s.
const WORK: Duration = Duration::from_millis(1);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let workers: usize = arguments.next().map_or(Ok(2), |text| text.parse())?;
    let jobs: usize = arguments.next().map_or(Ok(4000), |text| text.parse())?;
    let (mut submitter, threads, results) = pool::<usize, usize>(workers, spsc::CAPACITY, 64);
    std::thread::scope(|scope| {
        for mut worker in threads {
            scope.spawn(move || {
                while let Some(job) = worker.next_job() {
                    let begin = Instant::now();
                    while begin.elapsed() < WORK {
                        std::hint::spin_loop();
                    }
                    if worker.deliver(job).is_err() {
                        return;
                    }
                }
            });
        }
        let taker = scope.spawn(move || std::iter::from_fn(|| results.next_result()).count());

        let (mut taken, mut busy, mut costs) = (0, 0, Vec::new());
        while taken < jobs {
            let begin = Instant::now();
            let result = submitter.try_submit(taken);
            let cost = begin.elapsed();
            match result {
                Ok(_) => {
                    taken += 1;
                    costs.push(cost);
                }
                Err(TrySubmitError::Busy(_)) => {
                    busy += 1;
                    std::thread::sleep(WORK);
                }
                Err(TrySubmitError::Gone(_)) => break,
            }
        }
        println!("busy workers: {}, {busy} times busy", median_and_mean(&mut costs));

        costs.clear();
        for job in 0..1000 {
            std::thread::sleep(Duration::from_micros(500));
            let begin = Instant::now();
            if submitter.submit(job).is_err() {
                break;
            }
            costs.push(begin.elapsed());
        }
        println!("sleeping workers: {}", median_and_mean(&mut costs));
        drop(submitter);
        assert_eq!(taker.join().expect("the taker only counts"), taken + 1000);
    });
    Ok(())
}

/// The mean has the times when this thread was preempted in between.
fn median_and_mean(costs: &mut [Duration]) -> String {
    costs.sort_unstable();
    let mean = costs.iter().sum::<Duration>() / u32::try_from(costs.len().max(1)).unwrap_or(u32::MAX);
    let median = costs.get(costs.len() / 2).copied().unwrap_or_default();
    format!("{} ns a job (median; mean {})", median.as_nanos(), mean.as_nanos())
}
