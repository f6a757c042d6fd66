//! How far a run of all tables is: a bar with the time left on a terminal, lines elsewhere.
use std::{
    io::{self, IsTerminal},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

use super::plan::Job;
use crate::output;

/// How far it is.
pub(crate) struct Progress {
    /// None: nobody looks at a terminal.
    bar: Option<ProgressBar>,
    /// Seconds by experience: of all jobs, of those that are done, and of those that were measured now.
    all: f64,
    done: f64,
    measured: f64,
    /// What those that were measured now really took.
    took: f64,
    began: Instant,
    expected: f64,
    place: String,
}

impl Progress {
    /// Of these jobs, none of which is done.
    pub(crate) fn of(jobs: &[Job]) -> Self {
        let all: f64 = jobs.iter().map(|job| f64::from(job.seconds)).sum();
        let bar = io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{bar:30} {percent:>3} % {prefix} · {wide_msg}");
            let bar = ProgressBar::new((all * 1000.0) as u64);
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        let (done, measured, took, expected) = (0.0, 0.0, 0.0, 0.0);
        Self { bar, all, done, measured, took, began: Instant::now(), expected, place: String::new() }
    }

    /// A job was done before.
    pub(crate) fn was_done(&mut self, job: &Job) {
        self.done += f64::from(job.seconds);
        output::say(&format!("{} is done already", job.name));
    }

    /// A job begins: the one at this place, from 1, of so many.
    pub(crate) fn begins(&mut self, job: &Job, place: usize, jobs: usize) {
        self.began = Instant::now();
        self.expected = f64::from(job.seconds);
        self.place = format!("[{place}/{jobs}] {}", job.name);
        match &self.bar {
            Some(_) => self.tick(),
            None => output::say(&format!("{}, {} left", self.place, words(self.left()))),
        }
    }

    /// The job says something.
    pub(crate) fn says(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(line.to_owned()),
            None => output::say(&format!("{}: {line}", self.place)),
        }
        self.tick();
    }

    /// Time passes.
    pub(crate) fn tick(&self) {
        if let Some(bar) = &self.bar {
            bar.set_position(((self.done + self.share()) * 1000.0) as u64);
            bar.set_prefix(format!("{} left · {}", words(self.left()), self.place));
        }
    }

    /// The job has ended.
    pub(crate) fn ended(&mut self) {
        self.done += self.expected;
        self.measured += self.expected;
        self.took += self.began.elapsed().as_secs_f64();
        self.expected = 0.0;
    }

    /// Nothing is left to do.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// What the job that runs has done of its expected seconds: never all of them.
    fn share(&self) -> f64 {
        (self.began.elapsed().as_secs_f64() / self.pace()).min(self.expected * 0.95)
    }

    /// How many times as long as by experience it takes here.
    fn pace(&self) -> f64 {
        if self.measured > 0.0 { (self.took / self.measured).max(0.01) } else { 1.0 }
    }

    fn left(&self) -> Duration {
        Duration::from_secs_f64(((self.all - self.done - self.share()) * self.pace()).max(0.0))
    }
}

/// `about 4 min`.
fn words(time: Duration) -> String {
    match time.as_secs() {
        0..60 => format!("about {} s", time.as_secs().max(1)),
        60..5400 => format!("about {} min", (time.as_secs() + 30) / 60),
        seconds => format!("about {:.1} h", seconds as f64 / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_follows_what_jobs_took() {
        let jobs = [Job::new("a", "", 10), Job::new("b", "", 30), Job::new("c", "", 60)];
        let mut progress = Progress::of(&jobs);
        progress.was_done(&jobs[0]);
        assert_eq!(progress.left().as_secs(), 90);
        progress.begins(&jobs[1], 2, 3);
        progress.began -= Duration::from_secs(60);
        // Twice as long as by experience already: it can't be far from its end.
        assert!(progress.left().as_secs() <= 62, "{:?}", progress.left());
        progress.ended();
        assert_eq!(progress.left().as_secs(), 120, "this machine takes twice as long");
    }

    #[test]
    fn times_are_round() {
        for (seconds, text) in [(0, "about 1 s"), (59, "about 59 s"), (200, "about 3 min"), (9000, "about 2.5 h")] {
            assert_eq!(words(Duration::from_secs(seconds)), text);
        }
    }
}
