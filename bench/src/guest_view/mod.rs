//! `transship bench guest-view`: what a guest and its users notice of a move, beside what each side reports.
mod bare;
mod results;
mod tracked;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use clap::ValueEnum;
use serde::Serialize;
use serde_json::{Value, json};
use transship_lab::{
    Accel, Scratch, Workload,
    beats::{BEATS, Heard, heard, wait_for_beats},
    image,
};

use self::results::{Results, Run, Series};
use crate::{
    all::plan::{Job, Plan},
    arguments::Common,
    content::{Content, SourceMemory},
    files::By,
    guest_memory::GuestMemory,
    interrupt, limits,
    machine::Machine,
    order::turns,
    ours,
    output::say,
    pair::{GuestKind, Pair, Recipe, text},
    stock,
    tables::Measured,
    units::{self, millis},
};

const LONG_ABOUT: &str = "\
Moves guests that run, by transship and by stock QEMU's own migration (multifd, the same channels), and listens to \
them: each beats a thousand times a second on its serial port. A guest's blackout is the longest silence between two \
beats, at whichever side. What each side reports as its downtime is beside it: QEMU's leaves out what the destination \
does before the guest runs there.

There is the 32-bit guest of the tests, under KVM where that works, idle or writing up to 16 MiB of its memory as \
fast as it can; and a Linux guest, emulated. Then the first of them is only tracked, while transship and QEMU send so slowly \
that no move ends: how much slower does it write? And how long do both take until they can send?

It needs the guest images that scripts/setup.sh makes in the project's sources, and twice --mem plus 1.5 GiB of memory.";

/// What a guest that writes does so in, of its memory.
const HOT_SHARE: u64 = 8;
/// A KVM that is emulated itself checks a megabyte in a tenth of a second, so the guest has no more.
const HOT_MIB_MAX: u64 = 16;
/// Beats before and after each move.
const BEATS_BESIDE: usize = 200;
const PATIENCE: Duration = Duration::from_secs(60);

/// What a guest notices of a move.
#[derive(Debug, Clone, clap::Args)]
#[command(long_about = LONG_ABOUT)]
pub struct GuestView {
    /// Memory of the guest
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = units::memory)]
    pub mem: u64,
    /// Channels
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..))]
    pub channels: u8,
    /// Guest memory.
    #[command(flatten)]
    pub guest: GuestMemory,
    /// What it does: idle, writing, linux, tracked [default: all]
    #[arg(long, value_enum, value_name = "LOAD,...", value_delimiter = ',', hide_possible_values = true, default_values_t = Load::ALL, hide_default_value = true)]
    pub loads: Vec<Load>,
    /// Moves by each program
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,
    /// What every table is told.
    #[command(flatten)]
    pub common: Common,
}

/// Which guest, and what it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Load {
    /// The 32-bit guest writes nothing
    Idle,
    /// It writes as fast as it can
    Writing,
    /// The Linux guest writes 20 MB/s
    Linux,
    /// The 32-bit guest writes as fast as it can, and is not moved
    Tracked,
}

impl Load {
    const ALL: [Self; 4] = [Self::Idle, Self::Writing, Self::Linux, Self::Tracked];

    /// As it is called in tables.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Writing => "writing",
            Self::Linux => "Linux, writing 20 MB/s",
            Self::Tracked => "writing, tracked",
        }
    }

    fn workload(self, mem: u64) -> Workload {
        let mib = ((mem / HOT_SHARE) >> 20).min(HOT_MIB_MAX) as u32;
        let idle = self == Self::Idle;
        let rate = if self == Self::Linux { 5000 } else { 0 };
        // No check of everything while time is taken.
        Workload { mib, rate, hot_mib: None, idle, sweep_ms: 3_600_000 }
    }
}

impl Measured for GuestView {
    const NAME: &'static str = "guest-view";

    fn run(&self) -> Result<(), String> {
        run(self)
    }

    fn jobs(plan: &Plan) -> Vec<Job> {
        let pairs = plan.pairs;
        [("idle", 20), ("writing", 25), ("linux", 60), ("tracked", 50)]
            .map(|(load, quick)| {
                let (pairs, seconds) = if plan.quick { (pairs.min(5), quick) } else { (2 * pairs, 6 * quick) };
                let job = Job::new(Self::NAME, load, seconds).with(&["--loads", load]);
                job.mem(plan).runs("--runs", pairs).peer(plan).memory(plan)
            })
            .to_vec()
    }
}

/// Measures, prints and writes.
fn run(table: &GuestView) -> Result<(), String> {
    table.common.files.check()?;
    for name in ["kvm.elf", "linux/vmlinuz", "linux/initrd.img"] {
        image(name).map_err(|missing| format!("there is no guest to move: {missing}"))?;
    }
    let base = table.guest.base(table.mem)?;
    interrupt::clean_up_in(vec![base.clone()])?;
    let accel = Accel::best();
    let mut results = Results {
        machine: Machine::here(),
        qemu: String::new(),
        kvm: accel == Accel::Kvm,
        guest_bytes: table.mem,
        channels: table.channels,
        series: Vec::new(),
    };
    let measured = measure(table, &base, accel, &mut results);
    // What was measured before a failure took its time, too.
    results.series.retain(|series| !series.ours.is_empty() && !series.qemu.is_empty());
    if !results.series.is_empty() {
        let files = &table.common.files;
        files.publish(results.table(), &results, &results.aims(), &results.rows(&table.guest.title()), || {
            results.svg()
        })?;
    }
    measured
}

fn measure(table: &GuestView, base: &Path, accel: Accel, results: &mut Results) -> Result<(), String> {
    for &load in &table.loads {
        let kind = if load == Load::Linux { GuestKind::Linux } else { GuestKind::Small(accel) };
        // A guest that is only tracked has to have much to send.
        let content = if load == Load::Tracked { Content::Random } else { Content::Untouched };
        let home = Scratch::within(base).map_err(text)?;
        let memory = SourceMemory::create(&home.join("mem0"), table.mem, content)?;
        let recipe = Recipe {
            running: true,
            cold: true,
            workload: Some(load.workload(table.mem)),
            kind,
            memory: table.guest,
            append: if load == Load::Tracked { "" } else { BEATS },
            ..Recipe::new(&table.common.peer, base)
        };
        results.series.push(Series::new(load));
        for run in 1..=table.runs {
            for side in turns(2, run) {
                let by = [By::Transship, By::Qemu][side];
                let title = format!("{}, {}, run {run} of {}", load.title(), by.title(), table.runs);
                let once = || {
                    let pair = recipe.start(&memory)?;
                    if load == Load::Tracked { tracked::run(&pair, by) } else { moved(&pair, by, table.channels) }
                };
                let once = once().map_err(|error| format!("{title}: {error}"))?;
                say(&format!("{title}: {}", once.text()));
                if results.qemu.is_empty() {
                    results.qemu = once.qemu.clone();
                }
                let series = results.series.last_mut().ok_or("no series")?;
                if by == By::Transship { series.ours.push(once) } else { series.qemu.push(once) }
            }
            if load != Load::Tracked && table.guest.backend.has_file() {
                let title = format!("{}, two QEMUs with one memory, run {run} of {}", load.title(), table.runs);
                let silence = bare::once(&recipe, &memory).map_err(|error| format!("{title}: {error}"))?;
                say(&format!("{title}: {} ms of silence", units::short(silence)));
                results.series.last_mut().ok_or("no series")?.bare_ms.push(silence);
            }
        }
    }
    Ok(())
}

/// One move, heard from before it until after it.
fn moved(pair: &Pair<'_>, by: By, channels: u8) -> Result<Run, String> {
    let qemu = stock::version(&pair.source)?;
    let asked_ms = (by == By::Transship).then(|| limits::asked(&pair.source)).transpose()?;
    wait_for_beats(&pair.source, BEATS_BESIDE).map_err(text)?;
    let since = Instant::now();
    let run = match by {
        By::Transship => {
            let arguments = ["--channels", &channels.to_string()].map(str::to_owned);
            let moved = ours::transfer(&pair.ends(), &arguments)?.arrived()?;
            Run {
                total_ms: moved.number("/total_ms")?,
                reported_ms: moved.number("/downtime_ms")?,
                setup_ms: moved.number("/setup_ms")?,
                ..Run::default()
            }
        }
        By::Qemu => {
            let parameters = json!({ "multifd-channels": channels, "zero-page-detection": "multifd" });
            let (ran, info) = stock::run_within(pair, parameters, PATIENCE)?;
            let ran = ran.ok_or_else(|| format!("QEMU's own migration does not end: {info}"))?;
            let number = |name: &str| info.get(name).and_then(Value::as_f64).unwrap_or(f64::NAN);
            Run { total_ms: ran.ms, reported_ms: number("downtime"), setup_ms: number("setup-time"), ..Run::default() }
        }
    };
    wait_for_beats(&pair.destination, BEATS_BESIDE).map_err(text)?;
    let Heard { silence, usual, beats } = heard(&pair.source, &pair.destination, since).map_err(text)?;
    let swept = pair.destination.sweep().map_err(text)?;
    if swept.errors > 0 {
        return Err(format!("{} of {} pages are not what the guest has written", swept.errors, swept.pages));
    }
    Ok(Run { qemu, blackout_ms: millis(silence), beat_ms: millis(usual), beats, asked_ms, ..run })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::parsed::parsed;

    #[test]
    fn the_defaults_are_those_of_the_documentation() {
        let table = parsed::<GuestView>(&[]).unwrap();
        assert_eq!((table.mem, table.runs, table.channels), (1 << 30, 5, 2));
        assert_eq!(table.loads, Load::ALL);
        assert!(parsed::<GuestView>(&["--loads", "asleep"]).is_err());
        assert_eq!([64, 1024].map(|mib| Load::Writing.workload(mib << 20).mib), [8, 16]);
    }
}
