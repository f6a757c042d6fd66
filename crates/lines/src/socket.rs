//! The socket that a guest process listens on.
use std::{
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::{
            fs::{FileTypeExt, PermissionsExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::{
    fs::{CWD, RenameFlags, renameat_with},
    net::sockopt::socket_peercred,
    process::{Uid, geteuid},
};

/// Why a guest process can't listen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SocketError {
    /// Somebody listens there.
    #[error("{}: another process listens there; choose another path or end it", .0.display())]
    InUse(PathBuf),
    /// There is something that is no socket.
    #[error("{}: exists and is not a socket; choose another path", .0.display())]
    NotASocket(PathBuf),
    /// The system refused.
    #[error("can't listen at {}: {source}", path.display())]
    System {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A listening socket for one user and root. Its file goes when this is dropped.
#[derive(Debug)]
pub struct GuestSocket {
    listener: UnixListener,
    path: PathBuf,
    /// May connect, beside root.
    user: Uid,
    /// The same: who this process was when it began to listen.
    ours: Uid,
}

impl GuestSocket {
    /// Listens at `path`. A socket that a process left behind there is replaced.
    ///
    /// # Errors
    /// The path is taken, or the system refuses.
    pub fn listen(path: &Path) -> Result<Self, SocketError> {
        Self::listen_for(path, geteuid())
    }

    /// The same for `user` in place of the one that this process runs as: the socket is his.
    ///
    /// # Errors
    /// As [`GuestSocket::listen`]; this process may not give files away.
    pub fn listen_for(path: &Path, user: Uid) -> Result<Self, SocketError> {
        Self::make_way(path)?;
        let system = |source| SocketError::System { path: path.into(), source };
        // Made beside its name: whoever sees it there may connect, and nobody else.
        let made = beside(path);
        let listener = UnixListener::bind(&made).map_err(system)?;
        let placed = Self::place(&listener, &made, path, user);
        if placed.is_err() {
            // The first error is the one to tell.
            let _ = fs::remove_file(&made);
        }
        placed.map_err(system)?;
        Ok(Self { listener, path: path.into(), user, ours: geteuid() })
    }

    fn place(listener: &UnixListener, made: &Path, path: &Path, user: Uid) -> io::Result<()> {
        fs::set_permissions(made, fs::Permissions::from_mode(0o600))?;
        if user != geteuid() {
            std::os::unix::fs::lchown(made, Some(user.as_raw()), None)?;
        }
        listener.set_nonblocking(true)?;
        Ok(renameat_with(CWD, made, CWD, path, RenameFlags::NOREPLACE)?)
    }

    /// Checks that `path` is free, and removes a socket that nobody listens on.
    ///
    /// # Errors
    /// The path is taken, or the system refuses.
    pub fn make_way(path: &Path) -> Result<(), SocketError> {
        let system = |source| SocketError::System { path: path.into(), source };
        match fs::symlink_metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(system(e)),
            Ok(found) if !found.file_type().is_socket() => return Err(SocketError::NotASocket(path.into())),
            Ok(_) => {}
        }
        match UnixStream::connect(path) {
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path).map_err(system),
            Err(e) => Err(system(e)),
            Ok(_) => Err(SocketError::InUse(path.into())),
        }
    }

    /// A connection that waits, if there is one, and if its user may use this guest.
    pub fn accept(&self) -> Option<UnixStream> {
        let (stream, _) = self.listener.accept().ok()?;
        let user = socket_peercred(&stream).ok()?.uid;
        let allowed = user.is_root() || user == self.user || user == self.ours;
        if !allowed {
            let (theirs, ours) = (user.as_raw(), self.user.as_raw());
            tracing::warn!("turned away a connection of user {theirs}: only root and user {ours} may use this socket");
        }
        allowed.then_some(stream)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Readable when a connection waits.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// A name in the same directory, short: names of sockets are limited.
fn beside(path: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    path.with_file_name(format!(".{}.{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)))
}

impl Drop for GuestSocket {
    fn drop(&mut self) {
        // Another process may have removed it already.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_a_socket_that_nobody_listens_on_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("guest.sock");
        let first = GuestSocket::listen(&path).unwrap();
        assert!(matches!(GuestSocket::listen(&path), Err(SocketError::InUse(_))));
        drop(first);
        assert!(!path.exists());

        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "a socket is left behind");
        drop(GuestSocket::listen(&path).unwrap());

        fs::write(&path, "precious").unwrap();
        assert!(matches!(GuestSocket::listen(&path), Err(SocketError::NotASocket(_))));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }
}
