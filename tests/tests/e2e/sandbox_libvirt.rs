//! The rights of those who look at a domain of libvirt's or save it, and of their guards: another process makes
//! libvirt's calls for each of them.
use std::{fs, path::Path};

use rustix::process::Signal;
use transship_lab::{
    DiskFormat, Domain, LabError, LibvirtHost, Result, Transship,
    process::{of_ours, signal},
    wait_until,
};

use crate::libvirt::{assert_whole, saving};
use crate::sandbox::{assert_confined, assert_stopped, steered, threads};

/// The processes that make libvirt's calls for this command: one for itself, and one for its guard.
fn callers(vm: &str) -> Vec<u32> {
    let of_domain = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|word| word == b"--domain")
    };
    of_ours(vm, "steward").into_iter().filter(of_domain).collect()
}

/// The same of one command or guard.
fn caller_of(vm: &str, process: u32) -> Result<u32> {
    let is_its = |pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.lines().any(|line| line.strip_prefix("PPid:").is_some_and(|text| text.trim() == process.to_string()))
    };
    let found = callers(vm).into_iter().find(is_its);
    found.ok_or_else(|| LabError(format!("nobody makes libvirt's calls for process {process}")))
}

fn assert_nothing_of_ours(vm: &str) -> Result<()> {
    wait_until("the end of all of ours", || Ok(of_ours(vm, "").is_empty()))
}

/// A save that waits until it is told to go on. The guest runs.
fn held(vm: &str, file: &Path, more: &[&str]) -> Result<Transship> {
    let mut save = saving(vm, file, &[&["--live", "--hold"], more].concat()).start()?;
    wait_until("that it is held", || match save.process().ended()? {
        Some(status) => Err(LabError(format!("it ended, {status}: {}", save.stderr().tail()))),
        None => Ok(steered("status", vm, &["--json"])?.contains("\"ready\"")),
    })?;
    Ok(save)
}

#[test]
fn savers_and_watchers_of_a_domain_can_do_nothing_else() -> Result<()> {
    let Some(host) = LibvirtHost::start("h1")? else { return Ok(()) };
    let domain = Domain::multiboot("g1")?;
    let serial = domain.start(&host)?;
    let (vm, folder) = (host.vm("g1"), transship_lab::Scratch::new()?);
    let file = folder.join("file").display().to_string();
    let save = ["save", "--vm", &*vm, "--to", &*file, "--background", "--format", "libvirt"];
    for role in ["Save", "Guard"] {
        assert_stopped(role, || Transship::command(save), &folder)?;
    }
    let watch = ["watch", "--vm", &*vm, "--count", "1"];
    assert_stopped("Watch", || Transship::command(watch), &folder)?;
    Transship::command(watch).run()?.expect_code(0)?;
    assert_nothing_of_ours(&vm)?;
    assert_whole(&host, &domain, &serial)
}

/// libvirtd is restarted meanwhile.
#[test]
fn savers_of_a_domain_have_no_rights_but_over_their_folder() -> Result<()> {
    let Some(mut host) = LibvirtHost::start("h1")? else { return Ok(()) };
    let domain = Domain::multiboot("g1")?;
    let serial = domain.start(&host)?;
    let (vm, file) = (host.vm("g1"), domain.folder().join("a"));
    let save = held(&vm, &file, &[])?;
    for (field, value) in
        [("CapPrm", "000000000000000f"), ("CapEff", "000000000000000f"), ("NoNewPrivs", "1"), ("Seccomp", "2")]
    {
        let found = threads(save.pid(), field)?;
        assert!(found.iter().all(|thread| thread == value), "{field}: {found:?}");
    }
    let guards = of_ours(&vm, "guard");
    assert_eq!(guards.len(), 1, "{guards:?}");
    assert_confined(guards[0], "guard")?;
    let loaded = |pid: u32| fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default().contains("libvirt");
    assert!(!loaded(save.pid()) && !loaded(guards[0]), "libvirt's library is in a confined process");
    assert!(loaded(caller_of(&vm, save.pid())?) && callers(&vm).len() == 2, "{:?}", callers(&vm));
    host.restart()?;
    steered("go", &vm, &[])?;
    save.wait()?.expect_code(0)?;
    assert_nothing_of_ours(&vm)?;
    assert_whole(&host, &domain, &serial)?;
    Transship::command(["info", &*file.to_string_lossy(), "--check"]).run()?.expect_code(0)?;
    Ok(())
}

#[test]
fn watchers_of_a_domain_have_no_rights() -> Result<()> {
    let Some(mut host) = LibvirtHost::start("h1")? else { return Ok(()) };
    let domain = Domain::multiboot("g1")?;
    let serial = domain.start(&host)?;
    let vm = host.vm("g1");
    let mut watch = Transship::command(["watch", "--vm", &*vm, "--interval", "100ms", "--json"]).start()?;
    let said = watch.process().stdout().clone();
    let lines = || said.all().len();
    wait_until("looks", || Ok(lines() > 2))?;
    assert_confined(watch.pid(), "watch")?;
    host.restart()?;
    let before = lines();
    wait_until("more looks", || Ok(lines() > before + 2))?;
    watch.signal(Signal::INT)?;
    watch.wait()?.expect_code(0)?;
    assert_nothing_of_ours(&vm)?;
    assert_whole(&host, &domain, &serial)
}

/// Whoever of them is killed, and whether the guest runs or stands still then: it runs on, and nothing is left.
#[test]
#[ignore = "long: make test-long"]
fn whoever_is_killed_the_domain_runs_on() -> Result<()> {
    let Some(host) = LibvirtHost::start("h1")? else { return Ok(()) };
    let domain = Domain::with_disk("g1", DiskFormat::Raw)?;
    let serial = domain.start(&host)?;
    let (vm, file, victim) = (host.vm("g1"), domain.folder().join("a"), domain.folder().join("victim"));
    let is_as_before = || {
        wait_until("the guard", || Ok(host.state("g1")? == "running"))?;
        assert_nothing_of_ours(&vm)?;
        assert!(!file.exists(), "the file is left behind");
        let names = fs::read_dir(domain.folder())?;
        let left = names.flatten().filter(|entry| entry.file_name().to_string_lossy().contains("vda")).count();
        assert_eq!(left, 0, "an overlay is left behind");
        assert_whole(&host, &domain, &serial)
    };
    // While it runs.
    let save = held(&vm, &file, &[])?;
    signal(caller_of(&vm, save.pid())?, Signal::KILL)?;
    steered("go", &vm, &[])?;
    save.wait()?.expect_code(1)?;
    is_as_before()?;
    let mut save = held(&vm, &file, &[])?;
    save.kill9();
    is_as_before()?;
    // While it stands still, with its overlay made: the command of the user's kills.
    let kill = format!("test $TRANSSHIP_PHASE = back || kill -9 $(cat {})", victim.display());
    for is_saver in [true, false] {
        let disks = ["--format", "libvirt-sparse", "--disks", "--at-stop", &*kill];
        let save = held(&vm, &file, &disks)?;
        let who = if is_saver { save.pid() } else { caller_of(&vm, save.pid())? };
        fs::write(&victim, who.to_string())?;
        steered("go", &vm, &[])?;
        let ended = save.wait()?;
        assert_ne!(ended.code(), Some(0), "{ended}");
        assert!(ended.stderr.contains("the guest runs on here"), "{ended}");
        if !is_saver {
            // Who would have removed it is dead; that it is left is said.
            let said =
                ended.stderr.lines().find_map(|line| line.split_once(" was made for a disk")?.0.split(' ').next_back());
            let left = said.ok_or_else(|| LabError(format!("nothing is said of the overlay: {ended}")))?;
            fs::remove_file(left).map_err(|error| LabError(format!("{left}: {error}")))?;
        }
        is_as_before()?;
    }
    Ok(())
}
