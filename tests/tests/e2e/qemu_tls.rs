//! A stock QEMU at the other end, over TLS: its own `tls-creds-x509` meet `--tls`. Guests are asked afterwards whether
//! every page is theirs.
use serde_json::{Value, json};
use transship_lab::{
    Authority, Holder, LabError, Qemu, QemuBuilder, Result, Scratch, Transship, lines::Mark, other_qemu,
    transship::TransshipBuilder, wait_until,
};

use crate::hosts::Hosts;
use crate::peer::{PLAIN, Wires, assert_moved, assert_runs_on, multifd};

/// The QEMU that is installed, and a newer one if it is there.
fn versions() -> Result<Vec<Option<String>>> {
    Ok([None].into_iter().chain(other_qemu("11.1")?.map(Some)).collect())
}

fn guest(binary: Option<&str>) -> QemuBuilder {
    match binary {
        Some(binary) => Qemu::multiboot().binary(binary),
        None => Qemu::multiboot(),
    }
}

/// Gives a QEMU the certificates of a host, and uses them. `more`: other parameters.
fn equip(qemu: &Qemu, hosts: &Hosts, host: &str, endpoint: &str, more: Value) -> Result<()> {
    let folder = hosts.folder(host).display().to_string();
    let creds =
        json!({ "qom-type": "tls-creds-x509", "id": "tls0", "dir": folder, "endpoint": endpoint, "verify-peer": true });
    qemu.qmp("object-add", creds)?;
    let mut parameters = json!({ "tls-creds": "tls0" });
    if let (Some(all), Value::Object(more)) = (parameters.as_object_mut(), more) {
        all.extend(more);
    }
    qemu.qmp("migrate-set-parameters", parameters).map(drop)
}

/// A guest that waits over TLS, and where.
fn waiting(hosts: &Hosts, binary: Option<&str>, host: &str, wires: Wires, more: Value) -> Result<(Qemu, String)> {
    let destination = guest(binary).incoming().start()?;
    equip(&destination, hosts, host, "server", more)?;
    let to = wires.wait_at_a_port(&destination)?;
    Ok((destination, to))
}

#[test]
fn a_guest_goes_to_a_stock_qemu_over_tls() -> Result<()> {
    let hosts = Hosts::new()?;
    for binary in versions()? {
        for (wires, name) in [(PLAIN, None), (multifd(1, "none"), Some("ship2.*.org")), (multifd(8, "zstd"), None)] {
            let binary = binary.as_deref();
            let source = guest(binary).start()?;
            source.ready()?;
            let (destination, to) = waiting(&hosts, binary, "there", wires, json!({}))?;
            let left = source.next_count()?.count;
            let mut moving = wires.moving(&source, &to).args(hosts.tls("here"));
            if let Some(name) = name {
                moving = moving.args(["--peer-name", name]);
            }
            let report = moving.run()?.expect_code(0)?.report()?;
            assert_eq!(report["status"], "completed", "{binary:?} {wires:?}: {report}");
            assert_moved(&source, &destination, left)?;
            let said = destination.stderr().tail();
            assert!(!said.to_lowercase().contains("tls"), "{binary:?} {wires:?}: {said}");
        }
    }
    Ok(())
}

/// The moving side, its waiting QEMU's folder and parameters, our flags and our word.
type Refused = (&'static str, &'static str, Value, &'static [&'static str], &'static str);

/// Who is not trusted is told nothing of the guest, which runs on.
#[test]
fn a_qemu_that_is_not_trusted_gets_nothing() -> Result<()> {
    let hosts = Hosts::new()?;
    hosts.host("elsewhere", &Holder::named(["ship3.example.org"]))?;
    Authority::new()?.furnish(&hosts.folder("strange"), &Holder::named(["ship2.example.org", "127.0.0.1"]))?;
    let source = guest(None).start()?;
    source.ready()?;
    let closed = "has closed the connection: it does not trust this certificate";
    let authz = json!({ "tls-authz": "named" });
    let cases: [Refused; 4] = [
        ("here", "elsewhere", json!({}), &[], "(ship3.example.org) is not for 127.0.0.1"),
        ("here", "strange", json!({}), &[], "is signed by none of the authorities"),
        ("strange", "strange", authz.clone(), &[], closed),
        ("here", "there", json!({}), &["--peer-name", "ship9"], "--peer-name allows here: ship9"),
    ];
    for (ours, theirs, more, flags, why) in cases {
        for wires in [PLAIN, multifd(2, "none")] {
            let destination = guest(None).incoming().start()?;
            let named = json!({ "qom-type": "authz-simple", "id": "named", "identity": "CN=ship7.example.org" });
            destination.qmp("object-add", named)?;
            equip(&destination, &hosts, theirs, "server", more.clone())?;
            let to = wires.wait_at_a_port(&destination)?;
            let moving = wires.moving(&source, &to).args(hosts.tls(ours)).args(flags.iter().copied());
            let ended = moving.run()?;
            assert!(ended.stderr.lines().last().unwrap_or_default().contains(why), "{why:?} is not in: {ended}");
            assert_runs_on(&source, &ended, why)?;
        }
    }
    // A QEMU that speaks in clear, and one that wants TLS and hears clear words.
    let destination = guest(None).incoming().start()?;
    let to = PLAIN.wait_at_a_port(&destination)?;
    let ended = PLAIN.moving(&source, &to).args(hosts.tls("here")).run()?;
    assert_runs_on(&source, &ended, "it speaks in clear")?;
    let (_destination, to) = waiting(&hosts, None, "there", PLAIN, json!({}))?;
    let ended = PLAIN.moving(&source, &to).run()?;
    assert_runs_on(&source, &ended, "it wants TLS")
}

fn receiving(hosts: &Hosts, vm: &str, flags: &[&str]) -> TransshipBuilder {
    let receive = ["receive", "--peer", "qemu", "--vm", vm, "--listen", "tcp:127.0.0.1:0", "--json"];
    Transship::command(receive).args(hosts.tls("there")).args(flags.iter().copied())
}

fn migrate(source: &Qemu, wires: Wires, uri: &str) -> Result<()> {
    let mut on = vec!["return-path"];
    if wires.channels > 0 {
        on.push("multifd");
        let parameters = json!({ "multifd-channels": wires.channels, "multifd-compression": wires.compress });
        source.qmp("migrate-set-parameters", parameters)?;
    }
    let on: Vec<Value> = on.iter().map(|name| json!({ "capability": name, "state": true })).collect();
    source.qmp("migrate-set-capabilities", json!({ "capabilities": on }))?;
    source.qmp("migrate", json!({ "uri": uri })).map(drop)
}

/// How its migration has ended.
fn settled(qemu: &Qemu) -> Result<String> {
    let mut status = String::new();
    wait_until("the end of QEMU's migration", || {
        status = qemu.qmp("query-migrate", json!({}))?["status"].as_str().unwrap_or("none").to_owned();
        Ok(["completed", "failed", "cancelled"].contains(&status.as_str()))
    })?;
    Ok(status)
}

#[test]
fn a_stock_qemu_migrates_to_us_over_tls() -> Result<()> {
    let hosts = Hosts::new()?;
    hosts.authority.revoke(&hosts.folder("there"), &[9])?;
    for binary in versions()? {
        for (wires, name) in [(PLAIN, None), (multifd(1, "none"), Some("ship1.*.org")), (multifd(8, "zstd"), None)] {
            let story = format!("{binary:?} {wires:?}");
            let binary = binary.as_deref();
            let source = guest(binary).start()?;
            source.ready()?;
            let destination = guest(binary).incoming().start()?;
            let names = name.map(|name| ["--peer-name", name]);
            let receive =
                receiving(&hosts, &destination.vm(), names.as_ref().map_or(&[], |flags| &flags[..])).start()?;
            let to = receive.listening()?;
            equip(&source, &hosts, "here", "client", json!({}))?;
            let left = source.next_count()?.count;
            migrate(&source, wires, &to)?;
            let report = receive.wait()?.expect_code(0)?.report()?;
            assert_eq!(report["status"], "completed", "{story}: {report}");
            assert_eq!(settled(&source)?, "completed", "{story}");
            assert_moved(&source, &destination, left)?;
        }
    }
    Ok(())
}

/// Its guest runs on, and we wait on for the right one.
#[test]
fn a_source_that_is_not_trusted_is_turned_away() -> Result<()> {
    let hosts = Hosts::new()?;
    Authority::new()?.furnish(&hosts.folder("strange"), &Holder::named(["ship1.example.org"]))?;
    hosts.host("revoked", &Holder::named(["ship1.example.org"]).serial(9))?;
    hosts.host("third", &Holder::named(["ship3.example.org"]).serial(3))?;
    hosts.authority.revoke(&hosts.folder("there"), &[9])?;
    let source = guest(None).start()?;
    source.ready()?;
    let folder = Scratch::new()?;
    let file = folder.join("guest").display().to_string();
    let words = ["receive", "--peer", "qemu", "--to", &file, "--listen", "tcp:127.0.0.1:0", "--json"];
    let receive =
        Transship::command(words).args(hosts.tls("there")).args(["--peer-name", "ship1.example.org"]).start()?;
    let to = receive.listening()?;
    let localhost = to.replace("127.0.0.1", "localhost");
    let cases = [
        ("strange", json!({}), ""),
        ("revoked", json!({}), "(ship1.example.org) was revoked"),
        ("third", json!({}), "--peer-name allows here: ship1.example.org"),
        ("here", json!({ "tls-hostname": "ship9.example.org" }), ""),
        ("", json!({}), "it speaks in clear, without a certificate"),
    ];
    for (host, more, why) in cases {
        if !host.is_empty() {
            equip(&source, &hosts, host, "client", more)?;
        }
        migrate(&source, PLAIN, &to)?;
        assert_eq!(settled(&source)?, "failed", "{host} {why}");
        if !why.is_empty() {
            let said = |line: &str| (line.contains("turned ") && line.contains(why)).then_some(());
            receive.stderr().wait(Mark::START, why, said)?;
        }
        assert_eq!(source.status()?, "running", "{host}");
        source.next_count()?;
        source.qmp("migrate-set-parameters", json!({ "tls-creds": "", "tls-hostname": "" }))?;
        if !host.is_empty() {
            source.qmp("object-del", json!({ "id": "tls0" }))?;
        }
    }
    equip(&source, &hosts, "here", "client", json!({}))?;
    migrate(&source, PLAIN, &localhost)?;
    receive.wait()?.expect_code(0)?;
    assert_eq!(settled(&source)?, "completed");
    Ok(())
}

/// Our TLS is on the link between the relays; the two QEMUs know nothing of it.
#[test]
fn relays_have_certificates_on_their_link() -> Result<()> {
    let hosts = Hosts::new()?;
    hosts.host("third", &Holder::named(["ship3.example.org"]).serial(3))?;
    for wires in [PLAIN, multifd(2, "none")] {
        let source = guest(None).start()?;
        source.ready()?;
        let destination = guest(None).incoming().start()?;
        let to = wires.wait_for_a_guest(&destination)?;
        let far = ["relay", "--listen", "relay:tcp:127.0.0.1:0", "--to", &to, "--json"];
        let far =
            Transship::command(far).args(hosts.tls("there")).args(["--peer-name", "ship1.example.org"]).start()?;
        let (link, uri) = (far.listening()?, format!("unix:{}", destination.folder().join("relay").display()));
        let near =
            |host| Transship::command(["relay", "--listen", &*uri, "--to", &*link, "--json"]).args(hosts.tls(host));
        let stranger = near("third").run()?.expect_code(1)?;
        assert!(stranger.stderr.contains("is for none of the names that are allowed there"), "{stranger}");
        let said = |line: &str| line.contains("--peer-name allows here: ship1").then_some(());
        far.stderr().wait(Mark::START, "that the stranger was turned away", said)?;
        let near = near("here").start()?;
        near.listening()?;
        let left = source.next_count()?.count;
        migrate(&source, wires, &uri)?;
        near.wait()?.expect_code(0)?;
        far.wait()?.expect_code(0)?;
        if settled(&source)? != "completed" {
            return Err(LabError("the source does not know that it is over".into()));
        }
        destination.wait_status("running")?;
        assert_moved(&source, &destination, left)?;
    }
    Ok(())
}
