//! Guests that share a folder with their host by another process: what it reads for them comes into their memory
//! through a mapping of its own.
use crate::{ends::move_between, vhost_user::saved_and_restored};
use transship_lab::{FileBackEnd, Qemu, QemuBuilder, Result, SharedFolder, Transship, Workload, other_qemu};

const WORKLOAD: Workload = Workload { mib: 16, rate: 500, sweep_ms: 500, ..Workload::LINUX };

/// A Linux guest that has a file read into its memory all the time, in the newest QEMU if that is here.
fn linux(files: &FileBackEnd) -> QemuBuilder {
    let newest = other_qemu("11.1").ok().flatten();
    let qemu = newest.into_iter().fold(Qemu::linux(), |qemu, newest| qemu.binary(newest));
    qemu.workload(WORKLOAD).append(&SharedFolder::words(16)).args(files.args())
}

/// No page of the guest, and nothing that was read, is wrong since its start; and it goes on.
fn assert_right(guest: &Qemu) -> Result<()> {
    guest.serial().read_on(1000)?;
    let errors = guest.sweep()?.errors;
    assert_eq!(errors, 0, "{}", guest.serial().lines().tail());
    Ok(())
}

#[test]
#[ignore = "long: make test-long"]
fn a_guest_whose_files_come_from_another_process_is_moved_and_saved() -> Result<()> {
    let Some(folder) = SharedFolder::new(16)? else { return Ok(()) };
    let (files0, files1, files2) = (folder.serve(&[])?, folder.serve(&[])?, folder.serve(&[])?);
    let source = linux(&files0).start()?;
    source.ready()?;
    source.serial().read_on(1000)?;

    // The back end has been asked for its state, and goes on.
    let there = linux(&files1).incoming().start()?;
    let receive = Transship::receiving(&there.vm(), "tcp:127.0.0.1:0").start()?;
    let moving = Transship::moving(&source.vm(), &receive.listening()?);
    moving.env("TRANSSHIP_FAIL_POINT", "source.state-sent=error").run()?.expect_code(1)?;
    receive.wait()?.expect_code(1)?;
    assert_right(&source)?;
    drop((there, files1));

    let files1 = folder.serve(&[])?;
    let there = linux(&files1).incoming().start()?;
    // Slow enough that much is read between two looks. On a fast machine that is the whole file: what is then left for
    // the last round, that and what the guest writes, takes half a second.
    move_between(&source.vm(), &there.vm(), &["--verify", "--bandwidth", "60MB", "--downtime", "1s"])?;
    assert_right(&there)?;
    drop((source, files0));

    saved_and_restored(&there, &linux(&files2).incoming().start()?, assert_right)
}

/// QEMU 7.2 says itself that it can't migrate such a device.
#[test]
fn files_that_can_not_be_followed_are_refused_with_the_cure() -> Result<()> {
    let (Some(old), Some(folder)) = (other_qemu("7.2")?, SharedFolder::new(1)?) else { return Ok(()) };
    for (binary, options, reason) in [
        (
            old.as_str(),
            &[][..],
            "can't save the state of its devices: non-migratable device: 0000:00:01.0/vhost-user-fs",
        ),
        ("qemu-system-x86_64", &["--allow-direct-io"], "start virtiofsd without --allow-direct-io"),
    ] {
        let files = folder.serve(options)?;
        let guest = Qemu::firmware().memory(64).binary(binary).args(files.args()).start()?;
        let said = Transship::command(["check", "--vm", &guest.vm()]).run()?.stdout;
        assert!(said.contains(reason), "{reason:?} is not in: {said}");
    }
    Ok(())
}
