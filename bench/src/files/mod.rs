//! `transship bench files`: guests saved to files and restored from them, by transship, by stock QEMU and by the disk
//! alone, alternately.
mod aims;
mod cases;
pub(crate) mod disk;
mod guests;
mod ours;
mod picture;
mod results;
mod stock;
mod tables;

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant, SystemTime},
};

use serde_json::json;
use transship_lab::{Count, Qemu, Scratch, Workload, image, lines::Mark};

pub(crate) use self::cases::{By, Guest};
use self::{
    cases::{Case, Layout},
    guests::Source,
    results::{RestoreRun, Results, SaveRun, Series},
    stock::Until,
};
use crate::{
    all::plan::{Job, Plan},
    arguments::Common,
    at_hand,
    content::{Content, SourceMemory, first_difference},
    guest_memory::GuestMemory,
    interrupt,
    limits::StateAlone,
    machine::{self, Machine},
    order::turns,
    output::say,
    pair::{Recipe, text},
    stock as qemus,
    tables::Measured,
    threads,
    units::{self, millis},
};

const LONG_ABOUT: &str = "\
Saves guests to files in --dir and restores them, by transship and by stock QEMU's own migration to files: as one \
stream, with every page at its place, with several channels, and with direct I/O. The guests are stopped, or write \
while they are saved, or are saved as they were at the first moment (background). One more guest has never touched \
its memory. A guest that writes is also restored lazily by transship.

Each file is made durable, dropped from the page cache, restored and removed, alternating between transship and QEMU. \
In between, the disk alone writes and reads as many bytes, with direct I/O.

The benchmark needs twice --mem plus 1.5 GiB of memory, and 6 times --mem on the disk, because QEMU's file of a guest \
that writes grows until the save is abandoned. Running guests need the image that scripts/setup.sh makes in the \
project's sources; without it they are left out. Keep the machine otherwise idle.";

/// What a guest that runs writes again and again, of its memory.
const HOT_SHARE: u64 = 8;
/// How long a live guest may stand still: both sides' own choice, too.
const DOWNTIME_MS: u64 = 300;
/// A guest that runs says something so often, so that its first word after a restore comes soon.
const REPORT_MS: u64 = 10;
/// Of a 32-bit guest: its program and tables, which are not looked at when memory is compared.
const GUEST_BEGIN: u64 = 16 << 20;

/// Guests saved to files and restored.
#[derive(Debug, Clone, clap::Args)]
#[command(long_about = LONG_ABOUT)]
pub struct Snapshots {
    /// Memory of the guest
    #[arg(long, value_name = "SIZE", default_value = "4G", value_parser = units::memory)]
    pub mem: u64,
    /// A folder on the disk to measure
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,
    /// Number of channels where several are used
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..))]
    pub channels: u8,
    /// What the guest does: never touched (sparse), paused, live, background [default: all]
    #[arg(long, value_enum, value_name = "GUEST,...", value_delimiter = ',', hide_possible_values = true)]
    pub guests: Vec<Guest>,
    /// Saves and restores by each program; the table shows median and minimum
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,
    /// What every table is told.
    #[command(flatten)]
    pub common: Common,
}

/// What all runs have in common.
struct Setting<'a> {
    table: &'a Snapshots,
    /// The file system of guest memory.
    base: PathBuf,
    /// On the disk.
    folder: Scratch,
    direct_io: bool,
}

impl Measured for Snapshots {
    const NAME: &'static str = "files";

    fn run(&self) -> Result<(), String> {
        run(self)
    }

    fn jobs(plan: &Plan) -> Vec<Job> {
        let pairs = if plan.quick { plan.pairs.min(3) } else { plan.pairs };
        [("sparse", 15), ("paused", 60), ("live", 70), ("background", 35)]
            .map(|(guest, quick)| {
                let job = Job::new(Self::NAME, guest, if plan.quick { quick } else { quick * 20 });
                job.with(&["--guests", guest]).mem(plan).dir(plan).runs("--runs", pairs).peer(plan)
            })
            .to_vec()
    }
}

/// Measures, prints and writes.
fn run(table: &Snapshots) -> Result<(), String> {
    table.common.files.check()?;
    let base = Scratch::base();
    machine::check_room(table.mem, &base, false)?;
    machine::check_disk(&table.dir, (stock::FILE_TIMES_MAX + 2) * table.mem)?;
    interrupt::clean_up_in(vec![base.clone(), table.dir.clone()])?;
    let folder = Scratch::within(&table.dir).map_err(text)?;
    let direct_io = disk::does_direct_io(folder.path())?;
    if !direct_io {
        say(&format!(
            "the file system of {} does no direct I/O: it is left out, and so is the disk",
            table.dir.display()
        ));
    }
    let place = Setting { table, base, folder, direct_io };
    let mut results = Results {
        machine: Machine::here(),
        qemu: String::new(),
        guest_bytes: table.mem,
        hot_bytes: table.mem / HOT_SHARE,
        hot_mib_per_s: None,
        channels: table.channels,
        runs: table.runs,
        disk: Vec::new(),
        state: None,
        series: Vec::new(),
    };
    let measured = measure(&place, &mut results);
    // What was measured before a failure took its time, too.
    results.series.retain(|series| !series.saves.is_empty());
    if !results.series.is_empty() {
        table.common.files.publish(results.table(), &results, &results.aims(), &results.rows(), || results.svg())?;
    }
    measured
}

fn measure(place: &Setting<'_>, results: &mut Results) -> Result<(), String> {
    let wanted = |guests: &[Guest]| -> Vec<Guest> {
        let named = &place.table.guests;
        guests.iter().copied().filter(|guest| named.is_empty() || named.contains(guest)).collect()
    };
    let sparse = wanted(&[Guest::Sparse]);
    if !sparse.is_empty() {
        let (peer, base) = (&place.table.common.peer, &place.base);
        results.state = Some(StateAlone::of_firmware(peer, base, place.table.mem)?);
    }
    place.in_turns(&sparse, Content::Untouched, None, results)?;
    place.in_turns(&wanted(&[Guest::Paused]), Content::Random, None, results)?;
    let running = wanted(&[Guest::Live, Guest::Background]);
    if running.is_empty() {
        return Ok(());
    }
    match image("kvm.elf") {
        Ok(_) => {
            let mib = u32::try_from(results.hot_bytes >> 20).map_err(text)?;
            // No check of everything while time is taken.
            let workload = Workload { mib, rate: 0, hot_mib: None, idle: false, sweep_ms: 3_600_000 };
            place.in_turns(&running, Content::Random, Some(workload), results)
        }
        Err(missing) => {
            say(&format!("guests that run are left out: {missing}"));
            Ok(())
        }
    }
}

impl Setting<'_> {
    /// All cases of some guests: ours, QEMU's, the next case's, … and again. The disk has its turn beside direct I/O.
    fn in_turns(
        &self,
        guests: &[Guest],
        content: Content,
        workload: Option<Workload>,
        results: &mut Results,
    ) -> Result<(), String> {
        let cases = guests
            .iter()
            .flat_map(|guest| guest.cases())
            .filter(|case| self.direct_io || case.layout != Layout::Direct);
        let series = cases.flat_map(|case| case.sides().iter().map(move |&by| Series::new(case, by)));
        let first = results.series.len();
        results.series.extend(series);
        if results.series.len() == first {
            return Ok(());
        }
        say(&format!("{} memory: filling {}", content.title(), units::bytes(self.table.mem)));
        let home = Scratch::within(&self.base).map_err(text)?;
        let memory = SourceMemory::create(&home.join("mem0"), self.table.mem, content)?;
        let append = format!("workload.report_ms={REPORT_MS}");
        let recipe = Recipe {
            running: workload.is_some(),
            workload,
            append: &append,
            ..Recipe::new(&self.table.common.peer, &self.base)
        };
        for run in 1..=self.table.runs {
            for turn in turns(results.series.len() - first, run) {
                let number = first + turn;
                self.turn(&recipe, &memory, run, number, results)?;
            }
        }
        Ok(())
    }

    /// One save and what is restored from its file.
    fn turn(
        &self,
        recipe: &Recipe<'_>,
        memory: &SourceMemory,
        run: u32,
        number: usize,
        results: &mut Results,
    ) -> Result<(), String> {
        let Series { case, by, .. } = results.series[number];
        let title = format!("{}, {}", case.title(self.table.channels), by.title());
        let at = |error: String| format!("{title}, run {run}: {error}");
        let file = self.folder.join("snapshot");

        let source = Source::new(recipe.source(memory)?, memory.bytes())?;
        if results.qemu.is_empty() {
            results.qemu = qemus::version(&source.qemu)?;
        }
        if case.guest.runs() && results.hot_mib_per_s.is_none() {
            results.hot_mib_per_s = Some(threads::mib_per_s(&source.qemu)?);
        }
        let saved = self.save(&source, &file, case, by).map_err(at)?;
        // Its guest would take time from the restore.
        drop(source);
        let (ended, save_ms) = (saved.ended(), units::short(saved.ms));
        let status = saved.status.clone();
        let series = &mut results.series[number];
        series.saves.push(saved);

        let mut restored = String::new();
        if ended {
            let compare = run == 1;
            let eager = self.restore(recipe, memory, &file, case, by, false, compare).map_err(at)?;
            restored = format!(", restored in {} ms", units::short(eager.ms));
            series.restores.push(eager);
            if (by, case) == (By::Transship, Case { guest: Guest::Live, layout: Layout::Direct }) {
                let lazy = self.restore(recipe, memory, &file, case, by, true, compare);
                series.lazy.push(lazy.map_err(|error| at(format!("lazy: {error}")))?);
            }
        }
        remove(&file)?;
        say(&format!("{title}, run {run} of {}: {status}, {save_ms} ms{restored}", self.table.runs));

        // Once in each run, whichever guests there are.
        if case.guest != Guest::Sparse && case.layout == Layout::Direct && results.disk.len() < run as usize {
            results.disk.push(disk::measure(self.folder.path(), &self.base, self.table.mem)?);
        }
        Ok(())
    }

    fn save(&self, source: &Source, file: &Path, case: Case, by: By) -> Result<SaveRun, String> {
        if case.layout != Layout::Direct {
            at_hand::have(self.table.mem)?; // for the page cache
        }
        match by {
            By::Transship => ours::save(source, file, case, self.table.channels),
            By::Qemu => stock::save(source, file, case, self.table.channels),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "each is another question")]
    fn restore(
        &self,
        recipe: &Recipe<'_>,
        memory: &SourceMemory,
        file: &Path,
        case: Case,
        by: By,
        lazy: bool,
        compare: bool,
    ) -> Result<RestoreRun, String> {
        let home = Scratch::within(&self.base).map_err(text)?;
        let destination = recipe.destination(home.path(), memory.bytes())?;
        let vcpus = guests::vcpus(&destination)?;
        guests::forget(file)?;
        if case.guest != Guest::Sparse {
            let page_cache = if case.layout == Layout::Direct { 0 } else { self.table.mem };
            at_hand::have(memory.bytes() + page_cache)?;
        }
        let cpu_before = guests::cpu_seconds(&destination, &vcpus)?;
        let since = SystemTime::now();
        let channels = self.table.channels;
        let (restored, speaks_after) = until_it_speaks(&destination, case.guest.runs(), || match by {
            By::Transship => ours::restore(&destination, file, case.layout, channels, lazy),
            By::Qemu => stock::restore(&destination, file, case, channels),
        })?;
        let cpu_seconds = guests::cpu_seconds(&destination, &vcpus)? - cpu_before + restored.cpu_seconds;
        let runs_after = match case.guest.runs() {
            true => Some(since.until(destination.wait_event_time("RESUME", since, |_| true).map_err(text)?)),
            false => None,
        };
        let right = if compare { Some(self.is_right(memory, &destination, case)?) } else { None };
        Ok(RestoreRun {
            ms: millis(restored.time),
            process_ms: restored.process_time.map(millis),
            runs_after_ms: runs_after.map(millis),
            speaks_after_ms: speaks_after.map(millis),
            cpu_seconds,
            right,
        })
    }

    /// Is memory as it was? A snapshot that loses pages is quick, and its time worth nothing.
    fn is_right(&self, memory: &SourceMemory, destination: &Qemu, case: Case) -> Result<bool, String> {
        let mut from = 0;
        if case.guest.runs() {
            let sweep = destination.sweep().map_err(text)?;
            if sweep.errors > 0 {
                return Err(format!("{} of {} pages are not what the guest has written", sweep.errors, sweep.pages));
            }
            // It looks after the beginning by itself, and goes on writing there.
            from = GUEST_BEGIN + self.table.mem / HOT_SHARE;
        }
        let restored = GuestMemory::default().open(destination)?;
        let saved = fs::File::open(memory.path()).map_err(|error| format!("{}: {error}", memory.path().display()))?;
        match first_difference(saved, restored, from, memory.bytes())? {
            None => Ok(true),
            Some(offset) => Err(format!("the restored memory differs, first in the page at {offset:#x}")),
        }
    }
}

/// Runs `restore`, and sees how long it takes until the guest has said a line, if it is to.
fn until_it_speaks<T>(
    destination: &Qemu,
    is_to: bool,
    restore: impl FnOnce() -> Result<T, String>,
) -> Result<(T, Option<Duration>), String> {
    let begin = Instant::now();
    thread::scope(|scope| {
        let listen = || {
            let heard = destination.serial().lines().wait(Mark::START, "the restored guest", Count::read);
            heard.map(|_| begin.elapsed()).map_err(text)
        };
        let listening = is_to.then(|| scope.spawn(listen));
        let restored = restore();
        if restored.is_err() {
            // It will not say anything any more. A QEMU that is gone has quit already.
            let _ = destination.qmp("quit", json!({}));
        }
        let heard =
            listening.map(|thread| thread.join().unwrap_or_else(|_| Err("the listening thread panicked".into())));
        Ok((restored?, heard.transpose()?))
    })
}

fn remove(file: &Path) -> Result<(), String> {
    match fs::remove_file(file) {
        // A save that did not end may leave none.
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(format!("{}: {error}", file.display())),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::parsed::parsed;

    #[test]
    fn the_defaults_are_those_of_the_documentation() {
        let table = parsed::<Snapshots>(&[]).unwrap();
        assert_eq!((table.mem, table.runs, table.channels, table.dir), (4 << 30, 3, 4, PathBuf::from(".")));
        assert!(parsed::<Snapshots>(&["--channels", "0"]).is_err());
    }

    #[test]
    fn what_can_be_seen_before_is_refused_before() {
        let table = parsed(&["--mem", "64M", "--dir", "/no/such/folder"]).unwrap();
        let error = run(&table).unwrap_err();
        assert!(error.contains("/no/such/folder"), "{error}");
        let error = machine::check_disk(Path::new("/tmp"), 1 << 60).unwrap_err();
        assert!(error.contains("--dir") && error.contains("--mem"), "{error}");
    }
}
