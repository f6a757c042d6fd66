//! Guests that get their pages although the commands that bring them are killed.
use transship_lab::{Qemu, Result, Scratch, Transship, lines::Mark};

use crate::{
    hosts::Hosts,
    peer::assert_moved,
    post_copy::{assert_alone, busy, receiving, running, slowly},
    restoring::lazy::stand_ins,
};

/// By what connections are encrypted.
#[derive(Clone, Copy)]
enum Keys {
    None,
    Token,
    Certificates,
}

/// Commands are killed when the guest runs already: a second process goes on, with the keys of the first, and the
/// other command ends as ever. Returns the guest where it is then, and what it had written.
fn killed_on_the_way(
    (source, left): (&Qemu, u64),
    (receiver_dies, mover_dies): (bool, bool),
    keys: Keys,
) -> Result<(Qemu, u64)> {
    let destination = busy(16).incoming().start()?;
    let (folder, hosts) = (Scratch::new()?, Hosts::new()?);
    let there = format!("unix:{}", folder.join("there").display());
    let mut receive = receiving(&destination.vm(), &there);
    receive = match keys {
        Keys::None => receive,
        Keys::Token => receive.args(["--token-lifetime", "10m"]),
        Keys::Certificates => receive.args(hosts.tls("there")).args(["--peer-name", "*.example.org"]),
    };
    let mut receive = receive.start()?;
    receive.listening()?;
    let moving = Transship::moving(&source.vm(), &there).args(slowly(&[]));
    let mut moving = match keys {
        Keys::None => moving,
        Keys::Token => moving.args(["--token".to_owned(), receive.token()?]),
        Keys::Certificates => moving.args(hosts.tls("here")).args(["--peer-name", "ship2.example.org"]),
    }
    .start()?;
    destination.wait_status("running")?;
    assert_eq!((stand_ins(source)?.len(), stand_ins(&destination)?.len()), (1, 1));
    let said = (moving.stderr().clone(), receive.stderr().clone());
    if receiver_dies {
        receive.kill9();
    }
    if mover_dies {
        moving.kill9();
        said.0.wait(Mark::START, "its end", |line| line.contains("has all pages").then_some(()))?;
    } else {
        moving.wait()?.expect_code(0)?;
    }
    if receiver_dies {
        said.1.wait(Mark::START, "its end", |line| line.contains("pages are here").then_some(()))?;
    } else {
        receive.wait()?.expect_code(0)?;
    }
    assert_moved(source, &destination, left)?;
    assert_alone(&destination)?;
    assert_alone(source)?;
    let left = destination.next_count()?.count;
    Ok((destination, left))
}

#[test]
fn a_guest_gets_its_pages_though_both_commands_are_killed() -> Result<()> {
    let (source, left) = running(busy(16))?;
    killed_on_the_way((&source, left), (true, true), Keys::Certificates).map(drop)
}

#[test]
#[ignore = "long: make test-long"]
fn a_guest_gets_its_pages_whichever_command_is_killed() -> Result<()> {
    let (mut source, mut left) = running(busy(16))?;
    for (dies, keys) in [
        ((true, false), Keys::None),
        ((false, true), Keys::None),
        ((true, true), Keys::None),
        ((true, false), Keys::Token),
        ((true, true), Keys::Token),
        ((true, false), Keys::Certificates),
        ((false, true), Keys::Certificates),
    ] {
        (source, left) = killed_on_the_way((&source, left), dies, keys)?;
    }
    Ok(())
}
