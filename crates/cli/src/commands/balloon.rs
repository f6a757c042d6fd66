//! `transship balloon`: the device by which a guest says which of its memory is free.
use transship_balloon::End;
use transship_vmm::handoff::{GuestSocket, Shutdown};

use crate::{args::BalloonArgs, failure::Failure, output, signals::Watcher};

pub(crate) fn run(args: &BalloonArgs) -> Result<(), Failure> {
    let failed = |what: &dyn std::fmt::Display| Failure::Failed(what.to_string());
    let new = || Shutdown::new().map_err(|error| failed(&format!("can't make an eventfd: {error}")));
    let (when_unused, now) = (new()?, new()?);
    let asks = [when_unused.clone(), now.clone()];
    let _signals = Watcher::start(move |before| asks[before.min(1)].request())?;
    let socket = GuestSocket::listen(&args.socket).map_err(|error| failed(&error))?;
    output::say(&format!("listening at {}", args.socket.display()));
    let waiting = || {
        output::say(
            "ending when QEMU has let go of it (device_del, then chardev-remove), which may not survive it otherwise; again: end at once",
        );
    };
    let end = End { when_unused: &when_unused, now: &now, waiting: &waiting };
    transship_balloon::serve(&socket, &end).map_err(|error| failed(&format!("the balloon failed: {error}")))
}
