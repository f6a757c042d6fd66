//! The right to connect to a unix socket.
use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, lchown},
    path::Path,
};

use nix::unistd::{Group, User};
use transship_engine::Error;

use crate::{args::RelayArgs, checks::Checks, flags::number};

/// What is to be changed of a socket as the system makes it: for the user that this runs as, and within the umask.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Access {
    mode: Option<u32>,
    user: Option<u32>,
    group: Option<u32>,
    /// What SELinux is to know it as.
    label: Option<String>,
}

/// Where the kernel shows SELinux, if it has it.
const SELINUX: &str = "/sys/fs/selinux/enforce";
/// The label of the sockets that this thread makes; an empty one is the system's choice.
const NEXT_LABEL: &str = "/proc/thread-self/attr/sockcreate";

impl Access {
    /// Of the flags. `is_socket`: there is one to give away.
    pub(super) fn check(args: &RelayArgs, is_socket: bool, checks: &mut Checks) -> Option<Self> {
        let given = [
            ("--socket-mode", args.socket_mode.is_some()),
            ("--socket-owner", args.socket_owner.is_some()),
            ("--socket-label", args.socket_label.is_some()),
        ];
        if !is_socket {
            for (flag, _) in given.into_iter().filter(|(_, given)| *given) {
                checks.mistake(format!("{flag}: only a unix socket has one; use --listen unix:PATH"));
            }
        }
        let mode = match args.socket_mode.as_deref() {
            Some(text) => Some(checks.read("--socket-mode", text, mode)?),
            None => None,
        };
        let (user, group) = match args.socket_owner.as_deref() {
            Some(text) => checks.read("--socket-owner", text, owner)?,
            None => (None, None),
        };
        Some(Self { mode, user, group, label: args.socket_label.clone() })
    }

    /// Makes a socket, which gets its label at once: it has no other one for anybody.
    pub(super) fn labelled<T>(&self, make: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let Some(label) = &self.label else { return make() };
        if !Path::new(SELINUX).exists() {
            let why = "this host runs without SELinux, so its sockets have no labels; leave --socket-label out";
            return Err(Error::Unfit(why.into()));
        }
        let choose = |label: &str| {
            let what = format!("have sockets labelled {label:?} (--socket-label)");
            fs::write(NEXT_LABEL, label).map_err(|source| Error::Io { what, source })
        };
        choose(label)?;
        let made = make();
        choose("")?;
        made
    }

    /// Gives a socket away. The mode comes last: nobody may connect whom it is not for.
    pub(super) fn apply(&self, socket: &Path) -> Result<(), Error> {
        let failed = |what: &str| {
            let what = format!("change the {what} of {}", socket.display());
            move |source| Error::Io { what, source }
        };
        if self.user.is_some() || self.group.is_some() {
            lchown(socket, self.user, self.group).map_err(failed("owner"))?;
        }
        match self.mode {
            Some(mode) => fs::set_permissions(socket, Permissions::from_mode(mode)).map_err(failed("permissions")),
            None => Ok(()),
        }
    }
}

fn mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| format!("{text:?} is no mode; write three octal digits, such as 0660"))
}

/// Numbers of user and group.
fn owner(text: &str) -> Result<(Option<u32>, Option<u32>), String> {
    let (user, group) = text.split_once(':').map_or((text, None), |(user, group)| (user, Some(group)));
    if user.is_empty() && group.is_none_or(str::is_empty) {
        return Err("write USER, USER:GROUP or :GROUP".into());
    }
    let user = match user {
        "" => None,
        name => Some(number("user", name, |name| Ok(User::from_name(name)?.map(|user| user.uid.as_raw())))?),
    };
    let group = match group {
        None => None,
        Some(name) => Some(number("group", name, |name| Ok(Group::from_name(name)?.map(|group| group.gid.as_raw())))?),
    };
    Ok((user, group))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_and_modes_are_read_as_chown_and_chmod_read_them() {
        assert_eq!(owner("root"), Ok((Some(0), None)));
        assert_eq!(owner("root:root"), Ok((Some(0), Some(0))));
        assert_eq!(owner(":12"), Ok((None, Some(12))));
        assert_eq!(owner("7:8"), Ok((Some(7), Some(8))));
        assert_eq!((mode("0660"), mode("600")), (Ok(0o660), Ok(0o600)));
        for wrong in ["", ":", "nobody-of-this-name", "root:nobody-of-this-name", "4294967295"] {
            assert!(owner(wrong).is_err(), "{wrong}");
        }
        for wrong in ["", "9", "1000", "rw", "-1"] {
            assert!(mode(wrong).is_err(), "{wrong}");
        }
    }

    /// With SELinux this is no test of anything.
    #[test]
    fn a_host_without_selinux_makes_no_socket_with_a_label() {
        let access = Access { label: Some("system_u:object_r:svirt_socket_t:s0".into()), ..Access::default() };
        if !Path::new(SELINUX).exists() {
            let refused = access.labelled(|| -> Result<(), Error> { panic!("it was made") });
            assert!(matches!(&refused, Err(Error::Unfit(why)) if why.contains("without SELinux")), "{refused:?}");
        }
        assert!(Access::default().labelled(|| Ok(())).is_ok());
    }

    #[test]
    fn a_socket_gets_its_mode() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        let _socket = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
        let access = Access { mode: Some(0o640), ..Access::default() };
        access.apply(&path).expect("it is ours");
        assert_eq!(fs::metadata(&path).expect("it is there").permissions().mode() & 0o777, 0o640);
    }
}
