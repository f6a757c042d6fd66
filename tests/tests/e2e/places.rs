//! QEMUs that run as other people run them: as another user in QEMU's own sandbox, and in namespaces of their own. They
//! are reached by what the kernel shows of their process, wherever their files are.
use std::{fs, path::Path};

use crate::ends::move_with;
use crate::peer::assert_nothing_of_ours;
use crate::restoring::{assert_goes_on, restoring};
use transship_lab::{Accel, Backend, CONTAINED, LabError, Qemu, QemuBuilder, Result, Scratch, Transship, lacks};

/// Under emulation: what another user may do with KVM is not what is tried here.
fn guest(backend: Backend) -> QemuBuilder {
    Qemu::multiboot_under(Accel::Tcg).backend(backend).named_as_by_default()
}

/// As libvirt starts QEMU.
fn of_nobody() -> QemuBuilder {
    let sandbox = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
    guest(Backend::Default).args(["-sandbox", sandbox]).of_nobody()
}

/// In a container, with a socket for us and a disk past the page cache that only it sees.
fn contained(backend: Backend) -> QemuBuilder {
    let qmp = format!("unix:{CONTAINED}/qmp,server=on,wait=off");
    let disk = format!("file={CONTAINED}/disk,format=raw,if=none,id=disk,cache=none");
    guest(backend).args(["-qmp", &qmp, "-drive", &disk, "-device", "virtio-blk-pci,drive=disk"]).contained()
}

/// How it is reached from outside.
fn inside(guest: &Qemu) -> String {
    format!("qemu:/proc/{}/root{CONTAINED}/qmp", guest.pid())
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        lacks("root, to run QEMU as somebody else");
    }
    root
}

fn boots(builder: QemuBuilder) -> Result<Qemu> {
    let guest = builder.start()?;
    guest.ready()?;
    Ok(guest)
}

/// Moves it there and back, saves it in each way, and restores it at once and lazily.
fn goes_everywhere(builder: &dyn Fn() -> QemuBuilder, vm: fn(&Qemu) -> String) -> Result<()> {
    let (first, second) = (boots(builder())?, builder().incoming().start()?);
    move_with(&vm(&first), &vm(&second), &["--verify"], &[])?;
    assert_goes_on(&second)?;
    assert_nothing_of_ours(&first)?;
    let folder = Scratch::on_disk()?;
    for way in ["--paused", "--live", "--background"] {
        let path = folder.join(way);
        let to = path.to_string_lossy();
        Transship::command(["save", way, "--vm", &vm(&second), "--to", &*to]).run()?.expect_code(0)?;
        assert_goes_on(&second).map_err(|e| LabError(format!("{way}: {e}")))?;
        for flags in [&[][..], &["--lazy"]] {
            let third = builder().incoming().start()?;
            restoring(&vm(&third), &path).args(flags.iter().copied()).run()?.expect_code(0)?;
            assert_goes_on(&third).map_err(|e| LabError(format!("{way} {flags:?}: {e}")))?;
            assert_nothing_of_ours(&third)?;
        }
    }
    assert_nothing_of_ours(&second)
}

#[test]
fn a_qemu_of_another_user_in_its_sandbox_is_like_any_other() -> Result<()> {
    if !is_root() {
        return Ok(());
    }
    let user = transship_lab::process::status_field(of_nobody().incoming().start()?.pid(), "Uid")?;
    assert!(user.starts_with("65534"), "{user}");
    goes_everywhere(&of_nobody, Qemu::vm)
}

#[test]
fn a_qemu_in_a_container_is_like_any_other() -> Result<()> {
    if !is_root() {
        return Ok(());
    }
    let one = contained(Backend::Default).incoming().start()?;
    for namespace in ["user", "pid", "mnt", "net"] {
        let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{namespace}"));
        assert_ne!(of(&one.pid().to_string())?, of("self")?, "{namespace}");
    }
    drop(one);
    goes_everywhere(&|| contained(Backend::Default), inside)
}

/// Its memory is a file that has a name only there.
#[test]
fn memory_that_has_a_name_only_in_a_container_is_found() -> Result<()> {
    if !is_root() {
        return Ok(());
    }
    let shared = || contained(Backend::SharedFile).memory_folder(CONTAINED);
    assert!(!Path::new(CONTAINED).join("mem0").exists());
    goes_everywhere(&shared, inside)
}

/// Somebody else's container: neither root there nor here.
#[test]
fn a_qemu_in_another_users_container_is_like_any_other() -> Result<()> {
    if !is_root() {
        return Ok(());
    }
    goes_everywhere(&|| contained(Backend::Default).of_nobody(), inside)
}

/// Some remove the name of the memory's file once QEMU has it open.
#[test]
fn memory_whose_file_has_lost_its_name_is_found() -> Result<()> {
    let (source, destination) = (guest(Backend::SharedFile).booted()?, guest(Backend::SharedFile).incoming().start()?);
    for one in [&source, &destination] {
        fs::remove_file(&one.memory_files()[0])?;
    }
    move_with(&source.vm(), &destination.vm(), &["--verify"], &[])?;
    assert_goes_on(&destination)
}
