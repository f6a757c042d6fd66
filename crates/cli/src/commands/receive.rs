//! `transship receive`: the destination of a move, or of a stock QEMU's own migration.
use std::sync::Arc;

use transship_engine::{
    Error, FileSink, FileUri, Format, Listener, Progress, Report, Sink, Uri, receive_from_qemu, receive_guest,
};
use transship_vmm::{VmAddress, attach_destination};

use crate::{
    args::{ReceiveArgs, Sender},
    checks::Checks,
    failure::Failure,
    output,
    progress::Display,
    signals::{self, Side, Watcher},
    summary, units,
};

pub(crate) fn run(args: &ReceiveArgs) -> Result<(), Failure> {
    let request = Request::check(args)?;
    signals::outlive_file_limits()?;
    let progress = Progress::new();
    let _signals = Watcher::cancelling(&progress, Side::Destination)?;
    let mut report = Report::default();
    let outcome = receive(&request, &progress, &mut report);
    match request.peer {
        Sender::Transship => summary::finish(outcome, report, args.json),
        Sender::Qemu => summary::received(outcome, report, args.json),
    }
}

fn receive(request: &Request, progress: &Arc<Progress>, report: &mut Report) -> Result<(), Error> {
    // The address may be taken: that's known before the VM is touched.
    let listener = Listener::bind(&request.listen)?;
    match &request.into {
        Into::Guest(vm) => {
            let mut guest = attach_destination(vm)?;
            let _display = begin(&listener, progress)?;
            match request.peer {
                Sender::Transship => receive_guest(guest.as_mut(), listener, progress, report),
                Sender::Qemu => {
                    receive_from_qemu(Sink::Guest(guest.as_mut()), &listener, request.channels, progress, report)
                }
            }
        }
        Into::File(to, format) => {
            let file = FileSink::create(to, *format)?;
            let _display = begin(&listener, progress)?;
            receive_from_qemu(Sink::File(file), &listener, request.channels, progress, report)
        }
    }
}

fn begin(listener: &Listener, progress: &Arc<Progress>) -> Result<Display, Error> {
    // Scripts wait for this line; it has the port that the system chose.
    output::say(&format!("listening at {}", listener.uri()));
    Display::start(progress).map_err(|source| Error::Io { what: "can't start a thread".into(), source })
}

/// What was asked for, checked as far as possible without touching a VM.
struct Request {
    into: Into,
    listen: Uri,
    peer: Sender,
    channels: Option<u8>,
}

enum Into {
    Guest(VmAddress),
    File(FileUri, Format),
}

impl Request {
    fn check(args: &ReceiveArgs) -> Result<Self, Failure> {
        let mut checks = Checks::default();
        let listen = checks.read("--listen", &args.listen, str::parse::<Uri>);
        let into = match (&args.vm, &args.to) {
            (Some(vm), _) => checks.read("--vm", vm, str::parse::<VmAddress>).map(Into::Guest),
            (None, Some(to)) => {
                let format = args.format.map_or(Format::default(), |format| format.into());
                checks.read("--to", to, str::parse::<FileUri>).map(|to| Into::File(to, format))
            }
            // The parser of the command line has asked for one of them.
            (None, None) => None,
        };
        let channels = args
            .channels
            .as_ref()
            .map(|text| checks.within("--channels", text, units::count, (0, 255), "0 to 255"))
            .map(|count| count.and_then(|count| u8::try_from(count).ok()));
        if args.format.is_some() && args.to.is_none() {
            checks.mistake("--format: it is the layout of a file; name one with --to".into());
        }
        if args.peer == Sender::Transship {
            if args.to.is_some() {
                let way = "use `transship save` at the source, or add --peer qemu";
                checks.mistake(format!("--to: what a transship sends goes into a VM only; {way}"));
            }
            if args.channels.is_some() {
                checks.mistake("--channels: a transship that sends says by itself how many it uses".into());
            }
        }
        let request =
            listen.zip(into).map(|(listen, into)| Self { into, listen, peer: args.peer, channels: channels.flatten() });
        checks.finish(request)
    }
}
