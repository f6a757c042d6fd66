//! What `check` says, which is what a move, a save or a restore would do; and that it leaves no trace.
use serde_json::{Value, json};

use crate::peer::assert_nothing_of_ours;
use transship_lab::{Backend, LabError, Qemu, QemuBuilder, Result, Scratch, Transship, process};

fn checked(vm: &str, fits: bool) -> Result<Value> {
    let ended = Transship::command(["check", "--vm", vm, "--json"]).run()?.expect_code(if fits { 0 } else { 1 })?;
    serde_json::from_str(ended.stdout.trim()).map_err(|e| LabError(format!("{e}: {ended}")))
}

fn verdict<'a>(found: &'a Value, what: &str) -> &'a Value {
    let uses = found["uses"].as_array().into_iter().flatten();
    uses.clone().find(|of| of["what"] == what).unwrap_or(&Value::Null)
}

fn guest(backend: Backend) -> QemuBuilder {
    Qemu::multiboot().backend(backend).named_as_by_default()
}

#[test]
fn a_guest_is_described_and_not_touched() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let image = folder.join("disk");
    std::fs::File::create(&image).and_then(|file| file.set_len(1 << 20))?;
    let drive = format!("file={},format=raw,if=none,id=disk,cache=none", image.display());
    let source = guest(Backend::Default).args(["-drive", &drive, "-device", "virtio-blk-pci,drive=disk,id=vda"]);
    let source = source.booted()?;
    let settings = || source.qmp("query-migrate-capabilities", json!({}));
    let (before, files) = (settings()?, source.open_files()?.len());
    let found = checked(&source.vm(), true)?;
    assert_eq!(found["memory"][0]["name"], "pc.ram", "{found}");
    assert_eq!((&found["memory"][0]["kind"], &found["memory"][0]["page_bytes"]), (&json!("private"), &json!(4096)));
    assert!(found["disks"].as_array().is_some_and(|disks| disks.iter().any(|disk| disk["direct"] == true)), "{found}");
    assert!(found["devices"].as_array().is_some_and(|all| all.iter().any(|one| one["name"] == "vda")), "{found}");
    for what in ["move", "move --peer qemu", "save --paused", "save --live", "save --background", "watch"] {
        assert_eq!(verdict(&found, what)["works"], true, "{what}: {found}");
    }
    assert_eq!(found["doubts"], json!([]), "it runs no guests of its own");
    assert_eq!((settings()?, source.open_files()?.len()), (before, files));
    assert_nothing_of_ours(&source)?;
    // People get the same in words.
    let text = Transship::command(["check", "--vm", &source.vm()]).run()?.expect_code(0)?.stdout;
    assert!(text.contains("memory                  pc.ram: 64.0 MiB, private, pages of 4.0 KiB\n"), "{text}");
    assert!(text.contains("save --background       yes\n"), "{text}");
    Ok(())
}

/// Every refusal at once, and each in the words that the command itself has.
#[test]
fn what_would_be_refused_is_said_as_it_would_be() -> Result<()> {
    let virtio_mem = ["-object", "memory-backend-ram,id=more,size=64M", "-device", "virtio-mem-pci,memdev=more"];
    let source = guest(Backend::Default).args(["-m", "64M,maxmem=1G,slots=1"]).args(virtio_mem).start()?;
    let found = checked(&source.vm(), false)?;
    for (what, command) in [
        ("move", vec!["move", "--to", "tcp:127.0.0.1:1"]),
        ("move --peer qemu", vec!["move", "--peer", "qemu", "--to", "tcp:127.0.0.1:1"]),
        ("save --background", vec!["save", "--background", "--to", "/dev/null/x"]),
        ("watch", vec!["watch", "--count", "1"]),
    ] {
        let why = verdict(&found, what)["why_not"].clone();
        let why: Vec<&str> = why.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        assert!(!why.is_empty(), "{what}: {found}");
        if what == "save --background" {
            assert_eq!(why.len(), 2, "that of all, and its own: {why:?}");
            continue;
        }
        let vm = source.vm();
        let refused = Transship::command([&command[..], &["--vm", &vm]].concat()).run()?.expect_code(1)?.to_string();
        assert!(refused.contains(why[0]), "{what}: {refused} is not {}", why[0]);
    }
    assert_eq!(process::status_field(source.pid(), "TracerPid")?, "0");
    Ok(())
}

#[test]
fn a_qemu_that_waits_is_told_what_could_come() -> Result<()> {
    let waiting = guest(Backend::SharedFile).incoming().start()?;
    let found = checked(&waiting.vm(), true)?;
    assert_eq!(found["state"], "inmigrate");
    for what in ["receive", "receive --peer qemu", "restore", "restore --lazy"] {
        assert_eq!(verdict(&found, what)["works"], true, "{what}: {found}");
    }
    let bound = guest(Backend::SharedFile).memory_options("prealloc=on").incoming().start()?;
    let found = checked(&bound.vm(), true)?;
    let why = verdict(&found, "restore --lazy")["why_not"][0].as_str().unwrap_or_default();
    assert!(why.contains("prealloc=off"), "{found}");
    assert_eq!(verdict(&found, "restore")["works"], true);
    Ok(())
}

/// Who holds the only QMP socket is named.
#[test]
fn the_client_of_a_qmp_socket_is_named() -> Result<()> {
    let source = guest(Backend::Default).start()?;
    let socket = source.qmp_path();
    let mut holder = std::process::Command::new("socat");
    holder.arg("STDIO").arg(format!("UNIX-CONNECT:{}", socket.display()));
    holder.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut holder = holder.spawn()?;
    // It holds it when it has the greeting.
    let mut greeting = [0; 1];
    std::io::Read::read_exact(holder.stdout.as_mut().expect("it is piped"), &mut greeting)?;
    let refused = Transship::command(["check", "--vm", &source.vm()]).run();
    let _ = (holder.kill(), holder.wait());
    let refused = refused?.expect_code(1)?.to_string();
    let named = format!("process {} (socat: socat STDIO UNIX-CONNECT:", holder.id());
    assert!(refused.contains(&named) && refused.contains("have that client disconnect"), "{refused}");
    Ok(())
}
