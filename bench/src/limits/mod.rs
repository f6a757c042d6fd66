//! `transship bench limits`: what the machine does on its own. Other tables measure the same beside their rows.
mod asked;
pub(crate) mod codec;
pub(crate) mod copy;
mod look;
mod loopback;
pub(crate) mod state;
mod threads;

use std::path::{Path, PathBuf};

use transship_codec::Method;
use transship_lab::Scratch;
use transship_memory::WINDOW_PAGES;

pub(crate) use self::{asked::asked, state::StateAlone};
use self::{
    codec::PACKET_BYTES,
    copy::{Copy, Memory},
    look::Zeros,
};
use crate::{
    aims::Aims,
    all::plan::{Job, Plan},
    arguments::Common,
    at_hand,
    corpus::Corpus,
    files::disk::{self, DiskRun},
    interrupt,
    machine::{self, Machine},
    output::say,
    plot::{Bar, Chart, Group, Line, Side},
    results::Spread,
    rows::{FRESH, Limit, Row, WARM},
    tables::Measured,
    units,
};

const LONG_ABOUT: &str = "\
Measures what the machine does on its own: pages copied from one guest's memory into another's, which is fresh or \
warm; memory read by who has page tables for it, and zeros found by who has none; bytes through sockets of this host; \
each codec alone on all cores; and the disk of --dir with direct I/O, written, read, and read into fresh guest memory, and \
read through the page cache. Of what is written there are two: from huge pages, and from pages that lie anywhere, as \
those of guests. \
Nothing that moves a guest here is faster than these.

Other tables measure the limits of their rows by themselves.";

/// More would take longer and say the same.
const MOST_BYTES: u64 = 1 << 30;
const METHODS: [(Method, &str); 3] = [(Method::Zlib, "zlib"), (Method::Zstd, "zstd"), (Method::Lz4, "lz4")];

/// What the machine does on its own.
#[derive(Debug, Clone, clap::Args)]
#[command(long_about = LONG_ABOUT)]
pub struct Limits {
    /// Bytes that are copied, encoded, written, …
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = units::memory)]
    pub mem: u64,
    /// How often; the table shows the median
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,
    /// A folder on the disk to measure
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,
    /// Encode the files of this folder, repeatedly
    #[arg(long, value_name = "DIR")]
    pub corpus: Option<PathBuf>,
    /// What every table is told.
    #[command(flatten)]
    pub common: Common,
}

/// How often is tried what differs from time to time for reasons of the machine's.
const TRIES: usize = 3;

/// The quickest of some tries, as of a scan.
pub(crate) fn quickest(mut once: impl FnMut() -> Result<f64, String>) -> Result<f64, String> {
    (0..TRIES).try_fold(f64::INFINITY, |best, _| Ok(once()?.min(best)))
}

/// Threads that share a limit's work.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// As many as are copied or looked at for the limit of so many bytes: whole windows.
fn measured(bytes: u64) -> u64 {
    bytes.clamp(1, MOST_BYTES).next_multiple_of(WINDOW_PAGES.bytes())
}

/// A bare copy of so many bytes into memory in this state, on all cores.
pub(crate) fn copy(base: &Path, bytes: u64, memory: &str) -> Result<Limit, String> {
    let measured = measured(bytes);
    at_hand::have(2 * measured)?;
    let copy = Copy::new(base, measured)?;
    let mut ms = copy.once(cores())?;
    if memory == WARM {
        ms = copy.once(cores())?;
    }
    Ok(Limit { what: format!("copy, {memory}"), value: scaled(ms, measured, bytes) })
}

/// The same between memories that processes have for themselves, which the kernel has to copy twice.
pub(crate) fn copy_private(bytes: u64) -> Result<Limit, String> {
    let measured = measured(bytes);
    let copied = || {
        at_hand::have(2 * measured)?;
        Copy::private(measured)?.once(cores())
    };
    Ok(Limit { what: "copy from outside".into(), value: scaled(quickest(copied)?, measured, bytes) })
}

/// A link of so many Mbit/s carries so many bytes.
pub(crate) fn link(mbit: u32, bytes: f64) -> Limit {
    Limit { what: "the link".into(), value: bytes * 8.0 / 1e3 / f64::from(mbit) }
}

/// So many bytes read, by these threads.
pub(crate) fn scan(threads: usize, bytes: u64) -> Result<Limit, String> {
    let threads = threads.min(cores());
    let ms = bytes as f64 / machine::scan_bandwidth(threads)? * 1e3;
    Ok(Limit { what: "scan".into(), value: ms })
}

/// So many bytes of zeros found from outside, by these threads. More memory takes as much longer.
pub(crate) fn look(base: &Path, threads: usize, bytes: u64) -> Result<Limit, String> {
    look_at(|bytes| Zeros::new(base, bytes), threads, bytes)
}

/// The same of private memory, which the kernel has to copy.
pub(crate) fn look_private(threads: usize, bytes: u64) -> Result<Limit, String> {
    look_at(Zeros::private, threads, bytes)
}

fn look_at(zeros: impl FnOnce(u64) -> Result<Zeros, String>, threads: usize, bytes: u64) -> Result<Limit, String> {
    let measured = measured(bytes);
    at_hand::have(measured)?;
    let ms = zeros(measured)?.look(threads.min(cores()))?;
    Ok(Limit { what: "look from outside".into(), value: scaled(ms, measured, bytes) })
}

/// So many bytes of a corpus through a codec and back, all cores for one and then for the other. They come back into
/// memory in this state if that is given, and else into a buffer that is used again and again. None: it has no codec.
pub(crate) fn codec(
    method: &str,
    corpus: &Corpus,
    bytes: u64,
    memory: Option<(&Path, &str)>,
) -> Result<Option<Limit>, String> {
    let Some((method, name)) = METHODS.into_iter().find(|(_, name)| *name == method) else { return Ok(None) };
    let packets: Vec<&[u8]> = corpus.packets(PACKET_BYTES).collect();
    let measured = packets.iter().map(|packet| packet.len() as u64).sum();
    let into = memory.map(|(base, state)| memory_in(state, base, measured)).transpose()?;
    let run = codec::alone(method, &packets, cores(), into.as_ref().map(|memory| &memory.region))?;
    let state = memory.map_or_else(String::new, |(_, state)| format!(", {state}"));
    let value = scaled(run.encode_ms + run.decode_ms, measured, bytes);
    Ok(Some(Limit { what: format!("{name} alone{state}"), value }))
}

fn memory_in(state: &str, base: &Path, bytes: u64) -> Result<Memory, String> {
    at_hand::have(bytes)?;
    let memory = Memory::fresh(base, bytes)?;
    if state == WARM {
        memory.fill()?;
    }
    Ok(memory)
}

fn scaled(ms: f64, measured: u64, bytes: u64) -> f64 {
    ms * bytes as f64 / measured as f64
}

impl Measured for Limits {
    const NAME: &'static str = "limits";

    fn run(&self) -> Result<(), String> {
        self.common.files.check()?;
        let base = Scratch::base();
        machine::check_room(self.mem, &base, false)?;
        machine::check_disk(&self.dir, self.mem)?;
        interrupt::clean_up_in(vec![base.clone(), self.dir.clone()])?;
        let corpus = Corpus::new(self.corpus.as_deref(), self.mem)?;
        let mut rows = Vec::new();
        self.memory(&base, &mut rows)?;
        self.codecs(&corpus, &mut rows)?;
        self.disk(&base, &mut rows)?;
        let machine = Machine::here();
        let setting = format!("{}, codecs: {} · {}", units::bytes(self.mem), corpus.title(), machine.title("not used"));
        let lines = |row: &Row| {
            let bar = Bar { side: Side::Disk, ms: row.median(crate::rows::Side::Ours), remark: String::new() };
            Line { title: row.title.clone(), bars: vec![bar], note: row.memory.clone() }
        };
        let groups = vec![Group { title: units::bytes(self.mem), lines: rows.iter().map(lines).collect() }];
        let chart = Chart {
            title: "What the machine does on its own",
            setting: &setting,
            legend: &[(Side::Disk, "alone, all cores")],
            notes: "memory",
            axis: "time",
            groups,
        };
        let text = format!("{setting}\n{}", machine.warning());
        self.common.files.publish(text, &machine, &Aims::none(), &rows, || chart.svg())
    }

    fn jobs(plan: &Plan) -> Vec<Job> {
        let job = Job::new(Self::NAME, "", 30).mem(plan).runs("--runs", plan.pairs.min(3)).dir(plan).corpus(plan);
        vec![job]
    }
}

impl Limits {
    fn memory(&self, base: &Path, rows: &mut Vec<Row>) -> Result<(), String> {
        let [mut fresh, mut warm, mut loopback, mut scan, mut look] = [const { Vec::new() }; 5];
        for run in 1..=self.runs {
            at_hand::have(2 * self.mem)?;
            let copy = Copy::new(base, self.mem)?;
            fresh.push(copy.once(cores())?);
            warm.push(copy.once(cores())?);
            drop(copy);
            at_hand::have(self.mem)?;
            look.push(Zeros::new(base, self.mem)?.look(cores())?);
            loopback.push(loopback::once(self.mem, cores())?);
            scan.push(self.mem as f64 / machine::scan_bandwidth(cores())? * 1e3);
            say(&format!("memory, run {run} of {}: copied in {} ms", self.runs, units::short(fresh[fresh.len() - 1])));
        }
        rows.push(self.row("memory copied", FRESH, fresh));
        rows.push(self.row("memory copied", WARM, warm));
        rows.push(self.row("memory read", WARM, scan));
        rows.push(self.row("zeros found from outside", WARM, look));
        rows.push(self.row("sockets of this host", "", loopback));
        Ok(())
    }

    fn codecs(&self, corpus: &Corpus, rows: &mut Vec<Row>) -> Result<(), String> {
        let packets: Vec<&[u8]> = corpus.packets(PACKET_BYTES).collect();
        let measured = packets.iter().map(|packet| packet.len() as u64).sum();
        for (method, name) in METHODS {
            let (mut encode, mut decode, mut ratio) = (Vec::new(), Vec::new(), 1.0);
            for _ in 0..self.runs {
                let run = codec::alone(method, &packets, cores(), None)?;
                encode.push(scaled(run.encode_ms, measured, self.mem));
                decode.push(scaled(run.decode_ms, measured, self.mem));
                ratio = run.ratio;
            }
            say(&format!("{name}: encoded in {} ms, ratio {}", units::short(encode[0]), units::short(ratio)));
            rows.push(self.row(&format!("{name} encodes"), "", encode).fact("ratio", units::short(ratio), ""));
            rows.push(self.row(&format!("{name} decodes"), "", decode));
        }
        Ok(())
    }

    fn disk(&self, base: &Path, rows: &mut Vec<Row>) -> Result<(), String> {
        let folder = Scratch::within(&self.dir).map_err(|error| error.to_string())?;
        if !disk::does_direct_io(folder.path())? {
            say(&format!("the file system of {} does no direct I/O: the disk is left out", self.dir.display()));
            return Ok(());
        }
        let (mut all, mut scattered) = (Vec::new(), Vec::new());
        for run in 1..=self.runs {
            scattered.push(disk::written_scattered(folder.path(), self.mem)?);
            let disk = disk::measure(folder.path(), base, self.mem)?;
            say(&format!("the disk, run {run} of {}: written in {} ms", self.runs, units::short(disk.write_ms)));
            all.push(disk);
        }
        let each = |of: fn(&DiskRun) -> f64| all.iter().map(of).collect::<Vec<_>>();
        let mut written = |title, ms, cpu_seconds: Vec<f64>| {
            let cpu = Spread::of(cpu_seconds).median / (self.mem as f64 / 1e9);
            rows.push(self.row(title, "direct I/O", ms).fact("CPU s/GB", units::short(cpu), ""));
        };
        written("the disk written", each(|run| run.write_ms), each(|run| run.write_cpu_seconds));
        let (ms, cpu_seconds) = scattered.into_iter().map(|run| (run.ms, run.cpu_seconds)).unzip();
        written("the disk written, pages of 4 KiB", ms, cpu_seconds);
        rows.push(self.row("the disk read", "direct I/O", each(|run| run.read_ms)));
        rows.push(self.row("the disk read into memory", FRESH, each(|run| run.fill_ms)));
        rows.push(self.row("the disk read through the page cache", "page cache", each(|run| run.cached_ms)));
        Ok(())
    }

    fn row(&self, title: &str, memory: &str, ms: Vec<f64>) -> Row {
        let row = Row::of(title, memory, ms, Vec::new());
        let gb_per_s = self.mem as f64 / 1e6 / row.median(crate::rows::Side::Ours);
        row.fact("GB/s", units::short(gb_per_s), "")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_of_as_many_bytes_as_were_asked_for() {
        assert_eq!(scaled(10.0, 1 << 20, 1 << 22), 40.0);
        assert_eq!([0, 5, 1 << 19, 1 << 40].map(measured), [1 << 19, 1 << 19, 1 << 19, MOST_BYTES]);
        let odd = copy(Path::new("/dev/shm"), (1 << 20) + 5, FRESH).unwrap();
        assert!(odd.value > 0.0, "{odd:?}");
        let corpus = Corpus::new(None, 4 << 20).unwrap();
        assert_eq!(codec("auto", &corpus, 1 << 20, None).unwrap(), None);
        let memory = |state| Some((Path::new("/dev/shm"), state));
        for (into, what) in
            [(None, "zstd alone"), (memory(FRESH), "zstd alone, fresh"), (memory(WARM), "zstd alone, warm")]
        {
            let limit = codec("zstd", &corpus, 1 << 20, into).unwrap().unwrap();
            assert!(limit.what == what && limit.value > 0.0, "{limit:?}");
        }
    }
}
