//! Whoever comes to the destination's port while a move begins, or in the middle of the rounds, neither delays nor ends
//! it.
use std::{fs, io::Write, net::TcpStream};

use serde_json::{Value, json};
use transship_lab::{Accel, LabError, Qemu, Result, Scratch, Transship, transship::TransshipBuilder, wait_until};

/// What they say: nothing, the beginnings of what is expected there, and what is said elsewhere.
const FIRST_WORDS: [&[u8]; 6] = [b"", b"T", b"QEVM", b"\x11\x22", b"GET / HTTP/1.1\r\n\r\n", &[0; 200]];

/// They stay until they are dropped.
fn crowd(uri: &str) -> Result<Vec<TcpStream>> {
    let failed = |e: std::io::Error| LabError(format!("a stranger at {uri}: {e}"));
    let come = |words: &&[u8]| {
        let mut stranger = TcpStream::connect(uri.trim_start_matches("tcp:")).map_err(failed)?;
        stranger.write_all(words).map_err(failed)?;
        Ok(stranger)
    };
    FIRST_WORDS.iter().cycle().take(8 * FIRST_WORDS.len()).map(come).collect()
}

fn pair() -> Result<(Qemu, Qemu)> {
    let guest = || Qemu::multiboot_under(Accel::Tcg);
    let source = guest().booted()?;
    Ok((source, guest().incoming().start()?))
}

fn assert_goes_on(guest: &Qemu) -> Result<()> {
    assert_eq!(guest.status()?, "running");
    assert_eq!((guest.next_count()?.errors, guest.sweep()?.errors), (0, 0));
    Ok(())
}

#[test]
fn strangers_beside_the_channels_of_a_move_change_nothing() -> Result<()> {
    let (source, destination) = pair()?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let (uri, folder) = (receive.listening()?, Scratch::new()?);
    let gate = folder.join("gate");
    let moving = Transship::moving(&source.vm(), &uri).args(["--channels", "2"]);
    let moving =
        moving.env("TRANSSHIP_FAIL_POINT", "source.welcome=stall").env("TRANSSHIP_FAIL_FILE", &gate).start()?;
    wait_until("the welcome", || Ok(gate.exists()))?;
    let _strangers = crowd(&uri)?;
    fs::remove_file(&gate)?;
    moving.wait()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert_goes_on(&destination)
}

fn from_stock(to: &Qemu) -> TransshipBuilder {
    let listen = ["receive", "--peer", "qemu", "--vm", &to.vm(), "--listen", "tcp:127.0.0.1:0", "--json"];
    Transship::command(listen)
}

/// `channels`: of multifd; 0: it is off.
fn strangers_beside_a_stock_qemu(channels: u32) -> Result<()> {
    let (source, destination) = pair()?;
    let receive = from_stock(&destination).start()?;
    let uri = receive.listening()?;
    let set = |parameters| source.qmp("migrate-set-parameters", parameters);
    if channels > 0 {
        let on = json!([{ "capability": "multifd", "state": true }]);
        source.qmp("migrate-set-capabilities", json!({ "capabilities": on }))?;
        set(json!({ "multifd-channels": channels }))?;
    }
    // Less than the guest writes: it would never come to an end.
    set(json!({ "max-bandwidth": 256 << 10 }))?;
    source.qmp("migrate", json!({ "uri": uri }))?;
    let asked = || source.qmp("query-migrate", json!({}));
    wait_until("some of the pages", || Ok(asked()?["ram"]["transferred"].as_u64() > Some(100 << 10)))?;
    assert_eq!(asked()?["status"], "active");
    let _strangers = crowd(&uri)?;
    set(json!({ "max-bandwidth": 0 }))?;
    let ended = |status: &Value| ["completed", "failed", "cancelled"].iter().any(|end| status == end);
    wait_until("the end of it", || Ok(ended(&asked()?["status"])))?;
    let received = receive.wait()?.expect_code(0)?;
    assert_eq!(asked()?["status"], "completed", "{received}");
    assert_goes_on(&destination)
}

#[test]
fn strangers_beside_a_stock_qemu_change_nothing() -> Result<()> {
    strangers_beside_a_stock_qemu(0)
}

#[test]
fn strangers_beside_the_channels_of_a_stock_qemu_change_nothing() -> Result<()> {
    strangers_beside_a_stock_qemu(2)
}
