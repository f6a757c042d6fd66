//! `transship receive`: the destination of a move, or of a stock QEMU's own migration.
use std::sync::Arc;

use transship_engine::{
    Error, FilePlace, FileSink, FileSinkOptions, FileUri, Format, Listener, Progress, Report, Sink, StandIn, Uri,
    receive_from_qemu, receive_guest,
};
use transship_guest::{DestinationGuest, GuestError};
use transship_vmm::{VmAddress, attach_destination};

use crate::{
    args::{ReceiveArgs, Sender},
    checks::Checks,
    failure::Failure,
    flags::{self, folder_of},
    output,
    progress::Display,
    sandbox::{Errands, Left, Role, Sandbox, Steward},
    signals::{self, Held, Side},
    stand_in, summary,
    trust::{self, Comes, Entry, Network},
};

pub(crate) fn run(args: &ReceiveArgs) -> Result<(), Failure> {
    let request = Request::check(args)?;
    signals::outlive_file_limits()?;
    let progress = Progress::new();
    let signals = Held::hold()?;
    // It cleans up: it is told to after everything else has ended.
    let mut steward = None;
    let mut report = Report::default();
    // The address may be taken: that's known before the VM is touched.
    let outcome = match Listener::bind(&request.listen) {
        Ok(listener) => {
            let listener = match request.users.clone() {
                Some(users) => listener.for_users(users),
                None => listener,
            };
            let listener = trust::lock(listener, &request.entry, "transship move --vm VM --to ", args.json)?;
            let ready = prepare(&request, &listener, &mut steward);
            let _signals = signals.cancelling(&progress, Side::Destination)?;
            ready.and_then(|ready| receive(&request, ready, listener, &progress, &mut report))
        }
        Err(error) => Err(error),
    };
    match request.peer {
        Sender::Transship => summary::finish(outcome, report, args.json),
        Sender::Qemu => summary::received(outcome, report, args.json),
    }
}

/// What takes the guest.
enum Ready {
    Guest(Box<dyn DestinationGuest>, Option<stand_in::Process>),
    File(FileSink),
}

/// All that needs rights; then they are gone.
fn prepare(request: &Request, listener: &Listener, steward: &mut Option<Steward>) -> Result<Ready, Error> {
    let mut ready = match &request.into {
        Into::Guest(vm, text) => {
            let mut guest = attach_destination(vm)?;
            let mut second = None;
            if request.post_copy {
                guest.prepare_to_miss();
                second = Some(stand_in(request, text, guest.as_ref(), listener)?);
            }
            Ready::Guest(guest, second)
        }
        Into::File(to, options) => Ready::File(FileSink::create(to, *options)?),
    };
    let sandbox = &request.sandbox;
    let mut errands = Errands::of_listener(listener.uri());
    if let Ready::Guest(guest, Some(second)) = &mut ready {
        // The second process may go on to listen.
        errands = Errands { socket: errands.socket, other: second.take_life(), ..Errands::of_filling(guest.as_ref()) };
    }
    *steward = sandbox.steward(&errands)?;
    match &request.into {
        Into::File(FileUri { place: FilePlace::Path(path), .. }, _) => {
            sandbox.confine(Role::ReceiveFile, Left::Folder(&folder_of(path)))?;
        }
        Into::File(..) => drop(sandbox.confine(Role::ReceiveFile, Left::Nothing)?),
        Into::Guest(..) if request.post_copy => drop(sandbox.confine(Role::Fill, Left::Nothing)?),
        Into::Guest(..) => drop(sandbox.confine(Role::Receive, Left::Nothing)?),
    }
    Ok(ready)
}

/// The second process of a receiver whose guest may run before its pages are here.
fn stand_in(
    request: &Request,
    vm: &str,
    guest: &dyn DestinationGuest,
    listener: &Listener,
) -> Result<stand_in::Process, GuestError> {
    let stand_in = stand_in::Process::new(vm, &request.sandbox).freezing(guest.process());
    stand_in.with_key(listener.key()).start()
}

fn receive(
    request: &Request,
    ready: Ready,
    listener: Listener,
    progress: &Arc<Progress>,
    report: &mut Report,
) -> Result<(), Error> {
    let _display = begin(&listener, progress)?;
    match ready {
        Ready::Guest(mut guest, mut stand_in) => match request.peer {
            Sender::Transship => {
                let stand_in = stand_in.as_mut().map(|process| process as &mut dyn StandIn);
                receive_guest(guest.as_mut(), listener, stand_in, progress, report)
            }
            Sender::Qemu => {
                receive_from_qemu(Sink::Guest(guest.as_mut()), &listener, request.channels, progress, report)
            }
        },
        Ready::File(file) => receive_from_qemu(Sink::File(file), &listener, request.channels, progress, report),
    }
}

fn begin(listener: &Listener, progress: &Arc<Progress>) -> Result<Display, Error> {
    // Scripts wait for this line; it has the port that the system chose.
    output::say(&format!("listening at {}", listener.uri()));
    Display::start(progress).map_err(|source| Error::Io { what: "start a thread".into(), source })
}

/// What was asked for, checked as far as possible without touching a VM.
struct Request {
    into: Into,
    listen: Uri,
    sandbox: Sandbox,
    /// The guest may run before all its pages are here.
    post_copy: bool,
    peer: Sender,
    channels: Option<u8>,
    /// Whom it hears.
    entry: Entry,
    /// The users who may connect to its unix socket; none: everybody who can.
    users: Option<Vec<u32>>,
}

enum Into {
    /// And as the user wrote it.
    Guest(VmAddress, String),
    File(FileUri, FileSinkOptions),
}

impl Request {
    fn check(args: &ReceiveArgs) -> Result<Self, Failure> {
        let mut checks = Checks::default();
        let listen = checks.read("--listen", &args.listen, str::parse::<Uri>);
        let into = match (&args.vm, &args.to) {
            (Some(vm), _) => {
                checks.read("--vm", vm, str::parse::<VmAddress>).map(|found| Into::Guest(found, vm.clone()))
            }
            (None, Some(to)) => {
                let to = checks.read("--to", to, str::parse::<FileUri>);
                to.zip(file_options(args, &mut checks)).map(|(to, options)| Into::File(to, options))
            }
            // The parser of the command line has asked for one of them.
            (None, None) => None,
        };
        let channels = args.channels.as_deref().and_then(|text| flags::multifd_channels(&mut checks, Some(text), 0));
        if args.to.is_none() {
            let given = [
                ("--format: it is the layout", args.format.is_some()),
                ("--direct-io: it is about the pages", args.direct_io.is_some()),
                ("--io: it is about the pages", args.io.is_some()),
            ];
            for (what, _) in given.iter().filter(|(_, given)| *given) {
                checks.mistake(format!("{what} of a file; name one with --to"));
            }
        }
        if args.peer == Sender::Transship {
            if args.to.is_some() {
                let way = "use `transship save` at the source, or add --peer qemu";
                checks.mistake(format!("--to: a transship can send into a VM only; {way}"));
            }
            if args.channels.is_some() {
                checks
                    .mistake("--channels: a transship that sends announces its number by itself; leave it out".into());
            }
        }
        let network = Network::of(args.insecure);
        let entry = match args.peer {
            Sender::Transship => {
                let lifetime = args.token_lifetime.as_deref();
                trust::entry(&mut checks, listen.as_ref(), lifetime, &args.tls, network)
            }
            Sender::Qemu => {
                trust::no_token(&mut checks, "--token-lifetime", args.token_lifetime.is_some());
                trust::entry_of_qemu(&mut checks, listen.as_ref(), &args.tls, network)
            }
        };
        if args.postcopy && args.peer == Sender::Qemu {
            checks.mistake("--postcopy: that of a stock QEMU can't be received; leave it out with --peer qemu".into());
        }
        let sandbox = Sandbox::check(&args.sandbox, &mut checks);
        let comes = if args.peer == Sender::Transship { Comes::Transship } else { Comes::Qemu };
        let users = trust::users(&mut checks, listen.as_ref(), comes, &args.allow_user);
        let request = (|| {
            let (into, listen, sandbox, entry, users) = (into?, listen?, sandbox?, entry?, users?);
            let (post_copy, peer) = (args.postcopy, args.peer);
            Some(Self { into, listen, sandbox, post_copy, peer, channels, entry, users })
        })();
        checks.finish(request)
    }
}

fn file_options(args: &ReceiveArgs, checks: &mut Checks) -> Option<FileSinkOptions> {
    let format = args.format.map_or(Format::default(), |format| format.into());
    if format == Format::Raw {
        checks
            .mistake("--format raw: receive into a mapped-ram file, and convert it: transship convert FILE DIR".into());
    }
    if matches!(format, Format::Libvirt | Format::LibvirtSparse) {
        let why = "a save image begins with a domain's definition, which a stream of QEMU's does not carry";
        checks.mistake(format!("--format {format}: {why}; use --format mapped-ram or stream"));
    }
    let direct_io = flags::direct_io(checks, args.direct_io.as_deref(), format);
    Some(FileSinkOptions { format, direct_io: direct_io?, io: args.io.map(|io| io.into()).unwrap_or_default() })
}
