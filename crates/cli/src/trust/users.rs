//! `--allow-user`: who may connect to a unix socket of ours.
use nix::unistd::User;
use rustix::process::geteuid;
use transship_engine::Uri;

use crate::{checks::Checks, flags::number};

/// Whether anybody else but a transship connects there by himself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Comes {
    /// Another transship, which runs as the same user or as root unless somebody says otherwise.
    Transship,
    /// A QEMU, which has a user of its own as a rule: the socket's permissions say who that is.
    Qemu,
}

/// The users who may connect, by their numbers; none within: everybody who can.
pub(crate) fn users(
    checks: &mut Checks,
    listen: Option<&Uri>,
    comes: Comes,
    names: &[String],
) -> Option<Option<Vec<u32>>> {
    if !names.is_empty() && matches!(listen, Some(Uri::Tcp { .. })) {
        checks.mistake("--allow-user: only a unix socket knows its users; use --listen unix:PATH, or --tls".into());
        return None;
    }
    let find = |name: &str| Ok(User::from_name(name)?.map(|user| user.uid.as_raw()));
    let named: Vec<_> =
        names.iter().map(|name| checks.read("--allow-user", name, |name| number("user", name, find))).collect();
    let mut users: Vec<u32> = named.into_iter().collect::<Option<_>>()?;
    if users.is_empty() && comes == Comes::Qemu {
        return Some(None);
    }
    users.extend([0, geteuid().as_raw()]);
    Some(Some(users))
}
