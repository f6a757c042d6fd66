//! A source that wants more memory of us than the guest that waits has, or sends what can't be.
use transship_engine::{Error, Format, Misfit, Rule, Sink};
use transship_wire::qemu::{Block, Command, Configuration, Name, Reply, StreamWriter};

use super::{
    captured::{BLOCKS, Order, Stream, into_file, receive},
    guests::Waiting,
    refused::refusal as refusal_of,
};
use crate::common::errors::cause;

fn begin() -> StreamWriter {
    let mut writer = StreamWriter::new(0, 2);
    writer.header().configuration(&Configuration::new(Name::new("pc-i440fx-10.0").unwrap()));
    writer
}

/// Lists of one block each, behind the first one, which has the guest's memory.
fn lists(later: &[(&str, u64)]) -> Stream {
    let mut writer = begin();
    writer.command(&Command::OpenReturnPath);
    for (name, used_bytes) in [(BLOCKS[0].0, BLOCKS[0].1)].iter().chain(later) {
        let block = Block { name: Name::new(name).unwrap(), used_bytes: *used_bytes, gpa: None, mapped: None };
        writer.ram_start(*used_bytes).block(&block).end_of_section();
    }
    Stream { main: writer.take_bytes(), channels: Vec::new() }
}

fn refusal(knows_devices: bool, later: &[(&str, u64)]) -> Error {
    let (folder, mut guest) = (tempfile::tempdir().unwrap(), Waiting::new());
    guest.knows_devices = knows_devices;
    let ended = receive(Sink::Guest(&mut guest), folder.path(), &lists(later), Order::MainFirst, None);
    assert!(!ended.answers.contains(&Reply::Shut(0)));
    ended.result.unwrap_err()
}

/// What is kept for devices is what those of the guest that waits have, in whichever list it comes.
#[test]
fn blocks_of_later_lists_are_those_of_the_guest_that_waits() {
    let error = refusal(true, &[("pc.bios", 65_536), ("vga.vram", 4096)]);
    assert_eq!(error.misfit(), Some(Misfit::Memory), "{error}");
    let error = refusal(true, &[("pc.rom", 131_072), ("pc.bios", 1 << 30)]);
    assert_eq!(error.misfit(), Some(Misfit::Memory), "{error}");
}

/// Where it is not known what these are there is a bound for all of them together.
#[test]
fn all_lists_together_are_bounded() {
    let names: Vec<_> = (0..5).map(|number| format!("memory{number}")).collect();
    let later: Vec<_> = names.iter().map(|name| (name.as_str(), 5 << 30)).collect();
    let error = refusal(false, &later);
    assert_eq!(error.misfit(), Some(Misfit::Memory), "{error}");
}

/// A list of one small block, and what follows it.
fn small(then: impl FnOnce(&mut StreamWriter)) -> Stream {
    let mut writer = begin();
    let block = Block { name: Name::new("pc.ram").unwrap(), used_bytes: 1 << 20, gpa: None, mapped: None };
    writer.ram_start(1 << 20).block(&block).end_of_section();
    then(&mut writer);
    Stream { main: writer.take_bytes(), channels: Vec::new() }
}

#[test]
fn a_page_that_can_not_be_inflated_is_refused() {
    let stream = small(|writer| {
        // The number of the page with the flag of compressed ones, the block, and two bytes that are no zlib.
        writer.part().raw(b"\0\0\0\0\0\0\x11\0\x06pc.ram\0\0\0\x02xy").end_of_section();
    });
    let error = refusal_of(&stream, Order::MainFirst, None);
    assert_eq!(error.rule(), Some(Rule::Encoding), "{error}");
}

/// All pages have come by then, and the source can't be told.
#[test]
fn what_follows_the_memory_is_all_there_and_nothing_else() {
    let mut longer = Stream::plain();
    longer.main.extend(b"more");
    let undescribed = small(|writer| {
        writer.end().end_of_section().full(3, &Name::new("timer").unwrap(), 0, 2, &[0; 24]).eof();
    });
    for (stream, rule) in [(longer, Rule::Turn), (undescribed, Rule::Count)] {
        let folder = tempfile::tempdir().unwrap();
        let (ended, file) = into_file(folder.path(), &stream, Order::MainFirst, Format::Stream);
        let error = ended.result.unwrap_err();
        assert_eq!(cause(&error).and_then(Error::rule), Some(rule), "{error}");
        assert!(!file.exists());
    }
}
