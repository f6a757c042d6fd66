//! `transship save`: a guest into a file.
use std::{sync::Arc, time::Duration};

use transship_engine::{DirectIo, Error, FileUri, Format, Progress, Report, SaveOptions, Then, Way, save_guest};
use transship_vmm::{AttachOptions, VmAddress, attach_source};

use crate::{
    args::SaveArgs,
    checks::Checks,
    failure::Failure,
    guard::GuardProcess,
    hints,
    progress::Display,
    signals::{self, Side, Watcher},
    summary, units,
};

const DOWNTIME_MIN: Duration = Duration::from_millis(1);
const DOWNTIME_MAX: Duration = Duration::from_secs(60);

pub(crate) fn run(args: &SaveArgs) -> Result<(), Failure> {
    let request = Request::check(args)?;
    let progress = Progress::new();
    signals::outlive_file_limits()?;
    let _signals = Watcher::cancelling(&progress, Side::Save)?;
    let mut report = Report::default();
    let outcome = save(&request, &progress, &mut report);
    summary::saved(outcome, report, args.json)
}

/// The guest is let go of when this returns, and the display with it, before results are printed.
fn save(request: &Request, progress: &Arc<Progress>, report: &mut Report) -> Result<(), Error> {
    // It outlives the guest here: who was told to act does so when the guest is let go of.
    let mut guard = GuardProcess::of(&request.vm_text);
    let mut guest = attach_source(&request.vm, request.attach.clone())?;
    let _display =
        Display::start(progress).map_err(|source| Error::Io { what: "can't start a thread".into(), source })?;
    save_guest(guest.as_mut(), Some(&mut guard), &request.to, &request.options, progress, report)
}

/// What was asked for, checked as far as possible without touching a VM.
#[derive(Debug)]
struct Request {
    vm: VmAddress,
    /// As the user wrote it.
    vm_text: String,
    to: FileUri,
    options: SaveOptions,
    attach: AttachOptions,
}

impl Request {
    fn check(args: &SaveArgs) -> Result<Self, Failure> {
        let mut checks = Checks::default();
        let defaults = SaveOptions::default();
        let vm = checks.read("--vm", &args.vm, str::parse::<VmAddress>);
        let to = checks.read("--to", &args.to, str::parse::<FileUri>);
        let channels = match &args.channels {
            Some(text) => checks.within("--channels", text, units::count, (1, 255), "1 to 255"),
            None => Some(u64::from(defaults.channels)),
        };
        let direct_io = checks.read("--direct-io", &args.direct_io, str::parse::<DirectIo>);
        let format: Format = args.format.into();
        let way = match (args.paused, args.background) {
            (true, _) => Way::Paused,
            (_, true) => Way::Background,
            _ => Way::Live,
        };
        if format == Format::Stream && direct_io == Some(DirectIo::On) {
            checks.mistake("--direct-io=on: the pages of a stream have no places that a disk could take; use it with --format mapped-ram".into());
        }
        if format == Format::Stream && way == Way::Background {
            checks.mistake(
                "--background: its pages come in any order, which a stream can't; use it with --format mapped-ram"
                    .into(),
            );
        }
        let bounds = (DOWNTIME_MIN, DOWNTIME_MAX);
        let downtime = checks.within("--downtime", &args.downtime, units::time, bounds, "from 1ms to 60s");
        let max_rounds = checks.within("--max-rounds", &args.max_rounds, units::count, (1, 10_000), "1 to 10000");
        let request = (|| {
            Some(Self {
                vm: vm?,
                vm_text: args.vm.clone(),
                to: to?,
                options: SaveOptions {
                    way,
                    then: if args.stay_stopped { Then::StayStopped } else { Then::Resume },
                    channels: channels?.try_into().ok()?,
                    direct_io: direct_io?,
                    format,
                    downtime: downtime?,
                    max_rounds: max_rounds?.try_into().ok()?,
                    io: args.io.into(),
                },
                // Who stands still writes nothing, seen or unseen.
                attach: AttachOptions {
                    allow_untracked_writers: args.allow_untracked_writers || way == Way::Paused,
                    balloon: args.balloon.clone().map(hints::balloon),
                },
            })
        })();
        checks.finish(request)
    }
}
