//! `transship balloon`: the device by which a guest says which of its memory is free.
use transship_vmm::handoff::{GuestSocket, Shutdown};

use crate::{args::BalloonArgs, failure::Failure, output, signals::Watcher};

pub(crate) fn run(args: &BalloonArgs) -> Result<(), Failure> {
    let failed = |what: &dyn std::fmt::Display| Failure::Failed(what.to_string());
    let shutdown = Shutdown::new().map_err(|error| failed(&format!("can't make an eventfd: {error}")))?;
    let ask = shutdown.clone();
    let _signals = Watcher::start(move |_| ask.request())?;
    let socket = GuestSocket::listen(&args.socket).map_err(|error| failed(&error))?;
    output::say(&format!("listening at {}", args.socket.display()));
    transship_balloon::serve(&socket, &shutdown).map_err(|error| failed(&format!("the balloon failed: {error}")))
}
