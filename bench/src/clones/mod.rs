//! `transship bench clones`: many guests from one moment of another, by mapping its image and by loading it.
mod measure;
mod results;

use clap::ValueEnum;
use serde::Serialize;
use transship_lab::{Accel, Scratch, kvm_works};

use self::results::{Results, Way};
use crate::{
    all::plan::{Job, Plan},
    arguments::Common,
    interrupt,
    limits::StateAlone,
    machine::Machine,
    order::turns,
    output::say,
    tables::Measured,
    units,
};

const LONG_ABOUT: &str = "\
Makes guests from one moment of a guest that runs on: by `transship fork`, whose clones map the image; by stock \
QEMU, each loading the same guest from a mapped-ram file; and by `transship restore --lazy`. The time of each is that \
from a QEMU that waits to a guest that runs; how long QEMU itself takes to start is measured beside it. Memory is what \
all of them take together three seconds later, shared pages counted once.

The small guest runs under KVM where that works. The Linux guest is emulated: each of its QEMUs then also has memory \
for the code that it has translated, which nobody shares. Either guest has --content of its memory filled, and writes \
nothing. The benchmark needs the largest of --count times --content plus 40 MiB, and twice the largest --mem. Keep the \
machine otherwise idle.";

/// Many guests from one moment of another.
#[derive(Debug, Clone, clap::Args)]
#[command(long_about = LONG_ABOUT)]
pub struct Clones {
    /// Sizes of the guest's memory
    #[arg(long, value_name = "SIZE,...", default_value = "1G,4G", value_delimiter = ',', value_parser = units::memory)]
    pub mem: Vec<u64>,
    /// Numbers of clones
    #[arg(long, value_name = "N,...", default_value = "1,8,32", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub count: Vec<u32>,
    /// How much of its memory the guest has filled
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = units::memory)]
    pub content: u64,
    /// How often each is measured
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,
    /// What the guest is
    #[arg(long, value_enum, value_name = "GUEST", default_value_t = Guest::Small)]
    pub guest: Guest,
    /// What every table is told.
    #[command(flatten)]
    pub common: Common,
}

/// The guest that becomes many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Guest {
    /// The 32-bit guest, under KVM where that works
    Small,
    /// A distribution's kernel with one program, emulated
    Linux,
}

impl Guest {
    fn accel(self) -> Accel {
        if self == Self::Small && kvm_works() { Accel::Kvm } else { Accel::Tcg }
    }
}

impl Measured for Clones {
    const NAME: &'static str = "clones";

    fn run(&self) -> Result<(), String> {
        run(self)
    }

    fn jobs(plan: &Plan) -> Vec<Job> {
        let job = |part: &str, seconds, arguments: &[&str]| {
            Job::new(Self::NAME, part, seconds).with(arguments).runs("--runs", plan.pairs).peer(plan)
        };
        if plan.quick {
            return vec![job("", 40, &["--mem", "1G", "--count", "1,4"])];
        }
        let sizes = ["1G", "4G"].map(|mem| job(&mem.to_lowercase(), 900, &["--mem", mem]));
        let linux = job("linux", 900, &["--mem", "1G", "--guest", "linux"]);
        sizes.into_iter().chain([linux]).collect()
    }
}

const WAYS: [Way; 3] = [Way::Clones, Way::Qemu, Way::Lazy];

/// Measures, prints and writes.
fn run(table: &Clones) -> Result<(), String> {
    table.common.files.check()?;
    interrupt::clean_up_in(vec![Scratch::base()])?;
    let mut results = Results::new(Machine::here(), (table.guest, table.guest.accel()), table.content);
    let measured = measure(table, &mut results);
    if !results.rows.is_empty() {
        let (shown, files) = (results.merged(), &table.common.files);
        // What is loaded is the same, however much memory there is.
        let state = StateAlone::of_firmware(&table.common.peer, &Scratch::base(), results.rows[0].guest_bytes)?;
        files.publish(shown.table(), &results, &shown.aims(), &results.shared_rows(Some(state)), || shown.svg())?;
    }
    measured
}

fn measure(table: &Clones, results: &mut Results) -> Result<(), String> {
    for &guest_bytes in &table.mem {
        let setting = measure::Setting::start(&table.common.peer, table.guest, guest_bytes, table.content)?;
        results.qemu = setting.version()?;
        for &count in &table.count {
            for run in 1..=table.runs {
                for turn in turns(WAYS.len(), run) {
                    let way = WAYS[turn];
                    let title = format!("{}, {count} guests, {}", units::bytes(guest_bytes), way.title());
                    let row = setting.row(way, count).map_err(|error| format!("{title}: {error}"))?;
                    say(&format!("{title}: {} ms each", units::short(row.ms().median)));
                    results.rows.push(row);
                }
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
        let table = parsed::<Clones>(&[]).unwrap();
        assert_eq!((table.mem, table.count, table.content), (vec![1 << 30, 4 << 30], vec![1, 8, 32], 64 << 20));
        assert!(parsed::<Clones>(&["--count", "0"]).is_err());
    }
}
