//! `transship bench zero-pages`: the same memory moved alternately by transship and by stock QEMU.
use std::path::{Path, PathBuf};

use transship_lab::Scratch;

use crate::{
    aims::Aims,
    all::plan::{Job, Plan},
    arguments::Common,
    content::{Content, SourceMemory},
    guest_memory::{GuestMemory, MemoryKind},
    interrupt,
    limits::{self, StateAlone},
    machine::{self, Machine},
    order::turns,
    ours,
    output::say,
    pair::{Recipe, text},
    plot,
    results::{Check, Mode, OurRun, QemuRun, Results, Row, ScanBandwidth},
    rows, stock, table,
    tables::Measured,
    units,
};

const LONG_ABOUT: &str = "\
Starts two stock QEMUs for each move. Their guests have only firmware and, by default, stand still. The source's \
memory is filled from outside. Then the guest is moved, alternately by transship and by QEMU's own migration \
(multifd, the same channels, the same place of the zero check, no bandwidth limit). After the first move of each \
kind, the memory of both sides is compared byte for byte.

The benchmark needs twice --mem plus 1.5 GiB of memory. Keep the machine otherwise idle.";

/// Moves of memory that was never touched, or is zero, random or mixed.
#[derive(Debug, Clone, clap::Args)]
#[command(long_about = LONG_ABOUT)]
pub struct ZeroPages {
    /// Memory of the guest
    #[arg(long, value_name = "SIZE", default_value = "4G", value_parser = units::memory)]
    pub mem: u64,
    /// Numbers of channels; the main-thread check is measured with the most
    #[arg(long, value_name = "N,...", default_value = "1,2,4", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(1..))]
    pub channels: Vec<u8>,
    /// Moves by each program; the table shows median and minimum
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,
    /// What the memory holds
    #[arg(
        long,
        value_enum,
        value_name = "KIND,...",
        default_value = "untouched,zero,random,mixed",
        value_delimiter = ','
    )]
    pub kinds: Vec<Content>,
    /// What every table is told.
    #[command(flatten)]
    pub common: Common,
    /// Guest memory.
    #[command(flatten)]
    pub guest: GuestMemory,
    /// Take guest memory from this hugetlbfs, or from this tmpfs with huge=always
    #[arg(long, value_name = "DIR")]
    pub huge: Option<PathBuf>,
    /// Let the firmware run meanwhile; memory is not compared then
    #[arg(long)]
    pub running: bool,
    /// Leave memory out of the source QEMU's page tables
    ///
    /// A guest that has touched its memory did so through QEMU, which therefore has it in its page tables. Memory that
    /// was only written from outside is not there, and QEMU's own migration has to fault it in first. By default QEMU
    /// is made to read all of it once, before the time is taken.
    #[arg(long)]
    pub cold: bool,
    /// Have transship send all pages, as it does to another host
    ///
    /// By default a destination on the same host reads them itself (`move --no-lending`).
    #[arg(long)]
    pub no_lending: bool,
}

impl Measured for ZeroPages {
    const NAME: &'static str = "zero-pages";

    fn run(&self) -> Result<(), String> {
        run(self)
    }

    fn jobs(plan: &Plan) -> Vec<Job> {
        let channels = if plan.quick { "2" } else { "1,2,4" };
        let job = |part, kinds, more: &[&str]| {
            let job = Job::new(Self::NAME, part, if plan.quick { 35 } else { 600 });
            let job = job.with(&["--kinds", kinds, "--channels", channels]).with(more);
            job.mem(plan).runs("--runs", plan.pairs).peer(plan)
        };
        let kinds = ["untouched", "zero", "random", "mixed"].map(|kind| job(kind, kind, &[]).memory(plan));
        let warm = job("warm", "random", &["--memory", "warm"]).memory(plan);
        // As a QEMU has it that is started without a thought of its memory.
        let private = job("private", "zero,random,mixed", &["--backend", "ram"]);
        let sent = |part, kinds, memory| job(part, kinds, &["--no-lending", "--memory", memory]).memory(plan);
        let sent = [sent("sent", "zero,random,mixed", "fresh"), sent("sent-warm", "random", "warm")];
        kinds.into_iter().chain([warm, private]).chain(sent).collect()
    }
}

/// Measures, prints and writes.
fn run(table: &ZeroPages) -> Result<(), String> {
    let base = check(table)?;
    interrupt::clean_up_in(vec![base.clone(), Scratch::base()])?;
    let mut results = Results {
        machine: Machine::here(),
        qemu: String::new(),
        guest_bytes: table.mem,
        huge_pages: table.memory().backend == MemoryKind::Huge,
        memory: table.title(),
        guest_running: table.running,
        cold: table.cold,
        runs: table.runs,
        scan: Vec::new(),
        rows: Vec::new(),
    };
    let measured = measure(table, &base, &mut results);
    // What was measured before a failure took its time, too.
    if !results.rows.is_empty() {
        let rows = rows(table, &results, &base)?;
        table
            .common
            .files
            .publish(table::of(&results), &results, &Aims::of(&results), &rows, || plot::svg(&results))?;
    }
    measured
}

impl ZeroPages {
    /// A folder of huge pages says which memory it is.
    fn memory(&self) -> GuestMemory {
        let backend = if self.huge.is_some() { MemoryKind::Huge } else { self.guest.backend };
        GuestMemory { backend, ..self.guest }
    }

    /// For the column of a table.
    fn title(&self) -> String {
        let sent = if self.no_lending { ", sent" } else { "" };
        format!("{}{sent}", self.memory().title())
    }
}

/// The file system of guest memory, if all is well that can be seen before.
fn check(table: &ZeroPages) -> Result<PathBuf, String> {
    table.common.files.check()?;
    let Some(huge) = &table.huge else { return table.guest.base(table.mem) };
    machine::check_huge(huge, table.mem)?;
    machine::check_room(table.mem, huge, machine::is_hugetlbfs(huge)?)?;
    Ok(huge.clone())
}

/// Results are added as they come.
fn measure(table: &ZeroPages, base: &Path, results: &mut Results) -> Result<(), String> {
    let modes = modes(&table.channels);
    for threads in scanners(&modes) {
        let bytes_per_s = machine::scan_bandwidth(usize::from(threads))?;
        results.scan.push(ScanBandwidth { threads, bytes_per_s });
    }
    let recipe = Recipe {
        running: table.running,
        cold: table.cold,
        memory: table.memory(),
        ..Recipe::new(&table.common.peer, base)
    };
    for &content in &table.kinds {
        say(&format!("{}: filling {}", content.title(), units::bytes(table.mem)));
        let home = Scratch::within(base).map_err(text)?;
        let memory = SourceMemory::create(&home.join("mem0"), table.mem, content)?;
        for &mode in &modes {
            let row = Row { content, mode, guest_bytes: table.mem, ours: Vec::new(), qemu: Vec::new() };
            results.rows.push(row);
            let measured = in_turns(&recipe, &memory, (table.runs, table.no_lending), results);
            // A row is shown only with both.
            if results.rows.last().is_some_and(|row| row.qemu.is_empty()) {
                results.rows.pop();
            }
            measured?;
        }
    }
    Ok(())
}

/// Ours, QEMU's, QEMU's, ours, … into the last row.
fn in_turns(
    recipe: &Recipe<'_>,
    memory: &SourceMemory,
    (runs, no_lending): (u32, bool),
    results: &mut Results,
) -> Result<(), String> {
    let row = results.rows.last_mut().ok_or("no row to measure")?;
    let (title, mode) = (row.content.title(), row.mode);
    for run in 1..=runs {
        let compare = run == 1 && !recipe.running;
        let at = |error: String| format!("{title}, {}, run {run}: {error}", mode.title());

        for side in turns(2, run) {
            let pair = recipe.start(memory).map_err(at)?;
            if results.qemu.is_empty() {
                results.qemu = stock::version(&pair.source)?;
            }
            if side == 0 {
                let lending = no_lending.then(|| "--no-lending".to_owned());
                let arguments: Vec<_> = mode.our_arguments().into_iter().chain(lending).collect();
                let moved = ours::run(&pair, &arguments).map_err(at)?;
                row.ours.push(OurRun { equal: pair.compared(compare).map_err(at)?, ..moved });
            } else {
                let moved = stock::run(&pair, mode.qemu_parameters()).map_err(at)?;
                row.qemu.push(QemuRun { equal: pair.compared(compare).map_err(at)?, ..moved });
            }
        }
        let ms = |list: Option<f64>| list.map_or_else(String::new, units::short);
        let (ours, qemu) = (ms(row.ours.last().map(|run| run.ms)), ms(row.qemu.last().map(|run| run.ms)));
        say(&format!("{title}, {}, run {run} of {runs}: ours {ours} ms, QEMU {qemu} ms", mode.title()));
    }
    Ok(())
}

/// What all tables say alike, with the limits of these.
fn rows(table: &ZeroPages, results: &Results, base: &Path) -> Result<Vec<rows::Row>, String> {
    let has_untouched = results.rows.iter().any(|row| row.content == Content::Untouched);
    let state = has_untouched.then(|| StateAlone::of_firmware(&table.common.peer, base, table.mem)).transpose()?;
    results.rows.iter().map(|row| shared_row(table, row, base, state)).collect()
}

fn shared_row(table: &ZeroPages, row: &Row, base: &Path, state: Option<StateAlone>) -> Result<rows::Row, String> {
    let copy = |bytes| match table.memory().backend {
        // Private memory comes in other pages than any file's.
        MemoryKind::Ram => limits::copy_private(bytes),
        _ => limits::copy(base, bytes, table.memory().state()),
    };
    let threads = row.mode.scanners().into();
    let all = match row.content {
        Content::Zero if table.memory().backend == MemoryKind::Ram => {
            vec![limits::scan(threads, row.guest_bytes)?, limits::look_private(threads, row.guest_bytes)?]
        }
        Content::Zero => {
            vec![limits::scan(threads, row.guest_bytes)?, limits::look(base, threads, row.guest_bytes)?]
        }
        Content::Random => vec![copy(row.guest_bytes)?],
        // Half of it is random, but for each eighth page.
        Content::Mixed => vec![copy(row.guest_bytes / 16 * 7)?],
        Content::Untouched => state.map(StateAlone::moved).into_iter().collect(),
    };
    let (ours, qemu) = (row.ours.iter().map(|run| run.ms).collect(), row.qemu.iter().map(|run| run.ms).collect());
    let cold = if table.cold { ", source cold" } else { "" };
    let memory = format!("{}{cold}", table.title());
    let title = format!("{}, {}", row.content.title(), row.mode.title());
    let cpu = |seconds: f64| format!("{} s", units::short(seconds));
    Ok(rows::Row::of(title, memory, ours, qemu)
        .limit(all)
        .fact("CPU", cpu(row.our_cpu_seconds()), cpu(row.qemu_cpu_seconds()))
        .fact("wire", units::bytes(row.our_wire_bytes()), units::bytes(row.qemu_wire_bytes())))
}

/// Main-thread check with the most channels, for the gap that checking in channels closes, and then all by channels.
fn modes(channels: &[u8]) -> Vec<Mode> {
    let most = channels.iter().max().map(|&channels| Mode { check: Check::Main, channels });
    let mut modes: Vec<Mode> = most.into_iter().collect();
    for &channels in channels {
        let mode = Mode { check: Check::Channels, channels };
        if !modes.contains(&mode) {
            modes.push(mode);
        }
    }
    modes
}

fn scanners(modes: &[Mode]) -> Vec<u8> {
    let mut counts: Vec<u8> = modes.iter().map(|mode| mode.scanners()).collect();
    counts.sort_unstable();
    counts.dedup();
    counts
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::parsed::parsed;

    #[test]
    fn the_defaults_are_those_of_the_readme() {
        let table: ZeroPages = parsed(&[]).unwrap();
        assert_eq!((table.mem, table.runs, table.channels), (4 << 30, 3, vec![1, 2, 4]));
        assert_eq!(table.kinds, [Content::Untouched, Content::Zero, Content::Random, Content::Mixed]);
        let table: ZeroPages = parsed(&["--channels", "3,1", "--kinds", "zero", "--mem", "64M"]).unwrap();
        assert_eq!((table.mem, table.channels, table.kinds), (64 << 20, vec![3, 1], vec![Content::Zero]));
    }

    #[test]
    fn bad_values_are_refused() {
        for arguments in
            [["--channels", "0"], ["--channels", "256"], ["--runs", "0"], ["--mem", "1M"], ["--kinds", "odd"]]
        {
            assert!(parsed::<ZeroPages>(&arguments).is_err(), "{arguments:?}");
        }
    }

    #[test]
    fn main_thread_mode_comes_once_with_the_most_channels() {
        let by = |channels| Mode { check: Check::Channels, channels };
        assert_eq!(modes(&[1, 4, 2, 4]), [Mode { check: Check::Main, channels: 4 }, by(1), by(4), by(2)]);
        assert_eq!(scanners(&modes(&[1, 4, 2, 4])), [1, 2, 4]);
        assert_eq!(scanners(&modes(&[3])), [1, 3]);
    }

    #[test]
    fn what_can_be_seen_before_is_refused_before() {
        let error = run(&parsed(&["--json", "/no/such/folder/x.json"]).unwrap()).unwrap_err();
        assert!(error.contains("/no/such/folder"), "{error}");
        let error = run(&ZeroPages { huge: Some("/proc".into()), ..parsed(&[]).unwrap() }).unwrap_err();
        assert!(error.contains("no hugetlbfs"), "{error}");
        let error = run(&ZeroPages { mem: 1 << 40, ..parsed(&[]).unwrap() }).unwrap_err();
        assert!(error.contains("measure less with --mem"), "{error}");
    }
}
