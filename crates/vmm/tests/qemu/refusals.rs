//! What is refused, and that the refusal names the cause and the cure.
use std::os::unix::fs::MetadataExt;

use serde_json::json;
use transship_guest::{GuestError, SourceGuest};
use transship_vmm::{AttachOptions, VmAddress, qemu::QemuSource, settle_abandoned};

use super::lab::{Qemu, RAM_BYTES, Saves};

/// It is for the user to mend, and says by these words how.
#[track_caller]
fn assert_names(error: &GuestError, parts: &[&str]) {
    assert!(matches!(error, GuestError::Unfit(_)), "{error:?}");
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[test]
fn memory_on_a_disk() {
    let disk = tempfile::tempdir_in("/var/tmp").unwrap();
    let object = format!("memory-backend-file,id=mem0,size=64M,mem-path={}/ram,share=on", disk.path().display());
    let qemu = Qemu::start_with(&["-object", &object], &["-S"], &["-machine", "memory-backend=mem0"]);
    assert_names(&qemu.source_refusal(), &["disk file system", "mem-path=/dev/shm/guest"]);
}

/// Nothing to refuse: QEMU says where its memory is, and the kernel which file is there.
#[test]
fn a_file_whose_name_leads_to_another_one_by_now_is_found_by_its_mapping() {
    let qemu = Qemu::start(&["-S"]);
    std::fs::remove_file(qemu.path("ram")).unwrap();
    let other = std::fs::File::create(qemu.path("ram")).unwrap();
    other.set_len(RAM_BYTES).unwrap();
    let memory = qemu.source().memory();
    let (file, _) = memory.regions()[0].shared_file().unwrap();
    let found = std::fs::File::from(file.try_clone_to_owned().unwrap()).metadata().unwrap();
    assert_ne!(found.ino(), other.metadata().unwrap().ino());
    assert_eq!((found.nlink(), found.len()), (0, RAM_BYTES));
}

#[test]
fn the_wrong_end() {
    let waiting = Qemu::start(&["-incoming", "defer"]);
    assert_names(&waiting.source_refusal(), &["it is a destination"]);
    let running = Qemu::start(&[]);
    assert_names(&running.destination_refusal(), &["does not wait for a guest", "-incoming defer"]);
    let listening = Qemu::start(&["-incoming", "tcp:127.0.0.1:0"]);
    assert_names(&listening.destination_refusal(), &["already listens", "-incoming defer"]);
}

#[test]
fn a_guest_that_is_on_its_way_already() {
    let qemu = Qemu::start(&[]);
    qemu.qmp("migrate-set-parameters", json!({"max-bandwidth": 1}));
    qemu.qmp("migrate", json!({"uri": "exec:cat >/dev/null"}));
    assert_names(&qemu.source_refusal(), &["already migrating", "migrate_cancel"]);
    qemu.qmp("migrate_cancel", json!({}));
}

#[test]
fn a_guest_that_was_given_away() {
    for (saves, state) in [(Saves::Migrating, "postmigrate"), (Saves::Alone, "has given its guest away")] {
        let qemu = Qemu::start(&[]);
        let mut source = saves.source(&qemu);
        source.stop().unwrap();
        std::io::copy(&mut source.save_state().unwrap(), &mut std::io::sink()).unwrap();
        source.state_saved().unwrap();
        source.give_up().unwrap();
        drop(source);
        assert_names(&qemu.source_refusal(), &[state, "only if that guest runs nowhere else"]);
    }
}

/// Neither here, nor after whoever moved it was killed.
#[test]
fn a_guest_that_was_about_to_be_given_away_and_stays() {
    for is_killed in [false, true] {
        let qemu = Qemu::start(&[]);
        let mut source = Saves::Alone.source(&qemu);
        let will = source.last_will().unwrap();
        source.stop().unwrap();
        std::io::copy(&mut source.save_state().unwrap(), &mut std::io::sink()).unwrap();
        source.state_saved().unwrap();
        source.prepare_to_give_up().unwrap();
        if is_killed {
            drop(source);
            assert_names(&qemu.source_refusal(), &["has given its guest away"]);
            settle_abandoned(&VmAddress::Qemu(qemu.socket()), will, false).unwrap();
        } else {
            source.resume(false).unwrap();
            drop(source);
        }
        assert_eq!(qemu.status(), "paused");
        drop(qemu.source());
    }
}

#[test]
fn a_socket_in_use_and_a_socket_of_nobody() {
    let qemu = Qemu::start(&["-S"]);
    let _first = qemu.source();
    assert_names(
        &qemu.source_refusal(),
        &["another client holds this QMP socket", "-qmp unix:PATH2,server=on,wait=off"],
    );
    let nobody = qemu.path("nobody");
    let error = QemuSource::attach(&nobody, AttachOptions::default()).err().unwrap();
    assert_names(&error, &["no QEMU listens there"]);
}

#[test]
fn a_process_that_writes_the_same_memory() {
    let first = Qemu::start(&["-S"]);
    let object = format!("memory-backend-file,id=mem0,size=64M,mem-path={},share=on", first.path("ram").display());
    let machine = ["-machine", "memory-backend=mem0"];
    let second = Qemu::start_with(&["-object", &object], &["-incoming", "defer"], &machine);
    let pid = format!("process {} (qemu-system", second.pid());
    assert_names(&first.source_refusal(), &["can't be tracked", &pid, "--allow-untracked-writers"]);
    // For the second it would be the loss of the first one's memory.
    let pid = format!("process {} (qemu-system", first.pid());
    assert_names(&second.destination_refusal(), &[&pid, "mem-path of its own"]);
    let options = AttachOptions { allow_untracked_writers: true, ..AttachOptions::default() };
    assert!(QemuSource::attach(&first.socket(), options).is_ok());
}

/// No refusal, as it can be waited for.
#[test]
fn a_disk_that_writes_behind_the_tracker() {
    let disk = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    disk.as_file().set_len(1 << 20).unwrap();
    let drive = format!("if=none,id=direct,format=raw,cache=none,file={}", disk.path().display());
    let qemu = Qemu::start(&["-S", "-drive", &drive, "-device", "virtio-blk-pci,drive=direct"]);
    assert!(qemu.source().drain().unwrap());
    assert!(!Qemu::start(&["-S"]).source().drain().unwrap(), "without such a disk there is nothing to wait for");
}

#[test]
fn a_device_that_cannot_be_saved() {
    let folder = tempfile::tempdir().unwrap();
    let drive = format!("if=none,id=fat,format=raw,file=fat:rw:{}", folder.path().display());
    let qemu = Qemu::start(&["-S", "-drive", &drive, "-device", "virtio-blk-pci,drive=fat"]);
    assert_names(&qemu.source_refusal(), &["can't save the state of its devices", "vvfat"]);
}

#[test]
fn memory_plugged_during_the_move() {
    let qemu = Qemu::start_with(
        &["-object", "memory-backend-file,id=mem0,size=64M,mem-path=DIR/ram,share=on"],
        &["-m", "64M,slots=2,maxmem=1G"],
        &["-machine", "memory-backend=mem0"],
    );
    let mut source = qemu.source();
    let _tracker = source.track().unwrap();
    let path = qemu.path("more");
    let object =
        json!({"qom-type": "memory-backend-file", "id": "more", "size": 128 << 20, "mem-path": path, "share": true});
    qemu.qmp("object-add", object);
    qemu.qmp("device_add", json!({"driver": "pc-dimm", "id": "dimm", "memdev": "more"}));
    let error = source.stop().unwrap_err();
    assert_names(&error, &["plugged", "start again"]);
    source.resume(true).unwrap();
    drop(source);
    let regions = qemu.source().description().regions;
    assert_eq!(regions.len(), 2, "{regions:?}");
}
