//! `transship move`: the source.
use std::{sync::Arc, time::Duration};

use transship_codec::{Backend, Method, SettingError, qatzip_backend};
use transship_engine::{Compress, Error, MoveOptions, Progress, Report, Uri, move_guest};
use transship_vmm::{AttachOptions, VmAddress, attach_source};

use crate::{
    args::MoveArgs,
    checks::Checks,
    failure::Failure,
    guard::Guarded,
    output,
    progress::Display,
    signals::{Side, Watcher},
    summary, units,
};

/// Below this a packet of 128 pages would take so long that a pause could not be told from a dead link.
const BANDWIDTH_MIN: u64 = 1 << 20;
const DOWNTIME_MIN: Duration = Duration::from_millis(1);
const DOWNTIME_MAX: Duration = Duration::from_secs(60);

pub(crate) fn run(args: &MoveArgs) -> Result<(), Failure> {
    let request = Request::check(args)?;
    if matches!(request.options.compress, Compress::Fixed(setting) if setting.method() == Method::Qatzip) {
        say_who_makes_qatzip();
    }
    let progress = Progress::new();
    let _signals = Watcher::cancelling(&progress, Side::Source)?;
    let mut report = Report::default();
    let outcome = move_away(&request, &progress, &mut report);
    summary::finish(outcome, report, args.json)
}

/// The guest is let go of when this returns, and the display with it, before results are printed.
fn move_away(request: &Request, progress: &Arc<Progress>, report: &mut Report) -> Result<(), Error> {
    let guest = attach_source(&request.vm, request.attach)?;
    let mut guest = Guarded::new(guest, &request.vm_text);
    let _display =
        Display::start(progress).map_err(|source| Error::Io { what: "can't start a thread".into(), source })?;
    move_guest(&mut guest, &request.to, &request.options, progress, report)
}

/// Finding out may take a device's start: once, and not while the guest's pages wait.
fn say_who_makes_qatzip() {
    output::say(&match qatzip_backend() {
        Backend::Device => "qatzip is made by a QAT device".to_owned(),
        Backend::Software { reason } => format!("qatzip is made in software: {reason}"),
    });
}

/// The codecs know nothing of `auto`, which is none of them.
fn compression(text: &str) -> Result<Compress, String> {
    text.parse().map_err(|why| match why {
        SettingError::Method { .. } => format!("{why}, or auto"),
        other => other.to_string(),
    })
}

/// What was asked for, checked as far as possible without touching a VM.
#[derive(Debug)]
struct Request {
    vm: VmAddress,
    /// As the user wrote it.
    vm_text: String,
    to: Uri,
    options: MoveOptions,
    attach: AttachOptions,
}

impl Request {
    fn check(args: &MoveArgs) -> Result<Self, Failure> {
        let mut checks = Checks::default();
        let defaults = MoveOptions::default();
        let vm = checks.read("--vm", &args.vm, str::parse::<VmAddress>);
        let to = checks.read("--to", &args.to, str::parse::<Uri>);
        let channels = match &args.channels {
            Some(text) => checks.within("--channels", text, units::count, (1, 255), "1 to 255"),
            None => Some(u64::from(defaults.channels)),
        };
        let compress = checks.read("--compress", &args.compress, compression);
        let encoders = match &args.encoders {
            Some(text) => checks.within("--encoders", text, units::count, (1, 255), "1 to 255"),
            None => Some(u64::from(defaults.encoders)),
        };
        let bandwidth = match &args.bandwidth {
            Some(text) => {
                let bounds = (BANDWIDTH_MIN, u64::MAX);
                checks.within("--bandwidth", text, units::rate, bounds, "at least 1MiB/s").map(Some)
            }
            None => Some(None),
        };
        let bounds = (DOWNTIME_MIN, DOWNTIME_MAX);
        let downtime = checks.within("--downtime", &args.downtime, units::time, bounds, "from 1ms to 60s");
        let max_rounds = checks.within("--max-rounds", &args.max_rounds, units::count, (1, 10_000), "1 to 10000");
        let request = (|| {
            Some(Self {
                vm: vm?,
                vm_text: args.vm.clone(),
                to: to?,
                options: MoveOptions {
                    channels: channels?.try_into().ok()?,
                    compress: compress?,
                    encoders: encoders?.try_into().ok()?,
                    when_busy: args.when_busy.into(),
                    zero_pages: args.zero_pages.into(),
                    bandwidth: bandwidth?,
                    downtime: downtime?,
                    verify: args.verify,
                    max_rounds: max_rounds?.try_into().ok()?,
                },
                attach: AttachOptions { allow_untracked_writers: args.allow_untracked_writers },
            })
        })();
        checks.finish(request)
    }
}
