//! The lab itself: guests boot, count and check themselves, and notice one page that was changed behind their back. If
//! they did not, no other test would see a page that a move has lost.
#![allow(clippy::unwrap_used)]
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use transship_lab::{Accel, Qemu, Synthetic, Workload, other_qemu};

const PAGE: usize = 4096;

#[test]
#[ignore = "long: make test-long"]
fn a_linux_guest_notices_one_stale_page() {
    let workload = Workload { mib: 32, idle: true, ..Workload::LINUX };
    let guest = Qemu::linux().workload(workload).start().unwrap();
    notices_one_stale_page(&guest, 32 * 256, b"tranship");
}

#[test]
fn a_multiboot_guest_notices_one_stale_page() {
    let workload = Workload { idle: true, ..Workload::MULTIBOOT };
    let guest = Qemu::multiboot_with_kvm().workload(workload).start().unwrap();
    notices_one_stale_page(&guest, u64::from(workload.mib) * 256, b"ship");
}

/// One bit of one page: less than any move can get wrong.
fn notices_one_stale_page(guest: &Qemu, pages: u64, magic: &[u8]) {
    assert_eq!(guest.ready().unwrap(), pages);
    let before = guest.sweep().unwrap();
    assert_eq!((before.pages, before.errors), (pages, 0));

    let memory = &guest.memory_files()[0];
    flip_the_last_bit(memory, find_page(memory, magic));

    assert_eq!(guest.sweep().unwrap().errors, 1, "{}", guest.serial().lines().tail());
}

fn flip_the_last_bit(memory: &Path, page: u64) {
    let at = SeekFrom::Start(page + PAGE as u64 - 1);
    let mut file = OpenOptions::new().read(true).write(true).open(memory).unwrap();
    let mut last = [0];
    file.seek(at).unwrap();
    file.read_exact(&mut last).unwrap();
    file.seek(at).unwrap();
    file.write_all(&[last[0] ^ 1]).unwrap();
}

#[test]
fn a_linux_guest_writes_and_checks_while_it_runs() {
    let guest = Qemu::linux().start().unwrap();
    guest.ready().unwrap();
    let first = guest.next_count().unwrap();
    let swept = guest.sweep().unwrap();
    let then = guest.next_count().unwrap();
    assert!(then.count > first.count, "{first:?} {then:?}");
    assert_eq!(swept.pages, u64::from(Workload::LINUX.mib) * 256);
    assert_eq!((swept.errors, then.errors), (0, 0));
}

#[test]
#[ignore = "long: make test-long"]
fn older_and_newer_qemus_run_the_linux_guest() {
    for (version, exactly) in [("7.2", (7, 2)), ("11.1", (11, 1))] {
        let Some(qemu) = other_qemu(version).unwrap() else { return };
        let workload = Workload { mib: 32, ..Workload::LINUX };
        let guest = Qemu::linux().binary(qemu).workload(workload).start().unwrap();
        let says = guest.qmp("query-version", serde_json::json!({})).unwrap();
        assert_eq!(
            (says["qemu"]["major"].as_u64(), says["qemu"]["minor"].as_u64()),
            (Some(exactly.0), Some(exactly.1))
        );
        guest.ready().unwrap();
        assert_eq!(guest.sweep().unwrap().errors, 0);
    }
}

#[test]
fn memory_of_two_numa_nodes_is_two_files() {
    let guest = Qemu::multiboot_under(Accel::Tcg).backends(2).start().unwrap();
    guest.ready().unwrap();
    let sizes: Vec<_> = guest.memory_files().iter().map(|file| file.metadata().unwrap().len()).collect();
    assert_eq!(sizes, [32 << 20, 32 << 20]);
}

#[test]
fn a_qemu_is_asked_stopped_and_killed_from_outside() {
    let mut guest = Qemu::firmware().start().unwrap();
    assert_eq!(guest.status().unwrap(), "running");
    guest.qmp("stop", serde_json::json!({})).unwrap();
    guest.wait_status("paused").unwrap();
    assert!(!guest.is_traced().unwrap());
    assert!(guest.open_files().unwrap().iter().any(|file| file.ends_with("/mem0")));
    let (folder, pid) = (guest.folder().to_path_buf(), guest.pid());
    guest.kill9();
    assert!(guest.status().is_err());
    drop(guest);
    assert!(!folder.exists() && !Path::new(&format!("/proc/{pid}")).exists());
}

#[test]
fn a_waiting_qemu_says_so_and_a_refusing_one_says_why() {
    let waiting = Qemu::firmware().incoming().start().unwrap();
    assert_eq!(waiting.status().unwrap(), "inmigrate");
    let error = Qemu::firmware().machine("no-such-machine").start().unwrap_err().to_string();
    assert!(error.contains("no-such-machine"), "{error}");
}

/// QEMU's own migration between two of the lab's guests: what a good move looks like to these tests.
#[test]
fn a_moved_guest_is_followed_to_the_other_side() {
    let guest = Qemu::multiboot_under(Accel::Tcg);
    let source = guest.clone().start().unwrap();
    let destination = guest.incoming().start().unwrap();
    source.ready().unwrap();
    let left = source.next_count().unwrap();
    let uri = format!("unix:{}", destination.folder().join("move").display());
    destination.qmp("migrate-incoming", serde_json::json!({ "uri": uri })).unwrap();
    source.qmp("migrate", serde_json::json!({ "uri": uri })).unwrap();
    destination.wait_status("running").unwrap();
    source.wait_status("postmigrate").unwrap();
    assert!(destination.next_count().unwrap().count >= left.count);
    assert_eq!(destination.sweep().unwrap().errors, 0);
}

/// The first page in a memory file that begins with `magic` and belongs to the workload: not page 0, whose number
/// would also fit half a page of something else.
fn find_page(memory: &Path, magic: &[u8]) -> u64 {
    let mut file = File::open(memory).unwrap();
    let mut page = [0; PAGE];
    let mut at = 0;
    while file.read_exact(&mut page).is_ok() {
        let number = &page[magic.len()..2 * magic.len()];
        if page.starts_with(magic) && number[0] == 7 && number[1..].iter().all(|&b| b == 0) {
            return at;
        }
        at += PAGE as u64;
    }
    panic!("no page of the workload in {}", memory.display());
}

/// Whatever is open here is open in a program that another test starts meanwhile, too, until that runs.
#[test]
fn a_guest_that_was_asked_is_free_for_the_next_client() {
    let guest = Synthetic::builder().memory("16M").start().unwrap();
    let ask = || -> std::io::Result<String> {
        let mut client = UnixStream::connect(guest.socket())?;
        client.write_all(b"{\"id\":1,\"call\":\"describe\"}\n")?;
        let mut answer = String::new();
        BufReader::new(&client).read_line(&mut answer)?;
        client.shutdown(Shutdown::Both)?;
        Ok(answer)
    };
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                Command::new("true").status().unwrap();
            }
        });
        let answers: Vec<_> = (0..500).map(|_| guest.state().map(|_| ask())).collect();
        is_over.store(true, Relaxed);
        for answer in answers {
            let answer = answer.unwrap().unwrap();
            assert!(answer.contains("\"running\":true"), "{answer}");
        }
    });
}
