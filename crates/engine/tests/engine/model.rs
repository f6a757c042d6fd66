//! Whatever a guest writes, zeroes and frees while it moves, the destination holds the same bytes in the end.
#![allow(clippy::unwrap_used)]
use std::{
    io,
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    thread,
    time::Duration,
};

use crate::common::{
    self, Kind, Op, Scripted, Waiting, contents, kind,
    ops::{late, life, op},
    run,
};
use proptest::{collection::vec, prelude::*};
use transship_engine::{
    Compress, Error, Listener, Misfit, MoveOptions, MoveTerms, Progress, Report, Rule, Status, Uri, WhenBusy,
    ZeroPages, guest::GuestError, move_guest, receive_guest,
};
use transship_memory::{Freeing, GuestMemory, PAGE, PageCount};

/// Small enough to be quick, with a last window that is not whole.
const PAGES: [u64; 2] = [300, 1000];

/// Rounds go on until nothing is left, so that the whole script is done before the stop.
fn patient() -> MoveOptions {
    let terms = MoveTerms { downtime: Duration::from_nanos(1), max_rounds: 1000, ..MoveTerms::default() };
    MoveOptions { verify: true, terms, ..MoveOptions::default() }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_destination_holds_what_the_source_held(
        before in vec(op(), 0..300),
        life in life(40),
        late in late(),
        channels in 1..5u8,
        compress in prop_oneof![2 => Just("none"), 1 => Just("zlib:1"), 1 => Just("zstd:1"), 1 => Just("qatzip:1"), 1 => Just("lz4:1"),
            1 => Just("auto")],
        encoders in 1..4u8,
        when_busy in prop_oneof![Just(WhenBusy::Wait), Just(WhenBusy::Raw)],
        zero_pages in prop_oneof![Just(ZeroPages::Channels), Just(ZeroPages::Main), Just(ZeroPages::Off)],
        kinds in (kind(), kind()),
        lends in any::<bool>(),
        freeing in prop_oneof![Just(Freeing::Possible), Just(Freeing::Announced)],
        verify in any::<bool>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut source = Scripted { freeing, ..Scripted::living(&PAGES, life).with_memory(kinds.0) };
        source.script.lock().unwrap().late = late;
        for op in &before {
            common::apply(&source.memory, op, &mut source.script.lock().unwrap().history);
        }
        let mut destination = Waiting::with_memory(&PAGES, kinds.1);
        let compress: Compress = compress.parse().unwrap();
        let terms = MoveTerms { zero_pages, encoders, when_busy, ..patient().terms };
        let lend_to = if lends { common::us() } else { None };
        let options = MoveOptions { channels, compress, verify, lend_to, terms, ..patient() };
        let ended = run(&mut source, &mut destination, &options, folder.path());
        ended.source.unwrap();
        ended.destination.unwrap();
        let raw = ["none", "auto"].iter().any(|text| compress == text.parse().unwrap());
        let may_be_lent = lends && raw;
        prop_assert!(may_be_lent || ended.report.bytes.lent == 0);
        prop_assert!(!may_be_lent || ended.report.bytes.lent == ended.report.pages.normal * PAGE);
        prop_assert!(destination.has_kept(kinds.1));
        let (there, script) = (contents(&destination.memory), source.script.lock().unwrap());
        let wrong = match freeing {
            Freeing::Announced if !verify => script.history.wrong_for_a_balloon(&source.memory, &there),
            _ => script.history.wrong(&source.memory, &there),
        };
        prop_assert_eq!(wrong, vec![]);
        prop_assert!(source.state == destination.state);
        prop_assert_eq!(destination.started, Some(true));
    }
}

#[test]
fn pages_are_counted_by_what_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let fill = |page, byte| Op::Fill { region: 1, page, byte };
    let mut source = Scripted::new(&PAGES, vec![vec![fill(10, 8), fill(11, 0), fill(500, 1)], vec![fill(10, 9)]]);
    for op in [fill(10, 7), fill(11, 7), fill(12, 0)] {
        common::apply(&source.memory, &op, &mut source.script.lock().unwrap().history);
    }
    let ended = run(&mut source, &mut Waiting::new(&PAGES), &patient(), folder.path());
    ended.source.unwrap();
    let pages = ended.report.pages;
    // The first list is done before round one reads: page 10 is sent as 8 and again in round two, as are 500 and the
    // zero of 11.
    assert_eq!((pages.normal, pages.resent), (2 + 2 + 1, 3), "{:?}", ended.report);
    assert_eq!(pages.zero, 2 + 1);
    assert_eq!(pages.hole, 1300 - 4);
    assert_eq!(ended.report.status, Status::Completed);
}

/// The destination finds which are zero, and says so. It puts no zeros where none were written.
#[test]
fn pages_that_are_lent_are_counted_by_what_the_destination_finds() {
    let folder = tempfile::tempdir().unwrap();
    let fill = |page, byte| Op::Fill { region: 1, page, byte };
    let mut source = Scripted::new(&PAGES, vec![vec![fill(10, 8), fill(11, 0), fill(500, 1)], vec![fill(10, 9)]]);
    for op in [fill(10, 7), fill(11, 7), fill(12, 0)] {
        common::apply(&source.memory, &op, &mut source.script.lock().unwrap().history);
    }
    let mut destination = Waiting::new(&PAGES);
    let options = MoveOptions { lend_to: common::us(), ..patient() };
    let ended = run(&mut source, &mut destination, &options, folder.path());
    ended.source.unwrap();
    let Report { pages, bytes, rounds, verified, .. } = ended.report;
    // In round one 10 and 500 hold something, and 11 and 12 are zero. In round two all that was written comes again.
    assert_eq!((pages.normal, pages.zero, pages.hole), (2 + 2 + 1, 2 + 1, 1300 - 4), "{rounds:?}");
    assert_eq!((bytes.lent, verified), (5 * PAGE, Some(true)), "{rounds:?}");
    assert_eq!(rounds.iter().map(|round| round.lent).collect::<Vec<_>>()[..2], [2 * PAGE, 2 * PAGE], "{rounds:?}");
    let there: Vec<_> = destination.memory.regions().iter().map(|region| region.data().unwrap().count()).collect();
    assert!(there[1] < PageCount::new(12), "zeros took memory: {there:?}");
}

/// Passes bytes on, as ssh does with a socket of another host, and no descriptors.
fn pass_bytes_on(here: &Path, there: &Path) {
    let (listener, there) = (UnixListener::bind(here).unwrap(), there.to_owned());
    thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let Ok(far) = UnixStream::connect(&there) else { return };
            let back = (far.try_clone().unwrap(), near.try_clone().unwrap());
            for (mut from, mut to) in [(near, far), back] {
                thread::spawn(move || {
                    let _ = io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Both);
                });
            }
        }
    });
}

#[test]
fn where_descriptors_do_not_come_through_everything_is_sent() {
    for (kind, compress) in [(Kind::Shared, "auto"), (Kind::Shared, "none"), (Kind::Private, "none")] {
        let folder = tempfile::tempdir().unwrap();
        let [here, there] = ["here", "there"].map(|name| folder.path().join(name));
        let listener = Listener::bind(&Uri::Unix(there.clone())).unwrap();
        pass_bytes_on(&here, &there);
        let mut source = Scripted::new(&PAGES, vec![]).with_memory(kind);
        let fill = Op::FillRun { region: 1, first: 0, count: 20, byte: 7 };
        common::apply(&source.memory, &fill, &mut source.script.lock().unwrap().history);
        let mut destination = Waiting::new(&PAGES);
        let options = MoveOptions { lend_to: common::us(), compress: compress.parse().unwrap(), ..patient() };
        let mut report = Report::default();
        thread::scope(|scope| {
            let receiving = scope.spawn(|| {
                receive_guest(&mut destination, listener, None, &Progress::new(), &mut Report::default()).unwrap();
            });
            let to = Uri::Unix(here);
            move_guest(&mut source, None, None, &to, &options, &Progress::new(), &mut report).unwrap();
            receiving.join().unwrap();
        });
        assert_eq!((report.bytes.lent, report.verified), (0, Some(true)), "{kind:?}, {compress}");
        assert!(contents(&source.memory) == contents(&destination.memory));
    }
}

/// A guest of whose memory a part is given back and then looked at, once it was sent.
fn giving_back(memory: GuestMemory) -> Scripted {
    let free = Op::Free { region: 1, first: 5, count: 3 };
    let look = Op::Look { region: 1, first: 5, count: 3 };
    let mut source = Scripted::new(&PAGES, vec![vec![], vec![free, look]]);
    source.memory = memory;
    let fill = Op::FillRun { region: 1, first: 0, count: 20, byte: 7 };
    common::apply(&source.memory, &fill, &mut source.script.lock().unwrap().history);
    source.script.lock().unwrap().meanwhile.push_back(vec![Op::Fill { region: 0, page: 1, byte: 1 }]);
    source
}

/// Nobody reports that it is memory again. Guests may rely on its zeros.
#[test]
fn what_a_balloon_gave_back_and_the_guest_has_read_arrives_as_zeros() {
    let folder = tempfile::tempdir().unwrap();
    let mut source = giving_back(common::memory(&PAGES));
    let mut destination = Waiting::new(&PAGES);
    let ended = run(&mut source, &mut destination, &patient(), folder.path());
    ended.source.unwrap();
    assert_eq!(ended.report.verified, Some(true));
    assert!(contents(&source.memory) == contents(&destination.memory));
}

/// There the kernel can't be asked.
#[test]
fn what_a_balloon_gave_back_is_named_where_memory_is_on_a_disk_and_the_digests_differ() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let on_disk = common::memory_of(&PAGES, |_| tempfile::tempfile_in(folder.path()).unwrap().into());
    let mut source = giving_back(on_disk);
    let ended = run(&mut source, &mut Waiting::new(&PAGES), &patient(), folder.path());
    let error = ended.source.unwrap_err();
    assert_eq!(error.rule(), Some(Rule::Digest), "{error}");
    assert!(error.to_string().contains("a file on a disk"), "it is named: {error}");
    assert_eq!(ended.report.verified, Some(false));
    assert_eq!(source.script.lock().unwrap().resumed, Some(true));
}

/// What it says in time is not there any more. What it says nothing of is as it was, which no guest minds.
#[test]
fn what_a_guest_says_that_it_gave_back_is_given_back_there() {
    for (says, left) in [(true, 40), (false, 100)] {
        let folder = tempfile::tempdir().unwrap();
        let free = Op::Free { region: 1, first: 20, count: 60 };
        let mut source = Scripted::new(&PAGES, vec![vec![], vec![free]]);
        source.freeing = if says { Freeing::Announced } else { Freeing::Never };
        let fill = Op::FillRun { region: 1, first: 0, count: 100, byte: 7 };
        common::apply(&source.memory, &fill, &mut source.script.lock().unwrap().history);
        source.script.lock().unwrap().meanwhile.push_back(vec![Op::Fill { region: 0, page: 1, byte: 1 }]);
        let mut destination = Waiting::new(&PAGES);
        let options = MoveOptions { verify: false, ..patient() };
        let ended = run(&mut source, &mut destination, &options, folder.path());
        ended.source.unwrap();
        assert_eq!(destination.memory.regions()[1].data().unwrap().count(), PageCount::new(left), "{says}");
        let script = source.script.lock().unwrap();
        assert_eq!(script.history.wrong_for_a_balloon(&source.memory, &contents(&destination.memory)), []);
    }
}

/// Looking at a hole would make it memory again.
#[test]
fn what_becomes_a_hole_before_its_turn_is_not_read() {
    let folder = tempfile::tempdir().unwrap();
    // Done in the second round, when the first region was looked at already; one of these pages is used again.
    let free = Op::Free { region: 0, first: 10, count: 50 };
    let fill = |page| Op::Fill { region: 0, page, byte: 9 };
    for (compress, freeing) in [
        ("none", Freeing::Possible),
        ("lz4", Freeing::Possible),
        ("none", Freeing::Announced),
        ("lz4", Freeing::Announced),
    ] {
        let mut source =
            Scripted::new(&PAGES, vec![(0..100).map(fill).collect(), vec![free.clone()], vec![fill(12), fill(80)]]);
        source.freeing = freeing;
        for page in 0..100 {
            common::apply(&source.memory, &fill(page), &mut source.script.lock().unwrap().history);
        }
        let mut destination = Waiting::new(&PAGES);
        // Comparing would look at all of it.
        let options = MoveOptions { compress: compress.parse().unwrap(), verify: false, ..patient() };
        let ended = run(&mut source, &mut destination, &options, folder.path());
        ended.source.unwrap();
        let left = source.memory.regions()[0].data().unwrap().count();
        assert_eq!(left, PageCount::new(50 + 1), "{compress}, {freeing:?}");
        assert!(contents(&source.memory) == contents(&destination.memory), "{compress}, {freeing:?}");
        let report = ended.report;
        assert_eq!((report.rounds[0].hole, report.pages.zero), (1300 - 100, 0), "{report:?}");
        assert_eq!((report.rounds[1].hole, report.pages.normal), (50, 100 + 50 + 2), "{report:?}");
    }
}

/// Pages that shrink are encoded; what the encoders were given and made is told.
#[test]
fn encoded_pages_take_fewer_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let fill = |page| Op::Fill { region: 1, page, byte: 1 + (page % 250) as u8 };
    let mut source = Scripted::new(&PAGES, vec![]);
    for page in 0..1000 {
        common::apply(&source.memory, &fill(page), &mut source.script.lock().unwrap().history);
    }
    for method in ["zlib", "zstd", "qatzip", "lz4"] {
        source.script = Scripted::new(&PAGES, vec![]).script;
        let mut destination = Waiting::new(&PAGES);
        let terms = MoveTerms { encoders: 2, ..patient().terms };
        let options = MoveOptions { compress: method.parse().unwrap(), channels: 2, terms, ..patient() };
        let ended = run(&mut source, &mut destination, &options, folder.path());
        ended.source.unwrap();
        ended.destination.unwrap();
        assert!(contents(&source.memory) == contents(&destination.memory), "{method}");
        let bytes = ended.report.bytes;
        assert_eq!(bytes.encoder_in, 1000 * 4096, "{method}");
        assert!(bytes.encoder_out < bytes.encoder_in / 10, "{method}: {bytes:?}");
        assert!(bytes.wire < bytes.encoder_in, "{method}: {bytes:?}");
        assert!(ended.report.cpu.encoders > 0.0);
    }
}

#[test]
fn a_guest_that_stood_still_stands_still_afterwards() {
    let folder = tempfile::tempdir().unwrap();
    let mut source = Scripted::new(&PAGES, vec![]);
    source.script.lock().unwrap().stopped = true;
    let mut destination = Waiting::new(&PAGES);
    let ended = run(&mut source, &mut destination, &MoveOptions::default(), folder.path());
    ended.source.unwrap();
    assert_eq!(destination.started, Some(false));
    assert_eq!(ended.report.downtime_ms, 0.0);
}

#[test]
fn a_failure_before_the_hand_over_resumes_the_source() {
    let folder = tempfile::tempdir().unwrap();
    let mut source = Scripted { broken_state: true, ..Scripted::new(&PAGES, vec![]) };
    let mut destination = Waiting::new(&PAGES);
    let ended = run(&mut source, &mut destination, &patient(), folder.path());
    assert!(matches!(ended.source.unwrap_err(), Error::Guest(GuestError::Unfit(_))));
    // The destination hears the source's reason.
    assert!(matches!(ended.destination.unwrap_err(), Error::Refused(why) if why.contains("can't be saved")));
    assert_eq!((source.script.lock().unwrap().resumed, destination.started), (Some(true), None));
    assert_eq!(ended.report.status, Status::Failed);

    // And the next attempt works.
    source.broken_state = false;
    source.script.lock().unwrap().stopped = false;
    source.script.lock().unwrap().first_scans = 0;
    let mut destination = Waiting::new(&PAGES);
    run(&mut source, &mut destination, &patient(), folder.path()).source.unwrap();
    assert_eq!(destination.started, Some(true));
}

#[test]
fn a_destination_that_cannot_load_the_state_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let mut source = Scripted::new(&PAGES, vec![]);
    let mut destination = Waiting { refuses_state: true, ..Waiting::new(&PAGES) };
    let ended = run(&mut source, &mut destination, &patient(), folder.path());
    assert!(matches!(ended.source.unwrap_err(), Error::Refused(why) if why.contains("no such device")));
    assert_eq!((source.script.lock().unwrap().resumed, destination.started), (Some(true), None));
}

#[test]
fn guests_that_do_not_fit_are_refused_before_anything_is_touched() {
    let folder = tempfile::tempdir().unwrap();
    for (pages, why) in [(vec![300], "region1"), (vec![300, 1001], "4100096"), (vec![300, 1000, 5], "2 memory regions")]
    {
        let mut source = Scripted::new(&PAGES, vec![]);
        let mut destination = Waiting::new(&pages);
        let before = contents(&destination.memory);
        let ended = run(&mut source, &mut destination, &patient(), folder.path());
        assert_eq!(ended.destination.unwrap_err().misfit(), Some(Misfit::Memory));
        let Error::Refused(heard) = ended.source.unwrap_err() else { panic!("it was not told why") };
        assert!(heard.contains(why), "{heard}");
        assert!(contents(&destination.memory) == before);
        assert_eq!(source.script.lock().unwrap().resumed, None, "never stopped");
    }
}

#[test]
fn a_guest_that_outruns_the_link_gets_a_verdict_and_runs_on() {
    let folder = tempfile::tempdir().unwrap();
    let rewrite = |round| (0..1000).map(|page| Op::Fill { region: 1, page, byte: round }).collect();
    let mut source = Scripted::new(&PAGES, (1..100).map(rewrite).collect());
    let mut destination = Waiting::new(&PAGES);
    let terms = MoveTerms { bandwidth: Some(100 << 20), max_rounds: 3, ..patient().terms };
    let options = MoveOptions { terms, ..patient() };
    let ended = run(&mut source, &mut destination, &options, folder.path());
    let error = ended.source.unwrap_err();
    assert!(matches!(&error, Error::NotConverging(shortfall) if shortfall.rounds == 3), "{error}");
    assert_eq!(ended.report.status, Status::NotConverging);
    assert!(!source.script.lock().unwrap().stopped);
    assert_eq!(destination.started, None);
}
