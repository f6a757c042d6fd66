//! `transship save`: a guest into a file.
mod all;
mod overall;

use std::{sync::Arc, time::Duration};

use transship_engine::{
    Error, FileUri, Format, OverlayPlace, Progress, Recipients, Report, SaveOptions, Then, Way, save_guest,
};
use transship_guest::{NO_DISK_SNAPSHOT, Watch};
use transship_vmm::{
    AttachOptions, VmAddress,
    qemu::libvirt::{OverlayFolder, Purpose},
};

use crate::{
    args::{Converge, SaveArgs},
    checks::Checks,
    control::{About, ControlSocket, Listening},
    failure::Failure,
    flags::{self, Patience},
    keys,
    sandbox::{Role, Sandbox, Steward},
    signals::{self, Held, Side},
    source::{Place, Taken, Waiting, Wanted, WhenOpened},
    summary,
};

pub(crate) fn run(args: &SaveArgs) -> Result<(), Failure> {
    if let Some(of) = &args.all_of {
        return all::run(args, of);
    }
    let request = Request::check(args)?;
    let progress = Progress::new();
    request.deadline.iter().for_each(|&deadline| progress.end_within(deadline));
    signals::outlive_file_limits()?;
    let signals = Held::hold()?;
    let side = Side::Save;
    let about = About::new("save", &request.vm_text, &args.to, side);
    let is_held = request.options.hold.is_some();
    let control = ControlSocket::listen(about, args.steering.control.as_deref(), is_held)?;
    // It cleans up: it is told to after everything else has ended.
    let mut steward = None;
    let mut report = Report::default();
    let waiting = Waiting { signals, side, control, progress: Arc::clone(&progress) };
    let outcome = save(&request, waiting, &mut steward, &progress, &mut report);
    summary::saved(outcome, report, args.json)
}

/// The guest is let go of when this returns, and the display with it, before results are printed.
fn save(
    request: &Request,
    waiting: Waiting,
    steward: &mut Option<Steward>,
    progress: &Arc<Progress>,
    report: &mut Report,
) -> Result<(), Error> {
    let sandbox = &request.sandbox;
    sandbox.reach_domain(&request.vm, &request.purpose())?;
    let wanted = Wanted {
        vm: &request.vm,
        vm_text: &request.vm_text,
        attach: &request.attach,
        guard: &request.sandbox,
        watch: match request.options.way {
            Way::Paused => None,
            Way::Live => Some(Watch::Track),
            Way::Background => Some(Watch::Protect),
        },
        to: None,
        control: waiting.control.as_ref().map(Listening::path),
        commands: flags::commands(&request.options.at_stop, &request.options.hold),
        keeps_journal: false,
    };
    // The last is let go of first: a guard that was told to act finds the guest in nobody's hands.
    let Taken { mut guard, mut guest, .. } = wanted.take(sandbox, steward)?;
    let place = Place::of(&request.to, request.options.format == Format::Raw);
    let _threads = WhenOpened::confine(waiting, sandbox, Role::Save, place);
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
    sandbox: Sandbox,
    attach: AttachOptions,
    /// From the start.
    deadline: Option<Duration>,
}

impl Request {
    /// What its domain will be asked for, if it is one of libvirt's.
    fn purpose(&self) -> Purpose {
        let overlays = match &self.options.disks {
            None => OverlayFolder::Nowhere,
            Some(OverlayPlace::BesideDisks) => OverlayFolder::BesideDisks,
            Some(OverlayPlace::In(folder)) => OverlayFolder::In(folder.clone()),
        };
        let definition = matches!(self.options.format, Format::Libvirt | Format::LibvirtSparse);
        Purpose::Save { overlays, definition }
    }

    fn check(args: &SaveArgs) -> Result<Self, Failure> {
        let mut checks = Checks::default();
        let defaults = SaveOptions::default();
        let vm_text = args.vm.clone().unwrap_or_default();
        let vm = checks.read("--vm", &vm_text, str::parse::<VmAddress>);
        let to = checks.read("--to", &args.to, str::parse::<FileUri>);
        let channels = flags::count(&mut checks, "--channels", args.channels.as_deref(), defaults.channels);
        let format: Format = args.format.into();
        let direct_io = flags::direct_io(&mut checks, Some(&args.direct_io), format);
        let way = way(args);
        let is_libvirts = matches!(format, Format::Libvirt | Format::LibvirtSparse);
        if is_libvirts && vm.as_ref().is_some_and(|vm| !matches!(vm, VmAddress::Libvirt(_))) {
            let why = "only libvirt knows a domain's definition, with which a save image begins";
            checks.mistake(format!("--format {format}: {why}; name the guest by --vm libvirt:DOMAIN"));
        }
        if args.converge == Converge::Postcopy {
            checks.mistake("--converge postcopy: no guest runs in a file; use --converge pace, or --background".into());
        }
        if way != Way::Live && args.converge == Converge::Pace {
            checks.mistake("--converge pace: only a save with --live has rounds; leave it out".into());
        }
        let about = ["save", &vm_text, &args.to];
        let at_stop = flags::at_stop(&mut checks, args.at_stop.as_deref(), &args.at_stop_timeout, about);
        let disks = disks(args, vm.as_ref(), &mut checks);
        let hold = flags::hold(&mut checks, &args.steering, about);
        if hold.as_ref().is_some_and(Option::is_some) {
            refuse_hold(&mut checks, way, format);
        }
        let deadline = flags::deadline(&mut checks, args.deadline.as_deref());
        let tracking = flags::tracking(&mut checks, args.tracker, args.converge);
        let (bandwidth, encrypt_to) =
            (flags::bandwidth(&mut checks, args.bandwidth.as_deref()), encrypt_to(args, format, &mut checks));
        let sandbox = Sandbox::check(&args.sandbox, &mut checks);
        let patience = Patience::check(&mut checks, &args.downtime, args.max_downtime.as_deref(), &args.max_rounds);
        let request = (|| {
            let Patience { downtime, max_downtime, max_rounds } = patience?;
            Some(Self {
                vm: vm?,
                vm_text,
                to: to?,
                deadline: deadline?,
                sandbox: sandbox?,
                options: SaveOptions {
                    way,
                    then: if args.stay_stopped { Then::StayStopped } else { Then::Resume },
                    channels: channels?,
                    direct_io: direct_io?,
                    format,
                    downtime,
                    max_downtime,
                    max_rounds,
                    converge: args.converge.into(),
                    at_stop: at_stop?,
                    disks: disks?,
                    hold: hold?,
                    io: args.io.into(),
                    encrypt_to: encrypt_to?,
                    bandwidth: bandwidth?,
                },
                // A stopped guest writes nothing, tracked or not.
                attach: flags::attach(
                    args.allow_untracked_writers || way == Way::Paused,
                    tracking,
                    args.balloon.as_ref(),
                ),
            })
        })();
        checks.finish(request)
    }
}

/// Of `--paused` and `--background`.
fn way(args: &SaveArgs) -> Way {
    match (args.paused, args.background) {
        (true, _) => Way::Paused,
        (_, true) => Way::Background,
        _ => Way::Live,
    }
}

/// Of `--encrypt-to`: only a stream is written from the beginning to the end.
fn encrypt_to(args: &SaveArgs, format: Format, checks: &mut Checks) -> Option<Option<Recipients>> {
    if args.encrypt_to.is_empty() {
        return Some(None);
    }
    let why = match format {
        Format::Stream => return keys::recipients(checks, &args.encrypt_to),
        Format::Libvirt | Format::LibvirtSparse => "libvirt could not read it; encrypt the finished file with age",
        _ => "its pages have fixed places, of which each must be read alone, and there is no encrypted form for that",
    };
    checks.mistake(format!("--encrypt-to: with --format {format} {why}; or use --format stream"));
    None
}

/// Of `--disks`. QEMU and libvirt know only whole paths.
fn disks(args: &SaveArgs, vm: Option<&VmAddress>, checks: &mut Checks) -> Option<Option<OverlayPlace>> {
    let Some(folder) = &args.disks else { return Some(None) };
    if vm.is_some_and(|vm| !matches!(vm, VmAddress::Libvirt(_))) {
        checks.mistake(format!("--disks: {NO_DISK_SNAPSHOT}"));
    }
    let Some(folder) = folder else { return Some(Some(OverlayPlace::BesideDisks)) };
    match std::path::absolute(folder) {
        Ok(folder) => Some(Some(OverlayPlace::In(folder))),
        Err(error) => {
            checks.mistake(format!("--disks={}: {error}", folder.display()));
            None
        }
    }
}

/// Where a hold makes no sense.
fn refuse_hold(checks: &mut Checks, way: Way, format: Format) {
    if way != Way::Live {
        checks.mistake("--hold: only a save with --live has a moment to wait for; leave it out".into());
    }
    if format.is_sequential() {
        let why = "pages that the guest writes again are appended, so the file would grow for as long as it is held";
        checks.mistake(format!("--hold: with --format {format} {why}; use --format mapped-ram"));
    }
}
