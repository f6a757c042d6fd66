//! Save images of libvirt's: what is saved of a domain is loaded by `virsh restore`, here and at another host.
use crate::libvirt::old_libvirt;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use transship_lab::{Domain, LibvirtHost, Result, Transship, lacks, serial::Serial, wait_until};

fn save(host: &LibvirtHost, domain: &Domain, to: &Path, more: &[&str]) -> Result<()> {
    let args = ["save", "--vm", &*host.vm(domain.name()), "--to", &*to.to_string_lossy(), "--json"];
    Transship::command(args).args(more.iter().copied()).run()?.expect_code(0).map(drop)
}

/// It runs, and every page is what it wrote last.
pub(crate) fn assert_whole(host: &LibvirtHost, domain: &Domain, serial: &Serial) -> Result<()> {
    assert_eq!(host.state(domain.name())?, "running");
    let (count, sweep) = (serial.next_count()?, serial.sweep()?);
    assert_eq!((count.errors, sweep.errors), (0, 0), "{count:?} {sweep:?}");
    Ok(())
}

/// `virsh restore` loads it, and the guest goes on with every page as it was.
pub(crate) fn is_restored(host: &LibvirtHost, domain: &Domain, from: &Path) -> Result<()> {
    host.virsh(&["restore", &from.to_string_lossy()])?;
    let serial = domain.serial()?;
    assert_whole(host, domain, &serial)?;
    host.virsh(&["destroy", domain.name()]).map(drop)
}

fn file(domain: &Domain, name: &str) -> PathBuf {
    domain.folder().join(name)
}

#[test]
#[ignore = "long: make test-long"]
fn virsh_restores_what_was_saved_while_the_domain_ran_on() -> Result<()> {
    let Some(host) = LibvirtHost::start("h1")? else { return Ok(()) };
    let Some(other) = LibvirtHost::start("h2")? else { return Ok(()) };
    let domain = Domain::multiboot("g1")?;
    let serial = domain.start(&host)?;
    let (background, sparse) = (file(&domain, "background"), file(&domain, "sparse"));
    save(&host, &domain, &background, &["--background", "--format", "libvirt"])?;
    assert_whole(&host, &domain, &serial)?;
    let knows_sparse = host.version()? >= (11, 2);
    if knows_sparse {
        save(&host, &domain, &sparse, &["--background", "--format", "libvirt-sparse"])?;
    } else {
        lacks("libvirt 11.2, to restore a sparse save image");
    }
    // libvirt itself finds no fault with its definition.
    let xml = host.virsh(&["save-image-dumpxml", &background.to_string_lossy()])?;
    assert!(xml.contains("<name>g1</name>"), "{xml}");
    assert_whole(&host, &domain, &serial)?;
    drop(serial);
    host.virsh(&["destroy", "g1"])?;
    is_restored(&other, &domain, &background)?;
    if knows_sparse {
        is_restored(&host, &domain, &sparse)?;
    }
    Ok(())
}

/// Also by a newer one what was saved at an older one.
#[test]
#[ignore = "long: make test-long"]
fn an_older_virsh_restores_it_as_well() -> Result<()> {
    let Some(host) = old_libvirt("h1")? else { return Ok(()) };
    let Some(other) = LibvirtHost::start("h2")? else { return Ok(()) };
    let domain = Domain::multiboot("g1")?;
    let serial = domain.start(&host)?;
    let image = file(&domain, "image");
    save(&host, &domain, &image, &["--background", "--format", "libvirt"])?;
    assert_whole(&host, &domain, &serial)?;
    drop(serial);
    host.virsh(&["destroy", "g1"])?;
    is_restored(&host, &domain, &image)?;
    is_restored(&other, &domain, &image)
}

/// All ways, at the host that it was saved at; one that was suspended stays so.
#[test]
#[ignore = "takes minutes"]
fn virsh_restores_what_was_saved_in_any_way() -> Result<()> {
    let hosts = [LibvirtHost::start("h1")?, old_libvirt("h2")?];
    hosts.into_iter().flatten().try_for_each(|host| is_restored_however_it_was_saved(&host))
}

fn is_restored_however_it_was_saved(host: &LibvirtHost) -> Result<()> {
    let domain = Domain::linux("g1")?;
    let mut serial = domain.start(host)?;
    let formats = if host.version()? >= (11, 2) { &["libvirt", "libvirt-sparse"][..] } else { &["libvirt"] };
    for (way, format) in
        ["--live", "--paused", "--background"].iter().flat_map(|way| formats.iter().map(move |f| (way, f)))
    {
        let image = file(&domain, "image");
        save(host, &domain, &image, &[way, "--format", format])?;
        assert_whole(host, &domain, &serial)?;
        drop(serial);
        host.virsh(&["destroy", "g1"])?;
        host.virsh(&["restore", &image.to_string_lossy()])?;
        serial = domain.serial()?;
        assert_whole(host, &domain, &serial)?;
    }
    host.virsh(&["suspend", "g1"])?;
    let image = file(&domain, "suspended");
    save(host, &domain, &image, &["--background", "--format", "libvirt"])?;
    drop(serial);
    host.virsh(&["destroy", "g1"])?;
    host.virsh(&["restore", &image.to_string_lossy()])?;
    assert_eq!(host.state("g1")?, "paused");
    host.virsh(&["resume", "g1"])?;
    assert_whole(host, &domain, &domain.serial()?)
}

const RNG: &str = "<rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>\n";

/// A device is plugged in while the domain is saved: which of the two is in the file nobody can say.
#[test]
fn a_domain_that_is_changed_meanwhile_is_not_saved() -> Result<()> {
    let Some(host) = LibvirtHost::start("h1")? else { return Ok(()) };
    let domain = Domain::multiboot("g1")?;
    let serial = domain.start(&host)?;
    let (image, gate, device) = (file(&domain, "image"), file(&domain, "gate"), file(&domain, "rng.xml"));
    std::fs::write(&device, RNG)?;
    let (vm, to) = (host.vm("g1"), image.to_string_lossy());
    let save = Transship::command(["save", "--vm", &vm, "--to", &to, "--background", "--format", "libvirt"]);
    let save = save.env("TRANSSHIP_FAIL_POINT", "save.resumed=stall").env("TRANSSHIP_FAIL_FILE", &gate).start()?;
    wait_until("the save", || Ok(gate.exists()))?;
    // Until it is complete, libvirt knows that it is not.
    let partial = domain.folder().join(".image.transship-part");
    let unfinished = host.virsh(&["restore", &partial.to_string_lossy()]).unwrap_err().to_string();
    assert!(unfinished.contains("incomplete"), "{unfinished}");
    host.virsh(&["attach-device", "g1", &device.to_string_lossy()])?;
    std::fs::remove_file(&gate)?;
    let ended = save.wait()?.expect_code(1)?;
    assert!(ended.stderr.contains("definition was changed"), "{ended}");
    assert!(!image.exists() && !partial.exists());
    assert_whole(&host, &domain, &serial)
}

fn info(file: &Path) -> Result<Value> {
    Transship::command(["info", "--check", "--json", &*file.to_string_lossy()]).run()?.expect_code(0)?.report()
}

fn convert(from: &Path, to: &Path, more: &[&str]) -> Result<()> {
    let convert = Transship::command(["convert", &*from.to_string_lossy(), &*to.to_string_lossy()]);
    convert.args(more.iter().copied()).run()?.expect_code(0).map(drop)
}

/// As libvirt writes it, with whatever it compresses by: it is read, turned into a file for QEMU and back into an image
/// that virsh restores, and a QEMU without libvirt goes on with the guest.
#[test]
#[ignore = "long: make test-long"]
fn what_virsh_saved_is_read() -> Result<()> {
    let Some(host) = LibvirtHost::start("h1")? else { return Ok(()) };
    let domain = Domain::multiboot("g1")?;
    drop(domain.start(&host)?);
    let (mut qemu, socket) = host.waiting_qemu_like("g1")?;
    let mut saved = vec![("raw", file(&domain, "raw"))];
    host.virsh(&["save", "g1", &saved[0].1.to_string_lossy()])?;
    for encoding in ["gzip", "zstd", "bzip2", "xz", "sparse"] {
        let (_, last) = &saved[saved.len() - 1];
        host.virsh(&["restore", &last.to_string_lossy()])?;
        drop(domain.serial()?);
        let next = file(&domain, encoding);
        if host.virsh(&["save", "g1", &next.to_string_lossy(), "--image-format", encoding]).is_err() {
            lacks(format!("a libvirt that can save an image by {encoding} (11.2, and that program)"));
            host.virsh(&["destroy", "g1"])?;
            continue;
        }
        saved.push((encoding, next));
    }
    for (encoding, image) in &saved {
        let said = info(image)?;
        assert_eq!(
            (&said["libvirt"]["domain"], &said["libvirt"]["encoding"]),
            (&json!("g1"), &json!(encoding)),
            "{said}"
        );
        assert_eq!((&said["state"], &said["refusal"]), (&json!("running"), &Value::Null), "{said}");
        let (snapshot, again) = (file(&domain, "snapshot"), file(&domain, "again"));
        convert(image, &snapshot, &["--format", "mapped-ram"])?;
        assert_eq!(info(&snapshot)?["state"], "running");
        convert(image, &again, &["--format", "libvirt"])?;
        let refused =
            Transship::command(["convert", &*snapshot.to_string_lossy(), "x", "--format", "libvirt"]).run()?;
        assert!(refused.expect_code(1)?.stderr.contains("no definition of a domain"));
        is_restored(&host, &domain, &again)?;
    }
    let (_, last) = &saved[saved.len() - 1];
    qemu.start()?;
    let restore = ["restore", "--vm", &format!("qemu:{}", socket.display()), "--from", &last.to_string_lossy()];
    Transship::command(restore).run()?.expect_code(0)?;
    let serial = domain.serial()?;
    let (count, sweep) = (serial.next_count()?, serial.sweep()?);
    assert_eq!((count.errors, sweep.errors), (0, 0), "{count:?} {sweep:?}");
    Ok(())
}

fn saving_all(host: &LibvirtHost, to: &Path) -> Result<transship_lab::Finished> {
    let (of, to) = (format!("libvirt:{}", host.uri()), to.to_string_lossy().into_owned());
    let save = ["save", "--all-of", &of, "--to", &to, "--format", "libvirt", "--background", "--bandwidth", "100MiB/s"];
    Transship::command(save).args(["--json"]).run()
}

/// All domains of a host, and how to bring each back; if one can't be saved, the others are.
#[test]
#[ignore = "long: make test-long"]
fn all_domains_of_a_host_are_saved() -> Result<()> {
    let Some(host) = LibvirtHost::start("h1")? else { return Ok(()) };
    let domains = [Domain::multiboot("g1")?, Domain::multiboot("g2")?];
    let serials = [domains[0].start(&host)?, domains[1].start(&host)?];
    let folder = domains[0].folder().join("all");
    std::fs::create_dir_all(folder.join("g2.save"))?;
    let failed = saving_all(&host, &folder)?.expect_code(1)?;
    assert!(failed.stderr.contains("g2.save is not a regular file"), "{failed}");
    assert!(folder.join("g1.save").is_file(), "{failed}");
    std::fs::remove_dir(folder.join("g2.save"))?;

    let saved = saving_all(&host, &folder)?.expect_code(0)?.report()?;
    for (serial, domain) in serials.iter().zip(&domains) {
        assert_whole(&host, domain, serial)?;
    }
    drop(serials);
    for (one, domain) in saved.as_array().into_iter().flatten().zip(&domains) {
        assert_eq!((&one["domain"], &one["report"]["status"]), (&json!(domain.name()), &json!("completed")), "{saved}");
        host.virsh(&["destroy", domain.name()])?;
        let restore = one["restore"].as_str().unwrap_or_default();
        assert!(restore.starts_with("virsh -c ") && restore.contains(" restore "), "{saved}");
        is_restored(&host, domain, &folder.join(format!("{}.save", domain.name())))?;
    }
    assert_eq!(saved.as_array().map(Vec::len), Some(2), "{saved}");
    Ok(())
}
