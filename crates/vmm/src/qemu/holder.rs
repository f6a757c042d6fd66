//! Which process holds a unix socket that serves one client at a time.
//!
//! QEMU has a descriptor of each connection that it has accepted, and the kernel says which socket is at the other end
//! of it (`NETLINK_SOCK_DIAG`). A process that has that one open is the client.
use std::{fs, path::Path};

use rustix::{
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with},
};

use super::rights;

/// `SOCK_DIAG_BY_FAMILY`.
const BY_FAMILY: u16 = 20;
const REQUEST_AND_DUMP: u16 = 1 | 0x300;
const HEADER: usize = 16;
/// Of a `unix_diag_msg`.
const MESSAGE: usize = 16;
/// `UDIAG_SHOW_NAME` and `UDIAG_SHOW_PEER`, and what answers them.
const SHOW: u32 = 1 | 4;
const NAME: u16 = 0;
const PEER: u16 = 2;
const DONE: u16 = 3;

/// A unix socket, as the kernel knows it.
#[derive(Debug, PartialEq, Eq)]
struct Known {
    inode: u32,
    peer: Option<u32>,
    name: Vec<u8>,
}

/// Those who are connected to the socket of this path, in words: `process 12 (libvirtd: /usr/sbin/libvirtd)`.
pub(super) fn holders(path: &Path) -> Vec<String> {
    let Ok(known) = all() else { return Vec::new() };
    let served = known.iter().filter(|one| is_at(path, &one.name));
    let clients: Vec<u32> = served.filter_map(|one| one.peer).collect();
    let ourselves = std::process::id().to_string();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = processes.filter_map(|entry| entry.file_name().into_string().ok());
    let processes = processes.filter(|name| name.bytes().all(|digit| digit.is_ascii_digit()) && *name != ourselves);
    processes.filter(|pid| has_one(pid, &clients)).map(|pid| in_words(&pid)).collect()
}

/// The name that QEMU has bound may be another way to the same file, as seen from a root of its own.
fn is_at(path: &Path, name: &[u8]) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let bound = Path::new(std::ffi::OsStr::from_bytes(name));
    !name.is_empty() && (bound == path || (bound.file_name() == path.file_name() && is_same_file(path, bound)))
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |path: &Path| fs::metadata(path).map(|file| (file.dev(), file.ino())).ok();
    // One that can't be looked at from here has the same name at least.
    id(other).is_none_or(|other| Some(other) == id(one))
}

fn has_one(pid: &str, inodes: &[u32]) -> bool {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    open.filter_map(|entry| fs::read_link(entry.path()).ok()).any(|target| {
        let inode = target.to_str().and_then(|target| target.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
        inode.is_some_and(|inode| inodes.contains(&inode))
    })
}

fn in_words(pid: &str) -> String {
    const LONGEST: usize = 120;
    let name = rights::field(pid, "Name").unwrap_or_default();
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let line = String::from_utf8_lossy(&line).trim_end_matches('\0').replace('\0', " ");
    let line: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).take(LONGEST).collect();
    format!("process {pid} ({name}: {line})")
}

/// All unix sockets of our network namespace.
fn all() -> Result<Vec<Known>, Errno> {
    let kernel = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG))?;
    let mut request = Vec::new();
    request.extend(40_u32.to_ne_bytes());
    request.extend(BY_FAMILY.to_ne_bytes());
    request.extend(REQUEST_AND_DUMP.to_ne_bytes());
    request.extend([0; 8]);
    // A unix_diag_req: family, protocol, room; all states; no certain inode; what to show; no cookie.
    request.extend([AddressFamily::UNIX.as_raw() as u8, 0, 0, 0]);
    for number in [u32::MAX, 0, SHOW, 0, 0] {
        request.extend(number.to_ne_bytes());
    }
    send(&kernel, &request, SendFlags::empty())?;
    let (mut known, mut answer) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        let (bytes, _) = recv(&kernel, answer.as_mut_slice(), RecvFlags::empty())?;
        if bytes == 0 || read(&answer[..bytes], &mut known) {
            return Ok(known);
        }
    }
}

/// The sockets that an answer lists. True: it was the last one.
fn read(mut answer: &[u8], known: &mut Vec<Known>) -> bool {
    while let Some((length, kind)) = number32(answer, 0).zip(number16(answer, 4)) {
        let length = length as usize;
        // An error, or the end.
        if kind != BY_FAMILY || length < HEADER || length > answer.len() {
            return kind <= DONE || length < HEADER || length > answer.len();
        }
        known.extend(one(&answer[HEADER..length]));
        answer = &answer[length.next_multiple_of(4).min(answer.len())..];
    }
    false
}

fn one(message: &[u8]) -> Option<Known> {
    let mut one = Known { inode: number32(message, 4)?, peer: None, name: Vec::new() };
    let mut attributes = message.get(MESSAGE..)?;
    while let Some((length, kind)) = number16(attributes, 0).zip(number16(attributes, 2)) {
        let Some(value) = attributes.get(4..usize::from(length)) else { break };
        match kind {
            NAME => one.name = value.strip_suffix(&[0]).unwrap_or(value).to_vec(),
            PEER => one.peer = number32(value, 0),
            _ => {}
        }
        attributes = attributes.get(usize::from(length).next_multiple_of(4)..).unwrap_or_default();
    }
    Some(one)
}

fn number16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes))
}

fn number32(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{
        os::unix::net::{UnixListener, UnixStream},
        process::{Command, Stdio},
        thread,
    };

    use super::*;

    #[test]
    fn who_is_connected_is_named() {
        // Children that other tests fork have our descriptors for a moment.
        let holders = |path: &Path| -> Vec<String> {
            holders(path).into_iter().filter(|holder| !holder.contains("transship_vmm")).collect()
        };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(holders(&path), Vec::<String>::new());
        let ours = UnixStream::connect(&path).unwrap();
        let _served = listener.accept().unwrap();
        // We are not somebody else; a process that has our end is.
        assert_eq!(holders(&path), Vec::<String>::new());
        let mut child =
            Command::new("sleep").arg("600").stdin(Stdio::from(std::os::fd::OwnedFd::from(ours))).spawn().unwrap();
        // It is known by its new name a moment before its arguments are.
        while fs::read(format!("/proc/{}/cmdline", child.id())).unwrap().is_empty() {
            thread::yield_now();
        }
        let found = holders(&path);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found, [format!("process {} (sleep: sleep 600)", child.id())]);
    }

    #[test]
    fn an_answer_that_is_cut_short_is_no_harm() {
        let mut message = vec![1, 1, 1, 0];
        message.extend([7_u32, 0, 0].iter().flat_map(|number| number.to_ne_bytes()));
        message.extend([6_u16, NAME].iter().flat_map(|number| number.to_ne_bytes()));
        message.extend(*b"/x\0\0");
        message.extend([8_u16, PEER].iter().flat_map(|number| number.to_ne_bytes()));
        message.extend(9_u32.to_ne_bytes());
        assert_eq!(one(&message), Some(Known { inode: 7, peer: Some(9), name: b"/x".to_vec() }));
        for cut in 0..message.len() {
            let _ = one(&message[..cut]);
            let _ = read(&message[..cut], &mut Vec::new());
        }
    }
}
