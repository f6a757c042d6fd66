//! What processes use: CPU seconds and memory of their own, from /proc.
use std::{
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use transship_lab::{Process, process::status_field};

/// How often memory is looked at. Each look costs some 50 microseconds of a core that the measured ones may want.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// After this a run is taken for stuck.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long one side may go on after the other has ended.
const PATIENCE_ALONE: Duration = Duration::from_secs(60);

/// CPU seconds that the process has used so far, all its threads together. Also of one that has ended and was not
/// waited for yet.
pub(crate) fn cpu_seconds(pid: u32) -> Result<f64, String> {
    cpu_seconds_in(&format!("/proc/{pid}/stat"))
}

/// As [`cpu_seconds`], of one thread.
pub(crate) fn thread_cpu_seconds(pid: u32, thread: u32) -> Result<f64, String> {
    cpu_seconds_in(&format!("/proc/{pid}/task/{thread}/stat"))
}

/// CPU seconds that this thread has used so far.
pub(crate) fn own_cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn cpu_seconds_in(path: &str) -> Result<f64, String> {
    let stat = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let ticks = ticks_of(&stat).ok_or_else(|| format!("{path} is not as documented: {stat:?}"))?;
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// utime and stime: the 14th and 15th field. The second is the program's name, in which any character may be.
fn ticks_of(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(14 - 3);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// Memory of the process's own, in bytes: neither a guest's nor its program's. None: it has ended.
fn anonymous_bytes(pid: u32) -> Option<u64> {
    let value = status_field(pid, "RssAnon").ok()?;
    Some(value.strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// What a process used until its end.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Used {
    pub(crate) cpu_seconds: f64,
    pub(crate) anonymous_bytes_max: u64,
    pub(crate) ended_after: Duration,
}

/// Waits for the end of all of them. The kernel keeps them, so that their exit codes can still be asked for.
pub(crate) fn follow<const N: usize>(processes: [&Process; N], begin: Instant) -> Result<[Used; N], String> {
    let running = AtomicUsize::new(N);
    let mut used = [Used::default(); N];
    thread::scope(|scope| {
        let ends = processes.map(|process| {
            let running = &running;
            scope.spawn(move || {
                let ended = wait_for_end(process.pid());
                running.fetch_sub(1, SeqCst);
                ended.map(|()| begin.elapsed())
            })
        });
        let mut deadline = PATIENCE;
        while running.load(SeqCst) > 0 {
            if running.load(SeqCst) < N {
                deadline = deadline.min(begin.elapsed() + PATIENCE_ALONE);
            }
            for (used, process) in used.iter_mut().zip(processes) {
                used.anonymous_bytes_max = used.anonymous_bytes_max.max(anonymous_bytes(process.pid()).unwrap_or(0));
            }
            if begin.elapsed() > deadline {
                // It ends the wait above; the exit code then tells.
                processes.iter().for_each(|process| drop(process.signal(Signal::KILL)));
            }
            thread::sleep(LOOK_EVERY);
        }
        for (used, end) in used.iter_mut().zip(ends) {
            used.ended_after = end.join().map_err(|_| "a thread that waits for a process panicked")??;
        }
        Ok::<_, String>(())
    })?;
    for (used, process) in used.iter_mut().zip(processes) {
        used.cpu_seconds = cpu_seconds(process.pid())?;
    }
    Ok(used)
}

fn wait_for_end(pid: u32) -> Result<(), String> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or("a process without a number")?;
    loop {
        match rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(format!("can't wait for process {pid}: {error}")),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn the_name_of_a_program_may_hold_anything() {
        let stat = "12 (a ) R 9 9) S 1 12 12 0 -1 4194560 100 0 0 0 250 50 3 4 20 0 1 0 100 0 0";
        assert_eq!(ticks_of(stat), Some(300));
        assert_eq!(ticks_of("12 (sh) S 1 2 3"), None);
        assert_eq!(ticks_of(""), None);
    }

    #[test]
    fn what_a_process_used_is_known_after_its_end() {
        // `read` works in processes of its own until 30 ticks of CPU time are used up, whatever else the machine does.
        let busy = "while read -r a b c d e f g h i j k l m u s rest < /proc/self/stat; do [ $((u + s)) -lt 30 ] || exit 7; done";
        let mut command = Command::new("sh");
        command.args(["-c", busy]);
        let mut process = Process::start(command).unwrap();
        let [used] = follow([&process], Instant::now()).unwrap();
        assert!(used.cpu_seconds >= 0.3, "{used:?}");
        assert!(used.anonymous_bytes_max > 0, "{used:?}");
        assert_eq!(process.wait(Duration::from_secs(60)).unwrap().code(), Some(7));
    }
}
