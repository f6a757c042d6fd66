//! The user at the other end of a unix socket.
use std::os::fd::AsFd;

use rustix::{io::Result, net::sockopt::socket_peercred};

/// The user whose process has connected, as the kernel says.
pub(super) fn user_of(socket: impl AsFd) -> Result<u32> {
    socket_peercred(socket).map(|peer| peer.uid.as_raw())
}

/// The users who may connect to a unix socket.
#[derive(Debug, Clone)]
pub(super) struct Users(pub(super) Vec<u32>);

impl Users {
    /// Why this end of a unix socket is not served; none: it is. The kernel says whose process has connected.
    pub(super) fn refusal(&self, socket: impl AsFd) -> Option<String> {
        match user_of(socket) {
            Ok(user) if self.0.contains(&user) => None,
            Ok(user) => Some(format!(
                "user {user} may not connect here; allow it with --allow-user {user}, or run it as root or as this user"
            )),
            Err(error) => Some(format!("the kernel does not say who it is: {error}")),
        }
    }
}
