//! `transship balloon`: the device by which a guest says which of its memory is free.
use nix::unistd::User;
use tempfile::TempDir;
use transship_balloon::End;
use transship_lines::{GuestSocket, Shutdown, Uid};

use crate::{
    args::BalloonArgs,
    failure::Failure,
    output,
    sandbox::{Errands, Left, Role, Sandbox},
    signals::Held,
};

pub(crate) fn run(args: &BalloonArgs) -> Result<(), Failure> {
    let user = args.user.as_deref().map(user_id).transpose()?;
    let failed = |what: &dyn std::fmt::Display| Failure::Failed(what.to_string());
    let new = || Shutdown::new().map_err(|error| failed(&format!("can't make an eventfd: {error}")));
    let (when_unused, now) = (new()?, new()?);
    let asks = [when_unused.clone(), now.clone()];
    let signals = Held::hold()?;
    let socket = match user {
        Some(user) => GuestSocket::listen_for(&args.socket, user),
        None => GuestSocket::listen(&args.socket),
    };
    let socket = socket.map_err(|error| failed(&error))?;
    let room = TempDir::with_prefix("transship-").map_err(|error| failed(&format!("can't make a folder: {error}")))?;
    let sandbox = if args.no_sandbox { Sandbox::Off } else { Sandbox::by_default()? };
    // It cleans up: it is told to after everything else has ended.
    let errands = Errands { socket: Some(&args.socket), folder: Some(room.path()), ..Errands::default() };
    let _steward = sandbox.steward(&errands)?;
    let room = sandbox.confine(Role::Balloon, Left::Room(room.path()))?.unwrap_or(room.path());
    let _signals = signals.start(move |before| asks[before.min(1)].request())?;
    output::say(&format!("listening at {}", args.socket.display()));
    let waiting = || {
        output::say(
            "ending when QEMU has disconnected (device_del, then chardev-remove); QEMU may crash if the balloon ends \
             earlier. Press Ctrl-C again to end at once",
        );
    };
    let end = End { when_unused: &when_unused, now: &now, waiting: &waiting };
    transship_balloon::serve(&socket, room, &end).map_err(|error| failed(&format!("the balloon failed: {error}")))
}

/// Of a name that the system knows, or a number.
fn user_id(name: &str) -> Result<Uid, Failure> {
    let number = match User::from_name(name) {
        Ok(Some(user)) => Some(user.uid.as_raw()),
        Ok(None) => name.parse().ok().filter(|&number| number != u32::MAX), // which is none
        Err(error) => {
            return Err(Failure::Failed(format!("--user {name:?}: can't look it up: {error}")));
        }
    };
    let unknown = || Failure::Usage(vec![format!("--user {name:?}: there is no such user; give a name or a number")]);
    number.map(Uid::from_raw).ok_or_else(unknown)
}
