//! `transship bench codecs`: the same data moved with each method, alternately by transship and by stock QEMU.
mod results;

use clap::ValueEnum;
use serde::Serialize;
use serde_json::{Value, json};
use transship_lab::{Scratch, SlowLink, Transship};

use self::results::{Results, Series};
use crate::{
    all::plan::{Job, Plan},
    arguments::Moves,
    content::SourceMemory,
    corpus::Corpus,
    guest_memory::GuestMemory,
    interrupt,
    machine::Machine,
    order::turns,
    ours,
    output::say,
    pair::{Pair, Recipe, text},
    plot::Side,
    results::Run,
    runs::Runs,
    stock,
    tables::Measured,
    units,
};

const LONG_ABOUT: &str = "\
Fills the memory of a stopped guest with the files of --corpus, or with generated data that shrinks to about a third, \
and moves it with each method: by transship, and by QEMU's own migration where it has the method (none, zlib, zstd; \
level 1), with the same number of channels. The two alternate. After the first move with each method, the memory of \
both sides is compared byte for byte.

With --link, both sides run in network namespaces with a limited cable between them, and the bytes travel by TCP; \
that needs root and iproute2. Otherwise they go through a unix socket.

The benchmark needs twice --mem plus 1.5 GiB of memory. Keep the machine otherwise idle.";

/// Moves of data that can be compressed, by method.
#[derive(Debug, Clone, clap::Args)]
#[command(long_about = LONG_ABOUT)]
pub struct Codecs {
    /// Memory of the guest
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = units::memory)]
    pub mem: u64,
    /// Numbers of channels
    #[arg(long, value_name = "N,...", default_value = "4,8,16", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(1..))]
    pub channels: Vec<u8>,
    /// Methods [default: none,zlib,zstd,qatzip,lz4,auto]
    #[arg(long, value_enum, value_name = "METHOD,...", value_delimiter = ',', hide_possible_values = true)]
    pub methods: Vec<Method>,
    /// Our encoders [default: the command's choice]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub encoders: Option<u8>,
    /// Put a link of this speed, in Mbit/s, between the two sides
    #[arg(long, value_name = "MBIT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub link: Option<u32>,
    /// Guest memory.
    #[command(flatten)]
    pub guest: GuestMemory,
    /// What such a table is told.
    #[command(flatten)]
    pub moves: Moves,
}

/// A method, as `transship move --compress` and QEMU's `multifd-compression` call it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Pages as they are
    None,
    /// Deflate
    Zlib,
    /// Zstandard
    Zstd,
    /// QATzip's gzip members
    Qatzip,
    /// LZ4
    Lz4,
    /// Chosen meanwhile
    Auto,
}

impl Method {
    const ALL: [Self; 6] = [Self::None, Self::Zlib, Self::Zstd, Self::Qatzip, Self::Lz4, Self::Auto];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
            Self::Qatzip => "qatzip",
            Self::Lz4 => "lz4",
            Self::Auto => "auto",
        }
    }

    /// What QEMU's own migration is set to beside it; what QEMU does not have, or not here, is compared with none.
    fn of_qemu(self) -> Self {
        match self {
            Self::Zlib | Self::Zstd => self,
            Self::None | Self::Qatzip | Self::Lz4 | Self::Auto => Self::None,
        }
    }
}

/// For QEMU's own migration. The levels are those that our methods have by default.
pub(crate) fn qemu_parameters(channels: u8, method: Method) -> Value {
    json!({
        "multifd-channels": channels,
        "zero-page-detection": "multifd",
        "multifd-compression": method.of_qemu().name(),
        "multifd-zlib-level": 1,
        "multifd-zstd-level": 1,
    })
}

impl Measured for Codecs {
    const NAME: &'static str = "codecs";

    fn run(&self) -> Result<(), String> {
        run(self)
    }

    fn jobs(plan: &Plan) -> Vec<Job> {
        let job = |part: &str, seconds, arguments: &[&str]| {
            let job = Job::new(Self::NAME, part, seconds).with(arguments);
            job.mem(plan).corpus(plan).runs("--runs", plan.pairs).peer(plan).memory(plan)
        };
        if plan.quick {
            return vec![job("4", 80, &["--channels", "4", "--methods", "none,zlib,zstd,lz4"])];
        }
        let gigabit = job("1gbit", 1200, &["--channels", "4", "--methods", "none,zlib,zstd,auto", "--link", "1000"]);
        ["4", "8", "16"]
            .map(|channels| job(channels, 600, &["--channels", channels]))
            .into_iter()
            .chain([gigabit])
            .collect()
    }
}

/// Measures, prints and writes.
fn run(table: &Codecs) -> Result<(), String> {
    table.moves.common.files.check()?;
    let base = table.guest.base(table.mem)?;
    let methods = methods(&table.methods)?;
    interrupt::clean_up_in(vec![base.clone()])?;
    let corpus = Corpus::new(table.moves.corpus.as_deref(), table.mem)?;
    let link = table.link.map(SlowLink::with_offload).transpose().map_err(text)?;
    let mut results = Results {
        machine: Machine::here(),
        qemu: String::new(),
        guest_bytes: table.mem,
        corpus: corpus.title().to_owned(),
        encoders: table.encoders,
        link_mbit: table.link,
        memory: table.guest,
        runs: table.moves.runs,
        series: series(&table.channels, &methods),
    };
    say(&format!("filling {} with {}", units::bytes(table.mem), corpus.title()));
    let home = Scratch::within(&base).map_err(text)?;
    let memory = SourceMemory::of_corpus(&home.join("mem0"), table.mem, &corpus)?;
    let recipe = Recipe { link: link.as_ref(), memory: table.guest, ..Recipe::new(&table.moves.common.peer, &base) };
    let measured = measure(&recipe, &memory, &mut results);
    // What was measured before a failure took its time, too.
    results.series.retain(|series| !series.runs.is_empty());
    if !results.series.is_empty() {
        table.moves.common.files.publish(
            results.table(),
            &results,
            &results.aims(),
            &results.rows(&base, &corpus)?,
            || results.svg(),
        )?;
    }
    measured
}

/// Those that the command has. One that was named and that it does not have is an error.
fn methods(named: &[Method]) -> Result<Vec<Method>, String> {
    let wanted = if named.is_empty() { &Method::ALL } else { named };
    let mut methods = Vec::new();
    for &method in wanted {
        match refusal(method)? {
            None if methods.contains(&method) => {}
            None => methods.push(method),
            Some(why) if named.is_empty() => say(&format!("{} is left out: {why}", method.name())),
            Some(why) => return Err(format!("--methods {}: {why}", method.name())),
        }
    }
    Ok(methods)
}

/// What the command says against a method. It reads its arguments before it looks for the guest, which is not there.
fn refusal(method: Method) -> Result<Option<String>, String> {
    let nowhere = Scratch::new().map_err(text)?;
    let vm = format!("qemu:{}", nowhere.join("no-guest").display());
    let to = format!("unix:{}", nowhere.join("nobody").display());
    let finished = Transship::moving(&vm, &to).args(["--compress", method.name()]).run().map_err(text)?;
    let line = finished.stderr.lines().next().unwrap_or("the command refuses it").trim_start_matches("transship: ");
    Ok((finished.code() == Some(2)).then(|| line.to_owned()))
}

/// In the order in which they take turns: for each number of channels, each method of ours and then its like of QEMU's.
fn series(channels: &[u8], methods: &[Method]) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    for &channels in channels {
        for &method in methods {
            for (side, method) in [(Side::Ours, method), (Side::Qemu, method.of_qemu())] {
                if !all.iter().any(|series| series.is(channels, side, method)) {
                    all.push(Series { channels, side, method, runs: Runs::default() });
                }
            }
        }
    }
    all
}

fn measure(recipe: &Recipe<'_>, memory: &SourceMemory, results: &mut Results) -> Result<(), String> {
    let encoders = results.encoders;
    let rounds = results.runs;
    let mut channels: Vec<u8> = results.series.iter().map(|series| series.channels).collect();
    channels.dedup();
    for channels in channels {
        for round in 1..=rounds {
            let all = &mut results.series;
            let alike: Vec<usize> = (0..all.len()).filter(|&place| all[place].channels == channels).collect();
            for turn in turns(alike.len(), round) {
                let series = &mut all[alike[turn]];
                let at = |error: String| format!("{}, run {round}: {error}", series.title());
                let pair = recipe.start(memory).map_err(at)?;
                if results.qemu.is_empty() {
                    results.qemu = stock::version(&pair.source)?;
                }
                let run = once(&pair, series, encoders).map_err(at)?;
                let equal = pair.compared(round == 1).map_err(at)?;
                say(&format!("{}, run {round} of {rounds}: {} ms", series.title(), units::short(run.ms)));
                series.runs.guest_bytes = memory.bytes();
                series.runs.list.push(Run { equal, ..run });
            }
        }
    }
    Ok(())
}

fn once(pair: &Pair<'_>, series: &Series, encoders: Option<u8>) -> Result<Run, String> {
    let Series { channels, method, .. } = *series;
    match series.side {
        Side::Qemu => stock::run(pair, qemu_parameters(channels, method)).map(Run::from),
        Side::Ours | Side::OldModel | Side::Disk => {
            let mut arguments =
                ["--channels", &channels.to_string(), "--compress", method.name()].map(str::to_owned).to_vec();
            arguments.push("--no-lending".to_owned()); // what is measured goes over connections
            arguments.extend(encoders.iter().flat_map(|encoders| ["--encoders".to_owned(), encoders.to_string()]));
            ours::run(pair, &arguments).map(Run::from)
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::parsed::parsed;

    #[test]
    fn the_defaults_are_those_of_the_documentation() {
        let table: Codecs = parsed(&[]).unwrap();
        assert_eq!((table.mem, table.moves.runs, table.channels, table.link), (1 << 30, 3, vec![4, 8, 16], None));
        let table: Codecs = parsed(&["--methods", "zstd,none", "--link", "1000", "--encoders", "3"]).unwrap();
        assert_eq!(
            (table.methods, table.link, table.encoders),
            (vec![Method::Zstd, Method::None], Some(1000), Some(3))
        );
        for arguments in [["--methods", "gzip"], ["--link", "0"], ["--encoders", "0"], ["--channels", "0"]] {
            assert!(parsed::<Codecs>(&arguments).is_err(), "{arguments:?}");
        }
    }

    #[test]
    fn each_number_of_channels_has_what_its_methods_are_compared_with() {
        let all = series(&[4, 8], &[Method::Zlib, Method::Lz4, Method::Auto]);
        let titles: Vec<_> = all.iter().filter(|series| series.channels == 8).map(Series::title).collect();
        let wanted = ["zlib", "QEMU's zlib", "lz4", "QEMU's none", "auto"];
        assert_eq!(titles, wanted.map(|name| format!("8 channels, {name}")));
        assert_eq!(all.len(), 10);
    }
}
