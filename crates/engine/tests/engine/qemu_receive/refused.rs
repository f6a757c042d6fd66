//! What is refused, by whom nobody is kept from coming, and who gives up.
use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    sync::Arc,
    thread,
    time::Duration,
};

use transship_engine::{
    Actor, Error, FileSink, FileSinkOptions, FileUri, Format, Listener, Progress, Report, Rule, Sink, Status, Uri,
    receive_from_qemu,
};
use transship_wire::qemu::{Name, Pages, Reply};

use super::captured::{Order, Stream, assert_is_the_guest, into_file, receive, replies, sample, send};

/// How it fails, into a file that then is not there.
pub(super) fn refusal(stream: &Stream, order: Order, channels: Option<u8>) -> Error {
    let folder = tempfile::tempdir().unwrap();
    let sink = FileSink::create(&FileUri::path(folder.path().join("file")), FileSinkOptions::default()).unwrap();
    let ended = receive(Sink::File(sink), folder.path(), stream, order, channels);
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(!ended.answers.contains(&Reply::Shut(0)));
    let error = ended.result.expect_err("it can't be received");
    assert_eq!(error.actor(), Actor::Peer, "{error}");
    error
}

#[test]
fn what_can_not_be_received_is_refused_with_its_reason() {
    let x_ignore_shared = Stream { main: sample("x-ignore-shared-10.0.2"), channels: vec![] };
    let mapped_ram = Stream { main: sample("mapped-ram-10.0.2"), channels: vec![] };
    let postcopy = Stream { main: sample("postcopy-10.0.2-forward"), channels: vec![] };
    let without_channels = Stream { channels: vec![], ..Stream::multifd("none-10.0.2") };
    let mut twice = Stream::multifd("none-10.0.2");
    twice.channels[1] = twice.channels[0].clone();
    for (stream, channels, rule, why) in [
        (&x_ignore_shared, None, Rule::Abilities, "x-ignore-shared"),
        (&mapped_ram, None, Rule::Abilities, "mapped-ram"),
        (&postcopy, None, Rule::Abilities, "postcopy"),
        (&without_channels, None, Rule::Channels, "none of its channels has connected"),
        (&Stream::multifd("none-10.0.2"), Some(1), Rule::Channels, "--channels says that there are 1"),
        (&twice, None, Rule::Channels, "opened channel 0 twice"),
    ] {
        let error = refusal(stream, Order::MainFirst, channels);
        assert_eq!(error.rule(), Some(rule), "{why}: {error}");
        // There the user turns a capability off, which has to be named, or starts it with as many channels.
        assert!(error.to_string().contains(why), "{why}: {error}");
    }
}

#[test]
fn a_source_that_dies_leaves_no_file() {
    let whole = Stream::plain().with_return_path();
    // With less it is a stranger, who is turned away.
    for cut in [4, 8, 40, 100, whole.main.len() / 2, whole.main.len() - 200] {
        let stream = Stream { main: whole.main[..cut].to_vec(), ..whole.clone() };
        let error = refusal(&stream, Order::MainFirst, None);
        let is_cut = matches!(error, Error::Wire { source: transship_wire::Error::Truncated { .. }, .. });
        assert!(is_cut || error.rule() == Some(Rule::Stays), "{error:?}");
    }
    for method in ["none-10.0.2", "zstd-10.0.2", "none-7.2.22"] {
        let whole = Stream::multifd(method).with_return_path();
        let mut stream = whole.clone();
        let length = stream.channels[0].len();
        stream.channels[0].truncate(length / 2);
        let error = refusal(&stream, Order::MainFirst, None);
        assert_eq!(error.rule(), Some(Rule::Stays), "{error}");
    }
}

/// A source without a return path that had nothing left to send may think that all is well, so the message has to say
/// what to do.
#[test]
fn who_can_not_be_told_of_a_late_failure_is_named() {
    let whole = Stream::plain();
    for (cut, late) in [(whole.main.len() - 200, true), (whole.main.len() / 2, false)] {
        let stream = Stream { main: whole.main[..cut].to_vec(), channels: vec![] };
        let folder = tempfile::tempdir().unwrap();
        let (ended, file) = into_file(folder.path(), &stream, Order::MainFirst, Format::MappedRam);
        let error = ended.result.unwrap_err();
        assert_eq!(matches!(error, Error::Unknown(_)), late, "{error}");
        assert_eq!(error.to_string().contains("`cont` there"), late, "{error}");
        assert!(!file.exists());
    }
}

/// Pages behind the last barrier may have been overtaken by the end of the stream.
#[test]
fn pages_behind_the_last_barrier_are_missed() {
    let mut stream = Stream::multifd("none-10.0.2").with_return_path();
    let ram = Name::new("pc.ram").unwrap();
    for channel in &mut stream.channels {
        // Instead of the last barrier.
        let end = channel.len() - Pages::barrier().encode().len();
        channel.truncate(end);
        channel.extend(Pages::new(ram.clone(), &[], &[4096], transship_wire::qemu::Method::None, 0).encode());
    }
    let error = refusal(&stream, Order::MainFirst, None);
    assert_eq!(error.rule(), Some(Rule::Stays), "{error}");
}

/// Somebody who is silent or speaks something else keeps nobody from coming.
#[test]
fn strangers_are_turned_away() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = Listener::bind(&Uri::Unix(path.clone())).unwrap();
    let sink = FileSink::create(&FileUri::path(folder.path().join("file")), FileSinkOptions::default()).unwrap();
    let silent = UnixStream::connect(&path).unwrap();
    let mut stranger = UnixStream::connect(&path).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let sender = thread::spawn(move || send(&path, &Stream::multifd("zlib-10.0.2"), Order::MainFirst));
    receive_from_qemu(Sink::File(sink), &listener, Some(2), &Progress::new(), &mut Report::default()).unwrap();
    sender.join().unwrap();
    assert_is_the_guest(&folder.path().join("file"), "with strangers about");
    drop(silent);
}

/// A source that gives up before its stream begins, and tries again.
#[test]
fn channels_of_an_attempt_that_was_given_up_are_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = Listener::bind(&Uri::Unix(path.clone())).unwrap();
    let sink = FileSink::create(&FileUri::path(folder.path().join("file")), FileSinkOptions::default()).unwrap();
    let stream = Stream::multifd("none-10.0.2");
    let [main, channel] = [(); 2].map(|()| UnixStream::connect(&path).unwrap());
    (&channel).write_all(&stream.channels[0][..64]).unwrap();
    drop((main, channel));
    let sender = thread::spawn(move || send(&path, &stream, Order::MainFirst));
    receive_from_qemu(Sink::File(sink), &listener, None, &Progress::new(), &mut Report::default()).unwrap();
    sender.join().unwrap();
    assert_is_the_guest(&folder.path().join("file"), "at the second attempt");
}

#[test]
fn a_reception_can_be_cancelled_at_any_time() {
    let whole = Stream::plain().with_return_path().main;
    for sent in [None, Some(0), Some(6), Some(2000), Some(whole.len() / 2)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&Uri::Unix(path.clone())).unwrap();
        let sink = FileSink::create(&FileUri::path(folder.path().join("file")), FileSinkOptions::default()).unwrap();
        let mut source = sent.map(|sent| {
            let mut source = UnixStream::connect(&path).unwrap();
            source.write_all(&whole[..sent]).unwrap();
            source
        });
        let progress = Progress::new();
        let later = Arc::clone(&progress);
        let cancel = thread::spawn(move || {
            thread::sleep(Duration::from_millis(200));
            later.cancel();
        });
        let mut report = Report::default();
        let error = receive_from_qemu(Sink::File(sink), &listener, None, &progress, &mut report).unwrap_err();
        cancel.join().unwrap();
        assert!(matches!(error, Error::Cancelled(_)), "{sent:?}: {error}");
        assert_eq!(report.status, Status::Cancelled);
        if let Some(source) = &mut source {
            let mut answers = Vec::new();
            source.read_to_end(&mut answers).unwrap();
            if sent > Some(1000) {
                assert_eq!(replies(&answers).last(), Some(&Reply::Shut(1)));
            }
        }
        drop((source, listener));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
