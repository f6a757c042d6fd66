//! `transship bench relays`: a migration of two stock QEMUs over a link, through two relays and without them.
mod results;
mod routes;

use std::path::Path;

use transship_lab::{Scratch, SlowLink};

use self::{
    results::{Results, Series},
    routes::Route,
};
use crate::{
    all::plan::{Job, Plan},
    arguments::Moves,
    content::SourceMemory,
    corpus::Corpus,
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
Migrates a stopped guest from one stock QEMU to another over links of --links: directly, as it is and compressed by \
QEMU's multifd with zstd, and through two relays (`transship relay`), which compress by themselves. The relays have \
--channels connections or one; QEMU gives them --channels connections or one.

The two sides are in network namespaces with a cable of that speed between them (`tc tbf`). Nothing is encrypted. \
After the first migration by each route, the memory of both sides is compared byte for byte.

The benchmark needs root, iproute2, and twice --mem plus 1.5 GiB of memory. Keep the machine otherwise idle.";

/// Migrations of stock QEMU, through relays and without.
#[derive(Debug, Clone, clap::Args)]
#[command(long_about = LONG_ABOUT)]
pub struct Relays {
    /// Memory of the guest
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = units::memory)]
    pub mem: u64,
    /// What the links carry, in Mbit/s
    #[arg(long, value_name = "MBIT,...", default_value = "1000,10000", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub links: Vec<u32>,
    /// Connections of the relays, and QEMU's channels
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..))]
    pub channels: u8,
    /// What such a table is told.
    #[command(flatten)]
    pub moves: Moves,
}

impl Measured for Relays {
    const NAME: &'static str = "relays";

    fn run(&self) -> Result<(), String> {
        run(self)
    }

    fn jobs(plan: &Plan) -> Vec<Job> {
        let seconds = if plan.quick { 100 } else { 400 };
        let runs = if plan.quick { plan.pairs.min(3) } else { plan.pairs };
        vec![Job::new(Self::NAME, "links", seconds).mem(plan).corpus(plan).runs("--runs", runs).peer(plan)]
    }
}

/// Measures, prints and writes.
fn run(table: &Relays) -> Result<(), String> {
    table.moves.common.files.check()?;
    let base = Scratch::base();
    machine::check_room(table.mem, &base, false)?;
    interrupt::clean_up_in(vec![base.clone()])?;
    let corpus = Corpus::new(table.moves.corpus.as_deref(), table.mem)?;
    let mut results = Results {
        machine: Machine::here(),
        qemu: String::new(),
        guest_bytes: table.mem,
        corpus: corpus.title().to_owned(),
        channels: table.channels,
        runs: table.moves.runs,
        series: Vec::new(),
    };
    let measured = table.links.iter().try_for_each(|&mbit| over(mbit, table, &base, &corpus, &mut results));
    // What was measured before a failure took its time, too.
    results.series.retain(|series| !series.runs.is_empty());
    if !results.series.is_empty() {
        let files = &table.moves.common.files;
        files.publish(results.table(), &results, &results.aims(), &results.rows(), || results.svg())?;
    }
    measured
}

/// All routes over one link, again and again.
fn over(mbit: u32, table: &Relays, base: &Path, corpus: &Corpus, results: &mut Results) -> Result<(), String> {
    let link = SlowLink::with_offload(mbit).map_err(text)?;
    let recipe = Recipe { link: Some(&link), ..Recipe::new(&table.moves.common.peer, base) };
    let first = results.series.len();
    results.series.extend(Route::ALL.map(|route| Series { mbit, route, runs: Runs::default() }));
    let home = Scratch::within(base).map_err(text)?;
    let memory = SourceMemory::of_corpus(&home.join("mem0"), table.mem, corpus)?;
    for run in 1..=table.moves.runs {
        for turn in turns(Route::ALL.len(), run) {
            let series = &mut results.series[first + turn];
            let title = series.title();
            let at = |error: String| format!("{title}, run {run}: {error}");
            let pair = recipe.start(&memory).map_err(at)?;
            if results.qemu.is_empty() {
                results.qemu = stock::version(&pair.source)?;
            }
            let once = routes::run(&pair, &link, series.route, table.channels, run == 1).map_err(at)?;
            say(&format!("{title}, run {run} of {}: {} ms", table.moves.runs, units::short(once.ms)));
            series.runs.guest_bytes = memory.bytes();
            series.runs.list.push(once);
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
        let table = parsed::<Relays>(&[]).unwrap();
        let expected = (1 << 30, vec![1000, 10_000], 4, 3);
        assert_eq!((table.mem, table.links, table.channels, table.moves.runs), expected);
        for arguments in [["--links", "0"], ["--channels", "0"], ["--runs", "0"]] {
            assert!(parsed::<Relays>(&arguments).is_err(), "{arguments:?}");
        }
    }
}
