//! `transship move`: the source.
mod recovering;

use std::{sync::Arc, time::Duration};

use rustix::process::geteuid;
use transship_codec::{Backend, Method, SettingError, qatzip_backend};
use transship_engine::{
    Caller, Compress, Error, MoveOptions, MoveTerms, PostCopyAfter, Progress, QemuSendOptions, Report, Setting,
    StandIn, Uri, UserCommand, move_guest, send_to_qemu,
};
use transship_guest::{Guard, GuestError, Watch};
use transship_vmm::{AttachOptions, VmAddress};

use crate::{
    args::{Converge, MoveArgs, Peer},
    checks::Checks,
    control::{About, ControlSocket, Listening},
    failure::Failure,
    flags::{self, Patience},
    journal::Journal,
    output,
    sandbox::{Role, Sandbox, Steward},
    signals::{Held, Side},
    source::{Taken, Waiting, Wanted},
    stand_in, summary,
    trust::{self, Network},
    units,
};

pub(crate) fn run(args: &MoveArgs) -> Result<(), Failure> {
    let request = Request::check(args)?;
    if args.recover {
        return recovering::run(&request, args.json);
    }
    if matches!(&request.way, Way::ToTransship(MoveOptions { compress: Compress::Fixed(setting), .. }) if setting.method() == Method::Qatzip)
    {
        say_who_makes_qatzip();
    }
    let progress = Progress::new();
    request.deadline.iter().for_each(|&deadline| progress.end_within(deadline));
    let signals = Held::hold()?;
    let side = Side::Source;
    let about = About::new("move", &args.vm, &args.to, side);
    let control = ControlSocket::listen(about, args.steering.control.as_deref(), request.way.is_held())?;
    // It cleans up: it is told to after everything else has ended.
    let mut steward = None;
    let mut report = Report::default();
    let waiting = Waiting { signals, side, control, progress: Arc::clone(&progress) };
    let outcome = move_away(&request, waiting, &mut steward, &progress, &mut report);
    summary::finish(outcome, report, args.json)
}

/// The guest is let go of when this returns, and the display with it, before results are printed.
fn move_away(
    request: &Request,
    waiting: Waiting,
    steward: &mut Option<Steward>,
    progress: &Arc<Progress>,
    report: &mut Report,
) -> Result<(), Error> {
    let sandbox = request.sandbox();
    let wanted = Wanted {
        vm: &request.vm,
        vm_text: &request.vm_text,
        attach: &request.attach,
        guard: &request.sandbox,
        watch: Some(Watch::Track),
        to: Some(&request.to),
        control: waiting.control.as_ref().map(Listening::path),
        commands: request.way.commands(),
        keeps_journal: request.way.is_post_copy(),
    };
    // The last is let go of first: a guard that was told to act finds the guest in nobody's hands.
    let taken = wanted.take(sandbox, steward)?;
    let left = taken.left_to_read();
    let Taken { mut guard, mut guest, journal } = taken;
    let mut stand_in = request.stand_in(journal)?;
    let _threads = waiting.confined(sandbox, Role::Move, left)?;
    let guard: Option<&mut dyn Guard> = Some(&mut guard);
    match &request.way {
        Way::ToTransship(options) => {
            let stand_in = stand_in.as_mut().map(|process| process as &mut dyn StandIn);
            move_guest(guest.as_mut(), guard, stand_in, &request.to, options, progress, report)
        }
        Way::ToQemu(options) => send_to_qemu(guest.as_mut(), guard, &request.to, options, progress, report),
    }
}

/// Finding out may take a device's start: once, and not while the guest's pages wait.
fn say_who_makes_qatzip() {
    output::say(&match qatzip_backend() {
        Backend::Device => "qatzip is made by a QAT device".to_owned(),
        Backend::Software { reason } => format!("qatzip is made in software: {reason}"),
    });
}

/// The codecs know nothing of `auto`, which is none of them.
pub(super) fn compression(text: &str) -> Result<Compress, String> {
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
    way: Way,
    sandbox: Sandbox,
    attach: AttachOptions,
    /// From the start.
    deadline: Option<Duration>,
}

/// The kind of peer at the other end.
#[derive(Debug)]
enum Way {
    ToTransship(MoveOptions),
    ToQemu(QemuSendOptions),
}

impl Way {
    fn terms(&self) -> &MoveTerms {
        match self {
            Self::ToTransship(options) => &options.terms,
            Self::ToQemu(options) => &options.terms,
        }
    }

    fn is_post_copy(&self) -> bool {
        matches!(self, Self::ToTransship(MoveOptions { post_copy: Some(_), .. }))
    }

    fn is_held(&self) -> bool {
        self.terms().hold.is_some()
    }

    fn commands(&self) -> Vec<(&'static str, UserCommand)> {
        flags::commands(&self.terms().at_stop, &self.terms().hold)
    }
}

impl Request {
    /// The process that goes on for this one if the guest goes before its pages.
    fn stand_in(&self, journal: Option<Journal>) -> Result<Option<stand_in::Process>, GuestError> {
        if !self.way.is_post_copy() {
            return Ok(None);
        }
        let stand_in = stand_in::Process::new(&self.vm_text, &self.sandbox).calling(&self.to).keeping(journal);
        stand_in.with_key(self.way.terms().caller.as_ref().map(Caller::reveal)).start().map(Some)
    }

    /// The rights that the process keeps.
    fn sandbox(&self) -> &Sandbox {
        match &self.way {
            Way::ToTransship(options) => self.sandbox.encoding(options.compress),
            Way::ToQemu(_) => &self.sandbox,
        }
    }

    fn check(args: &MoveArgs) -> Result<Self, Failure> {
        let mut checks = Checks::default();
        let vm = checks.read("--vm", &args.vm, str::parse::<VmAddress>);
        if let Some(VmAddress::Libvirt(_)) = &vm {
            checks.mistake(format!("--vm: {}", transship_vmm::qemu::libvirt::NO_MOVES));
        }
        let to = checks.read("--to", &args.to, str::parse::<Uri>);
        let network = Network::of(args.insecure);
        let way = match args.peer {
            Peer::Transship => {
                let token = args.token.as_ref();
                let caller = trust::caller(&mut checks, to.as_ref(), token, &args.tls, network, "transship receive");
                to_transship(args, caller, &mut checks).map(Way::ToTransship)
            }
            Peer::Qemu => {
                trust::no_token(&mut checks, "--token", args.token.is_some());
                let caller = trust::caller_of_qemu(&mut checks, to.as_ref(), &args.tls, network);
                to_qemu(args, caller, &mut checks).map(Way::ToQemu)
            }
        };
        if args.recover {
            recovering::refuse(args, &mut checks);
        }
        let deadline = flags::deadline(&mut checks, args.deadline.as_deref());
        let tracking = flags::tracking(&mut checks, args.tracker, args.converge);
        let sandbox = Sandbox::check(&args.sandbox, &mut checks);
        let request = (|| {
            Some(Self {
                vm: vm?,
                vm_text: args.vm.clone(),
                to: to?,
                way: way?,
                sandbox: sandbox?,
                deadline: deadline?,
                attach: flags::attach(args.allow_untracked_writers, tracking, args.balloon.as_ref()),
            })
        })();
        checks.finish(request)
    }
}

fn to_transship(args: &MoveArgs, caller: Option<Option<Caller>>, checks: &mut Checks) -> Option<MoveOptions> {
    let defaults = MoveOptions::default();
    let channels = flags::count(checks, "--channels", args.channels.as_deref(), defaults.channels);
    let compress = checks.read("--compress", &args.compress, compression);
    let terms = terms(args, caller, checks);
    let post_copy = post_copy(args, checks);
    Some(MoveOptions {
        channels: channels?,
        compress: compress?,
        verify: args.verify,
        post_copy: post_copy?,
        // This process is somebody else's later.
        lend_to: (!args.no_lending).then(|| geteuid().as_raw()),
        terms: terms?,
    })
}

/// What can be asked of a move, whoever receives the guest.
fn terms(args: &MoveArgs, caller: Option<Option<Caller>>, checks: &mut Checks) -> Option<MoveTerms> {
    let encoders = flags::count(checks, "--encoders", args.encoders.as_deref(), MoveTerms::default().encoders);
    let bandwidth = flags::bandwidth(checks, args.bandwidth.as_deref());
    let patience = Patience::check(checks, &args.downtime, args.max_downtime.as_deref(), &args.max_rounds);
    let about = ["move", &args.vm, &args.to];
    let at_stop = flags::at_stop(checks, args.at_stop.as_deref(), &args.at_stop_timeout, about);
    let hold = flags::hold(checks, &args.steering, about);
    let Patience { downtime, max_downtime, max_rounds } = patience?;
    Some(MoveTerms {
        encoders: encoders?,
        when_busy: args.when_busy.into(),
        zero_pages: args.zero_pages.into(),
        bandwidth: bandwidth?,
        downtime,
        max_downtime,
        max_rounds,
        converge: args.converge.into(),
        at_stop: at_stop?,
        hold: hold?,
        caller: caller?,
    })
}

/// When the guest may go before its pages; none: never.
fn post_copy(args: &MoveArgs, checks: &mut Checks) -> Option<Option<PostCopyAfter>> {
    if args.converge != Converge::Postcopy {
        if args.postcopy_after.is_some() {
            checks.mistake("--postcopy-after: it is about --converge postcopy; add that, or leave this out".into());
        }
        return Some(None);
    }
    if args.verify {
        let why = "memory that follows the guest can't be compared before the guest runs";
        checks.mistake(format!("--verify: {why}; leave it out with --converge postcopy"));
    }
    if args.steering.hold || args.steering.hold_for.is_some() || args.steering.hold_until.is_some() {
        let why = "it keeps a guest ready that has converged";
        checks.mistake(format!("--hold: {why}; leave it out with --converge postcopy"));
    }
    if args.balloon.is_some() {
        let why = "it is not supported together with --converge postcopy";
        checks.mistake(format!("--balloon: {why}; leave out one of them"));
    }
    match &args.postcopy_after {
        None => Some(Some(PostCopyAfter::NoGain)),
        Some(text) => {
            let rounds = checks.within("--postcopy-after", text, units::count, (0, 10_000), "0 to 10000")?;
            Some(Some(PostCopyAfter::Rounds(rounds.try_into().ok()?)))
        }
    }
}

/// A stock QEMU can't do all that a transship can.
fn to_qemu(args: &MoveArgs, caller: Option<Option<Caller>>, checks: &mut Checks) -> Option<QemuSendOptions> {
    let channels = flags::multifd_channels(checks, args.channels.as_deref(), 0);
    let compress = checks.read("--compress", &args.compress, qemu_compression);
    if channels == Some(0) && compress.is_some_and(|setting| setting != Setting::NONE) {
        checks.mistake(format!(
            "--compress {:?}: with --peer qemu only multifd channels compress; add --channels N with the value of the \
             destination's multifd-channels",
            args.compress
        ));
    }
    if args.converge == Converge::Postcopy {
        let why = "a stock QEMU's own post-copy can't be spoken from outside of the source's QEMU";
        checks.mistake(format!("--converge postcopy: {why}; use --converge pace, or a transship at the other end"));
    }
    if args.verify {
        checks.mistake(
            "--verify: a stock QEMU has no hash of its memory to compare; leave --verify out with --peer qemu".into(),
        );
    }
    let terms = terms(args, caller, checks);
    Some(QemuSendOptions { channels: channels?, compress: compress?, terms: terms? })
}

/// What a stock QEMU decodes is what its `multifd-compression` says, and nothing else.
fn qemu_compression(text: &str) -> Result<Setting, String> {
    let choice = "a stock QEMU decodes none, zlib or zstd, whichever its multifd-compression names";
    if text == "auto" {
        return Err(format!("{choice}; name it"));
    }
    let setting: Setting = text.parse().map_err(|why: SettingError| why.to_string())?;
    match setting.method() {
        Method::None | Method::Zlib | Method::Zstd => Ok(setting),
        _ => Err(choice.to_owned()),
    }
}
