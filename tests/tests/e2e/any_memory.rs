//! Guests whose memory is what their QEMU was started with, at either end: private memory, memfds, files, each with
//! each. Their own checks say whether all of it came.
use crate::restoring::assert_goes_on;
use transship_lab::{Accel, Backend, LabError, Qemu, QemuBuilder, Result, Transship, Workload, kvm_works, other_qemu};

const ALL: [Backend; 7] = [
    Backend::Default,
    Backend::Ram,
    Backend::SharedRam,
    Backend::Memfd,
    Backend::PrivateMemfd,
    Backend::PrivateFile,
    Backend::SharedFile,
];

fn guest(backend: Backend) -> QemuBuilder {
    let accel = if kvm_works() { Accel::Kvm } else { Accel::Tcg };
    let workload = Workload { sweep_ms: 200, ..Workload::MULTIBOOT };
    Qemu::multiboot_under(accel).workload(workload).backend(backend).named_as_by_default()
}

/// Moves the guest, which checks that it arrived whole. The source's report.
fn moved(from: &Qemu, to: &Qemu, flags: &[&str]) -> Result<serde_json::Value> {
    let receive = Transship::receiving(&to.vm(), "tcp:127.0.0.1:0").start()?;
    let uri = receive.listening()?;
    let source = Transship::moving(&from.vm(), &uri).args(["--verify"]).args(flags.iter().copied()).run()?;
    let report = source.expect_code(0)?.report()?;
    receive.wait()?.expect_code(0)?;
    assert_goes_on(to)?;
    Ok(report)
}

#[test]
fn memory_of_any_kind_goes_to_memory_of_any_kind() -> Result<()> {
    for from in ALL {
        // Each kind goes once and comes once; which meet is the order's doing.
        for to in [Backend::Default, Backend::Memfd, Backend::SharedFile, from] {
            let source = guest(from).start()?;
            source.ready()?;
            let destination = guest(to).incoming().start()?;
            moved(&source, &destination, &[]).map_err(|e| LabError(format!("{from:?} to {to:?}: {e}")))?;
        }
    }
    Ok(())
}

/// A real kernel, moved there and back, encoded and not, under load.
#[test]
fn a_linux_guest_of_qemus_default_goes_there_and_back() -> Result<()> {
    let linux = || Qemu::linux().backend(Backend::Default);
    let mut here = linux().start()?;
    here.ready()?;
    for flags in [&["--channels", "2"][..], &["--compress", "zstd"], &["--compress", "lz4", "--when-busy", "raw"]] {
        let there = linux().incoming().start()?;
        moved(&here, &there, flags)?;
        here = there;
    }
    Ok(())
}

/// A QEMU that says where its memory is can have any; one that does not needs shared named files.
#[test]
fn memory_of_a_qemu_that_does_not_say_where_it_is_is_refused_with_the_cure() -> Result<()> {
    let Some(old) = other_qemu("7.2")? else { return Ok(()) };
    let here = Qemu::firmware().memory(64).binary(old).backend(Backend::Default).start()?;
    let refused = Transship::moving(&here.vm(), "tcp:127.0.0.1:1").run()?.expect_code(1)?.to_string();
    for part in [
        "QEMU 7.2 does not say where in its process guest memory \"pc.ram\" is",
        "-object memory-backend-file,id=mem0,size=64M,mem-path=/dev/shm/guest,share=on -machine memory-backend=mem0",
    ] {
        assert!(refused.contains(part), "{part:?} is not in {refused}");
    }
    Ok(())
}
