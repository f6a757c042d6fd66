//! Relays as a service: several migrations of stock QEMUs at once and one after another, at one address.
use crate::stock::wait_completed;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use transship_lab::{
    Authority, Holder, LabError, Qemu, Result, Scratch, Transship, transship::TransshipBuilder, wait_until,
};

/// Two relays that go on, with a token that is good for all; `most`: how many at once.
struct Service {
    near: Transship,
    far: Transship,
    folder: Scratch,
}

impl Service {
    fn start(most: &str) -> Result<Self> {
        let folder = Scratch::new()?;
        let to = format!("unix:{}", folder.join("waiting").display());
        let far = Transship::command(["relay", "--many", "--listen", "relay:tcp:127.0.0.1:0", "--to", &to, "--json"]);
        let far = far.args(["--token-lifetime", "1h"]).start()?;
        let token = far.token()?;
        let (link, uri) = (far.listening()?, format!("unix:{}", folder.join("relay").display()));
        let near = Transship::command(["relay", "--many", most, "--listen", &uri, "--to", &link, "--json"]);
        let near = near.args(["--channels", "2", "--socket-mode", "0600", "--token", &token]).start()?;
        near.listening()?;
        Ok(Self { near, far, folder })
    }

    /// The relay near the source says so.
    fn says(&self, part: &str) -> Result<()> {
        let said = wait_until(part, || Ok(lines(&self.near, part) > 0));
        said.map_err(|error| LabError(format!("{error}: {}", self.near.stderr().tail())))
    }

    fn at(&self, name: &str) -> Value {
        json!({ "uri": format!("unix:{}", self.folder.join(name).display()) })
    }

    /// A source, and a destination that waits where the relay looks for it.
    fn pair(&self, channels: u8) -> Result<Pair> {
        let source = Qemu::multiboot().booted()?;
        let destination = Qemu::multiboot().incoming().start()?;
        for qemu in [&source, &destination] {
            let capabilities = [("return-path", true), ("multifd", channels > 0)];
            let capabilities = capabilities.map(|(name, state)| json!({ "capability": name, "state": state }));
            qemu.qmp("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
            qemu.qmp("migrate-set-parameters", json!({ "multifd-channels": channels.max(1) }))?;
        }
        destination.qmp("migrate-incoming", self.at("waiting"))?;
        Ok(Pair { source, destination })
    }

    /// One begins, and stops right before it would be handed over, until it is told to go on.
    fn begin_and_hold(&self, pair: &Pair) -> Result<()> {
        let capability = json!({ "capability": "pause-before-switchover", "state": true });
        pair.source.qmp("migrate-set-capabilities", json!({ "capabilities": [capability] }))?;
        pair.source.qmp("migrate", self.at("relay"))?;
        pair.wait_source("pre-switchover")
    }
}

/// Lines of its talk with this in them.
fn lines(relay: &Transship, part: &str) -> usize {
    relay.stderr().all().iter().filter(|line| line.contains(part)).count()
}

struct Pair {
    source: Qemu,
    destination: Qemu,
}

impl Pair {
    fn wait_source(&self, status: &str) -> Result<()> {
        wait_until(status, || Ok(self.source.qmp("query-migrate", json!({}))?["status"] == status))
    }

    fn go_on(&self) -> Result<()> {
        self.source.qmp("migrate-continue", json!({ "state": "pre-switchover" })).map(drop)
    }

    fn is_over(&self) -> Result<()> {
        wait_completed(&self.source)?;
        self.destination.wait_status("running")?;
        let (count, sweep) = (self.destination.next_count()?, self.destination.sweep()?);
        assert_eq!((count.errors, sweep.errors), (0, 0), "{count:?} {sweep:?}");
        Ok(())
    }
}

#[test]
fn migrations_go_over_at_once_and_one_after_another() -> Result<()> {
    let service = Service::start("2")?;
    let mode = |path: &Path| path.metadata().map(|about| about.permissions().mode());
    assert_eq!(mode(&service.folder.join("relay"))? & 0o777, 0o600);
    let held = service.pair(2)?;
    service.begin_and_hold(&held)?;
    let quick = service.pair(2)?;
    quick.source.qmp("migrate", service.at("relay"))?;
    quick.is_over()?;
    // Two are under way again: there is no room for a third, whose guest runs on.
    let other = service.pair(0)?;
    service.begin_and_hold(&other)?;
    let third = service.pair(0)?;
    third.source.qmp("migrate", service.at("relay"))?;
    service.says("2 migrations are relayed already")?;
    third.wait_source("failed")?;
    third.source.wait_status("running")?;
    for pair in [&held, &other] {
        pair.go_on()?;
        pair.is_over()?;
    }
    // A QEMU that ends removes the socket at its address, even if that is another one's by now.
    let next = service.pair(0)?;
    next.source.qmp("migrate", service.at("relay"))?;
    next.is_over()?;
    // Their last reports are still to come.
    wait_until("four reports", || Ok(lines(&service.near, ": handed over in") == 4))?;
    for relay in [service.near, service.far] {
        relay.signal(Signal::TERM)?;
        relay.wait()?.expect_code(0)?;
    }
    Ok(())
}

/// Whoever ends the service ends no guest.
#[test]
fn a_service_that_ends_leaves_guests_at_their_sources() -> Result<()> {
    let service = Service::start("4")?;
    let pair = service.pair(0)?;
    service.begin_and_hold(&pair)?;
    service.near.signal(Signal::TERM)?;
    service.near.wait()?.expect_code(0)?;
    // Until it is told to go on, it may not look at its connections.
    let _ = pair.go_on();
    pair.wait_source("failed")?;
    pair.source.wait_status("running")?;
    let (count, sweep) = (pair.source.next_count()?, pair.source.sweep()?);
    assert_eq!((count.errors, sweep.errors), (0, 0), "{count:?} {sweep:?}");
    Ok(())
}

/// A relay as its unit in the package starts it, with the options that the unit suggests.
fn by_unit(name: &str, listen: &str, to: &str, certificates: &Path) -> Result<TransshipBuilder> {
    let path = format!("{}/../packaging/systemd/transship-relay-{name}@.service", env!("CARGO_MANIFEST_DIR"));
    let unit = std::fs::read_to_string(&path).map_err(|e| LabError(format!("{path}: {e}")))?;
    let behind = |start: &str| {
        let line = unit.lines().find_map(|line| line.strip_prefix(start)).map(str::to_owned);
        line.ok_or_else(|| LabError(format!("{path} has no line {start}")))
    };
    let (command, options) = (behind("ExecStart=/usr/bin/transship ")?, behind("#   OPTIONS=")?);
    let options =
        options.replace("/etc/pki/qemu", &certificates.to_string_lossy()).replace("root:libvirt-qemu", "root");
    let words = command.replace("${LISTEN}", listen).replace("${TO}", to).replace("$OPTIONS", &options);
    Ok(Transship::command(words.split_whitespace()))
}

/// Certificates are good for every migration, also after a relay was started anew: nobody has to be told anything.
#[test]
fn the_units_of_the_package_go_on_after_a_restart() -> Result<()> {
    let folder = Scratch::new()?;
    let certificates = folder.join("pki");
    Authority::new()?.furnish(&certificates, &Holder::named(["127.0.0.1"]))?;
    let [waiting, relay] = ["waiting", "relay"].map(|name| format!("unix:{}", folder.join(name).display()));
    let far = by_unit("far", "relay:tcp:127.0.0.1:0", &waiting, &certificates)?.start()?;
    let link = far.listening()?;
    let near = by_unit("near", &relay, &link, &certificates)?.start()?;
    near.listening()?;
    let mut service = Service { near, far, folder };
    for _ in 0..2 {
        for _ in 0..2 {
            let pair = service.pair(2)?;
            pair.source.qmp("migrate", service.at("relay"))?;
            pair.is_over()?;
        }
        service.far.kill9();
        service.far = by_unit("far", &link, &waiting, &certificates)?.start()?;
        service.far.listening()?;
    }
    Ok(())
}
