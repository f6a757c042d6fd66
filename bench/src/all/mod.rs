//! `transship bench all`: every table in one go, into one folder.
pub(crate) mod folder;
mod page;
pub(crate) mod plan;
mod progress;

use std::{
    env,
    fs::{self, File},
    hash::{DefaultHasher, Hasher},
    io::Read,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use transship_lab::{Process, binary, lines::Mark};

use self::{
    folder::{Done, Folder, Setup},
    plan::{Job, Plan},
    progress::Progress,
};
use crate::{
    guest_memory::MemoryKind,
    interrupt,
    machine::{self, Machine},
    output::say,
    pair::text,
    rows::Row,
    tables, units,
};

const LONG_ABOUT: &str = "\
Runs every table, one after the other, and puts the results into one folder: index.html, a page that shows all of them \
and needs no network, and for each run of the command its JSON, its picture and what it prints. Each result is there as \
soon as it is measured. If the run is interrupted, --resume goes on behind the last result; it refuses if the machine, \
QEMU, transship or the options are others.

A row is \"ahead\" or \"behind\" where the interval of its paired runs is on one side of 1, and \"even\" elsewhere \
(docs/benchmarks.md).

--quick is for a quarter of an hour or so on two cores, everything takes hours. Keep the machine otherwise idle.";

const QUICK_BYTES: u64 = 512 << 20;
const QUICK_PAIRS: u32 = 5;
const PAIRS: u32 = 9;
/// How often the bar moves when a table says nothing.
const TICK: Duration = Duration::from_millis(500);

/// Every table, into one folder.
#[derive(Debug, Clone, clap::Args)]
#[command(long_about = LONG_ABOUT)]
pub struct All {
    /// The folder of the results
    #[arg(long, value_name = "FOLDER")]
    pub out: PathBuf,
    /// Less memory, fewer rows and fewer pairs
    #[arg(long)]
    pub quick: bool,
    /// Go on with the interrupted run in this folder
    #[arg(long)]
    pub resume: bool,
    /// Memory of the guests [default: 512M with --quick, each table's own otherwise]
    #[arg(long, value_name = "SIZE", value_parser = units::memory)]
    pub mem: Option<u64>,
    /// Runs of both for each row [default: 5 with --quick, 9 otherwise]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub pairs: Option<u32>,
    /// Only these tables
    #[arg(long, value_name = "TABLE,...", value_delimiter = ',')]
    pub tables: Vec<String>,
    /// A folder on the disk to measure
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,
    /// Fill memory with the files of this folder, repeatedly, where it is to be compressed
    #[arg(long, value_name = "DIR")]
    pub corpus: Option<PathBuf>,
    /// The QEMU to use and to compare with
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64")]
    pub peer: String,
    /// Where guest memory lies, in the tables where it can be chosen: file, ram, memfd, huge
    #[arg(long, value_enum, value_name = "KIND", default_value = "file", hide_possible_values = true)]
    pub backend: MemoryKind,
}

impl All {
    fn plan(&self) -> Plan {
        let Self { quick, mem, pairs, dir, corpus, peer, tables, backend, .. } = self.clone();
        Plan {
            quick,
            mem: mem.or(quick.then_some(QUICK_BYTES)),
            pairs: pairs.unwrap_or(if quick { QUICK_PAIRS } else { PAIRS }),
            dir,
            corpus,
            peer,
            backend: backend.name().to_owned(),
            tables,
        }
    }
}

/// Measures what is not measured yet, and writes the page after each.
pub(crate) fn run(all: &All) -> Result<(), String> {
    let plan = all.plan();
    let jobs = jobs(&plan)?;
    let machine = Machine::here();
    let setup = Setup { machine, qemu: qemu_version(&plan.peer)?, build: build()?, plan };
    let folder = Folder::open(&all.out, all.resume, &setup)?;
    interrupt::clean_up_in(Vec::new())?;
    let mut done: Vec<Option<Done>> = jobs.iter().map(|job| folder.done(job)).collect::<Result<_, _>>()?;
    let mut failures: Vec<(Job, String)> = Vec::new();
    let mut progress = Progress::of(&jobs);
    jobs.iter().zip(&done).filter(|(_, done)| done.is_some()).for_each(|(job, _)| progress.was_done(job));
    for (place, job) in jobs.iter().enumerate() {
        if done[place].is_some() {
            continue;
        }
        progress.begins(job, place + 1, jobs.len());
        match measure(&folder, job, &progress) {
            Ok(result) => {
                folder.keep(&result)?;
                done[place] = Some(result);
            }
            // The others are worth measuring, too.
            Err(why) => {
                say(&format!("{}: {why}", job.name));
                failures.push((job.clone(), why));
            }
        }
        progress.ended();
        let results: Vec<&Done> = done.iter().flatten().collect();
        folder.write("index.html", &page::page(&setup, &results, &failures, jobs.len()))?;
    }
    progress.finish();
    let results: Vec<&Done> = done.iter().flatten().collect();
    folder.write("index.html", &page::page(&setup, &results, &failures, jobs.len()))?;
    println!("{}", page::summary(&results));
    println!("{}", folder.join("index.html").display());
    match failures.as_slice() {
        [] => Ok(()),
        list => {
            let names: Vec<&str> = list.iter().map(|(job, _)| job.name.as_str()).collect();
            Err(format!("{} failed; the rest is measured; try them again with --resume", names.join(", ")))
        }
    }
}

/// Of the tables that were named.
fn jobs(plan: &Plan) -> Result<Vec<Job>, String> {
    let all = tables::jobs(plan);
    if let Some(unknown) = plan.tables.iter().find(|name| !all.iter().any(|job| job.table() == *name)) {
        let mut names: Vec<&str> = all.iter().map(Job::table).collect();
        names.dedup();
        return Err(format!("--tables {unknown}: there is no such table; there are {}", names.join(", ")));
    }
    let is_wanted = |job: &Job| plan.tables.is_empty() || plan.tables.iter().any(|name| name == job.table());
    Ok(all.into_iter().filter(is_wanted).collect())
}

/// Runs the command, and takes its rows.
fn measure(folder: &Folder, job: &Job, progress: &Progress) -> Result<Done, String> {
    let load_before = machine::load();
    let begin = Instant::now();
    let (json, svg) = (folder.join(&format!("{}.json", job.name)), folder.join(&format!("{}.svg", job.name)));
    let mut command = Command::new(env::current_exe().map_err(|error| format!("this program's own path: {error}"))?);
    command.args(&job.arguments).arg("--json").arg(&json).arg("--svg").arg(&svg);
    let mut process = Process::start(command).map_err(text)?;
    interrupt::table_runs(Some(process.pid()));
    let followed = follow(&mut process, progress);
    interrupt::table_runs(None);
    followed?;
    let status = process.wait(Duration::from_secs(60)).map_err(text)?;
    if !status.success() {
        let said = process.stderr().all();
        let why = said.last().map_or("it does not say why", |line| line.trim_start_matches("transship bench: "));
        return Err(why.to_owned());
    }
    let printed = process.stdout().to_the_end().map_err(text)?.join("\n");
    folder.write(&format!("{}.txt", job.name), &format!("{printed}\n"))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(Done {
        job: job.clone(),
        rows: rows(&json)?,
        text: printed,
        took_s: begin.elapsed().as_secs_f64(),
        ended_at: now.as_secs(),
        load_before,
    })
}

/// Shows what a table says, until it ends.
fn follow(process: &mut Process, progress: &Progress) -> Result<(), String> {
    let mut mark = Mark::START;
    loop {
        let next = |line: &str| Some(line.trim_start_matches("transship: ").to_owned());
        match process.stderr().wait_for(TICK, mark, "a line", next) {
            Ok((line, behind)) => {
                progress.says(&line);
                mark = behind;
            }
            // Nothing for a while, or nothing any more.
            Err(_) if process.ended().map_err(text)?.is_some() => return Ok(()),
            Err(_) => progress.tick(),
        }
    }
}

/// Of the JSON that a table writes.
fn rows(json: &Path) -> Result<Vec<Row>, String> {
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", json.display());
    let read = fs::read_to_string(json).map_err(|error| failed(&error))?;
    let mut value: serde_json::Value = serde_json::from_str(&read).map_err(|error| failed(&error))?;
    serde_json::from_value(value["rows"].take()).map_err(|error| failed(&error))
}

/// The first line of `--version`.
fn qemu_version(peer: &str) -> Result<String, String> {
    let output = Command::new(peer).arg("--version").output();
    let output = output.map_err(|error| format!("can't start {peer}: {error}; name a QEMU with --peer"))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let line = said.lines().next().unwrap_or("without a version");
    Ok(line.trim_start_matches("QEMU emulator version ").to_owned())
}

/// Something that differs between two builds of transship or of this program.
fn build() -> Result<String, String> {
    let own = env::current_exe().map_err(|error| format!("this program's own path: {error}"))?;
    let mut hasher = DefaultHasher::new();
    for program in [own, binary().map_err(text)?] {
        let failed = |error| format!("{}: {error}", program.display());
        let (mut file, mut piece) = (File::open(&program).map_err(failed)?, vec![0; 1 << 20]);
        loop {
            match file.read(&mut piece).map_err(failed)? {
                0 => break,
                read => hasher.write(&piece[..read]),
            }
        }
    }
    Ok(format!("{:016x}", hasher.finish()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::parsed::parsed;

    #[test]
    fn the_defaults_are_those_of_the_documentation() {
        let plan = parsed::<All>(&["--out", "x"]).unwrap().plan();
        assert_eq!((plan.quick, plan.mem, plan.pairs), (false, None, 9));
        let plan = parsed::<All>(&["--out", "x", "--quick"]).unwrap().plan();
        assert_eq!((plan.quick, plan.mem, plan.pairs), (true, Some(512 << 20), 5));
        let plan = parsed::<All>(&["--out", "x", "--quick", "--mem", "64M", "--pairs", "1"]).unwrap().plan();
        assert_eq!((plan.mem, plan.pairs), (Some(64 << 20), 1));
        assert!(parsed::<All>(&[]).is_err(), "a folder has to be named");
    }

    #[test]
    fn a_table_that_is_not_there_is_named() {
        let plan = Plan { tables: vec!["codecs".into()], ..Plan::default() };
        assert!(jobs(&plan).unwrap().iter().all(|job| job.table() == "codecs"));
        let error = jobs(&Plan { tables: vec!["codex".into()], ..plan }).unwrap_err();
        assert!(error.contains("codex") && error.contains("zero-pages"), "{error}");
    }
}
