//! Flags that several subcommands have: their bounds, and what is said where they are wrong.
use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use transship_engine::{AtStopCommand, DirectIo, Format, HoldOptions, UserCommand};
use transship_vmm::{AttachOptions, Tracking};

use crate::{
    args::{Converge, SteeringArgs, Tracker},
    checks::Checks,
    hints, units,
};

/// Bytes a second. Below this a packet of 128 pages would take so long that a pause could not be told from a dead link.
pub(crate) const BANDWIDTH_MIN: u64 = 1 << 20;
const DOWNTIME_MIN: Duration = Duration::from_millis(1);
const DOWNTIME_MAX: Duration = Duration::from_secs(60);
const AT_STOP_MIN: Duration = Duration::from_secs(1);
/// A destination waits for the guest for twice as long.
const AT_STOP_MAX: Duration = Duration::from_secs(60);
const DEADLINE_MIN: Duration = Duration::from_secs(1);
const DEADLINE_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
const HOLD_MIN: Duration = Duration::from_secs(1);

/// How many threads or connections: at least one. `default`: without the flag.
pub(crate) fn count(checks: &mut Checks, flag: &str, text: Option<&str>, default: u8) -> Option<u8> {
    bounded(checks, flag, text, default, (1, "1 to 255"))
}

/// How many multifd channels; a stock QEMU may have none. `default`: without the flag.
pub(crate) fn multifd_channels(checks: &mut Checks, text: Option<&str>, default: u8) -> Option<u8> {
    bounded(checks, "--channels", text, default, (0, "0 to 255"))
}

fn bounded(
    checks: &mut Checks,
    flag: &str,
    text: Option<&str>,
    default: u8,
    (least, bounds): (u64, &str),
) -> Option<u8> {
    match text {
        Some(text) => checks.within(flag, text, units::count, (least, 255), bounds)?.try_into().ok(),
        None => Some(default),
    }
}

/// Of `--bandwidth`, in bytes a second; none: as fast as possible.
pub(crate) fn bandwidth(checks: &mut Checks, text: Option<&str>) -> Option<Option<u64>> {
    let Some(text) = text else { return Some(None) };
    checks.within("--bandwidth", text, units::rate, (BANDWIDTH_MIN, u64::MAX), "at least 1MiB/s").map(Some)
}

/// How long a guest that runs may be followed.
pub(crate) struct Patience {
    pub(crate) downtime: Duration,
    pub(crate) max_downtime: Duration,
    pub(crate) max_rounds: u32,
}

impl Patience {
    /// Of `--downtime`, `--max-downtime` and `--max-rounds`.
    pub(crate) fn check(
        checks: &mut Checks,
        downtime: &str,
        max_downtime: Option<&str>,
        max_rounds: &str,
    ) -> Option<Self> {
        let bounds = (DOWNTIME_MIN, DOWNTIME_MAX);
        let downtime = checks.within("--downtime", downtime, units::time, bounds, "from 1ms to 60s");
        let max_downtime = match max_downtime {
            Some(text) => {
                let bounds = (downtime.unwrap_or(DOWNTIME_MIN), DOWNTIME_MAX);
                checks.within("--max-downtime", text, units::time, bounds, "from --downtime to 60s")
            }
            None => downtime,
        };
        let max_rounds = checks.within("--max-rounds", max_rounds, units::count, (1, 10_000), "1 to 10000");
        Some(Self { downtime: downtime?, max_downtime: max_downtime?, max_rounds: max_rounds?.try_into().ok()? })
    }
}

/// `--deadline`: none, if there is none.
pub(crate) fn deadline(checks: &mut Checks, text: Option<&str>) -> Option<Option<Duration>> {
    let Some(text) = text else { return Some(None) };
    checks.within("--deadline", text, units::time, (DEADLINE_MIN, DEADLINE_MAX), "from 1s to 168h").map(Some)
}

/// `--direct-io` of a file of this format. Without the flag it is left to us.
pub(crate) fn direct_io(checks: &mut Checks, text: Option<&str>, format: Format) -> Option<DirectIo> {
    let direct_io = match text {
        Some(text) => checks.read("--direct-io", text, str::parse::<DirectIo>)?,
        None => DirectIo::default(),
    };
    if format.is_sequential() && direct_io == DirectIo::On {
        let cure = "use it with --format mapped-ram";
        checks.mistake(format!(
            "--direct-io=on: the pages of a stream have no fixed places, which direct I/O needs; {cure}"
        ));
    }
    Some(direct_io)
}

/// `--at-stop` and its time limit. The environment tells it what is done (`command`), to what, and where it goes.
pub(crate) fn at_stop(
    checks: &mut Checks,
    shell: Option<&str>,
    timeout: &str,
    [command, vm, to]: [&str; 3],
) -> Option<Option<AtStopCommand>> {
    let bounds = (AT_STOP_MIN, AT_STOP_MAX);
    let timeout = checks.within("--at-stop-timeout", timeout, units::time, bounds, "from 1s to 60s")?;
    let Some(shell) = shell else { return Some(None) };
    let command = UserCommand { shell: shell.to_owned(), environment: environment([command, vm, to]) };
    Some(Some(AtStopCommand { command, timeout }))
}

/// What a command of the user's learns.
fn environment([command, vm, to]: [&str; 3]) -> Vec<(String, String)> {
    let environment = [("TRANSSHIP_COMMAND", command), ("TRANSSHIP_VM", vm), ("TRANSSHIP_TO", to)];
    environment.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
}

/// `--hold`, `--hold-for` and `--hold-until`; `about` as for [`at_stop`].
pub(crate) fn hold(checks: &mut Checks, args: &SteeringArgs, about: [&str; 3]) -> Option<Option<HoldOptions>> {
    let time = match &args.hold_for {
        Some(text) => {
            let bounds = (HOLD_MIN, DEADLINE_MAX);
            Some(checks.within("--hold-for", text, units::time, bounds, "from 1s to 168h")?)
        }
        None => None,
    };
    let command = |shell: &String| UserCommand { shell: shell.clone(), environment: environment(about) };
    let until = args.hold_until.as_ref().map(command);
    let is_held = args.hold || time.is_some() || until.is_some();
    Some(is_held.then_some(HoldOptions { time, until }))
}

/// All of these, by the phases in which they run.
pub(crate) fn commands(
    at_stop: &Option<AtStopCommand>,
    hold: &Option<HoldOptions>,
) -> Vec<(&'static str, UserCommand)> {
    let at_stop = at_stop.iter().flat_map(|at_stop| ["stopped", "back"].map(|phase| (phase, at_stop.command.clone())));
    let until = hold.iter().filter_map(|hold| Some(("held", hold.until.clone()?)));
    at_stop.chain(until).collect()
}

/// `--run` and `--stopped`: whether a guest is to run. None: as it did when it was saved.
pub(crate) fn run_state(run: bool, stopped: bool) -> Option<bool> {
    match (run, stopped) {
        (true, _) => Some(true),
        (_, true) => Some(false),
        _ => None,
    }
}

/// Where a file of this name is made; a link is not replaced, but the file that it points to.
pub(crate) fn folder_of(path: &Path) -> PathBuf {
    let is_link = fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink());
    let path = if is_link { fs::canonicalize(path).unwrap_or_else(|_| path.into()) } else { path.into() };
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new(".")).to_owned()
}

/// `--tracker`, together with `--converge`: only those can be held who wait.
pub(crate) fn tracking(checks: &mut Checks, tracker: Tracker, converge: Converge) -> Tracking {
    match (converge, tracker) {
        (Converge::Pace, Tracker::Auto) => Tracking::Sync,
        (Converge::Pace, Tracker::Async) => {
            let why = "the asynchronous tracker can't hold writers";
            checks.mistake(format!("--converge pace: {why}; leave out --tracker async"));
            Tracking::Sync
        }
        (_, tracker) => tracker.into(),
    }
}

/// How a source is attached to. `may_write`: what writes past the tracker is let pass.
pub(crate) fn attach(may_write: bool, tracking: Tracking, balloon: Option<&PathBuf>) -> AttachOptions {
    AttachOptions { allow_untracked_writers: may_write, tracking, balloon: balloon.cloned().map(hints::balloon) }
}

/// Of a name that the system knows, or a number.
pub(crate) fn number(
    what: &str,
    name: &str,
    find: impl Fn(&str) -> Result<Option<u32>, nix::Error>,
) -> Result<u32, String> {
    match find(name) {
        Ok(Some(number)) => Ok(number),
        Ok(None) => {
            let number = name.parse().ok().filter(|number| *number != u32::MAX); // which is none
            number.ok_or_else(|| format!("there is no {what} {name:?}; give a name or a number"))
        }
        Err(error) => Err(format!("can't look up {what} {name:?}: {error}")),
    }
}
