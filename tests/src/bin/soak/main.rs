//! `make soak`: moves, saves and restores one guest between stock QEMUs again and again, hurts somebody meanwhile, and
//! looks at what came of it.
//!
//! - [`plan`]: what is to happen, from a seed
//! - [`host`], [`shelf`], [`guest`]: a QEMU, the shared disk with the last snapshot, and what the guest says of itself
//! - [`moves`], [`snapshots`]: the commands that run; [`harm`]: what is done to whom
//! - [`verdict`], [`traces`]: whether all is as promised, and nothing of ours is left
//! - [`tally`], [`story`]: what is reported of it
mod guest;
mod harm;
mod host;
mod moves;
mod plan;
mod shelf;
mod snapshots;
mod story;
mod tally;
mod traces;
mod verdict;

use clap::Parser;
use host::Host;
use plan::{Converge, Memory, Step, Version, Victim, Way};
use shelf::Shelf;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use story::Story;
use tally::Tally;
use transship_lab::{LabError, Result};
use verdict::{Done, Outcome};

/// Moves one guest between stock QEMUs again and again, while somebody is killed or held
#[derive(Debug, Parser)]
struct Args {
    /// How many moves (and saves with restores)
    #[arg(long, default_value_t = 100)]
    moves: u64,
    /// The same seed makes the same choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Begin at this step of the seed's plan
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Hurt nobody
    #[arg(long)]
    gentle: bool,
    /// Start anew after a failure, and fail at the end
    #[arg(long)]
    keep_going: bool,
    /// Where the logs of a failure and the tally go
    #[arg(long, default_value = "target/soak")]
    logs: PathBuf,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match soak(&args) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("soak: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The number of failures.
fn soak(args: &Args) -> Result<u64> {
    let (begin, mut tally) = (Instant::now(), Tally::default());
    let wanted: &[Victim] = if args.gentle { &[Victim::Nobody] } else { &[] };
    let steps = (args.first..args.first + args.moves).map(|number| Step::of(args.seed, number, wanted));
    let mut steps = steps.peekable();
    let shelf = Shelf::new()?;
    let (first, memory) = steps.peek().map_or((Version::Installed, Memory::Own), |step| (step.to, step.memory()));
    let mut guest = Some(begin_with(first, &shelf)?);
    let mut next = Some(Host::waiting(first, memory, &shelf.disk()));
    while let (Some(step), Some(source), Some(waiting)) = (steps.next(), guest.take(), next.take()) {
        let destination = started(waiting)?;
        // The QEMU of the next step starts while this one is under way.
        next = steps.peek().map(|next| Host::waiting(next.to, next.memory(), &shelf.disk()));
        guest = one(&step, Pair { source: Some(source), destination: Some(destination) }, &shelf, args, &mut tally)?;
    }
    tell(&tally, args, begin.elapsed())?;
    Ok(tally.failures())
}

/// One step; gives who runs the guest now, if it is to go on.
fn one(step: &Step, mut pair: Pair, shelf: &Shelf, args: &Args, tally: &mut Tally) -> Result<Option<Host>> {
    let (mut story, start, number) = (Story::default(), Instant::now(), step.number);
    story.say(&format!("{step:?}"));
    match pair.run(step, shelf, &mut story) {
        Ok((outcome, hit)) => {
            tally.count(step, hit, outcome, start.elapsed());
            let hit = if hit { "" } else { "nobody hit: " };
            eprintln!("soak: {number}: {:?}, {:?}: {hit}{outcome:?}, {:.1?}", step.way, step.blow, start.elapsed());
            Ok(pair.into_running())
        }
        Err(error) => {
            tally.fail(step);
            pair.listen(&mut story);
            let name = format!("seed-{}-step-{number}.log", args.seed);
            let log = write(&args.logs, &name, &format!("{error}\n{}", story.text()))?;
            eprintln!("soak: seed {}, step {number}: {error}", args.seed);
            eprintln!("soak: {:?}, {:?}; the rest is in {}", step.way, step.blow, log.display());
            drop(pair);
            args.keep_going.then(|| anew(step.to, shelf, &mut story)).transpose()
        }
    }
}

fn started(waiting: JoinHandle<Result<Host>>) -> Result<Host> {
    waiting.join().expect("starting a QEMU does not panic")
}

/// The two QEMUs of a step. Of those that are left afterwards one runs the guest.
struct Pair {
    source: Option<Host>,
    destination: Option<Host>,
}

impl Pair {
    fn run(&mut self, step: &Step, shelf: &Shelf, story: &mut Story) -> Result<(Outcome, bool)> {
        let (outcome, hit) = match step.way {
            Way::Move { compress, channels, balloon, converge } => {
                self.moved(step, &["--compress", compress, "--channels", channels], balloon, converge, story)?
            }
            Way::Snapshot { save, lazy } => self.through_a_file(step, save, lazy, shelf, story)?,
        };
        if matches!(outcome, Outcome::Lost | Outcome::Again) {
            (self.source, self.destination) = (None, None);
            self.source = Some(anew(step.to, shelf, story)?);
        }
        let host = self.running()?;
        host.before.assert_nothing_new(&host.qemu)?;
        guest::assert_whole(&host.qemu)?;
        Ok((outcome, hit))
    }

    fn moved(
        &mut self,
        step: &Step,
        encoding: &[&str],
        balloon: bool,
        converge: Converge,
        story: &mut Story,
    ) -> Result<(Outcome, bool)> {
        let (Some(source), Some(destination)) = (&mut self.source, &mut self.destination) else {
            return Err(LabError("a step begins with two QEMUs".into()));
        };
        let path = source.plug(balloon)?;
        // One that has a balloon is asked for what is free, and that and pages which follow exclude each other.
        let converge = if path.is_some() && converge == Converge::PostCopy { Converge::Never } else { converge };
        let mut flags = [encoding, converge.flags()].concat();
        flags.extend(path.iter().flat_map(|path| ["--balloon", path]));
        let (ends, hit) = moves::run(&step.blow, &flags, source, destination, story)?;
        let done = Done { blow: &step.blow, hit, follows: converge == Converge::PostCopy };
        let outcome = verdict::after_a_move(done, source, destination, &ends, story)?;
        if path.is_some() && outcome == Outcome::Stayed && !source.has_balloon()? {
            return Err(LabError("the guest lacks its balloon".into()));
        }
        Ok((outcome, hit))
    }

    fn through_a_file(
        &mut self,
        step: &Step,
        save: &str,
        lazy: bool,
        shelf: &Shelf,
        story: &mut Story,
    ) -> Result<(Outcome, bool)> {
        let (Some(source), Some(destination)) = (&mut self.source, &mut self.destination) else {
            return Err(LabError("a step begins with two QEMUs".into()));
        };
        let (saved, hit) = snapshots::save(Some(&step.blow), save, source, shelf, story)?;
        if saved == Outcome::Lost || hit {
            return Ok((saved, hit));
        }
        source.before.assert_nothing_new(&source.qemu)?;
        self.source = None;
        snapshots::restore(Some(&step.blow), lazy, destination, shelf, story)
    }

    /// The one that runs the guest. The other has ended.
    fn running(&mut self) -> Result<&mut Host> {
        let there = match &mut self.destination {
            Some(host) => host.runs()?,
            None => false,
        };
        *(if there { &mut self.source } else { &mut self.destination }) = None;
        let left = if there { &mut self.destination } else { &mut self.source };
        left.as_mut().ok_or_else(|| LabError("no QEMU is left".into()))
    }

    fn into_running(self) -> Option<Host> {
        self.source.or(self.destination)
    }

    fn listen(&self, story: &mut Story) {
        self.source.iter().for_each(|host| story.listen("source", host));
        self.destination.iter().for_each(|host| story.listen("destination", host));
    }
}

/// Boots the guest, and saves it once.
fn begin_with(version: Version, shelf: &Shelf) -> Result<Host> {
    let mut host = Host::boot(version, &shelf.disk())?;
    snapshots::save(None, "--paused", &mut host, shelf, &mut Story::default())?;
    guest::assert_whole(&host.qemu)?;
    Ok(host)
}

/// The guest as it was saved last, in a new QEMU.
fn anew(version: Version, shelf: &Shelf, story: &mut Story) -> Result<Host> {
    story.say("anew from the last snapshot");
    let mut host = started(Host::waiting(version, Memory::of(version), &shelf.disk()))?;
    snapshots::restore(None, false, &mut host, shelf, story)?;
    Ok(host)
}

fn tell(tally: &Tally, args: &Args, took: Duration) -> Result<()> {
    println!("{}", tally.table());
    let json = tally.json(args.seed, took);
    let steps = json["steps"].as_f64().unwrap_or(1.0).max(1.0);
    println!(
        "\nseed {}: {steps} steps, of which {} were moves, in {:.0} s, {:.2} s each",
        args.seed,
        json["moves"],
        took.as_secs_f64(),
        took.as_secs_f64() / steps
    );
    let path = write(&args.logs, &format!("seed-{}.json", args.seed), &format!("{json:#}\n"))?;
    println!("as JSON: {}", path.display());
    Ok(())
}

fn write(folder: &Path, name: &str, text: &str) -> Result<PathBuf> {
    let path = folder.join(name);
    let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, text));
    written.map(|()| path.clone()).map_err(|error| LabError(format!("{}: {error}", path.display())))
}
