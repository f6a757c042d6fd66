//! `transship fork`: an image of a running guest, and clones of it, each in a QEMU that is started here.
//!
//! The QEMUs belong to nobody here once they are there: each leads a process group of its own, says what it says into a
//! file, and goes on if this process is killed; one that has no guest by then goes on waiting for it.
use std::{
    fs::File,
    io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use serde::Serialize;
use transship_engine::{
    CloneReport, CloneSource, Error, FileUri, Format, Progress, Report, RestoreOptions, SaveOptions, Then, Way,
    clone_guest, save_guest,
};
use transship_vmm::{AttachOptions, Tracking, VmAddress, attach_destination, attach_source};

use super::clones::{After, quoted_arguments};
use crate::{
    args::ForkArgs,
    checks::Checks,
    failure::Failure,
    flags,
    guard::GuardProcess,
    output,
    progress::Display,
    sandbox::Sandbox,
    signals::{self, Side, Watcher},
    summary, units,
};

/// How long a QEMU may take until it listens.
const START_WAIT: Duration = Duration::from_secs(60);
/// How often it is looked for, as nothing says that a socket is listened at.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// A socket that somebody listens at, as /proc/net/unix shows it (`__SO_ACCEPTCON`).
const LISTENS: &str = "00010000";
const CLONES_MAX: u32 = 10_000;
/// Of what a QEMU has said last.
const SAID_MAX: usize = 400;

pub(crate) fn run(args: &ForkArgs) -> Result<(), Failure> {
    let request = Request::check(args)?;
    let progress = Progress::new();
    signals::outlive_file_limits()?;
    let _signals = Watcher::cancelling(&progress, Side::Fork)?;
    let mut report = ForkReport::default();
    let outcome = fork(&request, &progress, &mut report);
    summary::forked(outcome, report, args.json)
}

/// What became of a fork.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ForkReport {
    /// The image.
    pub(crate) image: Report,
    /// From the call until the last clone ran.
    pub(crate) total_ms: f64,
    /// From the complete image until the last clone ran.
    pub(crate) clones_ms: f64,
    pub(crate) clones: Vec<Forked>,
    pub(crate) error: Option<String>,
}

/// One clone.
#[derive(Debug, Serialize)]
pub(crate) struct Forked {
    pub(crate) number: u32,
    pub(crate) vm: String,
    /// The process that was started.
    pub(crate) pid: u32,
    /// Until its QEMU waited.
    pub(crate) start_ms: f64,
    pub(crate) clone: Option<CloneReport>,
    pub(crate) error: Option<String>,
}

fn fork(request: &Request, progress: &Arc<Progress>, report: &mut ForkReport) -> Result<(), Error> {
    let begin = Instant::now();
    save(request, progress, &mut report.image)?;
    let made = Instant::now();
    if let Some(exec) = &request.exec {
        let clones = Clones {
            folder: &request.folder,
            image: CloneSource::open(&request.folder)?,
            command: exec.replace("{args}", &quoted_arguments(&request.folder)?),
            after: request.after.as_deref(),
            next: AtomicU32::new(1),
            count: request.count,
            progress,
            done: Mutex::default(),
        };
        report.clones = clones.all()?;
        report.clones_ms = made.elapsed().as_secs_f64() * 1e3;
    }
    report.total_ms = begin.elapsed().as_secs_f64() * 1e3;
    let failed: Vec<&Forked> = report.clones.iter().filter(|clone| clone.error.is_some()).collect();
    match failed.first() {
        None => Ok(()),
        Some(first) => {
            let (count, all) = (failed.len(), report.clones.len());
            let (number, why) = (first.number, first.error.as_deref().unwrap_or_default());
            Err(Error::unfit(format!(
                "{count} of {all} clones failed; the guest and the others run; clone {number}: {why}"
            )))
        }
    }
}

/// The guest is let go of when this returns, and the display with it.
fn save(request: &Request, progress: &Arc<Progress>, report: &mut Report) -> Result<(), Error> {
    let mut guard = GuardProcess::start(&request.vm_text, &request.sandbox)?;
    let mut guest = attach_source(&request.vm, request.attach.clone())?;
    let _display = Display::start(progress).map_err(|source| Error::Io { what: "start a thread".into(), source })?;
    let to = FileUri::path(&request.folder);
    save_guest(guest.as_mut(), Some(&mut guard), &to, &request.options, progress, report)
}

/// The clones, which several threads make.
struct Clones<'a> {
    folder: &'a Path,
    image: CloneSource,
    /// What starts one, with `{dir}` and `{n}`.
    command: String,
    after: Option<&'a str>,
    next: AtomicU32,
    count: u32,
    progress: &'a Progress,
    done: Mutex<Vec<Forked>>,
}

impl Clones<'_> {
    fn all(self) -> Result<Vec<Forked>, Error> {
        // While one QEMU starts another loads: half of the time each waits for something.
        let threads = thread::available_parallelism().map_or(2, |cores| cores.get() as u32 * 2).min(self.count);
        thread::scope(|scope| {
            for _ in 0..threads {
                let spawned = thread::Builder::new().name("clone".into()).spawn_scoped(scope, || self.some());
                spawned.map_err(|source| Error::Io { what: "start a thread".into(), source })?;
            }
            Ok::<_, Error>(())
        })?;
        let mut done = self.done.into_inner().unwrap_or_else(PoisonError::into_inner);
        done.sort_unstable_by_key(|clone| clone.number);
        Ok(done)
    }

    fn some(&self) {
        loop {
            let number = self.next.fetch_add(1, Relaxed);
            if number > self.count {
                return;
            }
            let clone = self.one(number);
            self.done.lock().unwrap_or_else(PoisonError::into_inner).push(clone);
        }
    }

    fn one(&self, number: u32) -> Forked {
        let vm = VmAddress::Qemu(self.folder.join(format!("{number}.qmp")));
        let VmAddress::Qemu(socket) = &vm else { unreachable!("made above") };
        let address = format!("qemu:{}", socket.display());
        let mut forked = Forked { number, vm: address, pid: 0, start_ms: 0.0, clone: None, error: None };
        let begin = Instant::now();
        let mut child = match self.start(number) {
            Ok(child) => child,
            Err(why) => {
                forked.error = Some(why);
                return forked;
            }
        };
        forked.pid = child.id();
        let outcome = self
            .wait_listening(socket, &mut child, begin + START_WAIT)
            .and_then(|()| self.fill(&vm, begin, &mut forked));
        if let Err(why) = outcome {
            let said = self.said(number);
            // It has no guest, and nobody will bring one. The process group is its own.
            if let Some(group) = rustix::process::Pid::from_raw(child.id() as i32) {
                let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            }
            let _ = child.wait();
            forked.error = Some(if said.is_empty() { why } else { format!("{why}; it said: {said}") });
            return forked;
        }
        if let Some(command) = self.after {
            forked.error = After::of(command, &vm, number).and_then(|after| after.run()).err();
        }
        forked
    }

    fn start(&self, number: u32) -> Result<Child, String> {
        if self.progress.is_cancelled() {
            return Err("cancelled".into());
        }
        let failed = |error: io::Error| format!("can't start it: {error}");
        let folder = self.folder.display().to_string();
        let command = self.command.replace("{dir}", &folder).replace("{n}", &number.to_string());
        let log = File::create(self.folder.join(format!("{number}.log"))).map_err(failed)?;
        let mut shell = Command::new("sh");
        shell.args(["-c", &command]).stdin(Stdio::null()).stderr(log.try_clone().map_err(failed)?).stdout(log);
        // A Ctrl-C in the terminal is not for it.
        shell.process_group(0).spawn().map_err(failed)
    }

    fn wait_listening(&self, socket: &Path, child: &mut Child, deadline: Instant) -> Result<(), String> {
        while !is_listened_at(socket) {
            if let Ok(Some(status)) = child.try_wait() {
                return Err(format!("its QEMU ended ({status}) before it listened at {}", socket.display()));
            }
            if self.progress.is_cancelled() {
                return Err("cancelled".into());
            }
            if Instant::now() > deadline {
                let seconds = START_WAIT.as_secs();
                return Err(format!("nothing listens at {} after {seconds} s", socket.display()));
            }
            thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// Brings the guest into a QEMU that was started at `begin`. It listens before its machine is there, and waits when
    /// it answers.
    fn fill(&self, vm: &VmAddress, begin: Instant, forked: &mut Forked) -> Result<(), String> {
        let mut guest = attach_destination(vm).map_err(|error| error.to_string())?;
        let since = guest.answered().unwrap_or_else(Instant::now);
        forked.start_ms = since.duration_since(begin).as_secs_f64() * 1e3;
        let (options, mut report) =
            (RestoreOptions { run: Some(true), ..RestoreOptions::default() }, Report::default());
        let outcome = clone_guest(guest.as_mut(), &self.image, &options, None, since, &Progress::new(), &mut report);
        forked.clone = report.clone;
        outcome.map_err(|error| error.to_string())
    }

    /// The end of what its QEMU has said.
    fn said(&self, number: u32) -> String {
        let text = std::fs::read(self.folder.join(format!("{number}.log"))).unwrap_or_default();
        let text = String::from_utf8_lossy(&text[text.len().saturating_sub(SAID_MAX)..]).into_owned();
        output::one_line(&text)
    }
}

/// Whether somebody listens at a socket. To connect would be to be served.
fn is_listened_at(socket: &Path) -> bool {
    if !socket.exists() {
        return false;
    }
    let sockets = std::fs::read("/proc/net/unix").unwrap_or_default();
    let sockets = String::from_utf8_lossy(&sockets);
    let path = socket.to_string_lossy();
    sockets.lines().any(|line| {
        let mut words = line.split_ascii_whitespace();
        words.nth(3) == Some(LISTENS) && line.ends_with(&*path)
    })
}

/// What was asked for, checked as far as possible without touching a VM.
struct Request {
    vm: VmAddress,
    vm_text: String,
    folder: PathBuf,
    options: SaveOptions,
    attach: AttachOptions,
    /// Of the guard.
    sandbox: Sandbox,
    count: u32,
    exec: Option<String>,
    after: Option<String>,
}

impl Request {
    fn check(args: &ForkArgs) -> Result<Self, Failure> {
        let mut checks = Checks::default();
        let defaults = SaveOptions::default();
        let vm = checks.read("--vm", &args.vm, str::parse::<VmAddress>);
        let channels = flags::count(&mut checks, "--channels", args.channels.as_deref(), defaults.channels);
        let count = match &args.count {
            Some(text) => {
                let bounds = (1, u64::from(CLONES_MAX));
                checks.within("--count", text, units::count, bounds, "1 to 10000").map(|count| count as u32)
            }
            None => Some(1),
        };
        let sandbox = Sandbox::by_default()?;
        let folder = checks.read("--into", &args.into.display().to_string(), |_| std::path::absolute(&args.into));
        let request = (|| {
            Some(Self {
                vm: vm?,
                vm_text: args.vm.clone(),
                folder: folder?,
                options: SaveOptions {
                    way: Way::Background,
                    then: Then::Resume,
                    channels: channels?,
                    format: Format::Raw,
                    ..defaults
                },
                attach: flags::attach(args.allow_untracked_writers, Tracking::default(), None),
                sandbox,
                count: count?,
                exec: args.exec.clone(),
                after: args.after.clone(),
            })
        })();
        checks.finish(request)
    }
}
