//! Guests with a disk past the host's page cache (`cache=none`): the kernel has it read straight into guest memory.
//!
//! A page counts as written when the read begins, and its data comes when the disk has it. If the page is found by a
//! scan and sent in between, it is sent without that data, and nothing ever marks it again. So the disk is a slow one
//! here, with many reads under way at any time, and the guest knows what each of them has to bring.
use transship_lab::{Qemu, QemuBuilder, Result, SlowDisk, Transship, Workload, other_qemu};

const DISK_MIB: u64 = 16;
/// Of both QEMUs together. The guest has 64 reads under way, so each takes about a third of a second.
const READS_A_SECOND: u32 = 200;
const WORKLOAD: Workload = Workload { mib: 16, rate: 500, sweep_ms: 500, ..Workload::LINUX };

/// One for each version of QEMU, which wait for their disks each in their own way.
fn guests(disk: &SlowDisk) -> Result<Vec<QemuBuilder>> {
    // A machine that all versions have.
    let guest = Qemu::linux().machine("pc-q35-7.2").workload(WORKLOAD).append("workload.slots=32").args(disk.args());
    let mut guests = vec![guest.clone()];
    for version in ["7.2", "11.1"] {
        guests.extend(other_qemu(version)?.map(|binary| guest.clone().binary(binary)));
    }
    Ok(guests)
}

/// Moves the guest, which goes on reading. How many of its pages were not what they had to be, since its start.
fn moved(from: &Qemu, to: &Qemu) -> Result<u64> {
    let receive = Transship::receiving(&to.vm(), "tcp:127.0.0.1:0").start()?;
    let uri = receive.listening()?;
    Transship::moving(&from.vm(), &uri).run()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    to.serial().read_on(1)?;
    Ok(to.sweep()?.errors)
}

/// From each version to the next, again and again.
#[test]
#[ignore = "200 moves: make test-long"]
fn what_a_slow_disk_reads_during_many_moves_arrives() -> Result<()> {
    let Some(disk) = SlowDisk::new(DISK_MIB, READS_A_SECOND)? else { return Ok(()) };
    let guests = guests(&disk)?;
    let mut hosts = guests.iter().cycle();
    let mut start = |how: fn(QemuBuilder) -> QemuBuilder| {
        let host = hosts.next().expect("there is the QEMU that is installed");
        how(host.clone()).start()
    };
    let mut here = start(|builder| builder)?;
    here.ready()?;
    disk.slow_down(&here)?;
    here.serial().read_on(1)?;
    for number in 1..=200 {
        let there = start(QemuBuilder::incoming)?;
        disk.slow_down(&there)?;
        let errors = moved(&here, &there)?;
        assert_eq!(errors, 0, "pages with an old content after move {number}:\n{}", there.serial().lines().tail());
        here = there;
    }
    Ok(())
}
