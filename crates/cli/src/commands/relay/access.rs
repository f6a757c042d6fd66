//! The right to connect to a unix socket.
use std::{
    fs::{self, File, Permissions},
    io::{self, Write},
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
    /// What SELinux is to know the socket as, and the file that it is found by.
    label: Option<String>,
    file_label: Option<String>,
}

/// Where the kernel shows SELinux, if it has it.
const SELINUX: &str = "/sys/fs/selinux/enforce";
/// Says whether the policy knows a label.
const KNOWN: &str = "/sys/fs/selinux/context";
/// The label of the sockets that this thread makes.
const NEXT_SOCKET: &str = "/proc/thread-self/attr/sockcreate";
/// The label of the files that this thread makes.
const NEXT_FILE: &str = "/proc/thread-self/attr/fscreate";
/// For the two above: what the policy chooses. They would not see it if nothing at all was written.
const AS_USUAL: &str = "\n";

impl Access {
    /// Of the flags. `is_socket`: there is one to give away.
    pub(super) fn check(args: &RelayArgs, is_socket: bool, checks: &mut Checks) -> Option<Self> {
        let given = [
            ("--socket-mode", args.socket_mode.is_some()),
            ("--socket-owner", args.socket_owner.is_some()),
            ("--socket-label", args.socket_label.is_some()),
            ("--socket-file-label", args.socket_file_label.is_some()),
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
        Some(Self { mode, user, group, label: args.socket_label.clone(), file_label: args.socket_file_label.clone() })
    }

    /// Makes a socket. It and its file get their labels at once: they have no other ones for anybody.
    pub(super) fn labelled<T>(&self, make: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let wanted = self.wanted();
        if wanted.is_empty() {
            return make();
        }
        if !Path::new(SELINUX).exists() {
            let why = format!("this host runs without SELinux, which knows labels; leave {} out", flags(&wanted));
            return Err(Error::unfit(why));
        }
        for label in &wanted {
            label.check()?;
        }
        let chosen = wanted.iter().try_for_each(Wanted::choose);
        let made = chosen.and_then(|()| make().map_err(|error| refused(error, &wanted)));
        // What else this thread makes, or those that it starts, has the labels that it would have anyway.
        for label in &wanted {
            label.forget()?;
        }
        made
    }

    fn wanted(&self) -> Vec<Wanted<'_>> {
        let all = [
            ("--socket-label", NEXT_SOCKET, self.label.as_deref()),
            ("--socket-file-label", NEXT_FILE, self.file_label.as_deref()),
        ];
        all.into_iter().filter_map(|(flag, next, label)| Some(Wanted { flag, next, label: label? })).collect()
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

/// A label that is to be had.
struct Wanted<'a> {
    flag: &'static str,
    /// Where the kernel is told it.
    next: &'static str,
    label: &'a str,
}

impl Wanted<'_> {
    /// A process with some rights may give files a label that the policy does not know, and then nobody may use them.
    fn check(&self) -> Result<(), Error> {
        match tell(KNOWN, self.label) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Err(self.unknown()),
            // Whether it may be used is seen when it is.
            _ => Ok(()),
        }
    }

    fn choose(&self) -> Result<(), Error> {
        tell(self.next, self.label).map_err(|source| match source.kind() {
            io::ErrorKind::InvalidInput => self.unknown(),
            _ => Error::Io { what: format!("use the label {:?} ({})", self.label, self.flag), source },
        })
    }

    fn forget(&self) -> Result<(), Error> {
        let failed = |source| Error::Io { what: format!("take the label of {} back", self.flag), source };
        tell(self.next, AS_USUAL).map_err(failed)
    }

    fn unknown(&self) -> Error {
        let Self { flag, label, .. } = self;
        Error::unfit(format!(
            "{flag}: the policy of this host's SELinux has no label {label:?}; write USER:ROLE:TYPE:LEVEL with a type \
             that it has (`seinfo -t` lists them)"
        ))
    }
}

/// The kernel's answer to a few words in one of its files. Such a file is not made anew: asking for that alone is noted
/// as an attempt that was refused.
fn tell(file: &str, words: &str) -> io::Result<()> {
    File::options().write(true).open(file)?.write_all(words.as_bytes())
}

fn flags(wanted: &[Wanted<'_>]) -> String {
    wanted.iter().map(|label| label.flag).collect::<Vec<_>>().join(" and ")
}

/// The system's word alone does not say that the labels may be the reason.
fn refused(error: Error, wanted: &[Wanted<'_>]) -> Error {
    match error {
        Error::Io { ref source, .. } if source.kind() == io::ErrorKind::PermissionDenied => Error::unfit(format!(
            "{error}; SELinux may have refused it because of {}: `ausearch -m avc` shows it",
            flags(wanted)
        )),
        other => other,
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
            let says = |why: &str| why.contains("without SELinux") && why.ends_with("leave --socket-label out");
            assert!(matches!(&refused, Err(Error::Unfit { text: why, .. }) if says(why)), "{refused:?}");
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
