//! What the guest says of its memory and its disk, by its serial port.
use transship_lab::{LabError, Qemu, Result, Sweep};

/// All of its memory and its disk is what it wrote last.
pub(crate) fn assert_whole(qemu: &Qemu) -> Result<()> {
    let lines = qemu.serial().lines();
    let mark = lines.mark();
    qemu.serial().type_line("check")?;
    // Nobody else asks, so the next is the one that was asked for.
    let (_, mark) =
        lines.wait(mark, "a check of the disk", |line| line.contains("workload: disk blocks=").then_some(()))?;
    let (sweep, _) = lines.wait(mark, "a check", Sweep::read)?;
    match sweep.errors {
        0 => Ok(()),
        errors => Err(LabError(format!("the guest found {errors} wrong pages or blocks"))),
    }
}

/// From now on it writes nothing to its disk, so that a copy of it fits a snapshot of the memory.
pub(crate) fn rest(qemu: &Qemu) -> Result<()> {
    let mark = qemu.serial().lines().mark();
    qemu.serial().type_line("disk rest")?;
    let at_rest = |line: &str| line.contains("workload: disk at rest").then_some(());
    qemu.serial().lines().wait(mark, "the disk to be at rest", at_rest).map(drop)
}

/// The reverse.
pub(crate) fn go_on(qemu: &Qemu) -> Result<()> {
    qemu.serial().type_line("disk go")
}
