//! `transship bench tls`: the same guest moved in clear, by a token, with certificates, and by stock QEMU over its TLS.
mod far;
mod results;
mod wires;

use std::{path::Path, time::Duration};

use clap::ValueEnum;
use serde::Serialize;
use transship_lab::Scratch;

use self::{
    results::{Results, Series, Way},
    wires::{Hosts, Wire},
};
use crate::{
    all::plan::{Job, Plan},
    arguments::Moves,
    codecs::Method,
    content::{Content, SourceMemory},
    corpus::Corpus,
    guest_memory::GuestMemory,
    interrupt,
    machine::Machine,
    order::turns,
    output::say,
    pair::{Recipe, text},
    qemu_wire::StockMethod,
    stock,
    tables::Measured,
    units,
};

const LONG_ABOUT: &str = "\
Moves a stopped guest by TCP on this host, in four ways that take turns: by transship in clear, with a token and with \
certificates, and by stock QEMU's own migration with its tls-creds-x509 (multifd, the same channels and the same \
certificates). The guest's memory holds random data, or the files of --corpus. After the first move of each kind, the \
memory of both sides is compared byte for byte.

Then a guest that runs is moved by transship over connections on which every byte takes --delay, for the time that it \
stands still: what encryption adds to that is counted in round trips.

The benchmark needs twice --mem plus 1.5 GiB of memory. Keep the machine otherwise idle.";

/// Moves over encrypted connections and in clear.
#[derive(Debug, Clone, clap::Args)]
#[command(long_about = LONG_ABOUT)]
pub struct Tls {
    /// Memory of the guest
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = units::memory)]
    pub mem: u64,
    /// Numbers of channels
    #[arg(long, value_name = "N,...", default_value = "4", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(1..))]
    pub channels: Vec<u8>,
    /// Methods: none, zlib, zstd [default: none,zstd]
    #[arg(long, value_enum, value_name = "METHOD,...", value_delimiter = ',', hide_possible_values = true, default_values_t = [StockMethod::None, StockMethod::Zstd], hide_default_value = true)]
    pub methods: Vec<StockMethod>,
    /// What is moved: random data, a corpus, a guest that runs [default: random,corpus,running]
    #[arg(long, value_enum, value_name = "KIND,...", value_delimiter = ',', hide_possible_values = true, default_values_t = [Kind::Random, Kind::Corpus, Kind::Running], hide_default_value = true)]
    pub kinds: Vec<Kind>,
    /// How long every byte takes to the other side of a guest that runs, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub delay: u32,
    /// Guest memory.
    #[command(flatten)]
    pub guest: GuestMemory,
    /// What such a table is told.
    #[command(flatten)]
    pub moves: Moves,
}

/// What is moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A stopped guest with random data
    Random,
    /// A stopped guest with data that can be compressed
    Corpus,
    /// A guest that runs, and whose memory is empty
    Running,
}

impl Kind {
    /// As it is called in tables.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::Corpus => "corpus",
            Self::Running => "running",
        }
    }

    fn memory(self, file: &Path, bytes: u64, corpus: &Corpus) -> Result<SourceMemory, String> {
        match self {
            Self::Random => SourceMemory::create(file, bytes, Content::Random),
            Self::Corpus => SourceMemory::of_corpus(file, bytes, corpus),
            Self::Running => SourceMemory::create(file, bytes, Content::Untouched),
        }
    }
}

impl Measured for Tls {
    const NAME: &'static str = "tls";

    fn run(&self) -> Result<(), String> {
        run(self)
    }

    fn jobs(plan: &Plan) -> Vec<Job> {
        let job = |part: &str, seconds, arguments: &[&str]| {
            let job = Job::new(Self::NAME, part, seconds).with(arguments);
            job.mem(plan).corpus(plan).runs("--runs", plan.pairs).peer(plan).memory(plan)
        };
        let kinds: [(&str, u32, u32); 3] = [("random", 40, 400), ("corpus", 60, 700), ("running", 40, 120)];
        kinds
            .map(|(kind, quick, seconds)| match plan.quick {
                true => job(kind, quick, &["--kinds", kind, "--methods", "none"]),
                false => job(kind, seconds, &["--kinds", kind]),
            })
            .to_vec()
    }
}

/// Measures, prints and writes.
fn run(table: &Tls) -> Result<(), String> {
    table.moves.common.files.check()?;
    let base = table.guest.base(table.mem)?;
    interrupt::clean_up_in(vec![base.clone(), Scratch::base()])?;
    let corpus = Corpus::new(table.moves.corpus.as_deref(), table.mem)?;
    let mut results = Results {
        machine: Machine::here(),
        qemu: String::new(),
        guest_bytes: table.mem,
        corpus: corpus.title().to_owned(),
        delay_ms: table.delay,
        memory: table.guest,
        runs: table.moves.runs,
        series: Vec::new(),
    };
    let hosts = Hosts::new()?;
    let measured = table.kinds.iter().try_for_each(|&kind| in_turns(table, kind, &base, &corpus, &hosts, &mut results));
    // What was measured before a failure took its time, too.
    results.series.retain(|series| !series.runs.is_empty());
    if !results.series.is_empty() {
        let common = &table.moves.common;
        let rows = results.rows(&common.peer, &base, &corpus)?;
        common.files.publish(results.table(), &results, &results.aims(), &rows, || results.svg())?;
    }
    measured
}

/// In the order in which they take turns.
fn series(kind: Kind, channels: &[u8], methods: &[StockMethod]) -> Vec<Series> {
    let (channels, methods, wires): (&[u8], &[StockMethod], &[Wire]) = match kind {
        // An empty guest has nothing to compress, its downtime does not depend on channels, and what QEMU reports of it
        // leaves out what the destination does.
        Kind::Running => (&channels[..channels.len().min(1)], &[StockMethod::None], &Wire::OURS),
        Kind::Random | Kind::Corpus => (channels, methods, &Wire::ALL),
    };
    let ways = channels
        .iter()
        .flat_map(|&channels| methods.iter().map(move |&method| Way { kind, channels, method: Method::from(method) }));
    ways.flat_map(|way| wires.iter().map(move |&wire| Series::new(way, wire))).collect()
}

/// All wires with one kind of guest, again and again.
fn in_turns(
    table: &Tls,
    kind: Kind,
    base: &Path,
    corpus: &Corpus,
    hosts: &Hosts,
    results: &mut Results,
) -> Result<(), String> {
    let first = results.series.len();
    results.series.extend(series(kind, &table.channels, &table.methods));
    say(&format!("{}: filling {}", kind.title(), units::bytes(table.mem)));
    let home = Scratch::within(base).map_err(text)?;
    let memory = kind.memory(&home.join("mem0"), table.mem, corpus)?;
    let runs = kind == Kind::Running;
    let recipe =
        Recipe { running: runs, cold: runs, memory: table.guest, ..Recipe::new(&table.moves.common.peer, base) };
    let delay = runs.then(|| Duration::from_millis(table.delay.into()));
    for run in 1..=table.moves.runs {
        for turn in turns(results.series.len() - first, run) {
            let series = &mut results.series[first + turn];
            let title = series.title();
            let at = |error: String| format!("{title}, run {run}: {error}");
            let pair = recipe.start(&memory).map_err(at)?;
            if results.qemu.is_empty() {
                results.qemu = stock::version(&pair.source)?;
            }
            let mut once = wires::run(&pair, series.wire, series.way, hosts, delay).map_err(at)?;
            once.run.equal = pair.compared(run == 1 && !runs).map_err(at)?;
            let (ms, still) = (units::short(once.run.ms), units::short(once.downtime_ms));
            say(&format!("{title}, run {run} of {}: {ms} ms, {still} ms still", table.moves.runs));
            series.add(memory.bytes(), once);
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::parsed::parsed;

    #[test]
    fn the_defaults_are_those_of_the_documentation() {
        let table = parsed::<Tls>(&[]).unwrap();
        assert_eq!((table.mem, table.moves.runs, table.channels, table.delay), (1 << 30, 3, vec![4], 10));
        assert_eq!((table.methods.len(), table.kinds.len()), (2, 3));
        for arguments in [["--methods", "lz4"], ["--channels", "0"], ["--kinds", "zero"], ["--delay", "0"]] {
            assert!(parsed::<Tls>(&arguments).is_err(), "{arguments:?}");
        }
    }

    #[test]
    fn a_guest_that_runs_is_moved_once_by_each_of_our_wires() {
        let methods = [StockMethod::None, StockMethod::Zstd];
        let titles = |kind| series(kind, &[2, 4], &methods).iter().map(Series::title).collect::<Vec<_>>();
        assert_eq!(titles(Kind::Random).len(), 2 * 2 * Wire::ALL.len());
        let running = titles(Kind::Running);
        assert_eq!(running.len(), Wire::OURS.len());
        assert_eq!(running[0], "running, 2 channels, none, in clear");
    }
}
