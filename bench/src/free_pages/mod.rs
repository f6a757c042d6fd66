//! `transship bench free-pages`: a Linux guest whose free memory is full of old data, moved to and fro by transship and
//! by stock QEMU.
mod aims;
mod cases;
mod guests;
mod ours;
mod picture;
mod results;
mod stock;
mod tables;

use transship_lab::{Scratch, image};

use self::{
    cases::{Case, Load, Way},
    guests::{QemuWithBalloon, Recipe},
    results::{Results, Run, Series},
};
use crate::{
    all::plan::{Job, Plan},
    arguments::Common,
    at_hand,
    files::By,
    interrupt,
    machine::{self, Machine},
    order::turns,
    output::say,
    stock as qemus,
    tables::Measured,
    units,
};

const LONG_ABOUT: &str = "\
Moves a Linux guest, whose free memory is full of old data, back and forth. Before each move, a program in the guest \
writes nearly all free memory and gives it back. The guest is idle, or it compiles; the load is the same whatever the \
size of its memory. The guest says nothing about its free memory, names it on request (hints), or gives it back over \
time (reporting). transship is compared with stock QEMU's own migration and the same feature of QEMU's own balloon.

Hints need QEMU 11.1 or newer; name it with --peer (scripts/qemu-versions.sh of the project's sources builds one). \
The guest is the one that scripts/setup.sh makes there.

The benchmark needs twice the largest --mem plus 1.5 GiB of memory, and several hours, mainly because a guest that \
reports needs half a minute for that before each move. Keep the machine otherwise idle.";

/// How long the guest may stand still.
const DOWNTIME_MS: u64 = 300;

/// Moves of a guest whose free memory is full of old data.
#[derive(Debug, Clone, clap::Args)]
#[command(long_about = LONG_ABOUT)]
pub struct FreePages {
    /// Sizes of the guest's memory
    #[arg(long, value_name = "SIZE,...", default_value = "2G,4G,8G", value_delimiter = ',', value_parser = units::memory)]
    pub mem: Vec<u64>,
    /// What the guest does: idle, busy
    #[arg(
        long,
        value_enum,
        value_name = "LOAD,...",
        default_value = "idle,busy",
        value_delimiter = ',',
        hide_possible_values = true
    )]
    pub loads: Vec<Load>,
    /// How it tells which memory is free: without, balloon (a balloon that tells nothing), hints, reporting
    #[arg(
        long,
        value_enum,
        value_name = "WAY,...",
        default_value = "without,hints,reporting",
        value_delimiter = ',',
        hide_possible_values = true
    )]
    pub ways: Vec<Way>,
    /// How often it moves there and back in each case
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub times: u32,
    /// Channels
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..))]
    pub channels: u8,
    /// What every table is told.
    #[command(flatten)]
    pub common: Common,
}

impl Measured for FreePages {
    const NAME: &'static str = "free-pages";

    fn run(&self) -> Result<(), String> {
        run(self)
    }

    fn jobs(plan: &Plan) -> Vec<Job> {
        let job = |part: &str, seconds, arguments: &[&str], times| {
            Job::new(Self::NAME, part, seconds).with(arguments).runs("--times", times).peer(plan)
        };
        if plan.quick {
            let mem = format!("{}M", plan.mem.map_or(1024, |bytes| bytes >> 20).max(256));
            return vec![job(
                "idle",
                70,
                &["--mem", &mem, "--loads", "idle", "--ways", "without,hints"],
                plan.pairs.min(2),
            )];
        }
        let sizes = ["2G", "4G", "8G"].into_iter();
        let all = sizes.flat_map(|mem| ["without", "hints", "reporting"].map(|way| (mem, way)));
        let part = |mem: &str, way: &str| format!("{}-{way}", mem.to_lowercase());
        all.map(|(mem, way)| job(&part(mem, way), 1200, &["--mem", mem, "--ways", way], plan.pairs.min(10))).collect()
    }
}

/// Measures, prints and writes.
fn run(table: &FreePages) -> Result<(), String> {
    table.common.files.check()?;
    for name in ["linux/vmlinuz", "linux/initrd.img"] {
        image(name).map_err(|missing| format!("there is no guest to move: {missing}"))?;
    }
    let base = Scratch::base();
    machine::check_room(table.mem.iter().copied().max().unwrap_or(0), &base, false)?;
    interrupt::clean_up_in(vec![base.clone()])?;
    let mut results = Results {
        machine: Machine::here(),
        qemu: String::new(),
        channels: table.channels,
        times: table.times,
        series: Vec::new(),
    };
    let measured = measure(table, &mut results);
    // What was measured before a failure took its time, too.
    results.series.retain(|series| !series.runs.is_empty());
    if !results.series.is_empty() {
        let (files, rows) = (&table.common.files, results.rows(&base)?);
        files.publish(results.table(), &results, &results.aims(), &rows, || results.svg())?;
    }
    measured
}

fn measure(table: &FreePages, results: &mut Results) -> Result<(), String> {
    let mut ways = table.ways.clone();
    if ways.contains(&Way::Hints) && !guests::has_hint_device(&table.common.peer)? {
        let peer = &table.common.peer;
        let why = format!("{peer} has no vhost-user-test-device-pci; name QEMU 11.1 or newer with --peer");
        ways.retain(|way| *way != Way::Hints);
        if ways.is_empty() {
            return Err(format!("hints can't be measured: {why}"));
        }
        say(&format!("hints are left out: {why}"));
    }
    for &guest_bytes in &table.mem {
        for &way in &ways {
            for sides in way.turns() {
                chain(table, guest_bytes, way, &sides, results)?;
            }
        }
    }
    Ok(())
}

/// One guest that moves back and forth, idle and then busy, alternately by each of these.
fn chain(table: &FreePages, guest_bytes: u64, way: Way, sides: &[By], results: &mut Results) -> Result<(), String> {
    let recipe = Recipe { peer: &table.common.peer, guest_bytes, way, by: sides[0] };
    let case = |load, by| Case { guest_bytes, load, way, by };
    let mut home = recipe.start().map_err(|error| format!("{}: {error}", case(table.loads[0], sides[0]).title()))?;
    if results.qemu.is_empty() {
        results.qemu = qemus::version(&home.qemu)?;
    }
    for &load in &table.loads {
        let first = results.series.len();
        results.series.extend(sides.iter().map(|&by| Series::new(case(load, by))));
        for time in 1..=table.times {
            for turn in turns(sides.len(), time) {
                let series = &mut results.series[first + turn];
                for direction in ["there", "back"] {
                    let title = format!("{}, time {time} of {}, {direction}", series.case.title(), table.times);
                    let (next, run) = leg(&recipe, &home, series.case, table.channels)
                        .map_err(|error| format!("{title}: {error}"))?;
                    // Its memory is needed for the next one.
                    home = next;
                    let (ms, wire) = (units::short(run.ms), units::bytes(run.wire_bytes));
                    say(&format!("{title}: {ms} ms, {wire}"));
                    series.runs.push(run);
                }
            }
        }
    }
    Ok(())
}

/// One move, and where the guest is then.
fn leg(
    recipe: &Recipe<'_>,
    home: &QemuWithBalloon,
    case: Case,
    channels: u8,
) -> Result<(QemuWithBalloon, Run), String> {
    let next = recipe.waiting()?;
    let kept = home.keep_memory()?;
    let work_before = home.prepare(case.load, case.way)?;
    let allocated_bytes = home.allocated()?;
    at_hand::have(allocated_bytes)?;
    let begin = work_before.is_some().then(|| home.done()).transpose()?;
    drop(kept);
    let run = match case.by {
        By::Transship => ours::run(home, &next, channels),
        By::Qemu => stock::run(home, &next, channels),
    }?;
    let work_during = begin.map(|begin| Ok::<_, String>(begin.until(next.done()?))).transpose()?;
    next.arrived()?;
    Ok((next, Run { allocated_bytes, work_before, work_during, ..run }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::parsed::parsed;

    #[test]
    fn the_defaults_are_those_of_the_documentation() {
        let table = parsed::<FreePages>(&[]).unwrap();
        assert_eq!(table.mem, [2 << 30, 4 << 30, 8 << 30]);
        assert_eq!((table.loads, table.times, table.channels), (vec![Load::Idle, Load::Busy], 10, 4));
        assert_eq!(table.ways, [Way::Without, Way::Hints, Way::Reporting]);
        let table = parsed::<FreePages>(&["--mem", "1G", "--ways", "hints", "--loads", "busy"]).unwrap();
        assert_eq!((table.mem, table.ways, table.loads), (vec![1 << 30], vec![Way::Hints], vec![Load::Busy]));
        assert!(parsed::<FreePages>(&["--times", "0"]).is_err());
    }
}
