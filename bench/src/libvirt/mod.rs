//! `transship bench libvirt`: a domain of libvirt saved and migrated, by transship and by virsh alone.
mod measure;
mod results;

use std::path::PathBuf;

use clap::ValueEnum;
use serde::Serialize;
use transship_lab::Scratch;

use self::{
    measure::Hosts,
    results::{Results, Series},
};
use crate::{
    all::plan::{Job, Plan},
    corpus::Corpus,
    interrupt,
    machine::{self, Machine},
    order::turns,
    output::{Files, say},
    tables::Measured,
    units,
};

const LONG_ABOUT: &str = "\
Saves and migrates a domain of libvirt that runs, alternately by transship and by virsh alone. The domain has private \
memory and a raw disk past the page cache, as virt-install makes it. Most of its memory holds the files of --corpus.

Saved: by `transship save --background` while it runs on, and by `virsh save`, which stops it for the whole time and \
ends it. The time of both is that until the image is on the disk. Migrated: by `virsh migrate --live` over a link of \
--link, directly and through two relays; nothing is encrypted.

libvirtd runs in namespaces of its own, which needs root. Where it can't, the table is left out, and says so. The \
benchmark needs three times --mem of memory, and twice --mem on the disk of --dir. Keep the machine otherwise idle.";

/// A domain of libvirt, saved and migrated.
#[derive(Debug, Clone, clap::Args)]
#[command(long_about = LONG_ABOUT)]
pub struct Libvirt {
    /// Memory of the domain
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = units::memory)]
    pub mem: u64,
    /// What is done: save, save-sparse, migrate, migrate-parallel [default: all]
    #[arg(long, value_enum, value_name = "WHAT,...", value_delimiter = ',', hide_possible_values = true, default_values_t = Deed::ALL, hide_default_value = true)]
    pub what: Vec<Deed>,
    /// Mbit/s of the link that it is migrated over
    #[arg(long, value_name = "MBIT", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub link: u32,
    /// A folder on the disk, for images
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,
    /// Fill memory with the files of this folder, repeatedly
    #[arg(long, value_name = "DIR")]
    pub corpus: Option<PathBuf>,
    /// Saves and migrations by each; the table shows the median
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,
    /// Where results go.
    #[command(flatten)]
    pub files: Files,
}

/// What is done with the domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Deed {
    /// Saved to an image with a stream
    Save,
    /// Saved to an image with a place for every page
    SaveSparse,
    /// Migrated while it runs, by one connection
    Migrate,
    /// The same, by several connections (`--parallel`)
    MigrateParallel,
}

impl Deed {
    const ALL: [Self; 4] = [Self::Save, Self::SaveSparse, Self::Migrate, Self::MigrateParallel];

    fn is_migration(self) -> bool {
        matches!(self, Self::Migrate | Self::MigrateParallel)
    }

    /// As it is called in tables.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Save => "save",
            Self::SaveSparse => "save, sparse",
            Self::Migrate => "migrate",
            Self::MigrateParallel => "migrate, parallel",
        }
    }
}

/// By whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum By {
    /// `transship save`, or `virsh migrate` through its relays.
    Transship,
    /// By virsh alone.
    Virsh,
}

impl Measured for Libvirt {
    const NAME: &'static str = "libvirt";

    fn run(&self) -> Result<(), String> {
        run(self)
    }

    fn jobs(plan: &Plan) -> Vec<Job> {
        let job = |part: &str, seconds, what: &str| {
            let job = Job::new(Self::NAME, part, seconds).with(&["--what", what]);
            job.mem(plan).corpus(plan).runs("--runs", plan.pairs).dir(plan)
        };
        let (save, migrate) = if plan.quick { (60, 150) } else { (300, 600) };
        vec![job("save", save, "save,save-sparse"), job("migrate", migrate, "migrate,migrate-parallel")]
    }
}

/// Measures, prints and writes.
fn run(table: &Libvirt) -> Result<(), String> {
    table.files.check()?;
    interrupt::clean_up_in(vec![Scratch::base(), table.dir.clone(), PathBuf::from("/var/tmp")])?;
    let corpus = Corpus::new(table.corpus.as_deref(), table.mem)?;
    let mut results = Results {
        machine: Machine::here(),
        libvirt: None,
        guest_bytes: table.mem,
        corpus: corpus.title().to_owned(),
        link_mbit: table.link,
        runs: table.runs,
        series: Vec::new(),
    };
    let measured = measure(table, &corpus, &mut results);
    // What was measured before a failure took its time, too.
    results.series.retain(|series| !series.runs.is_empty());
    if measured.is_ok() || !results.series.is_empty() {
        let rows = results.rows(&table.dir)?;
        table.files.publish(results.table(), &results, &results.aims(), &rows, || results.svg())?;
    }
    measured
}

fn measure(table: &Libvirt, corpus: &Corpus, results: &mut Results) -> Result<(), String> {
    let migrates = table.what.iter().any(|what| what.is_migration());
    if !table.what.iter().all(|what| what.is_migration()) {
        machine::check_disk(&table.dir, 2 * table.mem)?;
    }
    let Some(hosts) = Hosts::start(migrates.then_some(table.link))? else { return Ok(()) };
    results.libvirt = Some(hosts.version()?);
    for &what in &table.what {
        if what == Deed::SaveSparse && !hosts.knows_sparse()? {
            say("save, sparse: left out, since this libvirt is older than 11.2");
            continue;
        }
        let first = results.series.len();
        results.series.extend([By::Transship, By::Virsh].map(|by| Series::new(what, by)));
        for run in 1..=table.runs {
            for turn in turns(results.series.len() - first, run) {
                let series = &mut results.series[first + turn];
                let title = series.title();
                let once = hosts.run(series.what, series.by, table, corpus);
                let once = once.map_err(|error| format!("{title}, run {run}: {error}"))?;
                let (ms, still) = (units::short(once.ms), units::short(once.downtime_ms));
                say(&format!("{title}, run {run} of {}: {ms} ms, {still} ms still", table.runs));
                series.runs.push(once);
            }
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
        let table = parsed::<Libvirt>(&[]).unwrap();
        assert_eq!((table.mem, table.runs, table.link, table.what), (1 << 30, 3, 1000, Deed::ALL.to_vec()));
        for arguments in [["--what", "restore"], ["--link", "0"]] {
            assert!(parsed::<Libvirt>(&arguments).is_err(), "{arguments:?}");
        }
    }
}
