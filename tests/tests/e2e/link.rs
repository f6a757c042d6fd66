//! A slow link carries what it is told to, and nothing when it is cut.
#![allow(clippy::unwrap_used)]
use std::process::Command;
use transship_lab::{PATIENCE, Process, SlowLink};

#[test]
fn the_two_ends_of_a_link_reach_each_other_and_only_each_other() {
    let link = SlowLink::new(100).unwrap();
    let listen = on(&link.destination(), "socat -u TCP-LISTEN:7000,bind=192.0.2.2 STDOUT");
    let mut listener = Process::start(listen).unwrap();
    // `retry`: the listener may need a moment. Without a child of socat's: if one ends while socat connects, it gives
    // up that connection, which may be there by then and is the only one that the listener takes.
    let say = on(&link.source(), "socat -u OPEN:/proc/sys/kernel/hostname TCP:192.0.2.2:7000,retry=1000,interval=0.05");
    let mut say = Process::start(say).unwrap();
    let said = say.wait(PATIENCE).unwrap();
    assert!(said.success(), "{said}: {}; the listener: {}", say.stderr().tail(), listener.stderr().tail());
    assert!(listener.wait(PATIENCE).unwrap().success());
    assert_eq!(listener.stdout().to_the_end().unwrap().len(), 1);

    link.cut().unwrap();
    let outside = on(&link.source(), "socat -u OPEN:/proc/sys/kernel/hostname TCP:198.51.100.1:7000");
    assert!(!Process::start(outside).unwrap().wait(PATIENCE).unwrap().success());
}

fn on(prefix: &[String], command: &str) -> Command {
    let mut words = prefix.iter().map(String::as_str).chain(command.split(' '));
    let mut command = Command::new(words.next().unwrap());
    command.args(words);
    command
}
