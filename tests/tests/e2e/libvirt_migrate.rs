//! `virsh migrate` between two libvirts, through relays.
use crate::libvirt::old_libvirt;
use transship_lab::{
    Accel, Domain, Kind, LabError, LibvirtHost, PATIENCE, Result, Transship, Workload, serial::Serial, wait_until,
};

/// On both hosts: each has a /run of its own.
const SOCKET: &str = "/run/transship-test.sock";

fn far(host: &LibvirtHost, port: &str) -> Result<(Transship, String)> {
    let (listen, to) = (format!("relay:tcp:127.0.0.1:{port}"), format!("unix:{SOCKET}"));
    let far =
        Transship::command(["relay", "--many", "--listen", &listen, "--to", &to]).prefix(&host.prefix()).start()?;
    let link = far.listening()?;
    Ok((far, link))
}

fn near(host: &LibvirtHost, link: &str) -> Result<Transship> {
    let listen = format!("unix:{SOCKET}");
    let near = Transship::command(["relay", "--many", "--listen", &listen, "--to", link, "--channels", "2"]);
    let near = near.prefix(&host.prefix()).start()?;
    near.listening()?;
    Ok(near)
}

/// A domain that takes half a minute to migrate at 1 MiB/s, and then has written more.
fn slow_domain() -> Result<Domain> {
    let accel = Accel::best();
    Domain::new("g1", &Kind::Multiboot(Workload { mib: 32, ..Workload::MULTIBOOT }), 64, accel)
}

fn words<'a>(domain: &'a Domain, to: &'a str, uri: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let words = ["migrate", "--live", "--unsafe", domain.name(), to, "--migrateuri", uri];
    words.into_iter().chain(more.iter().copied()).collect()
}

fn assert_whole(host: &LibvirtHost, domain: &Domain, serial: &Serial) -> Result<()> {
    assert_eq!(host.state(domain.name())?, "running");
    let (count, sweep) = (serial.next_count()?, serial.sweep()?);
    assert_eq!((count.errors, sweep.errors), (0, 0), "{count:?} {sweep:?}");
    Ok(())
}

/// The relay at the destination is killed in the middle: the domain runs on where it was, and virsh says why. The
/// service is started again, and the next attempt works.
#[test]
#[ignore = "takes minutes"]
fn virsh_migrates_through_relays_also_after_a_link_has_broken() -> Result<()> {
    for start in [LibvirtHost::start, old_libvirt] {
        let (Some(one), Some(other)) = (start("h1")?, start("h2")?) else { continue };
        is_migrated_in_the_end(&one, &other)?;
    }
    Ok(())
}

fn is_migrated_in_the_end(one: &LibvirtHost, other: &LibvirtHost) -> Result<()> {
    let domain = slow_domain()?;
    let serial = domain.start(one)?;
    let (mut relay, link) = far(other, "0")?;
    let port = link.rsplit(':').next().unwrap_or_default().to_owned();
    let source = near(one, &link)?;
    let (uri, to) = (format!("unix://{SOCKET}"), other.uri());

    let mut virsh = one.start_virsh(&words(&domain, &to, &uri, &["--bandwidth", "1"]))?;
    let has_come = |line: &String| line.contains("migration 1:");
    wait_until("the relays to have it", || Ok(source.stderr().all().iter().any(has_come)))?;
    wait_until("pages", || Ok(one.virsh(&["domjobinfo", "g1"])?.contains("Memory processed")))?;
    relay.kill9();
    let status = virsh.wait(PATIENCE)?;
    let said = virsh.stderr().to_the_end()?.join("\n");
    // What it learns first: that the connection broke, or that the QEMU which waited has ended.
    let is_said = ["error: operation failed", "unexpectedly closed the monitor"].iter().any(|part| said.contains(part));
    assert!(!status.success() && is_said, "{status}: {said}");
    assert_whole(one, &domain, &serial)?;
    // That of the QEMU which waited in vain.
    drop(domain.serial()?);

    let (_relay, _) = far(other, &port)?;
    one.virsh(&words(&domain, &to, &uri, &[]))?;
    let moved = domain.serial()?;
    assert_whole(other, &domain, &moved)?;
    assert!(one.state("g1").is_err(), "it is still at its source");
    Ok(())
}

/// QEMU itself connects, several times: by a unix socket, and back by TCP, where libvirt uses one port at both hosts.
/// They are one machine here, so each has an address of its own.
#[test]
#[ignore = "long: make test-long"]
fn virsh_migrates_with_several_connections() -> Result<()> {
    let Some(one) = LibvirtHost::start("h1")? else { return Ok(()) };
    let Some(other) = LibvirtHost::start("h2")? else { return Ok(()) };
    let domain = Domain::multiboot("g1")?;
    drop(domain.start(&one)?);
    let (_far, link) = far(&other, "0")?;
    let source = near(&one, &link)?;
    let parallel = ["--parallel", "--parallel-connections", "2"];
    one.virsh(&words(&domain, &other.uri(), &format!("unix://{SOCKET}"), &parallel))?;
    assert_whole(&other, &domain, &domain.serial()?)?;
    handed_over(&source)?;

    let port = free_port()?;
    let waiting = format!("tcp:127.0.0.2:{port}");
    let far = Transship::command(["relay", "--many", "--listen", "relay:tcp:127.0.0.1:0", "--to", &waiting]);
    let far = far.prefix(&one.prefix()).start()?;
    let (listen, link) = (format!("tcp:127.0.0.1:{port}"), far.listening()?);
    let source = Transship::command(["relay", "--many", "--listen", &listen, "--to", &link]);
    let source = source.prefix(&other.prefix()).start()?;
    source.listening()?;
    let uri = format!("tcp://127.0.0.1:{port}");
    let more = [&["--listen-address", "127.0.0.2"], &parallel[..]].concat();
    other.virsh(&words(&domain, &one.uri(), &uri, &more))?;
    assert_whole(&one, &domain, &domain.serial()?)?;
    handed_over(&source)
}

fn handed_over(relay: &Transship) -> Result<()> {
    let is_it = |line: &String| line.contains("migration 1: handed over");
    wait_until("the relay", || Ok(relay.stderr().all().iter().any(is_it)))
}

fn free_port() -> Result<u16> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    Ok(listener?.port())
}

/// libvirt itself is at work on the domain: it is left alone until that is over.
#[test]
#[ignore = "long: make test-long"]
fn a_domain_that_libvirt_migrates_is_not_saved_meanwhile() -> Result<()> {
    let Some(one) = LibvirtHost::start("h1")? else { return Ok(()) };
    let Some(other) = LibvirtHost::start("h2")? else { return Ok(()) };
    let domain = slow_domain()?;
    let serial = domain.start(&one)?;
    let (to, file) = (other.uri(), domain.folder().join("image"));
    let listen = ["--listen-address", "127.0.0.1", "--bandwidth", "1"];
    let mut virsh = one.start_virsh(&words(&domain, &to, "tcp://127.0.0.1:0", &listen))?;
    wait_until("the migration", || match virsh.ended()? {
        Some(status) => Err(LabError(format!("virsh ended, {status}: {}", virsh.stderr().tail()))),
        None => Ok(one.virsh(&["domjobinfo", "g1"])?.contains("Memory processed")),
    })?;
    let save = || Transship::command(["save", "--vm", &one.vm("g1"), "--to", &file.to_string_lossy(), "--background"]);
    let refused = save().run()?.expect_code(1)?;
    assert!(refused.stderr.contains("a migration away") && refused.stderr.contains("domjobabort"), "{refused}");
    one.virsh(&["domjobabort", "g1"])?;
    assert!(!virsh.wait(PATIENCE)?.success());
    save().run()?.expect_code(0)?;
    assert_whole(&one, &domain, &serial)
}
