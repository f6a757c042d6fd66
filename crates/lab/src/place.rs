//! Where a QEMU runs that is not simply ours.
use crate::{Result, Scratch, failed};
use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

/// The folder in memory that a QEMU in namespaces of its own has there, and nobody else. It has a `disk` in it.
pub const CONTAINED: &str = "/mnt";

/// Whose it is, and what it sees.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) of_nobody: bool,
    pub(crate) contained: bool,
}

impl Place {
    /// What goes before its own words.
    pub(crate) fn words(self) -> Vec<String> {
        let nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups";
        let namespaces = "unshare --user --map-root-user --mount --pid --net --ipc --uts --fork --kill-child";
        let mut words: Vec<String> = Vec::new();
        if self.of_nobody {
            words.extend(nobody.split(' ').map(str::to_owned));
        }
        if self.contained {
            words.extend(namespaces.split(' ').map(str::to_owned));
            let script = format!("mount -t tmpfs own {CONTAINED} && truncate -s 1M {CONTAINED}/disk && exec \"$@\"");
            words.extend(["sh", "-c", &script, "sh"].map(str::to_owned));
        }
        words
    }

    /// A folder that it can use.
    pub(crate) fn folder(self) -> Result<Scratch> {
        if !self.of_nobody {
            return Scratch::new();
        }
        let folder = Scratch::on_disk()?;
        allow_all(folder.path())?;
        Ok(folder)
    }

    /// Listens where it is to connect.
    pub(crate) fn listen(self, path: &Path) -> Result<UnixListener> {
        let listener = UnixListener::bind(path).map_err(failed(format!("can't bind {}", path.display())))?;
        if self.of_nobody {
            allow_all(path)?;
        }
        Ok(listener)
    }
}

fn allow_all(path: &Path) -> Result<()> {
    set_permissions(path, Permissions::from_mode(0o777)).map_err(failed(format!("can't open up {}", path.display())))
}
