//! `transship bench converge`: guests that write faster than the link carries, and each way of ending their moves.
mod aims;
mod cases;
mod ours;
mod qemu;
mod results;
mod round_trip;
mod watch;

use std::{
    mem,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use clap::ValueEnum;
use serde::Serialize;
use transship_lab::{Accel, Scratch, SlowLink, image, kvm_works};

use self::{
    cases::{Case, Hot, cases, workload},
    results::{Link, Results, Run, Series},
    watch::{Watch, fastest},
};
use crate::{
    all::plan::{Job, Plan},
    arguments::Common,
    content::{Content, SourceMemory},
    interrupt,
    limits::StateAlone,
    machine::{self, Machine},
    order::turns,
    output::{Files, say},
    pair::{GuestKind, Recipe, text},
    stock,
    tables::Measured,
    units,
};

const LONG_ABOUT: &str = "\
Moves guests that write 0.5 to 20 times as fast as the link carries, in every way that ends such a move, in turns: by \
transship as it is, with its writers held (--converge pace) and by post-copy; and by stock QEMU with auto-converge, with \
its limit of the dirty rate, and by its post-copy, with and without preemption. Each guest writes its hot set again and \
again; the rest of its memory holds random data. It beats on its serial port, so that its own blackout is known, and \
counts what it has written, so that its work during the move is known. After each move it checks all its memory.

The link is a cable of --link Mbit/s between two network namespaces, which needs root and iproute2, or this host's own \
sockets, with both programs bound to that rate.

It needs the guest images that scripts/setup.sh makes in the project's sources, and twice --mem plus 1.5 GiB of memory.";

/// A guest by which KVM is judged, what it writes, and how fast at least.
const KVM_PROBE_BYTES: u64 = 64 << 20;
const KVM_PROBE_MIB: u32 = 2;
const KVM_PAGES_PER_S: f64 = 16_384.0;
/// Beats before and after each move.
const BEATS_BESIDE: usize = 100;
/// For a move by QEMU: so many times what the link needs for all memory, and so much more.
const PATIENCE_TIMES: f64 = 12.0;
const PATIENCE_LEAST: Duration = Duration::from_secs(60);

/// Ways of ending moves of guests that write.
#[derive(Debug, Clone, clap::Args)]
#[command(long_about = LONG_ABOUT)]
pub struct Converge {
    /// Memory of the guest
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = units::memory)]
    pub mem: u64,
    /// What the link carries, in Mbit/s
    #[arg(long, value_name = "MBIT", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(8..=100_000))]
    pub link: u32,
    /// What the link is: cable, loopback [default: both]
    #[arg(long, value_enum, value_name = "WIRE,...", value_delimiter = ',', hide_possible_values = true, default_values_t = [Wire::Cable, Wire::Loopback], hide_default_value = true)]
    pub wires: Vec<Wire>,
    /// Guests: kvm, emulated, linux [default: kvm,linux]
    #[arg(long, value_enum, value_name = "GUEST,...", value_delimiter = ',', hide_possible_values = true, default_values_t = [Guest::Kvm, Guest::Linux], hide_default_value = true)]
    pub guests: Vec<Guest>,
    /// How many times as much as the link carries they write
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "0.5,1,2,5,20", value_parser = times)]
    pub times: Vec<f64>,
    /// What they write again and again: sizes, or all
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', default_value = "64M,512M,all")]
    pub hot: Vec<Hot>,
    /// Ways to end [default: all]
    #[arg(long, value_enum, value_name = "WAY,...", value_delimiter = ',', hide_default_value = true, default_values_t = Way::ALL)]
    pub ways: Vec<Way>,
    /// Channels
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..))]
    pub channels: u8,
    /// Moves of each guest in each way
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,
    /// Only guests that write twice what the link carries into 64 MiB, once in each way, over this host's sockets
    #[arg(long, conflicts_with_all = ["wires", "times", "hot", "runs"])]
    pub quick: bool,
    /// What every table is told.
    #[command(flatten)]
    pub common: Common,
}

fn times(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|times| (0.01..=1000.0).contains(times));
    number.ok_or_else(|| "write a number from 0.01 to 1000".to_owned())
}

/// What lies between the two hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wire {
    /// Two network namespaces with a limited cable
    Cable,
    /// This host's sockets; both programs are told the limit
    Loopback,
}

/// The guest that writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Guest {
    /// The 32-bit guest, under KVM where that works and is no slower than emulation
    Kvm,
    /// The 32-bit guest, emulated
    Emulated,
    /// A distribution's kernel with one program, emulated
    Linux,
}

impl Guest {
    fn title(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Emulated => "emulated",
            Self::Linux => "linux",
        }
    }

    fn kind(self, kvm: bool) -> GuestKind {
        match self {
            Self::Kvm if kvm => GuestKind::Small(Accel::Kvm),
            Self::Kvm | Self::Emulated => GuestKind::Small(Accel::Tcg),
            Self::Linux => GuestKind::Linux,
        }
    }
}

/// The program that moves it, and how that ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// By transship; a guest that writes too fast stays
    Never,
    /// By transship, which holds writers
    Pace,
    /// By transship; pages follow the guest
    Postcopy,
    /// By QEMU, which throttles processors
    AutoConverge,
    /// By QEMU, which limits the dirty rate of each processor (KVM with a dirty ring)
    DirtyLimit,
    /// By QEMU; pages follow the guest
    QemuPostcopy,
    /// The same, with a channel of its own for what is waited for
    QemuPreempt,
}

impl Way {
    const ALL: [Self; 7] = [
        Self::Never,
        Self::Pace,
        Self::Postcopy,
        Self::AutoConverge,
        Self::DirtyLimit,
        Self::QemuPostcopy,
        Self::QemuPreempt,
    ];

    /// As it is called in tables.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Pace => "pace",
            Self::Postcopy => "postcopy",
            Self::AutoConverge => "QEMU, auto-converge",
            Self::DirtyLimit => "QEMU, dirty-limit",
            Self::QemuPostcopy => "QEMU, post-copy",
            Self::QemuPreempt => "QEMU, preempt",
        }
    }

    /// Of transship.
    pub(crate) fn is_ours(self) -> bool {
        matches!(self, Self::Never | Self::Pace | Self::Postcopy)
    }
}

impl Measured for Converge {
    const NAME: &'static str = "converge";

    fn run(&self) -> Result<(), String> {
        run(&self.shape())
    }

    fn jobs(plan: &Plan) -> Vec<Job> {
        let job = |part: &str, seconds, arguments: &[&str]| {
            Job::new(Self::NAME, part, seconds).with(arguments).mem(plan).peer(plan)
        };
        if plan.quick {
            return vec![job("kvm", 120, &["--guests", "kvm", "--quick"])];
        }
        let sides = ["kvm", "linux"].into_iter().flat_map(|guest| ["cable", "loopback"].map(|wire| (guest, wire)));
        let parts = sides.flat_map(|(guest, wire)| ["64M", "512M", "all"].map(|hot| (guest, wire, hot)));
        let jobs = parts.map(|(guest, wire, hot)| {
            let part = format!("{guest}-{wire}-{hot}");
            let arguments = ["--guests", guest, "--wires", wire, "--hot", hot];
            job(&part, 4800, &arguments).runs("--runs", plan.pairs.min(3))
        });
        jobs.collect()
    }
}

impl Converge {
    /// What is really measured.
    fn shape(&self) -> Self {
        if !self.quick {
            return self.clone();
        }
        let hot = vec![Hot::Bytes(64 << 20)];
        Self { wires: vec![Wire::Loopback], times: vec![2.0], hot, runs: 1, ..self.clone() }
    }

    fn bytes_per_s(&self) -> u64 {
        u64::from(self.link) * 1_000_000 / 8
    }
}

/// Measures, prints and writes.
fn run(table: &Converge) -> Result<(), String> {
    table.common.files.check()?;
    for name in ["kvm.elf", "linux/vmlinuz", "linux/initrd.img"] {
        image(name).map_err(|missing| format!("there is no guest to move: {missing}"))?;
    }
    let base = Scratch::base();
    machine::check_room(table.mem, &base, false)?;
    let results = Arc::new(Mutex::new(Results {
        machine: Machine::here(),
        qemu: String::new(),
        kvm: false,
        guest_bytes: table.mem,
        channels: table.channels,
        links: Vec::new(),
        link_bytes_per_s: table.bytes_per_s(),
        state: None,
        series: Vec::new(),
    }));
    let (so_far, files) = (Arc::clone(&results), table.common.files.clone());
    interrupt::clean_up_in_after(vec![base.clone()], move || {
        if let Err(why) = publish(&so_far, &files) {
            say(&why);
        }
    })?;
    locked(&results).kvm = kvm_is_fast(&table.common.peer, &base)?;
    // Here, as nothing can be measured any more when a signal has come.
    let state = StateAlone::of_firmware(&table.common.peer, &base, table.mem)?;
    locked(&results).state = Some(state);
    let measured = measure(table, &base, &results);
    publish(&results, &table.common.files)?;
    measured
}

fn locked(results: &Mutex<Results>) -> MutexGuard<'_, Results> {
    results.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prints and writes what there is: what was measured before a failure or a signal took its time, too. Whoever comes
/// second waits for the end of this process.
fn publish(results: &Mutex<Results>, files: &Files) -> Result<(), String> {
    let mut results = locked(results);
    results.series.retain(|series| !series.runs.is_empty() || series.not_possible.is_some());
    let published = match results.series.iter().any(|series| !series.runs.is_empty()) {
        true => files.publish(results.table(), &*results, &results.aims(), &results.rows(), || results.svg()),
        false => Ok(()),
    };
    mem::forget(results);
    published
}

fn measure(table: &Converge, base: &Path, results: &Mutex<Results>) -> Result<(), String> {
    for &wire in &table.wires {
        let link = (wire == Wire::Cable).then(|| SlowLink::new(table.link)).transpose().map_err(text)?;
        let round_trip_ms = round_trip::median_ms(link.as_ref())?;
        locked(results).links.push(Link { wire, round_trip_ms });
        for &guest in &table.guests {
            for &hot in &table.hot {
                in_turns(table, base, (wire, link.as_ref()), (guest, hot), results)?;
            }
        }
    }
    Ok(())
}

/// A KVM that is emulated itself runs guests, and so slowly that they only just fill a hot set in the time that they
/// have for it.
fn kvm_is_fast(peer: &str, base: &Path) -> Result<bool, String> {
    if !kvm_works() {
        return Ok(false);
    }
    let home = Scratch::within(base).map_err(text)?;
    let memory = SourceMemory::create(&home.join("mem0"), KVM_PROBE_BYTES, Content::Untouched)?;
    let (kind, workload) = (GuestKind::Small(Accel::Kvm), Some(workload(KVM_PROBE_MIB, 0)));
    let recipe = Recipe { running: true, cold: true, workload, kind, ..Recipe::new(peer, base) };
    Ok(fastest(&recipe.source(&memory)?)? >= KVM_PAGES_PER_S)
}

/// A guest with one hot set, at each rate, in each way, again and again.
fn in_turns(
    table: &Converge,
    base: &Path,
    (wire, link): (Wire, Option<&SlowLink>),
    (guest, hot): (Guest, Hot),
    results: &Mutex<Results>,
) -> Result<(), String> {
    let Some(mib) = hot.mib(guest, table.mem) else {
        say(&format!("{}: {} do not fit into its memory, and are left out", guest.title(), hot.title()));
        return Ok(());
    };
    let kvm = locked(results).kvm;
    let home = Scratch::within(base).map_err(text)?;
    let memory = SourceMemory::create(&home.join("mem0"), table.mem, Content::Random)?;
    let recipe = |rate| {
        let (kind, workload) = (guest.kind(kvm), Some(workload(mib, rate)));
        let append = transship_lab::beats::BEATS;
        Recipe { running: true, workload, kind, append, link, ..Recipe::new(&table.common.peer, base) }
    };
    let most = fastest(&recipe(0).source(&memory)?)?;
    let link_rate = table.bytes_per_s() as f64 / transship_memory::PAGE as f64;
    say(&format!(
        "{}, {} hot: writes {} MiB/s at most, {} times what the link carries",
        guest.title(),
        hot.title(),
        units::short(most / 256.0),
        units::short(most / link_rate)
    ));
    for case in cases(&table.times, link_rate, most) {
        let case = Case { wire, guest, hot, ..case };
        let first = locked(results).series.len();
        locked(results).series.extend(table.ways.iter().map(|&way| Series::new(case.clone(), way)));
        for run in 1..=table.runs {
            for turn in turns(table.ways.len(), run) {
                let series = locked(results).series[first + turn].clone();
                let title = format!("{}, run {run} of {}", series.title(), table.runs);
                if series.not_possible.is_some() {
                    continue;
                }
                match moved(&recipe(case.pages_per_s), &memory, table, series.way, results) {
                    Ok(once) => {
                        let told = format!("{title}: {}", once.text());
                        locked(results).series[first + turn].runs.push(once);
                        say(&told);
                    }
                    Err(Failed::NotPossible(why)) => {
                        say(&format!("{title}: not possible here: {why}"));
                        locked(results).series[first + turn].not_possible = Some(why);
                    }
                    Err(Failed::Error(error)) => return Err(format!("{title}: {error}")),
                }
            }
        }
    }
    Ok(())
}

/// Why there is no run.
enum Failed {
    /// This QEMU, this kernel or this guest has not got what the way needs.
    NotPossible(String),
    Error(String),
}

impl From<String> for Failed {
    fn from(error: String) -> Self {
        Self::Error(error)
    }
}

/// One move, watched from before it until after it.
fn moved(
    recipe: &Recipe<'_>,
    memory: &SourceMemory,
    table: &Converge,
    way: Way,
    results: &Mutex<Results>,
) -> Result<Run, Failed> {
    let recipe = qemu::recipe_for(way, recipe).map_err(Failed::NotPossible)?;
    let pair = match recipe.start(memory) {
        Err(why) if way == Way::DirtyLimit => return Err(Failed::NotPossible(qemu::last_line(&why))),
        pair => pair?,
    };
    if locked(results).qemu.is_empty() {
        locked(results).qemu = stock::version(&pair.source)?;
    }
    let limit = pair.link.is_none().then(|| table.bytes_per_s());
    if !way.is_ours() {
        qemu::prepare(&pair, way, table.channels, limit)?;
    }
    let watch = Watch::begin(&pair)?;
    let run = match way.is_ours() {
        true => ours::moved(&pair, way, table.channels, limit)?,
        false => qemu::moved(&pair, way, patience(table))?,
    };
    Ok(watch.end(&pair, way, run)?)
}

fn patience(table: &Converge) -> Duration {
    let once = table.mem as f64 / table.bytes_per_s() as f64;
    Duration::from_secs_f64(once * PATIENCE_TIMES).max(PATIENCE_LEAST)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::parsed::parsed;

    #[test]
    fn the_defaults_are_those_of_the_documentation() {
        let table = parsed::<Converge>(&[]).unwrap();
        assert_eq!((table.mem, table.link, table.runs, table.channels), (1 << 30, 1000, 3, 2));
        assert_eq!(table.times, [0.5, 1.0, 2.0, 5.0, 20.0]);
        assert_eq!(table.hot, [Hot::Bytes(64 << 20), Hot::Bytes(512 << 20), Hot::All]);
        assert_eq!((table.ways.len(), table.wires.len()), (7, 2));
        assert_eq!(table.bytes_per_s(), 125_000_000);
        for wrong in [["--times", "0"], ["--hot", "some"], ["--ways", "hope"], ["--link", "1"]] {
            assert!(parsed::<Converge>(&wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn quick_is_one_guest_and_every_way() {
        let table = parsed::<Converge>(&["--quick", "--guests", "emulated"]).unwrap().shape();
        assert_eq!((table.times.len(), table.hot.len(), table.runs, table.ways.len()), (1, 1, 1, 7));
        assert!(parsed::<Converge>(&["--quick", "--runs", "2"]).is_err());
    }
}
