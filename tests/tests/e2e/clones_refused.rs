//! Images and QEMUs that do not belong together: refused with the cure, before anything is touched.
use std::{fs, os::unix::fs::FileExt, path::Path, process::Command};

use transship_lab::{Backend, MemoryMount, Qemu, Result, Scratch, Transship};

use crate::{
    clones::{assert_unchanged, cloning, guest, image},
    restoring::assert_goes_on,
};

/// Takes the flag away that keeps files as they are, which a user has to do first.
fn chattr(file: &Path) -> Result<()> {
    Command::new("chattr").arg("-i").arg(file).status()?;
    Ok(())
}

/// The clone is refused with all these words, and its QEMU waits as before.
fn refused(waiting: &Qemu, from: &Path, words: &[&str]) -> Result<()> {
    let refused = cloning(&waiting.vm(), from).run()?.expect_code(1)?.to_string();
    for part in words {
        assert!(refused.contains(part), "{part:?} is not in {refused}");
    }
    assert_eq!(waiting.status()?, "inmigrate");
    Ok(())
}

#[test]
fn memory_that_would_harm_the_image_or_is_of_another_one_is_refused() -> Result<()> {
    let folder = Scratch::new()?;
    let (path, source) = (folder.join("image"), guest().booted()?);
    image(&source, &path, "--background")?;
    // The file may be written for a moment, or QEMU would not start.
    chattr(&path.join("memory"))?;
    let shared = guest().clone_of(&path).backend(Backend::SharedFile).memory_options("readonly=off").start()?;
    refused(&shared, &path, &["\"mem0\" of the waiting guest is a shared mapping", "share=off", "--print-args"])?;
    drop(shared);
    let another = guest().backend(Backend::PrivateFile).incoming().start()?;
    refused(&another, &path, &["private mapping of another file", "--print-args"])?;
    let machine = guest().machine("pc").clone_of(&path).start()?;
    refused(&machine, &path, &["its machine is \"pc-q35", "start one with the same machine"])?;
    let larger = folder.join("larger");
    let other = guest().memory(96).booted()?;
    image(&other, &larger, "--background")?;
    let smaller = guest().clone_of(&path).start()?;
    refused(&smaller, &larger, &["\"mem0\" has 100663296 bytes, that of the waiting guest 67108864"])?;
    assert_unchanged(&path)?;
    assert_goes_on(&source)
}

#[test]
fn an_image_that_was_changed_is_refused() -> Result<()> {
    let folder = Scratch::new()?;
    let source = guest().booted()?;
    let make = |name: &str| -> Result<std::path::PathBuf> {
        let path = folder.join(name);
        image(&source, &path, "--paused")?;
        Ok(path)
    };
    // Even root can't change it by mistake, where the file system has the flag.
    let path = make("kept")?;
    let opened = fs::OpenOptions::new().write(true).open(path.join("memory"));
    assert!(opened.is_err(), "{opened:?}");
    let open = |path: &Path| -> Result<_> {
        chattr(&path.join("memory"))?;
        Ok(fs::OpenOptions::new().write(true).open(path.join("memory"))?)
    };
    let written = make("written")?;
    open(&written)?.write_all_at(b"x", 5 << 20)?;
    let waiting = guest().clone_of(&written).start()?;
    refused(&waiting, &written, &["memory: it was written after the image was complete", "make the image anew"])?;
    let checked = Transship::command(["info", "--check", &*written.to_string_lossy()]).run()?.expect_code(1)?;
    assert!(checked.to_string().contains("its checksum is not that of the manifest"), "{checked}");
    drop(waiting);
    let cut = make("cut")?;
    open(&cut)?.set_len(32 << 20)?;
    let waiting = guest().clone_of(&path).start()?;
    refused(&waiting, &cut, &["it has 33554432 bytes, and had 67108864", "make the image anew"])?;
    let copy = folder.join("copy");
    assert!(Command::new("cp").arg("-a").args([&path, &copy]).status()?.success());
    refused(&waiting, &copy, &["another file than the one that the image was completed with, such as a copy"])?;
    let empty = folder.join("empty");
    fs::create_dir(&empty)?;
    refused(&waiting, &empty, &["a folder without manifest.json", "save --format raw"])?;
    // A name that is taken stays as it is.
    let to = path.to_string_lossy();
    let save = ["save", "--format", "raw", "--vm", &source.vm(), "--to", &*to];
    let taken = Transship::command(save).run()?.expect_code(1)?.to_string();
    assert!(taken.contains("a folder with something in it") && taken.contains("name a new folder"), "{taken}");
    assert_unchanged(&path)?;
    assert_goes_on(&source)
}

#[test]
fn a_full_tmpfs_is_refused() -> Result<()> {
    let small = MemoryMount::tmpfs(3)?;
    let source = guest().booted()?;
    let path = small.path().join("image");
    let to = path.to_string_lossy();
    let save = ["save", "--background", "--format", "raw", "--vm", &source.vm(), "--to", &*to];
    let full = Transship::command(save).run()?.expect_code(1)?.to_string();
    assert!(full.contains("it needs up to") && full.contains("tmpfs at"), "{full}");
    assert_eq!(fs::read_dir(small.path())?.count(), 0, "nothing is left");
    assert_goes_on(&source)?;
    drop(small);
    // It holds the image, but not what its clones may touch.
    let small = MemoryMount::tmpfs(8)?;
    let path = small.path().join("image");
    image(&source, &path, "--background")?;
    let waiting = guest().clone_of(&path).start()?;
    refused(&waiting, &path, &["clones may touch", "mount -o remount,size="])?;
    drop(waiting);
    chattr(&path.join("memory"))?;
    assert_goes_on(&source)
}
