//! The balloon device, with a stock QEMU and the unmodified driver of a Linux guest.
#![allow(clippy::unwrap_used)]
use rustix::process::Signal;
use serde_json::json;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};
use transship_balloon::Client;
use transship_guest::Hint;
use transship_lab::balloon::BalloonClient;
use transship_lab::lines::Mark;
use transship_lab::{Balloon, PATIENCE, Qemu, QemuBuilder, Workload, other_qemu, wait_until};
use transship_memory::PageSet;
use transship_vmm::{AttachOptions, attach_source};

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 512 * MIB;

/// A Linux guest in the QEMU that has the device type, connected with the balloon; nothing where there is none.
fn guest(balloon: &Balloon) -> Option<QemuBuilder> {
    let qemu = other_qemu("11.1").unwrap()?;
    let workload = Workload { mib: 32, ..Workload::LINUX };
    Some(balloon.connected(Qemu::linux().binary(qemu).memory((MEMORY / MIB) as u32).workload(workload)))
}

fn allocated(memory: &Path) -> u64 {
    memory.metadata().unwrap().blocks() * 512
}

/// All that the guest can do without. One that was told only now that it has its memory again may name none.
fn all_hints(client: &mut BalloonClient) -> Vec<(u64, u64, u64)> {
    let mut hints = Vec::new();
    wait_until("hints for more than half of the memory", || {
        client.call("done", json!({}))?;
        hints = client.hints()?;
        let total: u64 = hints.iter().map(|(_, _, bytes)| bytes).sum();
        assert!(total < MEMORY - 32 * MIB, "{total} bytes in {} hints", hints.len());
        Ok(total > MEMORY / 2)
    })
    .unwrap();
    hints
}

#[test]
fn a_guest_names_its_free_memory_when_asked() {
    let balloon = Balloon::start().unwrap();
    let Some(guest) = guest(&balloon) else { return };
    let guest = guest.start().unwrap();
    guest.ready().unwrap();
    balloon.plug(&guest).unwrap();

    let mut client = balloon.client().unwrap();
    let about = client.call("describe", json!({})).unwrap();
    let refused = balloon.client().unwrap().call("describe", json!({})).unwrap_err();
    assert!(refused.to_string().contains("another process uses this balloon"), "{refused}");
    let file = guest.memory_files()[0].metadata().unwrap();
    let range = &about["memory"][0];
    assert_eq!((range["device"].as_u64(), range["inode"].as_u64()), (Some(file.dev()), Some(file.ino())), "{about}");

    // More than once: if it did not get its memory back, there would be none to name.
    for _ in 0..3 {
        let hints = all_hints(&mut client);
        assert!(hints.iter().all(|(entry, offset, bytes)| *entry == 0 && offset + bytes <= MEMORY), "{hints:?}");
        client.call("stop", json!({})).unwrap();
        client.call("done", json!({})).unwrap();
    }
    assert_eq!(guest.sweep().unwrap().errors, 0);

    // A client that goes without a word gives the memory back, too.
    client.call("start", json!({})).unwrap();
    drop(client);
    let mut client = balloon.client().unwrap();
    all_hints(&mut client);
    assert_eq!(guest.sweep().unwrap().errors, 0);
}

#[test]
#[ignore = "long: make test-long"]
fn the_device_is_unplugged_and_plugged_in_again() {
    let balloon = Balloon::start().unwrap();
    let Some(guest) = guest(&balloon) else { return };
    let guest = guest.start().unwrap();
    guest.ready().unwrap();
    for _ in 0..2 {
        balloon.plug(&guest).unwrap();
        let mut client = balloon.client().unwrap();
        all_hints(&mut client);
        balloon.unplug(&guest).unwrap();
        let lost = client.event().unwrap();
        assert!(lost["lost"].is_string(), "{lost}");
    }
    let mut client = balloon.client().unwrap();
    let refused = client.call("start", json!({})).unwrap_err();
    assert!(refused.to_string().contains("no driver"), "{refused}");
    assert_eq!(guest.sweep().unwrap().errors, 0);
}

#[test]
#[ignore = "minutes of an emulated guest: make test-long"]
fn it_inflates_deflates_and_tells_how_memory_is_used() {
    let balloon = Balloon::start().unwrap();
    let Some(guest) = guest(&balloon) else { return };
    let guest = guest.append("workload.stale=256").start().unwrap();
    guest.ready().unwrap();
    let memory = &guest.memory_files()[0];
    assert!(allocated(memory) > 256 * MIB);
    balloon.plug(&guest).unwrap();
    let mut client = balloon.client().unwrap();
    let target = |client: &mut BalloonClient, bytes: u64| {
        client.call("target", json!({ "bytes": bytes })).unwrap();
        wait_until("the balloon's size", || Ok(client.call("describe", json!({}))?["given_bytes"] == bytes)).unwrap();
    };
    // What it says is what it said last, so it comes a question later.
    let wait_free = |client: &mut BalloonClient, wanted: std::ops::Range<u64>| {
        wait_until("statistics", || {
            let free = client.call("statistics", json!({}))?["free_bytes"].as_u64();
            Ok(free.is_some_and(|free| wanted.contains(&free)))
        })
        .unwrap();
    };

    wait_free(&mut client, 300 * MIB..MEMORY);
    target(&mut client, 256 * MIB);
    assert!(allocated(memory) < 224 * MIB, "{}", allocated(memory));
    wait_free(&mut client, 0..MEMORY - 256 * MIB);
    target(&mut client, 0);
    wait_free(&mut client, 300 * MIB..MEMORY);
    assert_eq!(guest.sweep().unwrap().errors, 0);
}

#[test]
#[ignore = "long: make test-long"]
fn a_balloon_that_is_asked_to_end_tells_its_client_and_ends_when_qemu_lets_go() {
    let mut balloon = Balloon::start().unwrap();
    let Some(guest) = guest(&balloon) else { return };
    let guest = guest.start().unwrap();
    guest.ready().unwrap();
    balloon.plug(&guest).unwrap();
    let mut client = balloon.client().unwrap();
    all_hints(&mut client);
    balloon.command().signal(Signal::INT).unwrap();
    let lost = client.event().unwrap();
    assert!(lost["lost"].is_string(), "{lost}");
    // The guest, which has its memory again, uses the device as before: QEMU would not survive its end.
    balloon.command().stderr().wait(Mark::START, "what it waits for", |line| line.find("ending when QEMU")).unwrap();
    assert_eq!(guest.sweep().unwrap().errors, 0);
    assert!(balloon.command().process().ended().unwrap().is_none());
    balloon.unplug(&guest).unwrap();
    assert_eq!(guest.sweep().unwrap().errors, 0);
    assert_eq!(guest.status().unwrap(), "running");
    drop(guest);
    let status = balloon.command().process().wait(PATIENCE).unwrap();
    assert!(status.success(), "{status}");
}

/// Free page reporting: what the guest has freed becomes holes, by and by.
#[test]
#[ignore = "long: make test-long"]
fn reported_memory_becomes_holes() {
    let balloon = Balloon::start().unwrap();
    let Some(guest) = guest(&balloon) else { return };
    let guest = guest.append("workload.stale=256").start().unwrap();
    guest.ready().unwrap();
    let memory = &guest.memory_files()[0];
    let before = allocated(memory);
    assert!(before > 256 * MIB);
    balloon.plug(&guest).unwrap();
    wait_until("holes", || Ok(allocated(memory) < before - 200 * MIB)).unwrap();
    assert_eq!(guest.sweep().unwrap().errors, 0);
}

#[test]
#[ignore = "minutes of an emulated guest: make test-long"]
fn while_a_client_keeps_memory_nothing_becomes_a_hole() {
    let balloon = Balloon::start().unwrap();
    let Some(guest) = guest(&balloon) else { return };
    let guest = guest.append("workload.stale=128").start().unwrap();
    guest.ready().unwrap();
    let memory = &guest.memory_files()[0];
    let mut client = balloon.client().unwrap();
    client.call("keep", json!({})).unwrap();
    guest
        .qmp(
            "device_add",
            json!({
                "driver": "vhost-user-test-device-pci", "id": "balloon", "bus": "port0", "chardev": "balloon",
                "virtio-id": 5, "num_vqs": 5, "config_size": 16, "vq_size": 1024
            }),
        )
        .unwrap();
    wait_until("the driver", || Ok(client.call("describe", json!({}))?["hints"] == true)).unwrap();
    let before = allocated(memory);
    client.call("target", json!({ "bytes": 128 * MIB })).unwrap();
    wait_until("the balloon's size", || Ok(client.call("describe", json!({}))?["given_bytes"] == 128 * MIB)).unwrap();
    assert!(allocated(memory) >= before, "{} of {before}", allocated(memory));
}

/// What a hint says, taken at its word: the page was free at some moment after the hints were asked for, so unless it
/// was written since, nobody will miss what it holds. So all of that is overwritten, in a guest that takes, writes,
/// checks and frees memory as fast as it can.
fn what_hints_name_may_be_overwritten(kernel: &str) {
    let balloon = Balloon::start().unwrap();
    let Some(guest) = guest(&balloon) else { return };
    let guest = guest.append(&format!("workload.churn=192 workload.stale=300 {kernel}")).start().unwrap();
    guest.ready().unwrap();
    let mut source = attach_source(&guest.vm().parse().unwrap(), AttachOptions::default()).unwrap();
    let memory = source.memory();
    let mut tracker = source.track().unwrap();
    let file = OpenOptions::new().write(true).open(&guest.memory_files()[0]).unwrap();
    let garbage = vec![0x5a; 4 << 20];
    balloon.plug(&guest).unwrap();

    let mut overwritten = 0;
    for round in 0..4 {
        let mut client = Client::connect(balloon.path(), &memory).unwrap();
        // The rule: the scan, then the question …
        tracker.scan(0).unwrap();
        client.start().unwrap();
        let mut dead = PageSet::empty(memory.regions()[0].pages());
        let deadline = Instant::now() + PATIENCE;
        // … all hints, or those that come in a moment.
        let deadline = if round % 2 == 0 { deadline } else { Instant::now() + Duration::from_millis(100) };
        while let Some(Hint::Free(place)) = client.next(deadline).unwrap() {
            dead.insert(place.pages);
        }
        client.stop().unwrap();
        // In some rounds the guest has its memory again at once, in the others when it runs on.
        if round < 2 {
            client.done().unwrap();
        }
        // It uses again what it has named, meanwhile; and where it was not given back, it is short of memory and takes
        // it.
        guest.next_count().unwrap();
        guest.next_count().unwrap();
        guest.qmp("stop", json!({})).unwrap();
        guest.wait_status("paused").unwrap();
        dead.subtract(&tracker.scan(0).unwrap());
        for range in dead.ranges() {
            for (number, bytes) in chunks(range.bytes(), garbage.len() as u64).enumerate() {
                let at = range.first.offset() + number as u64 * garbage.len() as u64;
                file.write_all_at(&garbage[..bytes as usize], at).unwrap();
            }
        }
        overwritten += dead.count().get();
        guest.qmp("cont", json!({})).unwrap();
        // A stop of the guest in the middle ends the connection; this is how one ends that just goes.
        drop(client);
        let swept = guest.sweep().unwrap();
        assert_eq!(swept.errors, 0, "{}", guest.serial().lines().tail());
        balloon.wait_driver().unwrap();
    }
    // What the driver takes is cleared there, and so counts as written.
    let none_left = kernel.contains("init_on_alloc=1");
    assert!(overwritten > 1000 || none_left, "only {overwritten} pages");
}

fn chunks(bytes: u64, most: u64) -> impl Iterator<Item = u64> {
    (0..bytes.div_ceil(most)).map(move |n| most.min(bytes - n * most))
}

#[test]
#[ignore = "minutes of an emulated guest: make test-long"]
fn what_hints_name_may_be_overwritten_in_a_plain_guest() {
    what_hints_name_may_be_overwritten("init_on_alloc=0");
}

#[test]
#[ignore = "minutes of an emulated guest: make test-long"]
fn what_hints_name_may_be_overwritten_in_a_guest_that_clears_what_it_takes() {
    what_hints_name_may_be_overwritten("init_on_alloc=1");
}

#[test]
#[ignore = "minutes of an emulated guest: make test-long"]
fn what_hints_name_may_be_overwritten_in_a_guest_that_clears_what_it_frees() {
    what_hints_name_may_be_overwritten("init_on_alloc=0 init_on_free=1");
}
