//! One transship a domain at a time. QEMU's own socket takes one client; libvirt takes any number.
use std::{
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd},
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    time::{Duration, Instant},
};

/// A socket of a name that only one process can have, and that is free again when it ends, whichever way. The kernel
/// names the process that has it.
pub(super) struct Claim {
    socket: UnixListener,
}

impl Claim {
    /// Of a domain of this host, by its QEMU's process.
    ///
    /// # Errors
    /// Another process has it, by what name and number; or the kernel refuses.
    pub(super) fn of(uuid: &str, pid: i32) -> Result<Self, String> {
        let address = SocketAddr::from_abstract_name(format!("transship/domain/{uuid}/{pid}"));
        let address = address.map_err(|e| format!("can't claim the domain: {e}"))?;
        match UnixListener::bind_addr(&address) {
            Ok(socket) => Ok(Self { socket }),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => Err(match holder(&address) {
                Some(holder) => format!("another transship has the domain: {holder}; wait for it, or end it"),
                None => "another transship had the domain until now; try again".to_owned(),
            }),
            Err(e) => Err(format!("can't claim the domain: {e}")),
        }
    }

    /// Whoever has this open keeps the name from others, too.
    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The same, of one that a process that was killed may still have for a moment.
    pub(super) fn within(uuid: &str, pid: i32, limit: Duration) -> Result<Self, String> {
        let deadline = Instant::now() + limit;
        loop {
            match Self::of(uuid, pid) {
                Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
                other => return other,
            }
        }
    }
}

/// Number and command of the process that listens there.
fn holder(address: &SocketAddr) -> Option<String> {
    let stream = UnixStream::connect_addr(address).ok()?;
    let pid = rustix::net::sockopt::socket_peercred(&stream).ok()?.pid.as_raw_nonzero();
    let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<_> = words.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
    Some(format!("process {pid}, {}", words.join(" ").trim_end()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_domain_is_claimed_once_and_the_holder_is_named() {
        let claim = Claim::of("0000-test", 1).unwrap();
        let refused = Claim::of("0000-test", 1).err().unwrap();
        assert!(refused.contains(&format!("process {}", std::process::id())), "{refused}");
        assert!(Claim::of("0000-test", 2).is_ok(), "another QEMU is another domain");
        let kept = claim.socket().try_clone_to_owned().unwrap();
        drop(claim);
        assert!(Claim::of("0000-test", 1).is_err(), "somebody has it still");
        drop(kept);
        // A process that another thread is just starting has our descriptors until it is another program.
        Claim::within("0000-test", 1, Duration::from_secs(60)).unwrap();
    }
}
