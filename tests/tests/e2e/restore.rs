//! Guests from files: of stock QEMU and of our own, mostly before they run; asked afterwards whether every page is
//! theirs.
use std::fs;

use crate::restoring::{assert_goes_on, make_dirty, restoring, saved_by_stock};
use crate::stock::StockSave;
use serde_json::json;
use transship_lab::{
    Disk, Qemu, Result, Scratch, Synthetic, Transship, synthetic::SyntheticState, versions::other_qemu,
};

/// What stock QEMU saves we restore into a stock QEMU, whatever way it was written and is read, and whatever the memory
/// held before.
#[test]
#[ignore = "long: make test-long"]
fn a_linux_guest_that_stock_qemu_saved_goes_on() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let ways: [(&str, StockSave<'_>, &[&str]); 4] = [
        ("plain", StockSave::default(), &["--direct-io=off"]),
        ("multifd", StockSave { multifd: 2, ..StockSave::default() }, &["--direct-io=on", "--channels", "3"]),
        (
            "direct",
            StockSave { multifd: 3, direct_io: true, ..StockSave::default() },
            &["--direct-io=auto", "--io", "plain"],
        ),
        ("offset", StockSave { offset: 0x1234, ..StockSave::default() }, &["--channels", "1"]),
    ];
    for (name, way, flags) in ways {
        let path = folder.join(name);
        fs::write(&path, vec![7; way.offset as usize])?;
        saved_by_stock(Qemu::linux(), way, &path)?;
        let destination = Qemu::linux().incoming().start()?;
        make_dirty(&destination)?;
        let from = format!("file:{},offset={}", path.display(), way.offset);
        let report = restoring(&destination.vm(), from).args(flags.iter().copied()).run()?.expect_code(0)?.report()?;
        assert_eq!(report["status"], "completed", "{name}: {report}");
        assert_eq!(report["file"]["direct_io"], flags[0] != "--direct-io=off", "{name}: {report}");
        assert!(report["pages"]["normal"].as_u64() > Some(16384), "{name}: {report}");
        assert_goes_on(&destination)?;
        fs::remove_file(&path)?;
    }
    Ok(())
}

/// A stream has no places: its pages are sorted as they come.
#[test]
fn a_plain_stream_is_restored_from_a_file_and_from_a_pipe() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("stream");
    saved_by_stock(Qemu::linux(), StockSave { stream: true, ..StockSave::default() }, &path)?;
    let destination = Qemu::linux().incoming().start()?;
    make_dirty(&destination)?;
    restoring(&destination.vm(), &path).run()?.expect_code(0)?;
    assert_goes_on(&destination)?;
    drop(destination);

    let destination = Qemu::linux().incoming().start()?;
    // The program and its arguments come behind these words.
    let shell = ["sh", "-c", r#"file=$1; shift; cat "$file" | "$@""#, "sh"].map(str::to_owned);
    let prefix = [&shell[..], &[path.display().to_string()]].concat();
    restoring(&destination.vm(), "fd:0").prefix(&prefix).run()?.expect_code(0)?;
    assert_goes_on(&destination)
}

/// Whether it runs afterwards is as it was, unless somebody says otherwise.
#[test]
fn a_guest_that_stood_still_does_so_again() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("stopped");
    let source = Qemu::multiboot().booted()?;
    source.qmp("stop", json!({}))?;
    StockSave::default().save(&source, &path)?;
    drop(source);
    for (flag, status) in [(None, "paused"), (Some("--run"), "running")] {
        let destination = Qemu::multiboot().incoming().start()?;
        restoring(&destination.vm(), &path).args(flag).run()?.expect_code(0)?;
        assert_eq!(destination.status()?, status);
        destination.qmp("cont", json!({}))?;
        assert_goes_on(&destination)?;
    }
    Ok(())
}

#[test]
fn a_guest_that_ran_can_be_left_standing() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("ran");
    saved_by_stock(Qemu::multiboot(), StockSave::default(), &path)?;
    let destination = Qemu::multiboot().incoming().start()?;
    restoring(&destination.vm(), &path).args(["--stopped"]).run()?.expect_code(0)?;
    assert_eq!(destination.status()?, "paused");
    destination.qmp("cont", json!({}))?;
    assert_goes_on(&destination)
}

/// A QEMU of another version than the one that saved; 7.2 knows nothing of such files itself.
#[test]
fn other_qemus_take_it_eagerly_and_lazily() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("snapshot");
    let guest = || Qemu::multiboot().machine("pc-q35-7.2");
    saved_by_stock(guest(), StockSave { multifd: 2, ..StockSave::default() }, &path)?;
    for version in ["7.2", "11.1"] {
        let Some(binary) = other_qemu(version)? else { continue };
        for flags in [&[][..], &["--lazy"]] {
            let destination = guest().binary(&binary).incoming().start()?;
            make_dirty(&destination)?;
            restoring(&destination.vm(), &path).args(flags.iter().copied()).run()?.expect_code(0)?;
            assert_goes_on(&destination)?;
        }
    }
    Ok(())
}

/// What stock QEMU 11.1 saves, too; and what it leaves out of a file is told.
#[test]
fn files_of_a_newer_qemu_are_restored() -> Result<()> {
    let Some(binary) = other_qemu("11.1")? else { return Ok(()) };
    let folder = Scratch::on_disk()?;
    let guest = || Qemu::multiboot().binary(&binary);
    let path = folder.join("snapshot");
    saved_by_stock(guest(), StockSave::default(), &path)?;
    let destination = guest().incoming().start()?;
    restoring(&destination.vm(), &path).run()?.expect_code(0)?;
    assert_goes_on(&destination)?;
    drop(destination);

    saved_by_stock(guest(), StockSave { capabilities: &["x-ignore-shared"], ..StockSave::default() }, &path)?;
    let destination = guest().incoming().start()?;
    restoring(&destination.vm(), &path).run()?.expect_error(1, "left_out")?;
    assert_eq!(destination.status()?, "inmigrate");
    Ok(())
}

/// A disk with sectors of 4 KiB takes only what is aligned to that.
#[test]
fn a_disk_with_large_sectors_is_read_past_the_page_cache() -> Result<()> {
    let disk = Disk::new(400, 4096)?;
    let path = disk.join("snapshot");
    saved_by_stock(Qemu::multiboot(), StockSave { offset: 0x1234, ..StockSave::default() }, &path)?;
    let from = format!("file:{},offset=0x1234", path.display());
    for flags in [&["--direct-io=on"][..], &["--direct-io=on", "--io=plain"], &["--direct-io=on", "--lazy"]] {
        let destination = Qemu::multiboot().incoming().start()?;
        make_dirty(&destination)?;
        let report = restoring(&destination.vm(), &from).args(flags.iter().copied()).run()?.expect_code(0)?.report()?;
        assert_eq!(report["file"]["direct_io"], true, "{report}");
        assert_goes_on(&destination)?;
    }
    Ok(())
}

#[test]
fn a_disk_that_fails_starts_nothing() -> Result<()> {
    let disk = Disk::new(700, 512)?;
    let path = disk.join("snapshot");
    saved_by_stock(Qemu::linux(), StockSave::default(), &path)?;
    disk.cut(30)?;
    for channels in ["1", "4"] {
        let destination = Qemu::linux().incoming().start()?;
        let flags = ["--direct-io=on", "--channels", channels];
        let ended = restoring(&destination.vm(), &path).args(flags).run()?.expect_code(1)?;
        assert!(ended.stderr.contains("Input/output error") && ended.stderr.contains("snapshot: "), "{ended}");
        assert_eq!(destination.status()?, "inmigrate");
    }
    Ok(())
}

/// A file that does not fit, or is broken, is refused before anything is touched; and the guest that waits can still be
/// used.
#[test]
fn what_can_not_be_restored_leaves_the_guest_as_it_was() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("good");
    saved_by_stock(Qemu::multiboot(), StockSave::default(), &path)?;
    let cut = folder.join("cut");
    let whole = fs::read(&path)?;
    fs::write(&cut, &whole[..whole.len() / 2])?;
    let foreign = folder.join("foreign");
    fs::write(&foreign, "not a snapshot")?;
    let destination = Qemu::multiboot().incoming().start()?;
    make_dirty(&destination)?;
    let other_memory = Qemu::multiboot().memory(128).incoming().start()?;
    let other_machine = Qemu::multiboot().machine("pc").incoming().start()?;
    let with_vga = folder.join("vga");
    saved_by_stock(Qemu::multiboot().args(["-device", "VGA"]), StockSave::default(), &with_vga)?;
    for (guest, file, why) in [
        (&destination, &cut, "the file was cut short"),
        (&destination, &foreign, "no QEMU migration stream begins here"),
        (&destination, &folder.join("none"), "No such file"),
        (&other_memory, &path, "has 67108864 bytes, that of the waiting guest 134217728"),
        (&other_machine, &path, "its machine is \"pc-q35"),
        (&destination, &with_vga, "vga.vram\", which the waiting guest lacks"),
    ] {
        for lazy in [&["--lazy"][..], &[]] {
            let ended = restoring(&guest.vm(), file).args(lazy.iter().copied()).run()?.expect_code(1)?;
            assert!(ended.stderr.contains(why), "{ended}");
            assert_eq!(guest.status()?, "inmigrate");
        }
    }
    for file in destination.memory_files() {
        assert!(fs::read(file)?.iter().all(|&byte| byte == 0xa5), "its memory was touched");
    }
    restoring(&destination.vm(), &path).run()?.expect_code(0)?;
    assert_goes_on(&destination)
}

/// There and back without stock QEMU's own saving: live, in both formats; and `info` finds nothing wrong with what was
/// saved.
#[test]
fn a_linux_guest_that_we_saved_comes_back() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let source = Qemu::linux().booted()?;
    let ways: [(&str, &[&[&str]]); 2] = [("mapped-ram", &[&[], &["--lazy"]]), ("stream", &[&[]])];
    for (format, restores) in ways {
        let path = folder.join(format);
        let to = path.to_string_lossy();
        let save = ["save", "--vm", &source.vm(), "--to", &*to, "--format", format, "--json"];
        Transship::command(save).run()?.expect_code(0)?;
        let info = Transship::command(["info", &*to, "--check", "--json"]).run()?.expect_code(0)?.report()?;
        assert_eq!(
            (&info["format"], &info["state"], &info["checked"]),
            (&json!(format), &json!("running"), &json!(true))
        );
        for flags in restores {
            let destination = Qemu::linux().incoming().start()?;
            make_dirty(&destination)?;
            restoring(&destination.vm(), &path).args(flags.iter().copied()).run()?.expect_code(0)?;
            assert_goes_on(&destination)?;
        }
    }
    Ok(())
}

/// A guest that is no QEMU, by files of our own.
#[test]
fn a_synthetic_guest_comes_back_whole() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("synthetic");
    let source = Synthetic::builder().memory("64M").touched("60%").content("mixed").set("--regions", "2").start()?;
    let to = path.to_string_lossy();
    Transship::command(["save", "--vm", &source.vm(), "--to", &*to, "--paused", "--json"]).run()?.expect_code(0)?;
    drop(source);
    for flags in [&[][..], &["--lazy"]] {
        let destination = Synthetic::builder().memory("64M").set("--regions", "2").incoming().start()?;
        restoring(&destination.vm(), &path).args(flags.iter().copied()).run()?.expect_code(0)?;
        assert_eq!(destination.state()?, SyntheticState::Running);
        let check = destination.check()?;
        assert!(check.wrong == 0 && check.pages > 0, "{check:?}");
    }
    Ok(())
}
