//! `transship save --all-of`: all domains of a libvirt, each by a process of its own: whatever befalls one, the others
//! go on.
use std::{
    fs,
    io::{self, BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc,
    },
    thread,
};

use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use serde_json::Value;
use transship_vmm::qemu::libvirt::{ActiveDomain, active};

use super::{
    Request,
    overall::{self, Counts},
};
use crate::{
    args::{FileFormat, SaveArgs},
    checks::Checks,
    failure::Failure,
    flags, output,
    signals::Watcher,
    units::{Bytes, Time},
};

/// This program, also when its file was replaced or removed since it was started.
const OURSELVES: &str = "/proc/self/exe";
/// How many at a time.
const PARALLEL: u8 = 2;

pub(super) fn run(args: &SaveArgs, of: &str) -> Result<(), Failure> {
    let mut plan = SaveAll::check(args, of)?;
    let domains = active(plan.uri.as_deref())?;
    plan.share(args, domains.len());
    fs::create_dir_all(&plan.folder)
        .map_err(|error| Failure::Failed(format!("can't make {}: {error}", plan.folder.display())))?;
    let running = Arc::new(Running::default());
    let cancelled = Arc::clone(&running);
    let _signals = Watcher::start(move |_| {
        output::say("cancelling; all domains run on");
        cancelled.cancel();
    })?;
    let (count, bytes) = (domains.len(), domains.iter().map(|domain| domain.memory_bytes).sum());
    let queue = Mutex::new(domains.into_iter());
    let saved: Mutex<Vec<Saved>> = Mutex::new(Vec::new());
    let now = || {
        let (ended, ended_bytes) = lock(&saved).iter().fold((0, 0), |(n, sum), one| (n + 1, sum + one.memory_bytes));
        (Counts { domains: count, ended, bytes, ended_bytes }, running.list())
    };
    thread::scope(|scope| {
        let (save, over) = mpsc::channel::<()>();
        for _ in 0..plan.parallel {
            let save = save.clone();
            scope.spawn(|| {
                while let Some(domain) = next(&queue, &running) {
                    let one = plan.save(&domain, &running);
                    output::complain(&format!("{}: {}", one.domain, one.in_words()));
                    lock(&saved).push(one);
                }
                // The last one ends the bar.
                drop(save);
            });
        }
        drop(save);
        overall::show(&over, &now);
    });
    let mut saved = saved.into_inner().unwrap_or_else(PoisonError::into_inner);
    saved.sort_by(|one, other| one.domain.cmp(&other.domain));
    let printed = if args.json { output::json(&saved) } else { output::result(&table(&saved)) };
    let failed = saved.iter().filter(|one| one.code != Some(0)).count();
    match saved.iter().any(|one| one.code == Some(3)) {
        true => Err(Failure::NeedsPerson("a domain needs a person; its line says what to do".into())),
        false if failed > 0 => Err(Failure::Failed(format!("{failed} of {} domains were not saved", saved.len()))),
        false if running.is_cancelled() => Err(Failure::Failed("cancelled; all domains run on".into())),
        false => printed.map_err(Failure::from),
    }
}

fn next(queue: &Mutex<impl Iterator<Item = ActiveDomain>>, running: &Running) -> Option<ActiveDomain> {
    if running.is_cancelled() { None } else { lock(queue).next() }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What was asked for.
struct SaveAll {
    uri: Option<String>,
    folder: PathBuf,
    parallel: u8,
    is_libvirts: bool,
    /// Of all together.
    rate: Option<u64>,
    /// For each process.
    words: Vec<String>,
}

impl SaveAll {
    fn check(args: &SaveArgs, of: &str) -> Result<Self, Failure> {
        let mut checks = Checks::default();
        let Some(uri) = of.strip_prefix("libvirt:") else {
            checks.mistake(format!("--all-of {of:?}: write libvirt: or libvirt:URI"));
            return checks.finish(None);
        };
        if args.balloon.is_some() {
            checks.mistake("--balloon: libvirt does not know transship's balloon; leave it out".into());
        }
        let steering = &args.steering;
        if steering.hold || steering.hold_for.is_some() || steering.hold_until.is_some() {
            checks.mistake("--hold: each domain would wait in its turn; save them by one command each".into());
        }
        if steering.control.is_some() {
            checks.mistake("--control: each domain has a process and a socket of its own; leave it out".into());
        }
        let parallel = flags::count(&mut checks, "--parallel", args.parallel.as_deref(), PARALLEL);
        let rate = flags::bandwidth(&mut checks, args.bandwidth.as_deref());
        let plan = (|| {
            let (parallel, rate) = (parallel?, rate?);
            Some(Self {
                uri: (!uri.is_empty()).then(|| uri.to_owned()),
                folder: PathBuf::from(&args.to),
                parallel,
                is_libvirts: matches!(args.format, FileFormat::Libvirt | FileFormat::LibvirtSparse),
                rate,
                words: Vec::new(),
            })
        })();
        let plan = checks.finish(plan)?;
        // What is wrong for one is wrong for all, and is said once.
        let one = SaveArgs { vm: Some("libvirt:any".into()), all_of: None, bandwidth: None, ..args.clone() };
        Request::check(&one)?;
        Ok(plan)
    }

    /// Each of so many domains has its share of the rate, so that all that run at once keep to it together.
    fn share(&mut self, args: &SaveArgs, domains: usize) {
        let at_once = usize::from(self.parallel).min(domains).max(1) as u64;
        self.words = words(args, self.rate.map(|rate| (rate / at_once).max(flags::BANDWIDTH_MIN)));
    }

    fn save(&self, domain: &ActiveDomain, running: &Running) -> Saved {
        let file = self.folder.join(format!("{}.save", domain.address.domain));
        let mut saved = Saved::of(domain, &file, self.is_libvirts);
        let vm = domain.address.to_string();
        let mut command = Command::new(OURSELVES);
        command.args(["save", "--json", "--vm", &vm, "--to", &format!("file:{}", file.display())]).args(&self.words);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if let Err(error) = running.run(command, &mut saved) {
            saved.error = Some(format!("can't start a process: {error}"));
        }
        saved
    }
}

/// The flags that each process gets as they were given.
fn words(args: &SaveArgs, share: Option<u64>) -> Vec<String> {
    let mut words = vec![format!("--direct-io={}", args.direct_io), "--format".into(), name(args.format)];
    let mut add = |flag: &str, value: Option<String>| {
        words.push(flag.to_owned());
        words.extend(value);
    };
    for (flag, given) in [
        ("--paused", args.paused),
        ("--live", args.live),
        ("--background", args.background),
        ("--resume", args.resume),
        ("--stay-stopped", args.stay_stopped),
        ("--allow-untracked-writers", args.allow_untracked_writers),
    ] {
        if given {
            add(flag, None);
        }
    }
    add("--downtime", Some(args.downtime.clone()));
    add("--max-rounds", Some(args.max_rounds.clone()));
    add("--tracker", Some(name(args.tracker)));
    add("--converge", Some(name(args.converge)));
    add("--io", Some(name(args.io)));
    for (flag, value) in
        [("--channels", &args.channels), ("--deadline", &args.deadline), ("--max-downtime", &args.max_downtime)]
    {
        if value.is_some() {
            add(flag, value.clone());
        }
    }
    match &args.disks {
        None => {}
        Some(None) => add("--disks", None),
        Some(Some(folder)) => add(&format!("--disks={}", folder.display()), None),
    }
    if args.sandbox.no_sandbox {
        add("--no-sandbox", None);
    }
    if args.sandbox.user.is_some() {
        add("--user", args.sandbox.user.clone());
    }
    if let Some(share) = share {
        add("--bandwidth", Some(format!("{share}B/s")));
    }
    words
}

/// As it is written on a command line.
fn name(value: impl clap::ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// The processes that run now.
#[derive(Default)]
struct Running {
    /// With the memory of each one's domain.
    pids: Mutex<Vec<(Pid, u64)>>,
    /// Relaxed: `pids` is locked beside it.
    cancelled: AtomicBool,
}

impl Running {
    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Relaxed)
    }

    /// Numbers of the processes, and the memory of each one's domain.
    fn list(&self) -> Vec<(i32, u64)> {
        lock(&self.pids).iter().map(|(pid, memory)| (pid.as_raw_nonzero().get(), *memory)).collect()
    }

    /// Ends all of them as Ctrl-C does.
    fn cancel(&self) {
        let pids = lock(&self.pids);
        self.cancelled.store(true, Relaxed);
        for (pid, _) in pids.iter() {
            // One that has just ended needs no word.
            let _ = kill_process(*pid, Signal::TERM);
        }
    }

    /// Runs one to its end.
    fn run(&self, mut command: Command, saved: &mut Saved) -> io::Result<()> {
        let mut child = {
            let mut pids = lock(&self.pids);
            if self.is_cancelled() {
                saved.error = Some("cancelled; the domain runs on".into());
                return Ok(());
            }
            let child = command.spawn()?;
            pids.extend(pid(&child).map(|pid| (pid, saved.memory_bytes)));
            child
        };
        let (talk, result) = (child.stderr.take(), child.stdout.take());
        let listening = thread::spawn(move || talk.and_then(last_line));
        saved.report = result.and_then(report);
        saved.error = listening.join().ok().flatten();
        // A number is no other process's until it was waited for.
        let ended = {
            let own = pid(&child);
            let status = child.wait();
            lock(&self.pids).retain(|(pid, _)| Some(*pid) != own);
            status?
        };
        saved.code = ended.code();
        if saved.code == Some(0) {
            saved.error = None;
        }
        Ok(())
    }
}

fn pid(child: &Child) -> Option<Pid> {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw)
}

/// What it says last is why it failed.
fn last_line(talk: impl Read) -> Option<String> {
    let lines = BufReader::new(talk).lines().map_while(Result::ok);
    lines.last().map(|line| line.strip_prefix("transship: ").unwrap_or(&line).to_owned())
}

fn report(result: ChildStdout) -> Option<Value> {
    serde_json::from_reader(result).ok()
}

/// How it went with one.
#[derive(Debug, Serialize)]
struct Saved {
    domain: String,
    memory_bytes: u64,
    file: PathBuf,
    /// The exit code of its process.
    code: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// How to bring it back.
    restore: String,
    report: Option<Value>,
}

impl Saved {
    fn of(domain: &ActiveDomain, file: &Path, is_libvirts: bool) -> Self {
        let quoted = format!("'{}'", file.display().to_string().replace('\'', r"'\''"));
        let restore = match (is_libvirts, &domain.address.uri) {
            (true, Some(uri)) => format!("virsh -c '{uri}' restore {quoted}"),
            (true, None) => format!("virsh restore {quoted}"),
            (false, _) => format!("transship restore --vm qemu:SOCKET --from {quoted}"),
        };
        Self {
            domain: domain.address.domain.clone(),
            memory_bytes: domain.memory_bytes,
            file: file.to_path_buf(),
            code: None,
            error: None,
            restore,
            report: None,
        }
    }

    fn in_words(&self) -> String {
        let number = |name: &str| self.report.as_ref().and_then(|report| report[name].as_f64());
        match (&self.error, number("total_ms"), number("downtime_ms")) {
            (Some(error), ..) => error.clone(),
            (None, Some(total), Some(stood)) if self.code == Some(0) => {
                format!("saved in {}, stood still for {}", Time::from_ms(total), Time::from_ms(stood))
            }
            _ => format!("its process has ended without a word ({:?})", self.code),
        }
    }
}

fn table(saved: &[Saved]) -> String {
    let mut text = String::new();
    for one in saved {
        text.push_str(&format!("{:<24} {:>9}  {}\n", one.domain, Bytes(one.memory_bytes).to_string(), one.in_words()));
        if one.code == Some(0) {
            text.push_str(&format!("{:<24} {:>9}  {}\n", "", "", one.restore));
        }
    }
    if text.is_empty() { "no domain runs\n".into() } else { text }
}
