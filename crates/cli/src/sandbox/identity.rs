//! Another user, no capabilities, and a root folder without anything in it.
use std::{io, path::Path};

use nix::unistd::{Gid, Uid, User, setgroups, setresgid, setresuid};
use rustix::{
    process::{chroot, geteuid},
    thread::{
        CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, set_capabilities,
        set_keep_capabilities, set_no_new_privs,
    },
};
use tempfile::TempDir;

use super::Left;

/// Where an empty folder is best: in memory, else a disk would be waited for when it goes, with the process.
const EMPTY_IN: [&str; 2] = ["/dev/shm", "/run"];
/// What root may do to files of others.
const OF_FILES: CapabilitySet = CapabilitySet::DAC_OVERRIDE
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::CHOWN);
/// The user that root becomes if nobody says otherwise.
const UNASKED: &str = "nobody";
/// The number of that user, where no list of users has the name.
const UNASKED_ID: u32 = 65534;

/// The user that a process is as soon as it needs root no more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Account {
    user: u32,
    group: u32,
    /// As the user of the command line asked for it; none: he did not.
    name: Option<String>,
}

/// What a process has beside its descriptors when it has given up the rest.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// The path of the room, if it is the root folder now.
    pub(super) room: Option<&'static Path>,
    /// The right to trace others, by which their memory can be read.
    pub(super) reads_memory: bool,
}

/// How far root has become somebody who has no way to any path.
struct Replaced {
    room: Option<&'static Path>,
    /// Another user, with another root folder.
    is_complete: bool,
}

impl Account {
    /// The user with this name or number.
    pub(super) fn of(name: Option<&str>) -> Result<Self, String> {
        let Some(name) = name else {
            let (user, group) = find(UNASKED)?.unwrap_or((UNASKED_ID, UNASKED_ID));
            return Ok(Self { user, group, name: None });
        };
        if !geteuid().is_root() {
            return Err("only root can become another user; leave it out".into());
        }
        let number = || name.parse().ok().filter(|&number| number != u32::MAX).map(|number| (number, number));
        match find(name)?.or_else(number) {
            Some((user, group)) => Ok(Self { user, group, name: Some(name.to_owned()) }),
            None => Err(format!("there is no user {name:?}; give a name or a number")),
        }
    }

    /// What it was asked for as, if it was.
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Becomes this user, if this process is root's, with no capability, and never gets one again. Root also leaves all
    /// paths: the root folder is the room, or an empty one.
    ///
    /// With a folder, the user stays, and keeps what root's own rights over files are. One that reads the memory of a
    /// process keeps the right to trace, if everything else could be given up.
    pub(super) fn take(&self, left: Left<'_>) -> io::Result<Kept> {
        let (mut kept, mut keep) = (Kept::default(), CapabilitySet::empty());
        match left {
            _ if !geteuid().is_root() => {}
            Left::Folder(_) => keep = OF_FILES & capabilities(None)?.effective,
            Left::FolderOfImages(_) => {
                keep = OF_FILES.union(CapabilitySet::LINUX_IMMUTABLE) & capabilities(None)?.effective;
            }
            Left::Nothing => {
                self.replace_root(None)?;
            }
            Left::Room(room) => kept.room = self.replace_root(Some(room))?.room,
            Left::MemoryOf(_) => {
                // Becoming another user takes what may be had, too, if this is not said before.
                let said = set_keep_capabilities(true).is_ok();
                let wanted = CapabilitySet::SYS_PTRACE & capabilities(None)?.effective;
                let is_nobody = self.replace_root(None)?.is_complete;
                let _ = set_keep_capabilities(false);
                if said && is_nobody && !wanted.is_empty() {
                    (keep, kept.reads_memory) = (wanted, true);
                }
            }
        }
        // Those of an ambient set, or of the file of the program. A kernel too old for the first has none.
        let _ = clear_ambient_capability_set();
        let inheritable = CapabilitySet::empty();
        set_capabilities(None, CapabilitySets { effective: keep, permitted: keep, inheritable })?;
        set_no_new_privs(true)?;
        Ok(kept)
    }

    fn replace_root(&self, room: Option<&Path>) -> io::Result<Replaced> {
        let mut replaced = Replaced { room: None, is_complete: true };
        match leave_paths(room, self) {
            Ok(()) => replaced.room = room.map(|_| Path::new("/")),
            Err(error) => {
                tracing::info!("the root folder stays as it is: {error}");
                replaced.is_complete = false;
            }
        }
        match self.become_it() {
            Err(error) if self.name.is_some() => return Err(error),
            Err(error) => {
                tracing::warn!("can't become user {}: {error}; staying root, with no capability", self.user);
                replaced.is_complete = false;
            }
            Ok(()) => {}
        }
        Ok(replaced)
    }

    fn become_it(&self) -> io::Result<()> {
        let (user, group) = (Uid::from_raw(self.user), Gid::from_raw(self.group));
        setgroups(&[])?;
        setresgid(group, group, group)?;
        // Every capability goes with the last user id that is root's, or can't be used until it is asked for.
        Ok(setresuid(user, user, user)?)
    }
}

/// Makes `room` the root folder, and gives it to the user; or one that is gone already, in which nothing can be made.
fn leave_paths(room: Option<&Path>, account: &Account) -> io::Result<()> {
    if let Some(room) = room {
        std::os::unix::fs::chown(room, Some(account.user), Some(account.group))?;
        chroot(room)?;
    } else {
        let made = EMPTY_IN.iter().find_map(|base| TempDir::with_prefix_in(".transship-", base).ok());
        let folder = made.map_or_else(|| TempDir::with_prefix(".transship-"), Ok)?;
        std::env::set_current_dir(folder.path())?;
        folder.close()?;
        chroot(".")?;
    }
    std::env::set_current_dir("/").or_else(|_| std::env::set_current_dir("."))
}

/// Numbers of the user and its group; none: there is no such name.
fn find(name: &str) -> Result<Option<(u32, u32)>, String> {
    match User::from_name(name) {
        Ok(user) => Ok(user.map(|user| (user.uid.as_raw(), user.gid.as_raw()))),
        Err(error) => Err(format!("can't look up {name:?}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_becomes_nobody_unless_somebody_else_is_named() {
        let nobody = Account::of(None).expect("there is always one");
        assert!(nobody.user != 0 && nobody.group != 0 && nobody.name.is_none(), "{nobody:?}");
        if !geteuid().is_root() {
            assert!(Account::of(Some("daemon")).is_err());
            return;
        }
        assert_eq!(Account::of(Some("1234")), Ok(Account { user: 1234, group: 1234, name: Some("1234".into()) }));
        for wrong in ["", "nobody-of-this-name", "-1", "4294967295"] {
            assert!(Account::of(Some(wrong)).is_err(), "{wrong}");
        }
    }
}
