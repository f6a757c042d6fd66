//! The user at the other end of a unix socket.
use std::os::fd::AsFd;

use rustix::net::sockopt::socket_peercred;

/// The users who may connect to a unix socket.
#[derive(Debug, Clone)]
pub(super) struct Users(pub(super) Vec<u32>);

impl Users {
    /// Why this end of a unix socket is not served; none: it is. The kernel says whose process has connected.
    pub(super) fn refusal(&self, socket: impl AsFd) -> Option<String> {
        match socket_peercred(socket) {
            Ok(peer) if self.0.contains(&peer.uid.as_raw()) => None,
            Ok(peer) => Some(format!(
                "user {} may not connect here; allow it with --allow-user {0}, or run it as root or as this user",
                peer.uid.as_raw()
            )),
            Err(error) => Some(format!("the kernel does not say who it is: {error}")),
        }
    }
}
