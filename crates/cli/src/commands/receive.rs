//! `transship receive`: the destination.
use std::sync::Arc;

use transship_engine::{Error, Listener, Progress, Report, Uri, receive_guest};
use transship_vmm::{VmAddress, attach_destination};

use crate::{
    args::ReceiveArgs,
    checks::Checks,
    failure::Failure,
    output,
    progress::Display,
    signals::{Side, Watcher},
    summary,
};

pub(crate) fn run(args: &ReceiveArgs) -> Result<(), Failure> {
    let (vm, uri) = check(args)?;
    let progress = Progress::new();
    let _signals = Watcher::cancelling(&progress, Side::Destination)?;
    let mut report = Report::default();
    let outcome = receive(&vm, &uri, &progress, &mut report);
    summary::finish(outcome, report, args.json)
}

fn receive(vm: &VmAddress, uri: &Uri, progress: &Arc<Progress>, report: &mut Report) -> Result<(), Error> {
    // The address may be taken: that's known before the VM is touched.
    let listener = Listener::bind(uri)?;
    let mut guest = attach_destination(vm)?;
    // Scripts wait for this line; it has the port that the system chose.
    output::say(&format!("listening at {}", listener.uri()));
    let _display =
        Display::start(progress).map_err(|source| Error::Io { what: "can't start a thread".into(), source })?;
    receive_guest(guest.as_mut(), listener, progress, report)
}

fn check(args: &ReceiveArgs) -> Result<(VmAddress, Uri), Failure> {
    let mut checks = Checks::default();
    let vm = checks.read("--vm", &args.vm, str::parse::<VmAddress>);
    let uri = checks.read("--listen", &args.listen, str::parse::<Uri>);
    checks.finish(vm.zip(uri))
}
