//! What writes to guest memory past the tracker: found when a move begins, and found when it came meanwhile.
use crate::ends::held_at;
use serde_json::{Value, json};
use std::{
    io::{Read, Write},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    thread,
};
use transship_lab::{
    Balloon, LabError, Process, Qemu, QemuBuilder, Result, Scratch, Transship, lines::Mark, other_qemu,
};

/// A move in whose rounds `plug` happens. It is refused, the guest runs on, and nothing of ours is left in it. Returns
/// the refusal.
fn refused_after(guest: QemuBuilder, plug: impl FnOnce(&Qemu) -> Result<()>) -> Result<String> {
    refused_at("source.round", guest, "running", plug)
}

/// The same of a guest that stands still, at `prelaunch` or elsewhere: it has one round, when it is stopped.
fn refused_at(step: &str, guest: QemuBuilder, stays: &str, plug: impl FnOnce(&Qemu) -> Result<()>) -> Result<String> {
    let destination = guest.clone().incoming();
    let (source, destination) = (guest.start()?, destination.start()?);
    let folder = Scratch::new()?;
    let receive = Transship::receiving(&destination.vm(), &format!("unix:{}", folder.join("s").display())).start()?;
    let moving = held_at(step, Transship::moving(&source.vm(), &receive.listening()?), &folder)?;
    plug(&source)?;
    std::fs::remove_file(folder.join("gate"))?;
    let ended = moving.wait()?.expect_code(1)?;
    receive.wait()?.expect_code(1)?;
    assert_eq!(source.status()?, stays);
    assert_eq!(source.open_files()?.iter().filter(|file| file.contains("userfaultfd")).count(), 0);
    Ok(ended.stderr)
}

fn assert_came(refusal: &str, what: &str) {
    for part in ["came meanwhile", what, "--allow-untracked-writers"] {
        assert!(refusal.contains(part), "{part:?} is not in: {refusal}");
    }
}

/// A disk image where the page cache can be left out.
fn image(folder: &Scratch) -> Result<PathBuf> {
    let path = folder.join("disk");
    std::fs::write(&path, vec![0; 1 << 20])?;
    Ok(path)
}

/// Past the page cache.
fn add_late_disk(qemu: &Qemu, disk: &Path) -> Result<()> {
    let cache = json!({ "direct": true });
    let node = json!({"driver": "file", "node-name": "late", "filename": disk, "cache": cache});
    qemu.qmp("blockdev-add", node).map(drop)
}

#[test]
fn a_disk_past_the_page_cache_that_comes_meanwhile_is_named() -> Result<()> {
    let folder = Scratch::within(Path::new("/var/tmp"))?;
    let disk = image(&folder)?;
    let refusal = refused_after(Qemu::firmware().memory(64), |qemu| add_late_disk(qemu, &disk))?;
    assert_came(&refusal, "disk late with cache.direct=on");
    Ok(())
}

#[test]
fn a_disk_that_leaves_the_page_cache_meanwhile_is_named() -> Result<()> {
    let folder = Scratch::within(Path::new("/var/tmp"))?;
    let disk = image(&folder)?;
    let node = format!("driver=file,node-name=old,filename={}", disk.display());
    let refusal = refused_after(Qemu::firmware().memory(64).args(["-blockdev", &node]), |qemu| {
        let options = json!({"driver": "file", "node-name": "old", "filename": disk, "cache": { "direct": true }});
        qemu.qmp("blockdev-reopen", json!({ "options": [options] })).map(drop)
    })?;
    assert_came(&refusal, "disk old with cache.direct=on");
    Ok(())
}

/// Answers what a front end asks before it has a driver: a network card of no features.
fn network_back_end(socket: &Path) -> Result<()> {
    let listener = UnixListener::bind(socket).map_err(|e| LabError(format!("{}: {e}", socket.display())))?;
    thread::spawn(move || {
        listener.incoming().flatten().for_each(|front_end| drop(thread::spawn(|| answer(front_end))))
    });
    Ok(())
}

/// Until it hangs up.
fn answer(mut front_end: UnixStream) -> std::io::Result<()> {
    const GET_FEATURES: u32 = 1;
    const VERSION_1: u64 = 1 << 32;
    const LOG_ALL: u64 = 1 << 26;
    const PROTOCOL_FEATURES: u64 = 1 << 30;
    // Without these two QEMU could not migrate.
    const LOG_SHMFD: u64 = 1 << 1;
    const GET_PROTOCOL_FEATURES: u32 = 15;
    const REPLY: u32 = 5;
    loop {
        let mut head = [[0; 4]; 3];
        front_end.read_exact(head.as_flattened_mut())?;
        let [request, _flags, bytes] = head.map(u32::from_ne_bytes);
        front_end.read_exact(&mut vec![0; bytes as usize])?;
        let answer = match request {
            GET_FEATURES => VERSION_1 | LOG_ALL | PROTOCOL_FEATURES,
            GET_PROTOCOL_FEATURES => LOG_SHMFD,
            _ => continue,
        };
        front_end.write_all([request, REPLY, 8].map(u32::to_ne_bytes).as_flattened())?;
        front_end.write_all(&answer.to_ne_bytes())?;
    }
}

#[test]
fn a_network_of_another_process_that_comes_meanwhile_is_named() -> Result<()> {
    let folder = Scratch::new()?;
    network_back_end(&folder.join("net"))?;
    let chardev = format!("socket,id=net,path={}", folder.join("net").display());
    // The destination's is another connection.
    let refusal = refused_after(Qemu::firmware().memory(64).args(["-chardev", &chardev]), |qemu| {
        qemu.qmp("netdev_add", json!({"type": "vhost-user", "id": "late", "chardev": "net"})).map(drop)
    })?;
    assert_came(&refusal, "network late: index=0,type=vhost-user");
    Ok(())
}

/// QEMU starts passt by itself and waits until it has gone into the background. Here a script does, and has
/// `network_back_end` do the rest.
fn passt(folder: &Scratch) -> Result<PathBuf> {
    const SCRIPT: &str = r#"#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in
        --pid) pid=$2 ;;
        --fd) fd=$2 ;;
    esac
    shift
done
socat "FD:$fd" "UNIX-CONNECT:$(dirname "$0")/net" </dev/null >/dev/null 2>&1 &
echo $! >"$pid"
"#;
    let path = folder.join("passt");
    let made = std::fs::write(&path, SCRIPT)
        .and_then(|()| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)));
    made?;
    Ok(path)
}

#[test]
fn a_passt_that_shares_the_memory_is_known() -> Result<()> {
    let Some(newest) = other_qemu("11.1")? else { return Ok(()) };
    let folder = Scratch::new()?;
    network_back_end(&folder.join("net"))?;
    let program = passt(&folder)?;
    let refusal = refused_after(Qemu::firmware().memory(64).binary(&newest), |qemu| {
        let arguments = json!({"type": "passt", "id": "late", "path": program, "vhost-user": true});
        qemu.qmp("netdev_add", arguments).map(drop)
    })?;
    assert_came(&refusal, "network late: index=0,type=passt,vhost-user");

    let netdev = |more: &str| format!("passt,id=net,path={}{more}", program.display());
    let guest = |more: &str| Qemu::firmware().memory(64).binary(&newest).args(["-netdev", &netdev(more)]).start();
    let refusal = refusal_of(&guest(",vhost-user=on")?, &[])?;
    assert!(refusal.contains("network net: index=0,type=passt,vhost-user"), "{refusal}");
    // The other kind copies.
    let refusal = refusal_of(&guest("")?, &[])?;
    assert!(refusal.contains("nobody"), "{refusal}");
    Ok(())
}

/// Of a move to where nobody is: one that has nothing against the guest says that.
fn refusal_of(guest: &Qemu, prefix: &[String]) -> Result<String> {
    let moving = Transship::moving(&guest.vm(), "unix:/nobody/listens/here").prefix(prefix);
    Ok(moving.run()?.expect_code(1)?.stderr)
}

#[test]
fn a_device_that_is_another_process_and_comes_meanwhile_is_named() -> Result<()> {
    let Some(newest) = other_qemu("11.1")? else { return Ok(()) };
    let balloon = Balloon::start()?;
    let guest = Qemu::firmware().memory(64).binary(&newest).args(["-device", "pcie-root-port,id=port0"]);
    let refusal = refused_after(guest, |qemu| {
        let socket = json!({"type": "unix", "data": { "path": balloon.path() }});
        let backend = json!({"type": "socket", "data": { "addr": socket, "server": false }});
        qemu.qmp("chardev-add", json!({ "id": "late", "backend": backend }))?;
        let device: Value = json!({
            "driver": "vhost-user-test-device-pci", "id": "late", "bus": "port0", "chardev": "late",
            "virtio-id": 5, "num_vqs": 5, "config_size": 16, "vq_size": 1024
        });
        qemu.qmp("device_add", device).map(drop)
    })?;
    assert_came(&refusal, "device late (vhost-user-test-device-pci)");
    Ok(())
}

/// Another QEMU, which has the memory of this one mapped.
fn sharing_memory_of(qemu: &Qemu) -> Result<Qemu> {
    let file = qemu.memory_files()[0].display().to_string();
    let object = format!("memory-backend-file,id=shared,size=64M,share=on,mem-path={file}");
    Qemu::firmware().args(["-S", "-object", &object]).start()
}

#[test]
fn a_process_that_maps_the_memory_meanwhile_is_named() -> Result<()> {
    let mut second = None;
    let refusal = refused_after(Qemu::firmware().memory(64), |qemu| {
        second = Some(sharing_memory_of(qemu)?);
        Ok(())
    })?;
    let pid = second.as_ref().map_or(0, Qemu::pid);
    assert_came(&refusal, &format!("process {pid} (qemu-system"));
    Ok(())
}

/// It is looked at when it is stopped, and not before.
#[test]
fn what_comes_to_a_guest_that_stands_still_is_named_too() -> Result<()> {
    let folder = Scratch::within(Path::new("/var/tmp"))?;
    let (disk, mut second) = (image(&folder)?, None);
    let standing = || Qemu::firmware().memory(64).args(["-S"]);
    let refusal = refused_at("source.stopped", standing(), "prelaunch", |qemu| add_late_disk(qemu, &disk))?;
    assert_came(&refusal, "disk late with cache.direct=on");
    let refusal = refused_at("source.stopped", standing(), "prelaunch", |qemu| {
        second = Some(sharing_memory_of(qemu)?);
        Ok(())
    })?;
    let pid = second.as_ref().map_or(0, Qemu::pid);
    assert_came(&refusal, &format!("process {pid} (qemu-system"));
    let slots = standing().args(["-m", "64M,slots=1,maxmem=1G"]);
    let refusal = refused_at("source.stopped", slots, "prelaunch", |qemu| {
        qemu.qmp("object-add", json!({"qom-type": "memory-backend-ram", "id": "late", "size": 16 << 20}))?;
        qemu.qmp("device_add", json!({"driver": "pc-dimm", "id": "dimm0", "memdev": "late"})).map(drop)
    })?;
    assert!(refusal.contains("plugged, unplugged or remapped meanwhile"), "{refusal}");
    Ok(())
}

/// One that is root in a user namespace of its own sees all processes, and may look at no other's memory.
#[test]
fn processes_that_root_may_not_look_at_are_an_obstacle() -> Result<()> {
    let mut command = std::process::Command::new("unshare");
    command.args(["--user", "--map-root-user", "sh", "-c", "echo ready; exec sleep infinity"]);
    let root = Process::start(command)?;
    root.stdout().wait(Mark::START, "the namespace", |line| (line == "ready").then_some(()))?;
    let prefix = ["nsenter".to_owned(), format!("--user=/proc/{}/ns/user", root.pid())];
    let guest = Qemu::firmware().prefix(&prefix).start()?;
    let refusal = refusal_of(&guest, &prefix)?;
    assert!(refusal.contains("can't be inspected") && refusal.contains("can't be tracked"), "{refusal}");
    let moving = Transship::moving(&guest.vm(), "unix:/nobody/listens/here").args(["--allow-untracked-writers"]);
    let refusal = moving.prefix(&prefix).run()?.expect_code(1)?.stderr;
    assert!(refusal.contains("nobody"), "the user vouches: {refusal}");
    Ok(())
}
