//! The rights of those who bring pages to a guest that runs already: lazy restores, receivers and sources of post-copy,
//! and the second process beside each of them.
use std::{fs, os::unix::net::UnixStream, path::Path};

use rustix::process::Signal;
use transship_lab::{
    Backend, LabError, Qemu, QemuBuilder, Result, Scratch, Synthetic, Transship,
    lines::Mark,
    process::{of_ours, signal, status_field},
    wait_until,
};

use crate::ends::assert_whole;
use crate::post_copy::{busy, receiving};
use crate::restore_lazy_private::make_dirty;
use crate::restoring::{assert_goes_on, lazy::Stalled, restoring, saved_by_stock};
use crate::sandbox::{assert_confined, assert_stopped};
use crate::stock::StockSave;

const AT_ONCE: [&str; 6] = ["--converge", "postcopy", "--postcopy-after", "0", "--bandwidth", "2MiB"];

fn private() -> QemuBuilder {
    Qemu::multiboot().backend(Backend::Ram)
}

pub(crate) fn is_filtered(pid: u32) -> bool {
    status_field(pid, "Seccomp").is_ok_and(|mode| mode.trim() == "2")
}

/// The second process of this VM's command, once it has given up its rights.
pub(crate) fn stand_in(vm: &str) -> Result<u32> {
    let mut found = None;
    wait_until("a second process without rights", || {
        found = of_ours(vm, "stand-in").into_iter().find(|pid| is_filtered(*pid));
        Ok(found.is_some())
    })?;
    found.ok_or_else(|| LabError(format!("nobody stands by for {vm}")))
}

#[test]
fn those_who_bring_pages_later_can_do_nothing_else() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("snapshot");
    saved_by_stock(Qemu::multiboot(), StockSave::default(), &path)?;
    let tried = Scratch::new()?;
    let listen = format!("unix:{}", tried.join("move").display());
    let guest = Synthetic::builder().memory("16M").incoming().start()?;
    for waiting in [Qemu::multiboot().incoming(), private().incoming()] {
        let waiting = waiting.start()?;
        let lazily = || restoring(&waiting.vm(), &path).args(["--lazy"]);
        assert_stopped("Fill", lazily, &tried)?;
        assert_stopped("StandIn", lazily, &tried)?;
        let receive = || receiving(&waiting.vm(), &listen);
        assert_stopped("Fill", receive, &tried)?;
    }
    let receive = || receiving(&guest.vm(), &listen);
    assert_stopped("Fill", receive, &tried)
}

#[test]
fn movers_whose_guest_goes_before_its_pages_can_do_nothing_but_move() -> Result<()> {
    let (folder, qemu) = (Scratch::new()?, Qemu::multiboot().booted()?);
    let to = format!("unix:{}", folder.join("nobody").display());
    for role in ["Move", "Guard", "StandIn"] {
        assert_stopped(role, || Transship::moving(&qemu.vm(), &to).args(AT_ONCE), &folder)?;
    }
    assert_eq!(qemu.status()?, "running");
    qemu.next_count()?;
    Ok(())
}

/// It is held at some moment after it has given up its rights; most likely before its guest runs.
pub(crate) fn lazily_restored(destination: &Qemu, path: &Path) -> Result<()> {
    let mut restore = restoring(&destination.vm(), path).args(["--lazy", "--channels=1"]).start()?;
    // Without a pause: it takes no longer than it must.
    while !is_filtered(restore.pid()) {
        if let Some(status) = restore.process().ended()? {
            return Err(LabError(format!(
                "it ended without giving up anything, {status}: {}",
                restore.stderr().tail()
            )));
        }
    }
    restore.signal(Signal::STOP)?;
    assert_confined(restore.pid(), "a lazy restore")?;
    assert_confined(stand_in(&destination.vm())?, "the second process of a lazy restore")?;
    restore.signal(Signal::CONT)?;
    restore.wait()?.expect_code(0)?;
    Ok(())
}

/// Its memory is punched from here, or, where it is private, QEMU is made to give it back by somebody who may.
#[test]
fn lazy_restores_have_no_rights() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("snapshot");
    let guests = || [Qemu::multiboot(), private()].map(QemuBuilder::named_as_by_default);
    let [saved, _] = guests();
    saved_by_stock(saved, StockSave::default(), &path)?;
    for guest in guests() {
        let destination = guest.incoming().start()?;
        make_dirty(&destination)?;
        lazily_restored(&destination, &path)?;
        assert_goes_on(&destination)?;
        assert!(!destination.open_files()?.iter().any(|file| file.contains("userfaultfd")));
        assert_eq!(of_ours(&destination.vm(), ""), [0; 0], "something of ours is left");
    }
    Ok(())
}

/// By the hand-off protocol the guest itself gives what makes its threads wait, after all rights are gone.
#[test]
fn guests_that_hand_themselves_over_are_restored_lazily_without_rights() -> Result<()> {
    let folder = Scratch::new()?;
    let file = folder.join("file").display().to_string();
    let guest = Synthetic::builder().memory("64M").start()?;
    Transship::command(["save", "--vm", &*guest.vm(), "--to", &*file]).run()?.expect_code(0)?;
    let waiting = Synthetic::builder().memory("64M").incoming().start()?;
    restoring(&waiting.vm(), &file).args(["--lazy"]).run()?.expect_code(0)?;
    assert_whole(&waiting)
}

/// Both commands and both second processes, before and while the pages follow.
#[test]
fn nobody_has_rights_while_the_pages_of_a_guest_follow_it() -> Result<()> {
    let (source, destination, folder) = (busy(16).booted()?, busy(16).incoming().start()?, Scratch::new()?);
    let socket = folder.join("there");
    let there = format!("unix:{}", socket.display());
    let receive = receiving(&destination.vm(), &there).start()?;
    receive.listening()?;
    assert_confined(receive.pid(), "a receiver that waits")?;
    let moving = Transship::moving(&source.vm(), &there).args(AT_ONCE).start()?;
    destination.wait_status("running")?;
    for (pid, role) in [
        (receive.pid(), "receive"),
        (moving.pid(), "move"),
        (stand_in(&destination.vm())?, "the second process there"),
        (stand_in(&source.vm())?, "the second process here"),
    ] {
        assert_confined(pid, role)?;
    }
    moving.wait()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert!(!socket.exists(), "the socket is left behind");
    assert_eq!(destination.sweep()?.errors, 0);
    for vm in [source.vm(), destination.vm()] {
        assert_eq!(of_ours(&vm, ""), [0; 0], "something of ours is left");
    }
    Ok(())
}

/// Whoever ends it, and however.
#[test]
fn what_a_receiver_of_post_copy_leaves_behind_is_removed() -> Result<()> {
    let folder = Scratch::new()?;
    let socket = folder.join("there");
    let there = format!("unix:{}", socket.display());
    for signal in [Signal::INT, Signal::KILL] {
        let waiting = Qemu::multiboot().incoming().start()?;
        let receive = receiving(&waiting.vm(), &there).start()?;
        receive.listening()?;
        receive.signal(signal)?;
        receive.wait()?;
        wait_until("the end of its socket", || Ok(!socket.exists()))?;
        wait_until("the end of all of ours", || Ok(of_ours(&waiting.vm(), "").is_empty()))?;
        assert!(!waiting.open_files()?.iter().any(|file| file.contains("userfaultfd")));
    }
    Ok(())
}

/// A receiver at this socket whose second process is dead.
fn alone(destination: &Qemu, there: &str) -> Result<Transship> {
    let receive = receiving(&destination.vm(), there).start()?;
    receive.listening()?;
    signal(stand_in(&destination.vm())?, Signal::KILL)?;
    wait_until("its end", || Ok(of_ours(&destination.vm(), "stand-in").is_empty()))?;
    Ok(receive)
}

/// Post-copy is refused, as there must be somebody to stand by.
#[test]
fn a_receiver_whose_second_process_is_killed_takes_guests_all_the_same() -> Result<()> {
    let (source, folder) = (Qemu::multiboot().booted()?, Scratch::new()?);
    let socket = folder.join("there");
    let there = format!("unix:{}", socket.display());
    let destination = Qemu::multiboot().incoming().start()?;
    let receive = alone(&destination, &there)?;
    let refused = Transship::moving(&source.vm(), &there).args(AT_ONCE).run()?;
    assert_eq!(refused.code(), Some(1), "{refused}");
    source.wait_status("running")?;
    receive.wait()?.expect_code(1)?;
    assert!(!socket.exists(), "the socket is left behind");

    let destination = Qemu::multiboot().incoming().start()?;
    let receive = alone(&destination, &there)?;
    Transship::moving(&source.vm(), &there).run()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert!(!socket.exists(), "the socket is left behind");
    assert_eq!(destination.sweep()?.errors, 0);
    Ok(())
}

/// Its file fails, the restore is dead, and QEMU hears somebody else: the second process has no right to stop a
/// process, and has it stopped.
#[test]
fn a_guest_that_can_not_be_told_to_stop_is_frozen_without_rights() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("cut");
    saved_by_stock(Qemu::linux(), StockSave::default(), &path)?;
    let mut destination = Qemu::linux().incoming().start()?;
    let mut stalled = Stalled::start(&destination.vm(), &path)?;
    let second = stand_in(&destination.vm())?;
    assert_confined(second, "the second process")?;
    fs::OpenOptions::new().write(true).open(&path)?.set_len(8 << 20)?;
    let said = stalled.restore.stderr().clone();
    // The next that QEMU hears when the restore has ended.
    let _deaf = UnixStream::connect(destination.qmp_path())?;
    stalled.restore.kill9();
    said.wait(Mark::START, "the word that it was frozen", |line| line.contains("was frozen (SIGSTOP)").then_some(()))?;
    assert!(status_field(destination.pid(), "State")?.starts_with('T'));
    assert_eq!(stand_in(&destination.vm())?, second, "somebody holds the missing pages");
    destination.kill9();
    wait_until("the second process to end", || Ok(of_ours(&destination.vm(), "").is_empty()))
}
