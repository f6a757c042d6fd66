//! Whole streams, into files.
use transship_engine::{DirectIo, FileIo, FileSink, FileSinkOptions, FileUri, Format, Sink, Status};
use transship_wire::qemu::{Name, Packet, Pages, Record, Reply, Step, StreamReader};

use super::{
    captured::{BLOCKS, Order, Stream, assert_is_the_guest, crc32, into_file, receive},
    guests::end_of_sections,
};
use crate::common::snapshot::Snapshot;

#[test]
fn captured_streams_become_files() {
    for name in ["plain", "none-10.0.2", "zlib-10.0.2", "zstd-10.0.2", "none-7.2.22"] {
        for order in [Order::MainFirst, Order::ChannelsFirst, Order::StaysOpen] {
            for format in [Format::MappedRam, Format::Stream] {
                let (folder, story) = (tempfile::tempdir().unwrap(), format!("{name} {order:?} {format}"));
                let mut stream = if name == "plain" { Stream::plain() } else { Stream::multifd(name) };
                if order == Order::StaysOpen {
                    stream = stream.with_return_path();
                }
                let (ended, file) = into_file(folder.path(), &stream, order, format);
                ended.result.unwrap_or_else(|error| panic!("{story}: {error}"));
                assert_eq!(ended.report.status, Status::Completed);
                if name.contains("7.2") {
                    let snapshot = Snapshot::read(&file, 0);
                    let ram = snapshot.names.iter().position(|name| name == "pc.ram").unwrap();
                    assert_eq!(crc32(&snapshot.memory[ram]), BLOCKS[0].2, "{story}");
                } else {
                    assert_is_the_guest(&file, &story);
                }
                assert!(Snapshot::read(&file, 0).tail.ends_with(b"}"), "{story}");
                let expected = match order {
                    Order::StaysOpen if name.contains("7.2") => vec![Reply::Pong(7), Reply::Shut(0)],
                    Order::StaysOpen => vec![Reply::SwitchoverAck, Reply::Pong(7), Reply::Shut(0)],
                    _ => vec![],
                };
                assert_eq!(ended.answers, expected, "{story}");
            }
        }
    }
}

/// Past the page cache and through it, one after the other and many at a time; the report says which it was.
#[test]
fn a_file_is_the_same_however_it_is_written() {
    for (direct_io, io) in [
        (DirectIo::Auto, FileIo::Auto),
        (DirectIo::Auto, FileIo::Plain),
        (DirectIo::Off, FileIo::Auto),
        (DirectIo::Off, FileIo::Plain),
    ] {
        for stream in [Stream::plain(), Stream::multifd("none-10.0.2"), Stream::multifd("zstd-10.0.2")] {
            let (folder, story) = (tempfile::tempdir().unwrap(), format!("{direct_io:?} {io:?}"));
            let file = folder.path().join("file");
            let options = FileSinkOptions { direct_io, io, ..FileSinkOptions::default() };
            let sink = FileSink::create(&FileUri::path(&file), options).unwrap();
            let ended = receive(Sink::File(sink), folder.path(), &stream, Order::MainFirst, None);
            ended.result.unwrap_or_else(|error| panic!("{story}: {error}"));
            assert_is_the_guest(&file, &story);
            let report = ended.report.file.unwrap();
            let possible = direct_io == DirectIo::Auto;
            assert_eq!(report.direct_io, possible && report.direct_io_refused.is_none(), "{story}: {report:?}");
            assert!(!report.io_uring || (report.direct_io && io == FileIo::Auto), "{story}: {report:?}");
        }
    }
    // The pages of a stream have no places, so nothing is asked of the file system.
    let options = FileSinkOptions { format: Format::Stream, direct_io: DirectIo::On, io: FileIo::Auto };
    FileSink::create(&FileUri::path(tempfile::tempdir().unwrap().path().join("file")), options).unwrap();
}

/// A zero page is zero, whatever was there: by ZERO records, and by packets' entries, which a stock destination may not
/// clear.
#[test]
fn zero_pages_clear_what_came_before() {
    let ram = Name::new("pc.ram").unwrap();
    let mut stream = Stream::multifd("none-10.0.2");
    // Behind the channel's first barrier, that of the list of blocks, comes a round in which all pages are full of
    // something else; then a barrier.
    let barrier = Pages::barrier().encode();
    let mut junk = Vec::new();
    for first in (0..4096u64).step_by(128) {
        let offsets: Vec<u64> = (first..first + 128).map(|page| page * 4096).collect();
        junk.extend(Pages::new(ram.clone(), &offsets, &[], transship_wire::qemu::Method::None, 0).encode());
        junk.resize(junk.len() + 128 * 4096, 0x5a);
    }
    junk.extend(barrier);
    let behind_first = |bytes: &[u8]| {
        let Step::Done { record: Packet::Pages(pages), .. } = Packet::read(&bytes[64..], 0).unwrap() else { panic!() };
        assert!(pages.sync && pages.block().is_none());
        64 + barrier.len()
    };
    let at = behind_first(&stream.channels[0]);
    stream.channels[0].splice(at..at, junk);
    let at = behind_first(&stream.channels[1]);
    stream.channels[1].splice(at..at, barrier);
    // And the main stream's half.
    let mut reader = StreamReader::new();
    let begin = loop {
        let at = reader.position() as usize;
        match reader.next(&stream.main[at..]).unwrap() {
            Step::Done { record: Record::Part { .. }, .. } => break reader.position() as usize,
            Step::Done { .. } => {}
            more => panic!("{more:?}"),
        }
    };
    stream.main.splice(begin..begin, 0x200u64.to_be_bytes());
    for format in [Format::MappedRam, Format::Stream] {
        let folder = tempfile::tempdir().unwrap();
        let (ended, file) = into_file(folder.path(), &stream, Order::MainFirst, format);
        ended.result.unwrap();
        assert_is_the_guest(&file, &format.to_string());
        if format == Format::MappedRam {
            assert!(ended.report.file.unwrap().pages_freed > 4000, "their disk space is given back");
        }
    }
}

/// QEMU 9.2 sends one barrier more on the channels than on its main stream.
#[test]
fn the_last_barrier_may_have_no_other_half() {
    for _ in 0..5 {
        let mut stream = Stream::multifd("zstd-10.0.2").with_return_path();
        stream.channels.iter_mut().for_each(|channel| channel.extend(Pages::barrier().encode()));
        let folder = tempfile::tempdir().unwrap();
        let (ended, file) = into_file(folder.path(), &stream, Order::StaysOpen, Format::MappedRam);
        ended.result.unwrap();
        assert_is_the_guest(&file, "9.2");
    }
}

/// `-machine suppress-vmdesc=on`, and a connection that stays open: nothing says where the stream ends but what is in
/// it.
#[test]
fn a_stream_without_description_ends_too() {
    let mut stream = Stream::plain().with_return_path();
    let end = end_of_sections(&stream.main);
    stream.main.truncate(end + 1);
    let folder = tempfile::tempdir().unwrap();
    let (ended, file) = into_file(folder.path(), &stream, Order::StaysOpen, Format::MappedRam);
    ended.result.unwrap();
    assert_is_the_guest(&file, "without description");
    assert_eq!(ended.answers.last(), Some(&Reply::Shut(0)));
}
