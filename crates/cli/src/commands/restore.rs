//! `transship restore`: a guest from a file.
use std::sync::Arc;

use transship_engine::{DirectIo, Error, FileUri, Progress, Report, RestoreOptions, StandIn, restore_guest};
use transship_vmm::{VmAddress, attach_destination};

use crate::{
    args::RestoreArgs,
    checks::Checks,
    failure::Failure,
    flags, keys,
    progress::Display,
    sandbox::{Errands, Role, Sandbox, Steward},
    signals::{Side, Watcher},
    stand_in, summary,
};

pub(crate) fn run(args: &RestoreArgs) -> Result<(), Failure> {
    let request = Request::check(args)?;
    let progress = Progress::new();
    let _signals = Watcher::cancelling(&progress, Side::Restore)?;
    let mut report = Report::default();
    // It is told to end after everything else has ended.
    let mut steward = None;
    let outcome = restore(&request, &mut steward, &progress, &mut report);
    summary::restored(outcome, report, args.json)
}

fn restore(
    request: &Request,
    steward: &mut Option<Steward>,
    progress: &Arc<Progress>,
    report: &mut Report,
) -> Result<(), Error> {
    let mut guest = attach_destination(&request.vm)?;
    let _display = Display::start(progress).map_err(|source| Error::Io { what: "start a thread".into(), source })?;
    let sandbox = &request.sandbox;
    let mut stand_in = None;
    if request.lazy {
        guest.prepare_to_miss();
        stand_in = Some(stand_in::Process::new(&request.vm_text, sandbox).freezing(guest.process()).start()?);
        *steward = sandbox.steward(&Errands::of_filling(guest.as_ref()))?;
    }
    sandbox.confine_when_opened(if request.lazy { Role::Fill } else { Role::Restore });
    let lazily = stand_in.as_mut().map(|process| process as &mut dyn StandIn);
    restore_guest(guest.as_mut(), &request.from, &request.options, lazily, progress, report)
}

/// What was asked for, checked as far as possible without touching a VM.
struct Request {
    vm: VmAddress,
    /// As the user wrote it.
    vm_text: String,
    from: FileUri,
    lazy: bool,
    options: RestoreOptions,
    sandbox: Sandbox,
}

impl Request {
    fn check(args: &RestoreArgs) -> Result<Self, Failure> {
        let mut checks = Checks::default();
        let defaults = RestoreOptions::default();
        let vm = checks.read("--vm", &args.vm, str::parse::<VmAddress>);
        let from = checks.read("--from", &args.from, str::parse::<FileUri>);
        let channels = flags::count(&mut checks, "--channels", args.channels.as_deref(), defaults.channels);
        let direct_io = checks.read("--direct-io", &args.direct_io, str::parse::<DirectIo>);
        let run = flags::run_state(args.run, args.stopped);
        let identities = keys::identities(&mut checks, &args.identity);
        let sandbox = Sandbox::check(&args.sandbox, &mut checks);
        let request = (|| {
            let (channels, direct_io, io) = (channels?, direct_io?, args.io.into());
            let options = RestoreOptions { channels, direct_io, io, run, identities: identities? };
            let (vm, from, sandbox) = (vm?, from?, sandbox?);
            Some(Self { vm, vm_text: args.vm.clone(), from, lazy: args.lazy, options, sandbox })
        })();
        checks.finish(request)
    }
}
