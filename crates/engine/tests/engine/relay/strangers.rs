//! Whoever comes to the link and says nothing, or too little, neither delays nor ends the session of two relays.
use std::{
    io::Write,
    sync::{Arc, atomic::AtomicU64, mpsc},
    thread,
    time::Duration,
};

use transship_engine::{Error, Listener, Progress, Report, Uri, relay_to_qemu};
use transship_wire::{
    Preamble, Role, SessionId,
    relay::{Greeting, Message},
};

use super::{
    qemus::{Random, main_stream, read_exactly, say, shut},
    relays::{Ended, Relays, options},
};
use crate::crowd::Words;

/// All that a relay says first, but the last byte of it.
fn almost_all() -> Vec<u8> {
    let greeting = Greeting(Preamble { session: SessionId([3; 16]), role: Role::Control }).encode();
    let mut bytes = [&greeting[..], &Message::Hello { channels: 1 }.encode()].concat();
    bytes.pop();
    bytes
}

fn relay_among(first_words: Vec<Words>) {
    let relays = Relays::start_among(options("none"), first_words);
    let (main_bytes, _) = main_stream(&mut Random(3), 10, true);
    let main = relays.connect();
    assert!(say(&main, &main_bytes, Random(2), &AtomicU64::new(0)));
    relays.qemu.set_nonblocking(true).unwrap();
    let there = loop {
        match relays.qemu.accept() {
            Ok((there, _)) => break there,
            Err(_) if relays.near.is_finished() => panic!("{:?}", relays.near.join().unwrap().result),
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    };
    there.set_nonblocking(false).unwrap();
    assert!(read_exactly(&there, main_bytes.len()) == main_bytes);
    (&there).write_all(&shut(0)).unwrap();
    assert_eq!(read_exactly(&main, 8), shut(0));
    drop((main, there));
    let (near, far) = relays.end();
    for Ended { result, .. } in [near, far] {
        result.unwrap();
    }
}

#[test]
fn silent_strangers_do_not_end_a_session() {
    relay_among(vec![Words::AtOnce(vec![])]);
}

#[test]
fn strangers_who_greet_do_not_end_a_session() {
    relay_among(vec![Words::AtOnce(almost_all()), Words::Dribbled(almost_all())]);
}

/// Somebody who has greeted, and does not go on, keeps nobody from hearing the user.
#[test]
fn a_relay_is_cancelled_while_somebody_greets() {
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let uri = listener.uri().clone();
    let folder = tempfile::tempdir().unwrap();
    let qemu = Uri::Unix(folder.path().join("qemu"));
    let progress = Progress::new();
    let watched = Arc::clone(&progress);
    let (ended, end) = mpsc::channel();
    thread::spawn(move || ended.send(relay_to_qemu(listener, &qemu, &watched, &mut Report::default())));
    let Uri::Tcp { port, .. } = uri else { panic!("{uri}") };
    let greeter = || {
        let mut greeter = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        greeter.write_all(&almost_all()).unwrap();
        greeter
    };
    // Several: each that is waited for by itself would take half a minute.
    let greeters: Vec<_> = (0..8).map(|_| greeter()).collect();
    thread::sleep(Duration::from_millis(200)); // it may have met them by then, or not
    progress.cancel();
    let result = end.recv_timeout(Duration::from_secs(20)).expect("it is heard before any greeter's time is over");
    assert!(matches!(result, Err(Error::Cancelled(_))), "{result:?}");
    drop(greeters);
}
