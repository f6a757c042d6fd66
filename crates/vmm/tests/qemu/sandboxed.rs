//! QEMUs under seccomp filters: their own, as libvirt sets it, and one from outside that kills for `userfaultfd`.
use std::{fs, os::unix::process::CommandExt, process::Command, thread};

use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
use transship_guest::SourceGuest;

use super::lab::{Qemu, WRITTEN};

const SANDBOX: [&str; 2] = ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"];

/// Adds a filter that kills for `userfaultfd` to the program that is going to be started.
fn killing(command: &mut Command) {
    let calls = [(libc::SYS_userfaultfd, vec![])].into();
    let filter =
        SeccompFilter::new(calls, SeccompAction::Allow, SeccompAction::KillProcess, TargetArch::x86_64).unwrap();
    let filter = BpfProgram::try_from(filter).unwrap();
    // SAFETY: after the fork this makes two system calls.
    unsafe { command.pre_exec(move || seccompiler::apply_filter(&filter).map_err(std::io::Error::other)) };
}

/// Does something without the right to suspend a filter.
fn without_the_right<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    let act = || {
        // Of this thread only.
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::SYS_ADMIN);
        set_capabilities(None, sets).unwrap();
        act()
    };
    thread::scope(|scope| scope.spawn(act).join().unwrap())
}

fn filters(qemu: &Qemu) -> Vec<String> {
    let status = fs::read_to_string(format!("/proc/{}/status", qemu.pid())).unwrap();
    let kept = ["Seccomp", "SigBlk", "SigIgn", "SigCgt", "TracerPid"];
    status.lines().filter(|line| kept.iter().any(|name| line.starts_with(name))).map(str::to_owned).collect()
}

/// Tracks the guest's writes for a moment, and finds QEMU as it was before.
fn track(qemu: &Qemu) {
    let before = (qemu.descriptors(), filters(qemu));
    assert!(before.1.contains(&"Seccomp:\t2".to_owned()), "{before:?}");
    let mut source = qemu.source();
    let mut tracker = source.track().unwrap();
    tracker.scan(0).unwrap();
    qemu.wait_counting();
    assert!(tracker.scan(0).unwrap().contains(WRITTEN.first));
    drop((tracker, source));
    assert_eq!((qemu.descriptors(), filters(qemu)), before);
    qemu.wait_counting();
}

#[test]
fn its_own_filter_lets_the_call_pass() {
    let qemu = Qemu::start(&SANDBOX);
    qemu.wait_booted();
    track(&qemu);
    without_the_right(|| track(&qemu));
}

#[test]
fn a_filter_that_kills_is_suspended_or_stays_untried() {
    for more in [[].as_slice(), &SANDBOX] {
        let qemu = Qemu::start_prepared(killing, more);
        qemu.wait_booted();
        let before = (qemu.descriptors(), filters(&qemu));
        without_the_right(|| {
            let error = qemu.source().track().err().expect("a refusal").to_string();
            assert!(error.contains("seccomp filter") && error.contains("run transship as root"), "{error}");
        });
        assert_eq!((qemu.descriptors(), filters(&qemu)), before);
        qemu.wait_counting();
        if rustix::process::geteuid().is_root() {
            track(&qemu);
        }
    }
}
