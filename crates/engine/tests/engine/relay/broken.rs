//! Links, QEMUs and relays that end on the way: the guest is never in two places.
use std::{
    io::{Read, Write},
    net::Shutdown,
    sync::{atomic::AtomicU64, mpsc},
    thread,
    time::Duration,
};

use transship_engine::{Error, Outcome, Rule, Status};

use super::{
    qemus::{PATIENCE, Random, greeting, is_closed, main_stream, read_exactly, say, shut},
    relays::{Ended, Relays, options},
};

/// Says all of a source, with one channel, and gives what the waiting QEMU got of the main stream until all was closed
/// there. As with a QEMU, the channel has said all before the memory ends on the main connection.
fn what_arrives(relays: &Relays, main_bytes: &[u8], channel_bytes: &[u8]) -> Vec<u8> {
    let (main, line) = (relays.connect(), relays.connect());
    let mut got = Vec::new();
    let (has_said, is_said) = mpsc::channel();
    let (line, main) = (&line, &main);
    thread::scope(|scope| {
        scope.spawn(move || {
            say(line, channel_bytes, Random(1), &AtomicU64::new(0));
            has_said.send(()).unwrap();
            assert!(is_closed(line), "the channel is closed at the source");
        });
        scope.spawn(move || {
            let (memory, rest) = main_bytes.split_at(main_bytes.len() / 2);
            say(main, memory, Random(2), &AtomicU64::new(0));
            is_said.recv().unwrap();
            say(main, rest, Random(2), &AtomicU64::new(0));
            assert!(is_closed(main), "so is the main connection");
        });
        relays.qemu.set_nonblocking(true).unwrap();
        let mut readers = Vec::new();
        while !relays.near.is_finished() || !relays.far.is_finished() {
            let Ok((mut there, _)) = relays.qemu.accept() else {
                thread::sleep(Duration::from_millis(5));
                continue;
            };
            there.set_nonblocking(false).unwrap();
            readers.push(scope.spawn(move || {
                let (mut bytes, mut room) = (Vec::new(), [0; 64 << 10]);
                while let Ok(count @ 1..) = there.read(&mut room) {
                    bytes.extend_from_slice(&room[..count]);
                }
                bytes
            }));
        }
        for bytes in readers.into_iter().map(|reader| reader.join().unwrap()) {
            if bytes.starts_with(b"QEVM") {
                got = bytes;
            }
        }
    });
    got
}

/// Both relays say so.
fn assert_source_runs_on(relays: Relays) {
    let (near, far) = relays.end();
    for Ended { result, .. } in [near, far] {
        assert_eq!(result.unwrap_err().outcome(), Outcome::NothingLost);
    }
}

/// Wherever the link breaks before the guest is handed over: both QEMUs lose their connections, and the one that waits
/// can't run the guest.
#[test]
fn a_link_that_is_cut_leaves_the_guest_at_its_source() {
    let mut random = Random(31);
    let (main_bytes, end) = main_stream(&mut random, 500, true);
    let channel_bytes = [greeting(0), random.bytes(1 << 20)].concat();
    let all = (main_bytes.len() + channel_bytes.len()) as u64;
    for cut in (0..24).map(|_| 200 + random.below(all - 20_000)) {
        let relays = Relays::start(options("none"), cut);
        let got = what_arrives(&relays, &main_bytes, &channel_bytes);
        assert!(got.len() <= end && got == main_bytes[..got.len()], "cut after {cut}: {} of {end}", got.len());
        let (near, far) = relays.end();
        for Ended { result, .. } in [near, far] {
            let error = result.unwrap_err();
            assert_eq!(error.outcome(), Outcome::NothingLost, "cut after {cut}: {error}");
            assert_eq!(error.rule(), Some(Rule::Stays), "cut after {cut}: {error}");
        }
    }
}

/// It may run at the destination or not: the source is kept waiting until a person has checked.
#[test]
fn a_link_that_is_cut_at_the_hand_over_keeps_the_source_waiting() {
    for source_ends in [false, true] {
        let relays = Relays::start(options("none"), u64::MAX);
        let (main_bytes, _) = main_stream(&mut Random(3), 10, true);
        let main = relays.connect();
        assert!(say(&main, &main_bytes, Random(2), &AtomicU64::new(0)));
        let (there, _) = relays.accept();
        read_exactly(&there, main_bytes.len() - 4);
        relays.cable.cut_now();
        main.set_read_timeout(Some(Duration::from_millis(1500))).unwrap();
        assert!(!is_closed(&main), "a source that loses its connection lets the guest run again");
        // The destination may report what became of it.
        (&there).write_all(&shut(0)).unwrap();
        there.shutdown(Shutdown::Both).unwrap();
        match source_ends {
            true => drop(main),
            false => {
                relays.near_progress.cancel();
                main.set_read_timeout(Some(PATIENCE)).unwrap();
                assert!(is_closed(&main));
            }
        }
        let (near, far) = relays.end();
        for (Ended { result, .. }, part) in [(near, "at most one of the two"), (far, "has loaded all of the guest")] {
            let error = result.unwrap_err();
            assert!(error.outcome() == Outcome::NeedsPerson && error.to_string().contains(part), "{error}");
        }
    }
}

/// Once the source has been told, nothing that breaks matters.
#[test]
fn a_link_that_is_cut_afterwards_does_no_harm() {
    let relays = Relays::start(options("none"), u64::MAX);
    let (main_bytes, _) = main_stream(&mut Random(3), 10, true);
    let main = relays.connect();
    assert!(say(&main, &main_bytes, Random(2), &AtomicU64::new(0)));
    let (there, _) = relays.accept();
    read_exactly(&there, main_bytes.len() - 4);
    (&there).write_all(&shut(0)).unwrap();
    assert_eq!(read_exactly(&main, 8), shut(0));
    relays.cable.cut_now();
    drop(main);
    drop(there);
    let (near, _) = relays.end();
    near.result.unwrap();
}

/// The waiting QEMU dies, or says that it has failed: the source hears of it, and its guest runs on.
#[test]
fn a_waiting_qemu_that_fails_ends_it_for_the_source() {
    for says in [true, false] {
        let relays = Relays::start(options("zstd"), u64::MAX);
        let (main_bytes, _) = main_stream(&mut Random(3), 20_000, true);
        let main = relays.connect();
        thread::scope(|scope| {
            scope.spawn(|| say(&main, &main_bytes, Random(2), &AtomicU64::new(0)));
            let (there, _) = relays.accept();
            read_exactly(&there, 1 << 20);
            if says {
                (&there).write_all(&shut(1)).unwrap();
            }
            drop(there);
            let mut answer = Vec::new();
            let _ = (&main).read_to_end(&mut answer);
            assert!(answer.is_empty() || says && answer == shut(1), "{answer:?}");
        });
        drop(main);
        assert_source_runs_on(relays);
    }
}

/// The destination notices a source that gives up as it would without relays.
#[test]
fn a_source_that_gives_up_ends_it_over_there() {
    let relays = Relays::start(options("zstd"), u64::MAX);
    let (main_bytes, end) = main_stream(&mut Random(3), 100, true);
    let main = relays.connect();
    assert!(say(&main, &main_bytes[..end / 2], Random(2), &AtomicU64::new(0)));
    let (there, _) = relays.accept();
    drop(main);
    let mut got = Vec::new();
    (&there).read_to_end(&mut got).unwrap();
    assert_eq!(got, main_bytes[4..end / 2]);
    drop(there);
    assert_source_runs_on(relays);
}

/// The user cancels: everything is closed, and nothing runs at the destination.
#[test]
fn a_cancelled_relay_leaves_the_guest_at_its_source() {
    let relays = Relays::start(options("none"), u64::MAX);
    let (main_bytes, end) = main_stream(&mut Random(3), 100, true);
    let main = relays.connect();
    assert!(say(&main, &main_bytes[..end / 2], Random(2), &AtomicU64::new(0)));
    let (there, _) = relays.accept();
    relays.near_progress.cancel();
    assert!(is_closed(&main) && is_closed(&there));
    let (near, far) = relays.end();
    assert!(matches!(near.result, Err(Error::Cancelled(_))), "{:?}", near.result);
    assert_eq!(near.report.status, Status::Cancelled);
    assert!(matches!(far.result, Err(Error::Refused(why)) if why.contains("cancelled")), "the other relay says so");
}
