//! The rights of those whose files were opened by others and passed to them: they need no way to any file.
use std::{fs, path::Path};

use transship_lab::{LabError, Result, Scratch, Synthetic, Transship, transship::TransshipBuilder, wait_until};

use crate::ends::assert_whole;
use crate::restoring::restoring;
use crate::sandbox::{assert_confined, assert_stopped};
use crate::sandbox_filling::is_filtered;

/// Makes one file of another, both passed.
fn converting(from: &Path, to: &Path) -> TransshipBuilder {
    let script = format!("exec \"$0\" \"$@\" 3<'{}' 4>'{}'", from.display(), to.display());
    Transship::command(["convert", "fd:3", "fd:4"]).prefix(&["sh", "-c", &script].map(str::to_owned))
}

#[test]
fn converters_of_passed_files_can_do_nothing_but_convert() -> Result<()> {
    let folder = Scratch::new()?;
    let guest = Synthetic::builder().memory("16M").start()?;
    let [file, other] = ["file", "other"].map(|name| folder.join(name));
    let save = ["save", "--vm", &*guest.vm(), "--to", &*file.display().to_string()];
    Transship::command(save).run()?.expect_code(0)?;
    assert_stopped("Convert", || converting(&file, &other), &folder)?;
    converting(&file, &other).run()?.expect_code(0)?;
    let waiting = Synthetic::builder().memory("16M").incoming().start()?;
    restoring(&waiting.vm(), &other).run()?.expect_code(0)?;
    assert_whole(&waiting)
}

/// It has given them up before there is anything to be read.
#[test]
fn converters_of_passed_files_have_no_rights() -> Result<()> {
    let folder = Scratch::new()?;
    let guest = Synthetic::builder().memory("16M").start()?;
    let [file, pipe, other] = ["file", "pipe", "other"].map(|name| folder.join(name));
    let save = ["save", "--format", "stream", "--vm", &*guest.vm(), "--to", &*file.display().to_string()];
    Transship::command(save).run()?.expect_code(0)?;
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
        .map_err(|error| LabError(format!("a pipe: {error}")))?;
    // Both ends, so that nobody waits for the other one.
    let mut writer = fs::OpenOptions::new().read(true).write(true).open(&pipe)?;
    let converting = converting(&pipe, &other).start()?;
    wait_until("that it has given up its rights", || Ok(is_filtered(converting.pid())))?;
    assert_confined(converting.pid(), "convert")?;
    let mut bytes = fs::File::open(&file)?;
    std::io::copy(&mut bytes, &mut writer)?;
    drop(writer);
    converting.wait()?.expect_code(0)?;
    Transship::command(["info", &*other.display().to_string(), "--check"]).run()?.expect_code(0)?;
    Ok(())
}
