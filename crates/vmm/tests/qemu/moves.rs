//! Guests that move, and guests that come back.
use std::{
    io::{self, BufRead, BufReader, Read},
    os::fd::AsRawFd,
    process::{Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde_json::json;
use transship_guest::{DestinationGuest, Found, GuestError, LastWill, SourceGuest, StateMade};
use transship_memory::{PageCount, PageNumber};
use transship_vmm::{AttachOptions, VmAddress, qemu::QemuSource, settle_abandoned};

use super::lab::{Qemu, Saves, WRITTEN, clear, copy, move_memory, pair};

#[test]
fn a_guest_moves_whole_and_counts_on() {
    Saves::BOTH.into_iter().for_each(a_guest_moves);
}

fn a_guest_moves(saves: Saves) {
    let (from, to) = pair();
    let (settings, descriptors) = (from.settings(), from.descriptors());
    let (mut source, mut destination) = (saves.source(&from), to.destination());
    assert_eq!(source.description(), destination.description());
    assert!(source.description().machine.starts_with("qemu pc-q35-"), "{:?}", source.description());
    assert!(source.is_running().unwrap());

    move_memory(&mut source, &destination);
    assert_eq!(std::fs::read(from.path("ram")).unwrap(), std::fs::read(to.path("ram")).unwrap());
    let stopped_at = from.count();
    let mut state = source.save_state().unwrap();
    destination.load_state(&mut state).unwrap();
    source.state_saved().unwrap();
    assert_eq!((to.status().as_str(), to.count()), ("paused", stopped_at));

    destination.start(true).unwrap();
    to.wait_counting();
    assert_eq!((from.status().as_str(), from.count()), (saves.status(), stopped_at));
    drop(source);
    assert_eq!(from.settings(), settings);
    assert_eq!(from.descriptors(), descriptors);
    // The state came through a channel of ours, the settings were ours: nothing of it is left there either.
    drop(destination);
    assert!(
        !to.settings().0.as_array().unwrap().iter().any(|c| c["capability"] == "x-ignore-shared" && c["state"] == true)
    );
}

#[test]
fn only_written_pages_are_seen_again() {
    let qemu = Qemu::start(&[]);
    qemu.wait_booted();
    let mut source = qemu.source();
    let mut tracker = source.track().unwrap();
    let present = tracker.scan(0).unwrap();
    assert!(present.contains(WRITTEN.first) && present.contains(PageNumber::new(8)));
    qemu.wait_counting();
    let written = tracker.scan(0).unwrap();
    for page in WRITTEN.iter() {
        assert!(written.contains(page), "page {page}");
    }
    assert!(written.count() < PageCount::new(1000), "{} pages of a guest that writes 65", written.count());
    source.stop().unwrap();
    tracker.scan(0).unwrap();
    assert_eq!(tracker.scan(0).unwrap().count(), PageCount::ZERO);
    drop(tracker);
    source.resume(true).unwrap();
    qemu.wait_counting();
}

#[test]
fn a_stopped_guest_is_resumed() {
    let qemu = Qemu::start(&[]);
    qemu.wait_booted();
    let settings = qemu.settings();
    let mut source = qemu.source();
    source.stop().unwrap();
    assert_eq!(qemu.status(), "paused");
    source.resume(true).unwrap();
    qemu.wait_counting();
    source.stop().unwrap();
    source.resume(false).unwrap();
    assert_eq!(qemu.status(), "paused");
    assert_eq!(qemu.settings(), settings);
}

#[test]
fn a_guest_comes_back_from_every_stage_of_saving_and_can_be_moved_then() {
    Saves::BOTH.into_iter().for_each(a_guest_comes_back);
}

fn a_guest_comes_back(saves: Saves) {
    let (from, to) = pair();
    // Settings that a user made and that don't fit a plain stream.
    from.qmp("migrate-set-capabilities", json!({"capabilities": [{"capability": "multifd", "state": true}]}));
    from.qmp("migrate-set-parameters", json!({"max-bandwidth": 12345678}));
    let (settings, descriptors) = (from.settings(), from.descriptors());
    let back = |source: &mut dyn SourceGuest| {
        source.resume(true).unwrap();
        source.tidy();
        from.wait_counting();
        assert_eq!(from.settings(), settings);
        assert_eq!(from.descriptors(), descriptors);
    };
    let mut source = saves.source(&from);

    source.stop().unwrap();
    let unread = source.save_state().unwrap();
    back(&mut source);
    drop(unread);

    source.stop().unwrap();
    let mut half_read = source.save_state().unwrap();
    half_read.read_exact(&mut [0; 1000]).unwrap();
    drop(half_read);
    // Nobody but the reader knows, where QEMU does not wait for it.
    assert_eq!(source.state_saved().is_err(), saves == Saves::Migrating);
    back(&mut source);

    source.stop().unwrap();
    io::copy(&mut source.save_state().unwrap(), &mut io::sink()).unwrap();
    source.state_saved().unwrap();
    assert_eq!(from.status(), saves.status());
    source.tidy();
    assert_eq!(from.settings(), settings);
    back(&mut source);

    drop(source);
    let (mut source, mut destination) = (saves.source(&from), to.destination());
    move_memory(&mut source, &destination);
    destination.load_state(&mut source.save_state().unwrap()).unwrap();
    source.state_saved().unwrap();
    destination.start(true).unwrap();
    to.wait_counting();
}

/// Kept stopped, it is as before: it may be saved again, moved, or let run.
#[test]
fn a_guest_that_was_saved_and_stays_stopped_is_as_before() {
    Saves::BOTH.into_iter().for_each(a_saved_guest_is_as_before);
}

fn a_saved_guest_is_as_before(saves: Saves) {
    let all_of = |source: &mut dyn SourceGuest| {
        let mut state = Vec::new();
        source.save_state().unwrap().read_to_end(&mut state).unwrap();
        source.state_saved().unwrap();
        state
    };
    let (from, to) = pair();
    from.qmp("migrate-set-parameters", json!({"max-bandwidth": 12345678}));
    let (settings, descriptors) = (from.settings(), from.descriptors());
    let mut source = saves.source(&from);
    source.keep_stopped();
    source.stop().unwrap();
    let (first, second) = (all_of(&mut source), all_of(&mut source));
    assert_eq!(first.len(), second.len());
    source.resume(false).unwrap();
    assert_eq!(from.status(), "paused");

    // A save of which nobody reads the end, and one that nobody reads at all.
    let mut half_read = source.save_state().unwrap();
    half_read.read_exact(&mut [0; 1000]).unwrap();
    drop(half_read);
    assert_eq!(source.state_saved().is_err(), saves == Saves::Migrating);
    source.resume(false).unwrap();
    let unread = source.save_state().unwrap();
    assert_eq!(source.state_saved().is_err(), saves == Saves::Migrating);
    drop((unread, source));
    assert_eq!(from.status(), "paused");
    assert_eq!(from.settings(), settings);
    assert_eq!(from.descriptors(), descriptors);

    // The state is the same as that of a guest which goes; and it can go.
    let (mut source, mut destination) = (saves.source(&from), to.destination());
    assert!(!source.is_running().unwrap());
    move_memory(&mut source, &destination);
    let third = all_of(&mut source);
    assert_eq!(third.len(), first.len());
    assert_eq!(from.status(), saves.status());
    destination.load_state(&mut first.as_slice()).unwrap();
    destination.start(true).unwrap();
    to.wait_counting();
}

#[test]
fn a_guest_that_was_saved_and_kept_can_be_let_run_with_its_disk() {
    let qemu = Qemu::start(&[]);
    qemu.wait_booted();
    let mut source = qemu.source();
    source.keep_stopped();
    source.stop().unwrap();
    io::copy(&mut source.save_state().unwrap(), &mut io::sink()).unwrap();
    source.state_saved().unwrap();
    drop(source);
    assert_eq!(qemu.status(), "paused");
    let nodes = qemu.qmp("query-named-block-nodes", json!({}));
    assert!(nodes.as_array().unwrap().iter().all(|node| node["active"] != false), "{nodes}");
    qemu.qmp("cont", json!({}));
    qemu.wait_counting();
}

#[test]
fn a_guest_that_never_ran_stays_so_when_it_is_saved() {
    let qemu = Qemu::start(&["-S"]);
    let mut source = qemu.source();
    source.keep_stopped();
    source.stop().unwrap();
    io::copy(&mut source.save_state().unwrap(), &mut io::sink()).unwrap();
    source.state_saved().unwrap();
    source.resume(false).unwrap();
    assert_eq!(qemu.status(), "prelaunch");
}

const DYING: &str = "TRANSSHIP_VMM_DYING";

/// A saver that is killed in the middle, as a process of its own. Not a test by itself.
#[test]
fn child_that_saves() {
    let Ok(what) = std::env::var(DYING) else { return };
    let [saves, keep, socket] = what.splitn(3, ' ').collect::<Vec<_>>().try_into().unwrap();
    let mut source = QemuSource::attach(socket.as_ref(), AttachOptions::default()).unwrap();
    if saves == "Alone" {
        source.hurry_state();
    }
    let will = source.last_will().unwrap();
    println!("\nwill {} {}", will.files[0].as_raw_fd(), will.text);
    source.stop().unwrap();
    if keep == "keep" {
        source.keep_stopped();
    }
    source.save_state().unwrap().read_exact(&mut [0; 1000]).unwrap();
    println!("saving");
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn a_guest_whose_saver_died_is_put_back_by_its_last_will() {
    Saves::BOTH.into_iter().for_each(a_will_is_done);
}

fn a_will_is_done(saves: Saves) {
    let qemu = Qemu::start(&[]);
    qemu.wait_booted();
    qemu.qmp("migrate-set-capabilities", json!({"capabilities": [{"capability": "multifd", "state": true}]}));
    qemu.qmp("migrate-set-parameters", json!({"max-bandwidth": 12345678}));
    let settings = qemu.settings();
    let vm = VmAddress::Qemu(qemu.socket());
    for keep in ["keep", "go"] {
        let mut saver = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "qemu::moves::child_that_saves", "--nocapture"])
            .env(DYING, format!("{saves:?} {keep} {}", qemu.socket().display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(saver.stdout.take().unwrap()).lines().map(Result::unwrap);
        let will = lines.find_map(|line| line.strip_prefix("will ").map(str::to_owned)).unwrap();
        let (number, text) = will.split_once(' ').unwrap();
        // As whoever is told the will has it.
        let saving = pidfd_open(Pid::from_child(&saver), PidfdFlags::empty()).unwrap();
        let end = pidfd_getfd(saving, number.parse().unwrap(), PidfdGetfdFlags::empty()).unwrap();
        assert!(lines.any(|line| line == "saving"));
        assert_eq!(qemu.settings() == settings, saves == Saves::Alone);
        saver.kill().unwrap();
        saver.wait().unwrap();
        settle_abandoned(&vm, LastWill { text: text.into(), files: vec![end] }, false).unwrap();
        assert_eq!(qemu.settings(), settings);
        assert_ne!(qemu.status(), "running");
        settle_abandoned(&vm, LastWill { text: text.into(), files: Vec::new() }, true).unwrap();
        qemu.wait_counting();
    }
}

#[test]
fn dropping_in_the_middle_of_a_save_puts_the_settings_back() {
    let qemu = Qemu::start(&[]);
    let (settings, descriptors) = (qemu.settings(), qemu.descriptors());
    let mut source = qemu.source();
    source.stop().unwrap();
    let _state = source.save_state().unwrap();
    drop(source);
    assert_eq!(qemu.settings(), settings);
    assert_eq!(qemu.descriptors(), descriptors);
    assert_eq!(qemu.status(), "paused");
}

#[test]
fn a_running_guest_is_not_saved() {
    let qemu = Qemu::start(&[]);
    let error = qemu.source().save_state().err().unwrap();
    assert!(matches!(error, GuestError::Bug(_)), "{error:?}");
}

#[test]
fn a_guest_that_was_never_started_moves_as_such() {
    for saves in Saves::BOTH {
        let (from, to) = (Qemu::start(&["-S"]), Qemu::start(&["-incoming", "defer"]));
        let (mut source, mut destination) = (saves.source(&from), to.destination());
        assert!(!source.is_running().unwrap());
        move_memory(&mut source, &destination);
        destination.load_state(&mut source.save_state().unwrap()).unwrap();
        source.state_saved().unwrap();
        destination.start(false).unwrap();
        assert_eq!(to.status(), "prelaunch", "{saves:?}");
        to.qmp("cont", json!({}));
        to.wait_booted();
    }
}

#[test]
fn several_backends_and_files_without_a_name_move_too() {
    let memory = |node: u32| {
        [
            format!("memory-backend-file,id=ram{node},size=32M,mem-path=DIR,share=on"),
            format!("node,nodeid={node},memdev=ram{node}"),
        ]
    };
    let ([ram0, node0], [ram1, node1]) = (memory(0), memory(1));
    // Made in this order, they are described by their names' order.
    let options = ["-object", &*ram1, "-numa", &*node1, "-object", &*ram0, "-numa", &*node0];
    let from = Qemu::start_with(&options, &[], &[]);
    let to = Qemu::start_with(&options, &["-incoming", "defer"], &[]);
    let (mut source, mut destination) = (from.source(), to.destination());
    let names: Vec<String> = source.description().regions.iter().map(|region| region.name.clone()).collect();
    assert_eq!(names, ["ram0", "ram1"]);
    assert_eq!(source.description(), destination.description());
    move_memory(&mut source, &destination);
    destination.load_state(&mut source.save_state().unwrap()).unwrap();
    source.state_saved().unwrap();
    destination.start(true).unwrap();
    assert_eq!(to.status(), "running");
}

#[test]
fn a_state_that_is_cut_or_changed_is_refused_in_qemus_words_and_nothing_runs() {
    let from = Qemu::start(&[]);
    from.wait_booted();
    let mut source = from.source();
    source.stop().unwrap();
    let mut state = Vec::new();
    source.save_state().unwrap().read_to_end(&mut state).unwrap();
    source.state_saved().unwrap();
    let mut other_machine = state.clone();
    other_machine[20] ^= 1;
    for bad in [&state[..state.len() / 2], &other_machine, b"nonsense".as_slice(), b"".as_slice()] {
        let to = Qemu::start(&["-incoming", "defer"]);
        let settings = to.settings();
        let mut destination = to.destination();
        clear(&destination.memory());
        let (here, there) = (source.memory(), destination.memory());
        copy(&here.regions()[0], &there.regions()[0], &here.regions()[0].data().unwrap());
        let error = destination.load_state(&mut &*bad).unwrap_err();
        assert!(matches!(error, GuestError::Vmm(_)), "{error:?}");
        assert_eq!(to.settings(), settings);
        assert_eq!(to.status(), "inmigrate");
        assert!(destination.start(false).is_err());
        drop(destination);
        let refusal = to.destination_refusal();
        assert!(matches!(&refusal, GuestError::Unfit(why) if why.contains("start a new one")), "{refusal:?}");
    }
    source.resume(true).unwrap();
    from.wait_counting();
}

#[test]
fn a_state_whose_sender_breaks_off_is_an_error() {
    struct Breaks;
    impl Read for Breaks {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("the link is down"))
        }
    }
    let to = Qemu::start(&["-incoming", "defer"]);
    let settings = to.settings();
    let error = to.destination().load_state(&mut Breaks).unwrap_err().to_string();
    assert!(error.contains("the link is down"), "{error}");
    assert_eq!(to.settings(), settings);
    assert_eq!(to.status(), "inmigrate");
}

/// QEMU has read most of the command to load then, and has the end of a socket. It forgets both.
#[test]
fn a_state_that_was_expected_in_vain_leaves_nothing_behind() {
    let (from, to) = pair();
    let (settings, descriptors) = (to.settings(), to.descriptors());
    let mut destination = to.destination();
    destination.expect_state(StateMade::ByAdapter).unwrap();
    assert_ne!((to.settings(), to.descriptors()), (settings.clone(), descriptors.clone()));
    drop(destination);
    assert_eq!((to.settings(), to.descriptors()), (settings.clone(), descriptors));
    assert_eq!(to.status(), "inmigrate");

    // One of another form than expected comes in another way.
    for expected in [StateMade::ByAdapter, StateMade::ByVmm] {
        let to = Qemu::start(&["-incoming", "defer"]);
        let (mut source, mut destination) = (Saves::Alone.source(&from), to.destination());
        move_memory(&mut source, &destination);
        destination.expect_state(expected).unwrap();
        destination.load_state(&mut source.save_state().unwrap()).unwrap();
        source.state_saved().unwrap();
        assert_eq!(to.settings(), settings, "{expected:?}: put back before the guest runs");
        destination.start(true).unwrap();
        to.wait_counting();
        drop(destination);
        source.resume(true).unwrap();
    }
}

#[test]
fn a_qemu_that_dies_is_named_at_once() {
    let mut from = Qemu::start(&[]);
    let mut source = from.source();
    let mut tracker = source.track().unwrap();
    tracker.scan(0).unwrap();
    source.stop().unwrap();
    from.kill();
    assert!(tracker.scan(0).is_err());
    let error = source.save_state().err().unwrap().to_string();
    assert!(error.contains("it has ended"), "{error}");
    assert!(source.resume(true).is_err());

    let mut to = Qemu::start(&["-incoming", "defer"]);
    let mut destination = to.destination();
    to.kill();
    assert!(destination.load_state(&mut io::empty()).unwrap_err().to_string().contains("it has ended"));
}

/// The line that messages give to a person, run as it stands.
#[test]
fn the_hint_works() {
    if std::process::Command::new("socat").arg("-V").output().is_err() {
        panic!("install socat: messages tell users to use it");
    }
    let qemu = Qemu::start(&[]);
    let mut source = qemu.source();
    source.stop().unwrap();
    let hint = source.resume_hint();
    drop(source);
    let shell = std::process::Command::new("sh").args(["-c", &hint]).output().unwrap();
    assert!(shell.status.success(), "{hint}: {shell:?}");
    assert_eq!(qemu.status(), "running", "{hint}: {shell:?}");
}

/// QEMU would crash if it were told to save one that can't be saved.
#[test]
fn a_device_that_came_meanwhile_and_can_not_be_saved_is_noticed() {
    for memory in
        ["memory-backend-file,id=mem0,size=64M,mem-path=DIR/ram,share=on", "memory-backend-ram,id=mem0,size=64M"]
    {
        let late = [
            (json!({"driver": "nvme", "serial": "1"}), "nvme"),
            (json!({"driver": "virtio-mem-pci", "memdev": "more"}), "meanwhile"),
        ];
        for ((mut device, named), is_prepared) in
            late.into_iter().flat_map(|late| [(late.clone(), true), (late, false)])
        {
            let more = "memory-backend-file,id=more,size=64M,mem-path=DIR/more,share=on";
            let options = ["-S", "-m", "64M,maxmem=1G", "-object", more, "-device", "pcie-root-port,id=slot0"];
            let qemu = Qemu::start_with(&["-object", memory], &options, &["-machine", "memory-backend=mem0"]);
            let mut source = Saves::Alone.source(&qemu);
            if is_prepared {
                source.prepare_stop().unwrap();
            }
            assert_eq!(source.stop_at_once().unwrap(), Found::Standing);
            device["bus"] = json!("slot0");
            qemu.qmp("device_add", device);
            let saved = source.save_state().map(drop).and_then(|()| source.state_saved());
            let error = saved.and_then(|()| source.check_unchanged()).unwrap_err().to_string();
            assert!(error.contains(named), "{memory}: {error}");
            source.resume(true).unwrap();
            assert_eq!(qemu.status(), "prelaunch");
        }
    }
}

/// Its state is saved by what was known of its memory before the stop.
#[test]
fn memory_that_came_with_the_stop_is_noticed() {
    let qemu = Qemu::start(&["-device", "pcie-root-port,id=slot0"]);
    qemu.wait_booted();
    let mut source = Saves::Alone.source(&qemu);
    source.hurry_state();
    source.prepare_stop().unwrap();
    assert_eq!(source.stop_at_once().unwrap(), Found::Running);
    // It has a ROM.
    qemu.qmp("device_add", json!({ "driver": "virtio-net-pci", "bus": "slot0" }));
    source.save_state().unwrap();
    source.state_saved().unwrap();
    let error = source.check_unchanged().unwrap_err().to_string();
    assert!(error.contains("meanwhile"), "{error}");
    source.resume(true).unwrap();
    qemu.wait_counting();
}
