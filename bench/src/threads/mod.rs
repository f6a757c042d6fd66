//! `transship bench threads`: guests that keep writing, moved by any number of encoders; and how encoders are fed.
mod encoding;
mod old_model;
mod one_process;
mod results;
mod runs;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use serde::Serialize;
use transship_codec::{Method, Setting};
use transship_lab::{Qemu, Scratch, SlowLink, Synthetic, Workload, image};

use self::{
    results::{Load, Results},
    runs::{Comparison, Run, Series},
};
use crate::{
    all::plan::{Job, Plan},
    arguments::Moves,
    codecs,
    content::SourceMemory,
    corpus::Corpus,
    ends::Ends,
    interrupt,
    machine::{self, Machine},
    order::turns,
    ours::{self, Moved},
    output::say,
    pair::{Pair, Recipe, text},
    plot::Side,
    stock,
    tables::Measured,
    units,
};

const LONG_ABOUT: &str = "\
Moves guests that keep writing, compressed with zstd, by 2 encoders and by each number of --encoders. When all \
encoders are busy, packets wait or are sent raw; both are measured. There are two kinds of guest:

- transship's own, whose threads (--writers) write a quarter of the memory again and again with data that does not \
shrink; all its memory is checked after each move
- stock QEMU with a 32-bit guest that writes a quarter of the memory with data that shrinks to nothing. It is also \
moved by QEMU's own migration (multifd, zstd, as many channels as there are encoders). It needs the guest image of \
the project's sources (scripts/setup.sh) and is left out without it.

Both write --write-rate MiB a second, and the rest of their memory holds the corpus. A move that does not converge \
ends with a verdict, which the table shows.

Then the same corpus goes through the same number of encoders in one process. They are fed by the lock-free rings \
that moves use, and by the old model, where each thread has room for one request, a mutex and a condition variable.";

/// Encoders of the run that all others are compared with.
const FEW: u8 = 2;
/// After this a move by QEMU is taken for one that does not converge.
const QEMU_PATIENCE: Duration = Duration::from_secs(120);
/// The first megabytes of a 32-bit guest hold its program and tables.
const GUEST_BEGIN: u64 = 16 << 20;

/// Moves of guests that keep writing, by number of encoders.
#[derive(Debug, Clone, clap::Args)]
#[command(long_about = LONG_ABOUT)]
pub struct Threads {
    /// Numbers of encoders; 2 are always measured
    #[arg(long, value_name = "N,...", default_value = "4,8,16", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(1..))]
    pub encoders: Vec<u8>,
    /// Our channels
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..))]
    pub channels: u8,
    /// Memory of the guest
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = units::memory)]
    pub mem: u64,
    /// MiB that the guest writes in a second
    #[arg(long, value_name = "MIB", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub write_rate: u32,
    /// Threads that write in transship's own guest
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..))]
    pub writers: u8,
    /// Put a link of this speed, in Mbit/s, between the two sides
    #[arg(long, value_name = "MBIT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub link: Option<u32>,
    /// What such a table is told.
    #[command(flatten)]
    pub moves: Moves,
}

/// What is moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Guest {
    Synthetic,
    Qemu,
}

/// What to do when all encoders are busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum WhenBusy {
    Wait,
    Raw,
}

impl Measured for Threads {
    const NAME: &'static str = "threads";

    fn run(&self) -> Result<(), String> {
        run(self)
    }

    fn jobs(plan: &Plan) -> Vec<Job> {
        let job = Job::new(Self::NAME, "", if plan.quick { 60 } else { 1500 });
        let job = if plan.quick { job.with(&["--encoders", "4"]) } else { job };
        vec![
            job.mem(plan)
                .corpus(plan)
                .runs("--runs", if plan.quick { plan.pairs.min(3) } else { plan.pairs })
                .peer(plan),
        ]
    }
}

/// Measures, prints and writes.
fn run(table: &Threads) -> Result<(), String> {
    table.moves.common.files.check()?;
    let base = Scratch::base();
    machine::check_room(table.mem, &base, false)?;
    interrupt::clean_up_in(vec![base.clone()])?;
    let corpus = Corpus::new(table.moves.corpus.as_deref(), table.mem)?;
    let link = table.link.map(SlowLink::with_offload).transpose().map_err(text)?;
    let mut results = Results {
        machine: Machine::here(),
        qemu: None,
        guest_bytes: table.mem,
        corpus: corpus.title().to_owned(),
        load: Load {
            mib_per_s: table.write_rate,
            writers: table.writers,
            hot_bytes: table.mem / 4,
            qemu_mib_per_s: None,
        },
        channels: table.channels,
        link_mbit: table.link,
        runs: table.moves.runs,
        moves: Vec::new(),
        one_process: Vec::new(),
    };
    let measured = measure(table, &base, &corpus, link.as_ref(), &mut results);
    // What was measured before a failure took its time, too.
    results.moves.retain(|series| !series.runs.is_empty());
    if !results.moves.is_empty() {
        let (files, rows) = (&table.moves.common.files, results.rows(&base, &corpus)?);
        files.publish(results.table(), &results, &results.aims(), &rows, || results.svg())?;
    }
    measured
}

fn measure(
    table: &Threads,
    base: &Path,
    corpus: &Corpus,
    link: Option<&SlowLink>,
    results: &mut Results,
) -> Result<(), String> {
    let encoders = encoders(&table.encoders);
    results.moves.extend(series(&[Guest::Synthetic], &encoders));
    let files = Scratch::within(base).map_err(text)?;
    corpus.write(&files.join("corpus"))?;
    in_turns(results, Guest::Synthetic, |series, _| synthetic(table, files.path(), link, series))?;
    drop(files);

    match image("kvm.elf") {
        Err(missing) => say(&format!("the QEMU guest is left out, and with it QEMU's own migration: {missing}")),
        Ok(_) => {
            results.moves.extend(series(&[Guest::Qemu], &encoders));
            qemu(table, base, corpus, link, results)?;
        }
    }

    let packets: Vec<&[u8]> = corpus.packets(one_process::PACKET_BYTES).collect();
    let count = table.mem as usize / one_process::PACKET_BYTES;
    let setting = Setting::new(Method::Zstd, None).map_err(text)?;
    for encoders in encoders {
        let mut comparison = Comparison { encoders, rings: Vec::new(), old_model: Vec::new() };
        for _ in 0..table.moves.runs {
            comparison.rings.push(one_process::by_rings(setting, &packets, count, encoders.into()));
            comparison.old_model.push(one_process::by_old_model(setting, &packets, count, encoders.into()));
        }
        say(&format!("{encoders} encoders in one process: done"));
        results.one_process.push(comparison);
    }
    Ok(())
}

/// With the few that all others are compared with first, each once.
fn encoders(wanted: &[u8]) -> Vec<u8> {
    let mut encoders = vec![FEW];
    for &count in wanted {
        if !encoders.contains(&count) {
            encoders.push(count);
        }
    }
    encoders
}

/// In the order in which they take turns.
fn series(guests: &[Guest], encoders: &[u8]) -> Vec<Series> {
    let mut all = Vec::new();
    for &guest in guests {
        for &encoders in encoders {
            let mut add = |side, when_busy| all.push(Series { guest, side, encoders, when_busy, runs: Vec::new() });
            add(Side::Ours, Some(WhenBusy::Wait));
            add(Side::Ours, Some(WhenBusy::Raw));
            if guest == Guest::Qemu {
                add(Side::Qemu, None);
            }
        }
    }
    all
}

fn in_turns(
    results: &mut Results,
    guest: Guest,
    mut once: impl FnMut(&Series, u32) -> Result<Run, String>,
) -> Result<(), String> {
    let rounds = results.runs;
    for round in 1..=rounds {
        let all = &mut results.moves;
        let alike: Vec<usize> = (0..all.len()).filter(|&place| all[place].guest == guest).collect();
        for turn in turns(alike.len(), round) {
            let series = &mut all[alike[turn]];
            let run = once(series, round).map_err(|error| format!("{}, run {round}: {error}", series.title()))?;
            let (title, ms) = (series.title(), units::short(run.ms));
            say(&format!("{title}, run {round} of {rounds}: {} after {ms} ms", run.status));
            series.runs.push(run);
        }
    }
    Ok(())
}

fn our_arguments(channels: u8, series: &Series) -> Vec<String> {
    let when_busy = if series.when_busy == Some(WhenBusy::Raw) { "raw" } else { "wait" };
    let (channels, encoders) = (channels.to_string(), series.encoders.to_string());
    let arguments = ["--channels", &channels, "--compress", "zstd", "--encoders", &encoders, "--when-busy", when_busy];
    arguments.map(str::to_owned).to_vec()
}

/// One move of transship's own guest, which then looks at all its memory.
fn synthetic(table: &Threads, corpus: &Path, link: Option<&SlowLink>, series: &Series) -> Result<Run, String> {
    let memory = format!("{}M", table.mem >> 20);
    let source = Synthetic::builder()
        .memory(&memory)
        .touched("100%")
        .set("--corpus", &corpus.display().to_string())
        .write_rate(&format!("{}M", table.write_rate))
        .hot_set(&format!("{}M", table.mem >> 22))
        .set("--threads", &table.writers.to_string())
        .start()
        .map_err(text)?;
    let destination = Synthetic::builder().memory(&memory).incoming().start().map_err(text)?;
    let ends = Ends { source: source.vm(), destination: destination.vm(), folder: destination.folder(), link };
    let moved = ended(ours::transfer(&ends, &our_arguments(table.channels, series))?)?;
    let run = Run::of_ours(&moved)?;
    // Wherever it runs now, it knows what it has written.
    let home = if run.arrived() { destination } else { source };
    let check = home.check().map_err(text)?;
    if check.wrong > 0 {
        return Err(format!("{} of {} pages do not hold what the guest has written", check.wrong, check.pages));
    }
    Ok(run)
}

/// It arrived, or there is a verdict; everything else is an error.
fn ended(moved: Moved) -> Result<Moved, String> {
    if moved.report["status"] == "not-converging" { Ok(moved) } else { moved.arrived() }
}

/// All moves of QEMU's guest, by both.
fn qemu(
    table: &Threads,
    base: &Path,
    corpus: &Corpus,
    link: Option<&SlowLink>,
    results: &mut Results,
) -> Result<(), String> {
    let hot_mib = u32::try_from((table.mem - GUEST_BEGIN).min(table.mem / 4) >> 20).map_err(text)?;
    let rate = table.write_rate.saturating_mul(256);
    // No check of everything while time is taken.
    let workload = Workload { mib: hot_mib, rate, hot_mib: None, idle: false, sweep_ms: 3_600_000 };
    let home = Scratch::within(base).map_err(text)?;
    let memory = SourceMemory::of_corpus(&home.join("mem0"), table.mem, corpus)?;
    let recipe =
        Recipe { running: true, workload: Some(workload), link, ..Recipe::new(&table.moves.common.peer, base) };
    let (mut version, mut written) = (None, None);
    let moved = in_turns(results, Guest::Qemu, |series, _| {
        let pair = recipe.start(&memory)?;
        if version.is_none() {
            version = Some(stock::version(&pair.source)?);
            written = Some(mib_per_s(&pair.source)?);
        }
        by(&pair, table.channels, series)
    });
    (results.qemu, results.load.qemu_mib_per_s) = (version, written);
    moved
}

fn by(pair: &Pair<'_>, channels: u8, series: &Series) -> Result<Run, String> {
    if series.side != Side::Qemu {
        let moved = ended(ours::transfer(&pair.ends(), &our_arguments(channels, series))?)?;
        return Run::of_ours(&moved);
    }
    let parameters = codecs::qemu_parameters(series.encoders, codecs::Method::Zstd);
    let (ran, info) = stock::run_within(pair, parameters, QEMU_PATIENCE)?;
    Run::of_qemu(ran.as_ref(), &info, QEMU_PATIENCE)
}

/// What the guest says that it writes, between two of its reports.
pub(crate) fn mib_per_s(guest: &Qemu) -> Result<f64, String> {
    let first = guest.next_count().map_err(text)?;
    let begin = Instant::now();
    let mut last = first;
    while begin.elapsed() < Duration::from_secs(1) {
        last = guest.next_count().map_err(text)?;
    }
    Ok((last.count - first.count) as f64 / 256.0 / begin.elapsed().as_secs_f64())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::parsed::parsed;

    #[test]
    fn the_defaults_are_those_of_the_documentation() {
        let table = parsed::<Threads>(&[]).unwrap();
        assert_eq!((table.mem, table.moves.runs, table.channels, table.write_rate), (512 << 20, 3, 4, 32));
        assert_eq!(encoders(&table.encoders), [2, 4, 8, 16]);
        assert_eq!(encoders(&[2, 3, 3]), [2, 3]);
        assert!(parsed::<Threads>(&["--encoders", "0"]).is_err());
    }

    #[test]
    fn qemu_takes_turns_where_it_can() {
        let all = series(&[Guest::Synthetic, Guest::Qemu], &[2, 4]);
        assert_eq!(all.len(), 4 + 6);
        let arguments = our_arguments(3, &all[3]).join(" ");
        assert_eq!(arguments, "--channels 3 --compress zstd --encoders 4 --when-busy raw");
    }
}
