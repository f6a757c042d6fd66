//! Guests saved to encrypted files: they go on from them, `age` and a stock QEMU read them, and nobody else does.
use std::{fs, path::Path, process::Command};

use memchr::memmem;
use transship_lab::{
    Finished, LabError, Qemu, Result, Scratch, Transship, process::of_ours, transship::TransshipBuilder, wait_until,
};

use crate::{
    save::assert_goes_on,
    stock::{StockLoad, StockSave},
};

/// In the memory of every such guest, as its program says it.
const MARKER: &[u8] = b"workload: ready pages=";
/// A piece that is encrypted, and what is added to each.
const PIECE: usize = (64 << 10) + 16;

/// Has a program do its work.
fn program(name: &str, args: &[&str]) -> Result<String> {
    let output = Command::new(name).args(args).output().map_err(|e| LabError(format!("{name}: {e}")))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(LabError(format!("{name} {args:?}: {}", String::from_utf8_lossy(&output.stderr)))),
    }
}

/// A file with a key, as `age-keygen` makes it, and its public half.
fn key(folder: &Scratch, name: &str) -> Result<(String, String)> {
    let path = text(&folder.join(name));
    program("age-keygen", &["-o", &path])?;
    let public = program("age-keygen", &["-y", &path])?.trim().to_owned();
    Ok((path, public))
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn bytes(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|e| LabError(format!("{}: {e}", path.display())))
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    Ok(fs::write(path, bytes)?)
}

fn shows_memory(bytes: &[u8]) -> bool {
    memmem::find(bytes, MARKER).is_some()
}

fn saving(guest: &Qemu, to: &str, keys: &[&str]) -> TransshipBuilder {
    let args = ["save", "--vm", &guest.vm(), "--to", to, "--format", "stream", "--json"];
    let keys = keys.iter().flat_map(|key| ["--encrypt-to", key]);
    Transship::command(args.into_iter().chain(keys))
}

fn restore(guest: &Qemu, from: &str, keys: &[&str]) -> Result<Finished> {
    let args = ["restore", "--vm", &guest.vm(), "--from", from, "--json"];
    Transship::command(args.into_iter().chain(keys.iter().flat_map(|key| ["--identity", key]))).run()
}

/// However it is saved and whichever of the keys opens it; what `age` makes of the file a stock QEMU loads.
#[test]
fn a_guest_goes_on_from_an_encrypted_file() -> Result<()> {
    let folder = Scratch::new()?;
    let ((mine, _), (theirs, public)) = (key(&folder, "mine")?, key(&folder, "theirs")?);
    let source = Qemu::multiboot().booted()?;
    for (way, opener) in [("--live", &mine), ("--paused", &theirs), ("--background", &mine)] {
        let path = folder.join("snapshot");
        write(&path, &[9; 70_000])?;
        let to = format!("file:{},offset=0x1234", path.display());
        // One says who by the file of a secret key, the other by the public key.
        saving(&source, &to, &[&mine, &public]).args([way]).run()?.expect_code(0)?;
        assert_goes_on(&source, way)?;
        let all = bytes(&path)?;
        let (before, file) = all.split_at(0x1234);
        assert!(before.iter().all(|&byte| byte == 9), "{way}: what is before it was changed");
        assert!(file.starts_with(b"age-encryption.org/v1\n"), "{way}: {:?}", &file[..30]);
        assert!(!shows_memory(file), "{way}: guest memory is in it");
        let destination = Qemu::multiboot().incoming().start()?;
        restore(&destination, &to, &[opener])?.expect_code(0)?;
        assert_goes_on(&destination, way)?;

        let (alone, clear) = (folder.join("alone"), folder.join("clear"));
        write(&alone, file)?;
        program("age", &["-d", "-i", opener, "-o", &text(&clear), &text(&alone)])?;
        assert!(shows_memory(&bytes(&clear)?), "{way}: the marker is in no file");
        let destination = Qemu::multiboot().incoming().start()?;
        StockLoad { stream: true, ..StockLoad::default() }.load(&destination, &clear)?;
        assert_goes_on(&destination, &format!("{way}, by age and a stock QEMU"))?;
    }
    Ok(())
}

/// What a stock QEMU has saved and `age` has encrypted is read like ours.
#[test]
fn a_file_that_age_has_encrypted_is_read() -> Result<()> {
    let folder = Scratch::new()?;
    let (mine, public) = key(&folder, "mine")?;
    let source = Qemu::multiboot().booted()?;
    let [clear, path, mapped] = ["clear", "snapshot", "mapped"].map(|name| folder.join(name));
    StockSave { stream: true, ..StockSave::default() }.save(&source, &clear)?;
    drop(source);
    program("age", &["-r", &public, "-o", &text(&path), &text(&clear)])?;
    let info = ["info", &text(&path), "--identity", &mine, "--json"].map(str::to_owned);
    let info = Transship::command(info).run()?.expect_code(0)?.report()?;
    assert_eq!((&info["format"], &info["encrypted"]), (&"stream".into(), &true.into()), "{info}");
    let convert = ["convert", &text(&path), &text(&mapped), "--identity", &mine].map(str::to_owned);
    Transship::command(convert).run()?.expect_code(0)?;
    for (file, keys) in [(&path, &[mine.as_str()][..]), (&mapped, &[])] {
        let destination = Qemu::multiboot().incoming().start()?;
        restore(&destination, &text(file), keys)?.expect_code(0)?;
        assert_goes_on(&destination, &text(file))?;
    }
    Ok(())
}

/// Also one that was not, and one for somebody else.
#[test]
fn a_file_is_encrypted_while_it_is_converted() -> Result<()> {
    let folder = Scratch::new()?;
    let ((mine, public), (theirs, their_public)) = (key(&folder, "mine")?, key(&folder, "theirs")?);
    let source = Qemu::multiboot().booted()?;
    let [mapped, first, second] = ["mapped", "first", "second"].map(|name| text(&folder.join(name)));
    Transship::command(["save", "--paused", "--vm", &source.vm(), "--to", &mapped]).run()?.expect_code(0)?;
    drop(source);
    let convert = |from: &str, to: &str, flags: &[&str]| {
        Transship::command(["convert", from, to]).args(flags.iter().copied()).run()
    };
    convert(&mapped, &first, &["--encrypt-to", &public])?.expect_code(0)?;
    convert(&first, &second, &["--format", "stream", "--identity", &mine, "--encrypt-to", &their_public])?
        .expect_code(0)?;
    for (file, key, other) in [(&first, &mine, &theirs), (&second, &theirs, &mine)] {
        assert!(!shows_memory(&bytes(Path::new(file))?), "{file}: guest memory is in it");
        let destination = Qemu::multiboot().incoming().start()?;
        restore(&destination, file, &[other])?.expect_code(1)?;
        let destination = Qemu::multiboot().incoming().start()?;
        restore(&destination, file, &[key])?.expect_code(0)?;
        assert_goes_on(&destination, file)?;
    }
    let refused = convert(&first, &mapped, &["--identity", &mine, "--encrypt-to", &public])?.expect_code(1)?;
    assert!(refused.stderr.contains("only a file of the format stream"), "{refused}");
    let refused = convert(&mapped, &second, &["--format", "mapped-ram", "--encrypt-to", &public])?.expect_code(2)?;
    assert!(refused.stderr.contains("--encrypt-to"), "{refused}");
    Ok(())
}

/// No guest runs on a part of a stream, or on one that was changed, and nobody gets it without its key.
#[test]
fn what_is_not_whole_or_for_others_starts_no_guest() -> Result<()> {
    let folder = Scratch::new()?;
    let ((mine, _), (other, _)) = (key(&folder, "mine")?, key(&folder, "other")?);
    let source = Qemu::multiboot().booted()?;
    let [whole, clear, changed] = ["whole", "clear", "changed"].map(|name| folder.join(name));
    saving(&source, &text(&whole), &[&mine]).args(["--paused", "--stay-stopped"]).run()?.expect_code(0)?;
    saving(&source, &text(&clear), &[]).args(["--paused"]).run()?.expect_code(0)?;
    let sealed = bytes(&whole)?;
    let head = memmem::find(&sealed, b"\n--- ").map_or(0, |at| at + 5 + 44 + 16);
    let pieces = (sealed.len() - head) / PIECE;
    let flipped = |at: usize| {
        let mut bytes = sealed.clone();
        bytes[at] ^= 1;
        bytes
    };
    let without = |from: usize, to: usize| [&sealed[..from], &sealed[to..]].concat();
    let damaged = [
        ("without its last piece", sealed[..head + pieces * PIECE].to_vec()),
        ("cut within the memory", sealed[..head + pieces / 2 * PIECE].to_vec()),
        ("cut within a piece", sealed[..sealed.len() - 100].to_vec()),
        ("changed in the middle", flipped(sealed.len() / 2)),
        ("changed at its end", flipped(sealed.len() - 1)),
        ("without a piece", without(head + 5 * PIECE, head + 6 * PIECE)),
    ];
    for (story, bytes) in damaged {
        write(&changed, &bytes)?;
        let destination = Qemu::multiboot().incoming().start()?;
        let refused = restore(&destination, &text(&changed), &[&mine])?.expect_code(1)?;
        assert!(refused.stderr.contains("its encryption was changed or cut short"), "{story}: {refused}");
        assert_eq!(destination.status()?, "inmigrate", "{story}");
    }
    let destination = Qemu::multiboot().incoming().start()?;
    write(&changed, &flipped(head - 30))?;
    for (file, keys, why) in [
        (&whole, &[other.as_str()][..], "it is encrypted for another key than age1"),
        (&whole, &[], "name the file that has its key with --identity"),
        (&clear, &[mine.as_str()], "it is not encrypted"),
        (&changed, &[mine.as_str()], "the head of its encryption is damaged"),
    ] {
        let refused = restore(&destination, &text(file), keys)?.expect_code(1)?;
        assert!(refused.stderr.contains(why), "{why:?} is not in {refused}");
        assert_eq!(destination.status()?, "inmigrate", "{why}");
    }
    // Nothing was touched by all that.
    restore(&destination, &text(&whole), &[&other, &mine])?.expect_code(0)?;
    assert_goes_on(&destination, "with the right key")
}

/// What a save leaves that was killed shows nothing of the guest, whatever its name, and is no snapshot.
#[test]
fn a_save_that_is_killed_leaves_nothing_in_clear() -> Result<()> {
    let folder = Scratch::new()?;
    let (mine, _) = key(&folder, "mine")?;
    let source = Qemu::multiboot().booted()?;
    let path = folder.join("snapshot");
    let part = folder.join(".snapshot.transship-part");
    for step in ["round", "tail", "synced"] {
        let (killed, left) = match step {
            "synced" => {
                // As a descriptor it is written in place.
                let script = format!("exec \"$0\" \"$@\" 3>'{}'", path.display());
                let prefix = ["sh", "-c", &script].map(str::to_owned);
                let armed = saving(&source, "fd:3", &[&mine]).prefix(&prefix);
                (armed.env("TRANSSHIP_FAIL_POINT", format!("save.{step}=kill")).run()?, path.clone())
            }
            _ => {
                let armed = saving(&source, &text(&path), &[&mine]);
                (armed.env("TRANSSHIP_FAIL_POINT", format!("save.{step}=kill")).run()?, part.clone())
            }
        };
        assert_eq!(killed.code(), None, "{step}: {killed}");
        // Its guard may still speak with QEMU, which has no ear for the next save then.
        wait_until("its guard to end", || Ok(of_ours(&source.vm(), "").is_empty()))?;
        let bytes = bytes(&left)?;
        assert!(bytes.len() > 1 << 20 && !shows_memory(&bytes), "{step}: {} bytes", bytes.len());
        assert!(bytes[..19] == [0; 19], "{step}: it has its head");
        source.wait_status("running")?;
        assert_goes_on(&source, step)?;
    }
    Ok(())
}
