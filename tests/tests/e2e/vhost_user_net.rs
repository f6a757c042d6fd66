//! Guests with a network card that is another process: packets come into their memory through a mapping of its own, and
//! lie there for seconds until the guest reads them.
use crate::ends::move_between;
use transship_lab::{
    Backend, Echo, NetBackEnd, Network, Qemu, QemuBuilder, Result, Scratch, Transship, Workload, other_qemu,
};

/// Datagrams a second.
const RATE: u32 = 500;
const WORKLOAD: Workload = Workload { mib: 16, rate: 500, sweep_ms: 500, ..Workload::LINUX };
/// Slow enough that much comes in between two looks.
const SLOWLY: [&str; 3] = ["--verify", "--bandwidth", "60MB"];

/// A Linux guest that sends datagrams all the time, and knows what has to come back.
fn linux(echo: &Echo) -> QemuBuilder {
    Qemu::linux().workload(WORKLOAD).append(&echo.words(RATE))
}

fn booted(guest: QemuBuilder) -> Result<Qemu> {
    let guest = guest.start()?;
    guest.ready()?;
    guest.serial().hear_on(RATE.into())?;
    Ok(guest)
}

/// No page of the guest, and no datagram that has come in since its start, is wrong; and it hears on.
fn assert_right(guest: &Qemu) -> Result<()> {
    guest.serial().hear_on(RATE.into())?;
    let errors = guest.sweep()?.errors;
    assert_eq!(errors, 0, "{}", guest.serial().lines().tail());
    Ok(())
}

fn refused(command: &[&str], cure: &str) -> Result<()> {
    let said = Transship::command(command.iter().copied()).run()?.expect_code(1)?.stderr;
    assert!(said.contains(cure), "{cure:?} is not in: {said}");
    Ok(())
}

fn check(guest: &Qemu) -> Result<String> {
    Ok(Transship::command(["check", "--vm", &guest.vm()]).run()?.stdout)
}

#[test]
#[ignore = "long: make test-long"]
fn a_guest_whose_network_is_another_process_is_moved_and_saved() -> Result<()> {
    let echo = Echo::start()?;
    let Some(net0) = Network::Passt.start()? else { return Ok(()) };
    let source = booted(linux(&echo).args(net0.args()))?;
    let there = moved_on(&source, linux(&echo), Network::Passt)?;
    drop((source, net0));
    let checked = check(&there.0)?;
    assert!(
        checked.contains("save --live             yes") && checked.contains("--background       no: "),
        "{checked}"
    );

    let folder = Scratch::new()?;
    let snapshot = folder.join("snapshot").display().to_string();
    let save = ["save", "--vm", &there.0.vm(), "--to", &snapshot];
    refused(&[&save[..], &["--background"]].concat(), "save the guest with --live")?;
    refused(&[&save[..], &["--live", "--tracker", "sync"]].concat(), "leave out --tracker sync")?;
    saved_and_restored(there, linux(&echo), (Network::Passt, "--live"), &snapshot)
}

/// As `move_between`, to a destination with a network of its own.
fn moved_on(source: &Qemu, like_it: QemuBuilder, network: Network) -> Result<(Qemu, NetBackEnd)> {
    let net = network.start()?.expect("there is one already");
    let there = like_it.args(net.args()).incoming().start()?;
    move_between(&source.vm(), &there.vm(), &SLOWLY)?;
    assert_right(&there)?;
    Ok((there, net))
}

/// The guest goes on when it is saved, and then elsewhere from the file.
fn saved_and_restored(
    (guest, net): (Qemu, NetBackEnd),
    like_it: QemuBuilder,
    (network, way): (Network, &str),
    snapshot: &str,
) -> Result<()> {
    Transship::command(["save", way, "--vm", &guest.vm(), "--to", snapshot]).run()?.expect_code(0)?;
    assert_right(&guest)?;
    // Two would get each other's datagrams.
    drop((guest, net));
    let net = network.start()?.expect("there is one already");
    let restored = like_it.args(net.args()).incoming().start()?;
    let restore = ["restore", "--vm", &restored.vm(), "--from", snapshot];
    refused(&[&restore[..], &["--lazy"]].concat(), "without --lazy")?;
    Transship::command(restore).run()?.expect_code(0)?;
    assert_right(&restored)
}

/// By a back end that has no state of its own, and writes from a thread that never rests.
#[test]
#[ignore = "half a minute, and both cores"]
fn a_guest_of_a_back_end_that_polls_arrives_whole() -> Result<()> {
    let echo = Echo::start()?;
    let Some(net0) = Network::Testpmd.start()? else { return Ok(()) };
    let guest = || linux(&echo).backend(Backend::Memfd);
    let source = booted(guest().args(net0.args()))?;
    let there = moved_on(&source, guest(), Network::Testpmd)?;
    drop((source, net0));
    let folder = Scratch::new()?;
    saved_and_restored(there, guest(), (Network::Testpmd, "--paused"), &folder.join("snapshot").display().to_string())
}

/// Debian 13's passt ends when it was asked for its state. So such a guest can go, but not stay.
#[test]
#[ignore = "half a minute"]
fn a_back_end_that_ends_with_its_state_is_moved_and_not_saved() -> Result<()> {
    let echo = Echo::start()?;
    let Some(mut net0) = Network::PasstThatEnds.start()? else { return Ok(()) };
    let source = booted(linux(&echo).args(net0.args()))?;
    let folder = Scratch::new()?;
    let save = ["save", "--live", "--vm", &source.vm(), "--to", &folder.join("snapshot").display().to_string()];
    refused(&save, "the guest would go on without that network")?;
    assert!(check(&source)?.contains("save --live             no: "), "as check says");
    assert_right(&source)?;
    let _there = moved_on(&source, linux(&echo), Network::PasstThatEnds)?;
    assert!(net0.process().ended()?.is_some(), "the test's reason");
    Ok(())
}

/// QEMU 10.1 and newer start passt by themselves. Where such a guest arrives, QEMU 11.1 crashes when it lets it run,
/// also after a migration of its own.
#[test]
fn a_guest_whose_passt_qemu_has_started_is_refused_with_the_cure() -> Result<()> {
    let (Some(newest), Some(passt)) = (other_qemu("11.1")?, Network::Passt.program()?) else { return Ok(()) };
    let netdev = format!("passt,id=net,vhost-user=on,path={}", passt.display());
    let card = "virtio-net-pci,netdev=net,romfile=";
    let guest = Qemu::firmware().memory(64).binary(&newest).args(["-netdev", &netdev, "-device", card]).start()?;
    let said = check(&guest)?;
    assert!(said.contains("type=passt,vhost-user") && said.contains("start passt yourself"), "{said}");
    Ok(())
}
