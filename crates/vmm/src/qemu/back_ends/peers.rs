//! Which processes are at the other end of a socket of QEMU's.
//!
//! The kernel says who has made that end: whoever listened, or connected. A daemon is often not that process any more,
//! but a child of it. So the other end itself is asked for (`sock_diag`), and who has it open is looked for among all
//! processes.
use std::{
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
};

use rustix::{
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with},
    process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open},
};
use serde_json::json;

use crate::qemu::{
    machine::Device,
    qmp::{Qmp, peer_of},
    writers,
};

/// Processes at the other end of the device's socket.
pub(super) fn of_device(qmp: &mut Qmp, device: &Device) -> Vec<i32> {
    let chardev = qmp.execute("qom-get", json!({ "path": device.path, "property": "chardev" })).ok();
    chardev.as_ref().and_then(|chardev| chardev.as_str()).map(|chardev| of_chardev(qmp, chardev)).unwrap_or_default()
}

/// The same, of a character device.
pub(super) fn of_chardev(qmp: &mut Qmp, chardev: &str) -> Vec<i32> {
    let at = format!("/chardevs/{chardev}");
    let Ok(address) = qmp.execute("qom-get", json!({ "path": at, "property": "addr" })) else { return Vec::new() };
    let path = address["path"].as_str().map(Path::new);
    path.map(|path| connected(qmp.pid(), path)).unwrap_or_default()
}

/// Those at the other end of the connection that process `pid` has by this socket, whichever of them listens.
fn connected(pid: i32, path: &Path) -> Vec<i32> {
    let Some(socket) = socket_of(pid, path) else { return Vec::new() };
    // Without an answer, as for sockets of another network namespace: who has made it.
    match other_end(&socket) {
        Ok(inode) => holders(inode),
        Err(_) => peer_of(&socket).into_iter().collect(),
    }
}

/// A copy of the end that the process has.
fn socket_of(pid: i32, path: &Path) -> Option<UnixStream> {
    let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    let is_socket = |link: &Path| link.to_str().is_some_and(|target| target.starts_with("socket:["));
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
    let sockets = descriptors.filter(|entry| fs::read_link(entry.path()).is_ok_and(|link| is_socket(&link)));
    let numbers = sockets.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut copies =
        numbers.filter_map(|number| pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok()).map(UnixStream::from);
    // One that listens has no other end; sockets of other families have addresses that are none of these.
    let is_it = |socket: &UnixStream| {
        let ends = socket.peer_addr().and_then(|peer| Ok([peer, socket.local_addr()?]));
        ends.is_ok_and(|ends| ends.iter().any(|end| end.as_pathname() == Some(path)))
    };
    copies.find(is_it)
}

/// The number of the socket that this one is connected to.
fn other_end(socket: &UnixStream) -> io::Result<u32> {
    let inode = u32::try_from(rustix::fs::fstat(socket)?.st_ino).map_err(io::Error::other)?;
    let kernel: OwnedFd =
        socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG))?;
    send(kernel.as_fd(), &question(inode), SendFlags::empty())?;
    let mut answer = [0; 1024];
    let (length, _) = recv(kernel.as_fd(), &mut answer, RecvFlags::DONTWAIT)?;
    peer_in(&answer[..length.min(answer.len())]).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// What a request and an answer begin with: `struct nlmsghdr`.
const HEAD: usize = 16;
/// By family: `SOCK_DIAG_BY_FAMILY`.
const BY_FAMILY: u16 = 20;

/// `struct unix_diag_req` for one socket: with it, whom it is connected to.
fn question(inode: u32) -> Vec<u8> {
    const REQUEST: u16 = 1;
    const LENGTH: u32 = HEAD as u32 + 24;
    const SHOW_PEER: u32 = 4;
    const ANY: u32 = u32::MAX;
    let unix = u32::from(AddressFamily::UNIX.as_raw());
    let kind = u32::from(BY_FAMILY) | u32::from(REQUEST) << 16;
    // The last two would be a cookie.
    let words = [LENGTH, kind.to_le(), 0, 0, unix.to_le(), ANY, inode, SHOW_PEER, ANY, ANY];
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// The peer in the answer: `struct unix_diag_msg`, and attributes behind it.
fn peer_in(answer: &[u8]) -> Option<u32> {
    const ABOUT: usize = 16;
    const PEER: u16 = 2;
    let number = |at: usize| Some(u16::from_ne_bytes(answer.get(at..at + 2)?.try_into().ok()?));
    if number(4)? != BY_FAMILY {
        return None;
    }
    let mut at = HEAD + ABOUT;
    loop {
        let length = usize::from(number(at)?);
        if number(at + 2)? == PEER {
            return Some(u32::from_ne_bytes(answer.get(at + 4..at + 8)?.try_into().ok()?));
        }
        at += length.next_multiple_of(4).max(4);
    }
}

/// The processes that have this socket open.
fn holders(inode: u32) -> Vec<i32> {
    let name = format!("socket:[{inode}]");
    let is_it = |entry: &fs::DirEntry| fs::read_link(entry.path()).is_ok_and(|link| link.as_os_str() == name.as_str());
    let has_it =
        |pid: &i32| fs::read_dir(format!("/proc/{pid}/fd")).is_ok_and(|all| all.flatten().any(|entry| is_it(&entry)));
    writers::processes().filter(has_it).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{
        os::unix::net::UnixListener,
        process::{Command, Stdio},
    };

    use super::*;

    fn ourselves() -> i32 {
        std::process::id() as i32
    }

    #[test]
    fn the_other_end_is_found_whoever_listens() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        assert!(connected(ourselves(), &path).is_empty());
        let ours = UnixStream::connect(&path).unwrap();
        let served = listener.accept().unwrap();
        assert_eq!(connected(ourselves(), &path), [ourselves()]);
        drop(listener);
        assert_eq!(connected(ourselves(), &path), [ourselves()]);
        drop(served);
        assert!(connected(ourselves(), &path).is_empty());
        assert!(connected(ourselves(), &folder.path().join("other")).is_empty());
        drop(ours);
    }

    /// As a daemon is that was listening before it went into the background.
    #[test]
    fn the_other_end_is_found_where_somebody_else_has_made_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let _ours = UnixStream::connect(&path).unwrap();
        let served = OwnedFd::from(listener.accept().unwrap().0);
        let mut heir = Command::new("sleep").arg("1000").stdin(Stdio::from(served)).spawn().unwrap();
        assert_eq!(connected(ourselves(), &path), [heir.id() as i32]);
        heir.kill().unwrap();
        heir.wait().unwrap();
    }

    #[test]
    fn an_answer_without_a_peer_has_none() {
        let mut answer = question(1);
        assert_eq!(peer_in(&answer), None);
        answer.truncate(HEAD + 16);
        answer.extend([[5, 0], [1, 0], [7, 7], [7, 7], [8, 0], [2, 0], [4, 3], [2, 1]].as_flattened());
        // The first is padded to 8 bytes.
        assert_eq!(peer_in(&answer), Some(0x0102_0304));
        answer[4] = 2;
        assert_eq!(peer_in(&answer), None, "an error");
        assert_eq!(peer_in(&[]), None);
    }
}
