//! Domains of real libvirts: saved while they run on, by everything that may happen meanwhile.
use std::path::Path;
use transship_lab::{
    Domain, LabError, LibvirtHost, Process, Result, Transship, serial::Serial, transship::TransshipBuilder, wait_until,
};

pub(crate) fn saving(vm: &str, to: &Path, more: &[&str]) -> TransshipBuilder {
    Transship::command(["save", "--vm", vm, "--to", &*to.to_string_lossy(), "--json"]).args(more.iter().copied())
}

/// It runs, as libvirt knows, nothing of ours is in it, and every page is what it wrote last.
pub(crate) fn assert_whole(host: &LibvirtHost, domain: &Domain, serial: &Serial) -> Result<()> {
    assert_eq!(host.state(domain.name())?, "running");
    let files = transship_lab::process::open_files(host.pid(domain.name())?)?;
    assert!(!files.iter().any(|file| file.contains("userfaultfd") || file.contains("transship-state")), "{files:?}");
    let sets = host.virsh(&["qemu-monitor-command", domain.name(), r#"{"execute":"query-fdsets"}"#])?;
    assert!(!sets.contains("transship"), "{sets}");
    let (count, sweep) = (serial.next_count()?, serial.sweep()?);
    assert_eq!((count.errors, sweep.errors), (0, 0), "{count:?} {sweep:?}");
    Ok(())
}

/// Runs a save up to a step, where it waits for the gate to go.
pub(crate) fn stalled(save: TransshipBuilder, step: &str, gate: &Path) -> Result<Transship> {
    let save = save.env("TRANSSHIP_FAIL_POINT", format!("{step}=stall")).env("TRANSSHIP_FAIL_FILE", gate);
    let mut save = save.start()?;
    wait_until(step, || match save.process().ended()? {
        Some(status) => Err(LabError(format!("ended before {step}, {status}: {}", save.stderr().tail()))),
        None => Ok(gate.exists()),
    })?;
    Ok(save)
}

/// The libvirt of Debian 12, beside whatever is installed.
pub(crate) fn old_libvirt(name: &str) -> Result<Option<LibvirtHost>> {
    LibvirtHost::start_version(name, "9.0")
}

/// All ways; a second transship, libvirt's own operations and a domain that is not there are refused. One domain for
/// all of it, since each takes seconds to boot.
#[test]
fn a_domain_is_saved_in_all_ways_and_libvirt_knows_its_state() -> Result<()> {
    let Some(host) = LibvirtHost::start("h1")? else { return Ok(()) };
    is_saved_in_all_ways(&host, &Domain::linux("g1")?)
}

#[test]
#[ignore = "long: make test-long"]
fn an_older_libvirt_knows_its_state_as_well() -> Result<()> {
    let Some(host) = old_libvirt("h1")? else { return Ok(()) };
    assert_eq!(host.version()?, (9, 0));
    is_saved_in_all_ways(&host, &Domain::multiboot("g1")?)
}

fn is_saved_in_all_ways(host: &LibvirtHost, domain: &Domain) -> Result<()> {
    let serial = domain.start(host)?;
    let vm = host.vm("g1");
    let mut events = host.start_virsh(&["event", "--domain", "g1", "--event", "lifecycle", "--loop"])?;
    let watch = Transship::command(["watch", "--vm", &vm, "--count", "1", "--json"]).run()?.expect_code(0)?;
    assert!(watch.report()?["dirty_pages"].as_u64() > Some(0), "{watch}");
    let (file, gate) = (domain.folder().join("a"), domain.folder().join("gate"));
    let save = stalled(saving(&vm, &file, &["--background", "--channels", "1"]), "save.resumed", &gate)?;
    // libvirt and its commands go on meanwhile, and nobody else may save it.
    assert_eq!(host.state("g1")?, "running");
    host.virsh(&["qemu-monitor-command", "g1", r#"{"execute":"query-status"}"#])?;
    for command in ["domblklist", "dommemstat", "suspend", "resume", "dumpxml"] {
        host.virsh(&[command, "g1"])?;
    }
    let second = saving(&vm, &file, &["--live"]).run()?.expect_code(1)?;
    assert!(second.stderr.contains(&format!("process {}", save.pid())), "{second}");
    std::fs::remove_file(&gate)?;
    save.wait()?.expect_code(0)?;
    assert_whole(host, domain, &serial)?;
    saving(&vm, &file, &["--live"]).run()?.expect_code(0)?;
    assert_whole(host, domain, &serial)?;
    saving(&vm, &file, &["--paused"]).run()?.expect_code(0)?;
    assert_whole(host, domain, &serial)?;
    host.virsh(&["suspend", "g1"])?;
    saving(&vm, &file, &["--background"]).run()?.expect_code(0)?;
    assert_eq!(host.virsh(&["domstate", "--reason", "g1"])?, "paused (user)");
    host.virsh(&["resume", "g1"])?;
    // All that it makes of the three stops, and of virsh's own two. A save of a suspended domain is no event.
    let stops = ["Suspended Paused", "Resumed Unpaused"].repeat(5);
    wait_until("events", || Ok(lifecycle(&events).len() >= stops.len()))?;
    assert_eq!(lifecycle(&events), stops);
    events.kill9();
    assert_whole(host, domain, &serial)?;
    let gone = saving(&host.vm("g2"), &file, &[]).run()?.expect_code(1)?;
    assert!(gone.stderr.contains("can't find domain \"g2\""), "{gone}");
    let away = Transship::moving(&vm, "tcp:127.0.0.1:1").run()?.expect_code(2)?;
    assert!(away.stderr.contains("virsh migrate"), "{away}");
    drop(serial);
    // What was saved is the guest as any QEMU of the same machine has it.
    let moved = Transship::command(["info", &*file.to_string_lossy()]).run()?.expect_code(0)?;
    assert!(moved.stdout.contains("pc.ram"), "{moved}");
    Ok(())
}

/// What `virsh event` has said of the domain's life.
fn lifecycle(events: &Process) -> Vec<String> {
    let said = events.stdout().all();
    let detail = |line: &String| Some(line.split_once("event 'lifecycle' for domain 'g1': ")?.1.trim().to_owned());
    said.iter().filter_map(detail).collect()
}

/// `kill -9` of the command at each step; then the guest runs on, whole, libvirt knows it, and the next save succeeds.
#[test]
#[ignore = "takes minutes"]
fn a_domain_whose_saver_dies_runs_on() -> Result<()> {
    let hosts = [LibvirtHost::start("h1")?, old_libvirt("h2")?];
    hosts.into_iter().flatten().try_for_each(|host| runs_on_when_its_saver_dies(&host))
}

fn runs_on_when_its_saver_dies(host: &LibvirtHost) -> Result<()> {
    let domain = Domain::linux("g1")?;
    let serial = domain.start(host)?;
    let file = domain.folder().join("a");
    for (way, step) in [
        ("--background", "save.protecting"),
        ("--background", "save.stopped"),
        ("--background", "save.state"),
        ("--background", "save.resumed"),
        ("--background", "save.background"),
        ("--live", "save.tracking"),
        ("--live", "save.stopped"),
        ("--live", "save.state"),
    ] {
        let save = saving(&host.vm("g1"), &file, &[way]).env("TRANSSHIP_FAIL_POINT", format!("{step}=kill"));
        let died = save.run()?;
        assert_eq!(died.code(), None, "{way} {step}: {died}");
        wait_until("the guard", || Ok(host.state("g1")? == "running"))?;
        assert!(!file.exists(), "{way} {step}");
        assert_whole(host, &domain, &serial)?;
    }
    saving(&host.vm("g1"), &file, &["--background"]).run()?.expect_code(0)?;
    assert_whole(host, &domain, &serial)
}

/// libvirtd is killed and started again: while the guest stands still, and while it is saved.
#[test]
#[ignore = "takes minutes"]
fn libvirtd_may_be_restarted_during_a_save() -> Result<()> {
    let hosts = [LibvirtHost::start("h1")?, old_libvirt("h2")?];
    hosts.into_iter().flatten().try_for_each(|mut host| outlives_its_libvirtd(&mut host))
}

fn outlives_its_libvirtd(host: &mut LibvirtHost) -> Result<()> {
    let domain = Domain::linux("g1")?;
    let serial = domain.start(host)?;
    let (file, gate) = (domain.folder().join("a"), domain.folder().join("gate"));
    for (way, step) in [("--live", "save.stopped"), ("--live", "save.tracking"), ("--background", "save.stopped")] {
        let save = stalled(saving(&host.vm("g1"), &file, &[way]), step, &gate)?;
        host.restart()?;
        std::fs::remove_file(&gate)?;
        let ended = save.wait()?;
        // Whether a balloon has moved meanwhile nobody knows, so that one is given up.
        match way {
            "--background" => assert!(ended.clone().expect_code(1)?.stderr.contains("libvirt's daemon"), "{ended}"),
            _ => drop(ended.expect_code(0)?),
        }
        assert_whole(host, &domain, &serial)?;
    }
    Ok(())
}
