//! Migrations through two relays, from their first byte to their last.
use std::{
    io::Write,
    net::Shutdown,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
};

use transship_engine::Status;
use transship_wire::qemu::Reply;

use super::{
    qemus::{Random, greeting, is_closed, main_stream, read_exactly, say, shut},
    relays::{Ended, Relays, options},
};

/// A migration with `channels` that each say and hear `channel_bytes`.
fn migrate(compress: &str, channels: u8, pages: usize, channel_bytes: usize, seed: u64) -> (Ended, Ended) {
    let relays = Relays::start(options(compress), u64::MAX);
    let mut random = Random(seed);
    let (main_bytes, _) = main_stream(&mut random, pages, true);
    let said: Vec<_> = (0..channels).map(|n| [greeting(n), random.bytes(channel_bytes)].concat()).collect();
    let heard: Vec<_> = (0..channels).map(|_| random.bytes(channel_bytes / 2 + 1)).collect();
    let main = relays.connect();
    let lines: Vec<_> = said.iter().map(|_| relays.connect()).collect();
    thread::scope(|scope| {
        for ((line, said), heard) in lines.iter().zip(&said).zip(&heard) {
            let random = Random(random.next());
            scope.spawn(move || {
                assert!(say(line, said, random, &AtomicU64::new(0)));
                line.shutdown(Shutdown::Write).unwrap();
            });
            scope.spawn(move || {
                assert!(read_exactly(line, heard.len()) == *heard);
                assert!(is_closed(line));
            });
        }
        scope.spawn(|| assert!(say(&main, &main_bytes, Random(9), &AtomicU64::new(0))));
        let (over_there, first) = relays.accept();
        assert_eq!(first, b"QEVM", "the main connection comes first");
        for _ in 0..channels {
            let (line, first) = relays.accept();
            let (said, heard, random) = (&said, &heard, Random(random.next()));
            scope.spawn(move || {
                let rest = read_exactly(&line, 60);
                let number = usize::from(rest[20]);
                assert!([&first[..], &rest].concat() == said[number][..64]);
                thread::scope(|scope| {
                    scope.spawn(|| {
                        assert!(say(&line, &heard[number], random, &AtomicU64::new(0)));
                        line.shutdown(Shutdown::Write).unwrap();
                    });
                    assert!(read_exactly(&line, said[number].len() - 64) == said[number][64..]);
                    assert!(is_closed(&line), "an end is an end over there, too");
                });
            });
        }
        assert!(read_exactly(&over_there, main_bytes.len() - 4) == main_bytes[4..]);
        (&over_there).write_all(&[Reply::Pong(1).encode(), shut(0)].concat()).unwrap();
        drop(over_there);
        assert_eq!(read_exactly(&main, 16), [Reply::Pong(1).encode(), shut(0)].concat());
        main.shutdown(Shutdown::Both).unwrap();
    });
    relays.end()
}

#[test]
fn what_is_said_arrives_in_order_in_both_directions() {
    for (seed, compress) in ["none", "lz4", "zstd:3", "zlib", "qatzip", "auto"].into_iter().enumerate() {
        let (near, far) = migrate(compress, 3, 1000, 6 << 20, 77 + seed as u64);
        for Ended { result, report } in [&near, &far] {
            assert!(result.is_ok(), "{compress}: {result:?}");
            assert_eq!(report.status, Status::Completed);
        }
        let [near, far] = [near, far].map(|ended| ended.report.relay.unwrap());
        assert_eq!((near.connections, near.from_qemu, near.to_qemu), (4, far.to_qemu, far.from_qemu), "{compress}");
        assert!(near.link_out == far.link_in && near.from_qemu > 20 << 20, "{near:?}");
        if !["none", "auto"].contains(&compress) {
            let method = compress.split(':').next().unwrap();
            let encoded = near.methods.iter().find(|bytes| bytes.method == method).unwrap();
            assert!(encoded.made < encoded.bytes && near.ratio > 1.2, "{near:?}");
        }
    }
}

#[test]
fn one_connection_is_relayed() {
    let (near, far) = migrate("zstd", 0, 300, 0, 5);
    assert!(near.result.is_ok() && far.result.is_ok(), "{:?} {:?}", near.result, far.result);
}

/// A multifd channel waits for the main stream at each barrier, and reads nothing meanwhile.
#[test]
fn a_connection_that_is_not_read_holds_up_no_other_and_fills_no_memory() {
    const SILENT: usize = 96 << 20;
    let relays = Relays::start(options("lz4"), u64::MAX);
    let mut random = Random(4711);
    let (main_bytes, end) = main_stream(&mut random, 8000, true);
    let silent_bytes = [greeting(0), vec![5; SILENT]].concat();
    let lively_bytes = [greeting(1), random.bytes(40 << 20)].concat();
    let (main, silent, lively) = (relays.connect(), relays.connect(), relays.connect());
    let taken = AtomicU64::new(0);
    thread::scope(|scope| {
        scope.spawn(|| say(&silent, &silent_bytes, Random(1), &taken));
        scope.spawn(|| say(&lively, &lively_bytes, Random(2), &AtomicU64::new(0)));
        scope.spawn(|| say(&main, &main_bytes, Random(3), &AtomicU64::new(0)));
        let (main_there, _) = relays.accept();
        let others = [relays.accept().0, relays.accept().0].map(|line| (read_exactly(&line, 60)[20], Arc::new(line)));
        let [(number, first), (_, second)] = &others;
        let (silent_there, lively_there) = if *number == 0 { (first, second) } else { (second, first) };
        let (reading, lively_bytes) = (Arc::clone(lively_there), &lively_bytes);
        let read = scope.spawn(move || assert!(read_exactly(&reading, lively_bytes.len() - 64) == lively_bytes[64..]));
        // All but the end, which is given only when all else was taken.
        assert!(read_exactly(&main_there, end - 4) == main_bytes[4..end]);
        read.join().unwrap();
        // What the two relays and four sockets may hold of it: a window, and what waits for encoders.
        let held = taken.load(SeqCst);
        assert!(held < 40 << 20, "{held} bytes were taken of a connection that nobody reads");
        assert!(held > 12 << 20, "{held}: the window was not used");
        assert!(read_exactly(silent_there, SILENT).iter().all(|&byte| byte == 5));
        assert!(read_exactly(&main_there, main_bytes.len() - end) == main_bytes[end..]);
        (&main_there).write_all(&shut(0)).unwrap();
        assert_eq!(read_exactly(&main, 8), shut(0));
        for line in [&main, &silent, &lively] {
            line.shutdown(Shutdown::Both).unwrap();
        }
        drop(main_there);
        others.iter().for_each(|(_, line)| line.shutdown(Shutdown::Both).unwrap());
    });
    let (near, far) = relays.end();
    assert!(near.result.is_ok() && far.result.is_ok(), "{:?} {:?}", near.result, far.result);
}

/// A QEMU of 7.2 takes the first connection for the main one, and a newer one that accepts a connection does nothing
/// else until it hears something. So whoever says nothing is not let through, and who speaks first waits for the main
/// connection.
#[test]
fn the_main_connection_comes_first_and_nobody_who_is_silent() {
    let relays = Relays::start(options("none"), u64::MAX);
    let (main_bytes, _) = main_stream(&mut Random(3), 10, true);
    let silent = relays.connect();
    let (main, line) = (relays.connect(), relays.connect());
    assert!(say(&line, &greeting(0), Random(1), &AtomicU64::new(0)));
    let mut stranger = relays.connect();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    assert!(is_closed(&stranger), "it is turned away");
    relays.qemu.set_nonblocking(true).unwrap();
    assert!(relays.qemu.accept().is_err(), "nothing is opened before the main stream has begun");
    relays.qemu.set_nonblocking(false).unwrap();
    assert!(say(&main, &main_bytes, Random(2), &AtomicU64::new(0)));
    let (there, first) = relays.accept();
    assert_eq!(first, b"QEVM");
    let (line_there, first) = relays.accept();
    assert_eq!(first, greeting(0)[..4]);
    read_exactly(&there, main_bytes.len() - 4);
    (&there).write_all(&shut(0)).unwrap();
    assert_eq!(read_exactly(&main, 8), shut(0));
    drop((main, line, there, line_there));
    relays.qemu.set_nonblocking(true).unwrap();
    assert!(relays.qemu.accept().is_err(), "whoever is silent is not let through");
    let qemu = relays.qemu.try_clone().unwrap();
    let (near, far) = relays.end();
    assert!(near.result.is_ok() && far.result.is_ok(), "{:?} {:?}", near.result, far.result);
    assert!(qemu.accept().is_err());
    drop(silent);
}
