//! `transship bench qemu-wire`: the same guest between transship and stock QEMU, alternately in every direction.
mod results;
mod routes;

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::Serialize;
use transship_lab::Scratch;

use self::{
    results::{Results, Series},
    routes::{Route, Wire},
};
use crate::{
    all::plan::{Job, Plan},
    arguments::Moves,
    codecs::Method,
    content::{Content, SourceMemory},
    corpus::Corpus,
    files::disk,
    interrupt,
    machine::{self, Machine},
    order::turns,
    output::say,
    pair::{Recipe, text},
    runs::Runs,
    stock,
    tables::Measured,
    units,
};

const LONG_ABOUT: &str = "\
Moves a stopped guest by QEMU's own migration protocol: from QEMU to QEMU, from transship to QEMU (`move --peer \
qemu`), and from QEMU to transship, into a waiting QEMU and into a file (`receive --peer qemu`). For comparison it \
also moves the guest by transship's own protocol. All routes use multifd, the same number of channels and the same \
method, and alternate.

The guest's memory holds the files of --corpus, or generated data that shrinks to about a third; or it is zero; or it \
was never touched. Zero pages never reach a method, so the last two are measured only with none. After the first move \
on each route, the memory of both sides is compared byte for byte; a file is restored for that.

The benchmark needs twice --mem plus 1.5 GiB of memory, and twice --mem on the disk of --dir. Keep the machine \
otherwise idle.";

/// Moves between transship and stock QEMU, in every direction.
#[derive(Debug, Clone, clap::Args)]
#[command(long_about = LONG_ABOUT)]
pub struct QemuWire {
    /// Memory of the guest
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = units::memory)]
    pub mem: u64,
    /// Numbers of channels
    #[arg(long, value_name = "N,...", default_value = "2,4", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(1..))]
    pub channels: Vec<u8>,
    /// Methods: none, zlib, zstd [default: all]
    #[arg(long, value_enum, value_name = "METHOD,...", value_delimiter = ',', hide_possible_values = true, default_values_t = [StockMethod::None, StockMethod::Zlib, StockMethod::Zstd], hide_default_value = true)]
    pub methods: Vec<StockMethod>,
    /// What memory holds: corpus, zero, untouched [default: all]
    #[arg(long, value_enum, value_name = "KIND,...", value_delimiter = ',', hide_possible_values = true, default_values_t = [Kind::Corpus, Kind::Zero, Kind::Untouched], hide_default_value = true)]
    pub kinds: Vec<Kind>,
    /// A folder on the disk for the received file
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,
    /// What such a table is told.
    #[command(flatten)]
    pub moves: Moves,
}

/// A method that a stock QEMU has, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StockMethod {
    /// Pages as they are
    None,
    /// Deflate
    Zlib,
    /// Zstandard
    Zstd,
}

impl From<StockMethod> for Method {
    fn from(method: StockMethod) -> Self {
        match method {
            StockMethod::None => Self::None,
            StockMethod::Zlib => Self::Zlib,
            StockMethod::Zstd => Self::Zstd,
        }
    }
}

/// What memory holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Data that can be compressed
    Corpus,
    /// Pages that were written, with zeros
    Zero,
    /// Holes
    Untouched,
}

impl Kind {
    /// As it is called in tables.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Corpus => "corpus",
            Self::Zero => Content::Zero.title(),
            Self::Untouched => Content::Untouched.title(),
        }
    }

    fn memory(self, file: &Path, bytes: u64, corpus: &Corpus) -> Result<SourceMemory, String> {
        match self {
            Self::Corpus => SourceMemory::of_corpus(file, bytes, corpus),
            Self::Zero => SourceMemory::create(file, bytes, Content::Zero),
            Self::Untouched => SourceMemory::create(file, bytes, Content::Untouched),
        }
    }
}

/// What all moves have in common.
struct Setting<'a> {
    table: &'a QemuWire,
    recipe: Recipe<'a>,
    base: &'a Path,
    /// On the disk.
    folder: Scratch,
}

impl Measured for QemuWire {
    const NAME: &'static str = "qemu-wire";

    fn run(&self) -> Result<(), String> {
        run(self)
    }

    fn jobs(plan: &Plan) -> Vec<Job> {
        let job = |part: &str, seconds, arguments: &[&str]| {
            let job = Job::new(Self::NAME, part, seconds).with(arguments).mem(plan).corpus(plan).dir(plan);
            job.runs("--runs", if plan.quick { plan.pairs.min(3) } else { plan.pairs }).peer(plan)
        };
        if plan.quick {
            return vec![
                job("corpus", 50, &["--kinds", "corpus", "--channels", "2", "--methods", "zstd"]),
                job("zero", 25, &["--kinds", "zero", "--channels", "2"]),
            ];
        }
        let kinds = [("corpus", 2400), ("zero", 500), ("untouched", 500)];
        kinds.map(|(kind, seconds)| job(kind, seconds, &["--kinds", kind])).to_vec()
    }
}

/// Measures, prints and writes.
fn run(table: &QemuWire) -> Result<(), String> {
    table.moves.common.files.check()?;
    let base = Scratch::base();
    machine::check_room(table.mem, &base, false)?;
    machine::check_disk(&table.dir, 2 * table.mem)?;
    interrupt::clean_up_in(vec![base.clone(), table.dir.clone()])?;
    let corpus = Corpus::new(table.moves.corpus.as_deref(), table.mem)?;
    let folder = Scratch::within(&table.dir).map_err(text)?;
    let direct_io = disk::does_direct_io(folder.path())?;
    let recipe = Recipe::new(&table.moves.common.peer, &base);
    let place = Setting { table, recipe, base: &base, folder };
    let mut results = Results {
        machine: Machine::here(),
        qemu: String::new(),
        guest_bytes: table.mem,
        corpus: corpus.title().to_owned(),
        runs: table.moves.runs,
        direct_io,
        disk: Vec::new(),
        series: Vec::new(),
    };
    let measured = table.kinds.iter().try_for_each(|&kind| place.in_turns(kind, &corpus, &mut results));
    // What was measured before a failure took its time, too.
    results.series.retain(|series| !series.runs.is_empty());
    if !results.series.is_empty() {
        let (common, rows) = (&table.moves.common, results.rows(&table.moves.common.peer, &base, &corpus)?);
        common.files.publish(results.table(), &results, &results.aims(), &rows, || results.svg())?;
    }
    measured
}

/// In the order in which they take turns.
fn series(kind: Kind, channels: &[u8], methods: &[StockMethod]) -> Vec<Series> {
    // Zero pages never come to an encoder.
    let methods = if kind == Kind::Corpus { methods } else { &[StockMethod::None] };
    let wires = channels
        .iter()
        .flat_map(|&channels| methods.iter().map(move |&method| Wire { channels, method: method.into() }));
    wires.flat_map(|wire| Route::ALL.map(|route| Series { kind, wire, route, runs: Runs::default() })).collect()
}

impl Setting<'_> {
    /// All routes with one kind of memory, again and again; of the corpus also the disk on its own, once a run.
    fn in_turns(&self, kind: Kind, corpus: &Corpus, results: &mut Results) -> Result<(), String> {
        let first = results.series.len();
        results.series.extend(series(kind, &self.table.channels, &self.table.methods));
        say(&format!("{} memory: filling {}", kind.title(), units::bytes(self.table.mem)));
        let home = Scratch::within(self.base).map_err(text)?;
        let memory = kind.memory(&home.join("mem0"), self.table.mem, corpus)?;
        for run in 1..=self.table.moves.runs {
            for turn in turns(results.series.len() - first, run) {
                let number = first + turn;
                let title = results.series[number].title();
                let at = |error: String| format!("{title}, run {run}: {error}");
                let pair = self.recipe.start(&memory).map_err(at)?;
                if results.qemu.is_empty() {
                    results.qemu = stock::version(&pair.source)?;
                }
                let series = &mut results.series[number];
                let once = routes::run(&pair, series.route, series.wire, self.folder.path(), run == 1).map_err(at)?;
                say(&format!("{title}, run {run} of {}: {} ms", self.table.moves.runs, units::short(once.ms)));
                series.runs.guest_bytes = memory.bytes();
                series.runs.list.push(once);
            }
            if kind == Kind::Corpus && results.direct_io {
                let disk = disk::written(self.folder.path(), memory.bytes())?;
                say(&format!("the disk, run {run} of {}: {} ms", self.table.moves.runs, units::short(disk.ms)));
                results.disk.push(disk.ms);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::parsed::parsed;

    #[test]
    fn the_defaults_are_those_of_the_documentation() {
        let table = parsed::<QemuWire>(&[]).unwrap();
        assert_eq!((table.mem, table.moves.runs, table.channels), (1 << 30, 3, vec![2, 4]));
        assert_eq!((table.methods.len(), table.kinds.len(), table.dir), (3, 3, PathBuf::from(".")));
        for arguments in [["--methods", "lz4"], ["--channels", "0"], ["--kinds", "random"]] {
            assert!(parsed::<QemuWire>(&arguments).is_err(), "{arguments:?}");
        }
    }

    #[test]
    fn only_data_goes_by_every_method() {
        let methods = [StockMethod::None, StockMethod::Zstd];
        let titles: Vec<_> = series(Kind::Corpus, &[2], &methods).iter().map(Series::title).collect();
        assert_eq!(titles.len(), 2 * Route::ALL.len());
        assert_eq!(titles[0], "corpus, 2 channels, none, QEMU to QEMU");
        assert_eq!(titles[Route::ALL.len() + 1], "corpus, 2 channels, zstd, ours to QEMU");
        assert_eq!(series(Kind::Zero, &[2, 4], &methods).len(), 2 * Route::ALL.len());
    }

    #[test]
    fn a_folder_that_is_not_there_is_refused_before_anything_starts() {
        let table = parsed::<QemuWire>(&["--mem", "64M", "--dir", "/no/such/folder"]).unwrap();
        assert!(run(&table).unwrap_err().contains("/no/such/folder"));
    }
}
