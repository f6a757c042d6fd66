//! QEMU's formats with one field changed, and streams that mean harm: each is refused, and the error names field and
//! place.
mod channels;
mod mapped_ram;

use crate::streams::*;
use transship_wire::qemu::*;
use transship_wire::{Error, PAGE_BYTES};

const PAGE: u64 = PAGE_BYTES as u64;

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn read(bytes: &[u8]) -> Result<(), Error> {
    read_all(bytes, StreamReader::new(), |_, _, _| {}).map(|_| ())
}

#[track_caller]
fn assert_refused(bytes: &[u8], field: &str, offset: usize) {
    let error = read(bytes).expect_err(&format!("{field} at {offset} should be refused"));
    assert_eq!(error.place(), (field, offset), "{error}");
}

/// A stream with one of everything, and the place of the record that is looked for.
fn stream(configuration: &Configuration, wanted: impl Fn(&Record<'_>) -> bool) -> (Vec<u8>, usize) {
    let mut writer = StreamWriter::new(0, 7);
    writer.header().configuration(configuration).command(&Command::Ping(1)).ram_start(3 * PAGE);
    for (text, pages) in [("pc.ram", 2), ("rom", 1)] {
        let gpa = configuration.ignore_shared.then_some(0);
        let block = Block { name: name(text), used_bytes: pages * PAGE, gpa, mapped: None };
        writer.block(&block);
    }
    writer.end_of_section().part().zero_page(&name("pc.ram"), 0).page(&name("pc.ram"), PAGE, &[1; PAGE_BYTES]);
    writer.zero_page(&name("rom"), 0).end_of_section().end().end_of_section().eof();
    let bytes = writer.take_bytes();
    let mut place = None;
    let mut at = 0;
    read_all(&bytes, StreamReader::new(), |record, read, _| {
        if place.is_none() && wanted(record) {
            place = Some(at);
        }
        at += read.len();
    })
    .unwrap();
    let place = place.expect("the record that the test wants");
    (bytes, place)
}

fn plain(wanted: impl Fn(&Record<'_>) -> bool) -> (Vec<u8>, usize) {
    stream(&Configuration::new(name("pc")), wanted)
}

/// Changes what is `offset` bytes behind the beginning of the record.
fn changed((mut bytes, place): (Vec<u8>, usize), offset: usize, new: &[u8]) -> Vec<u8> {
    bytes[place + offset..][..new.len()].copy_from_slice(new);
    bytes
}

#[test]
fn header_and_configuration() {
    let start = || plain(|record| *record == Record::Header);
    assert_refused(&changed(start(), 0, b"QEMU"), "stream magic", 0);
    assert_refused(&changed(start(), 7, &[2]), "stream version", 4);
    assert_refused(&changed(start(), 8, &[8]), "record type", 8);
    for length in [[0, 0, 0, 0], [0, 0, 1, 0], [0xff; 4]] {
        assert_refused(&changed(start(), 9, &length), "machine name", 9);
    }
    assert_refused(&changed(start(), 13, b"\n"), "machine name", 13);
    assert_refused(&changed(start(), 14, &[0xff]), "machine name", 14);
}

/// The machine's name is 2 bytes, so the first subsection begins at 8 + 1 + 4 + 2.
#[test]
fn subsections_of_the_configuration() {
    let everything =
        Configuration { page_bits: true, ignore_shared: true, uuid: Some([1; 16]), ..Configuration::new(name("pc")) };
    let start = || stream(&everything, |record| *record == Record::Header);
    assert_eq!(read(&start().0), Ok(()));
    let (page_bits, name_bytes) = (15, "configuration/target-page-bits".len());
    assert_refused(&changed(start(), page_bits + 2, b"X"), "configuration subsection", page_bits + 2);
    let version = page_bits + 2 + name_bytes;
    assert_refused(&changed(start(), version + 3, &[2]), "subsection version", version);
    assert_refused(&changed(start(), version + 7, &[13]), "page bits", version + 4);

    let capabilities = version + 8;
    let count = capabilities + 2 + "configuration/capabilities".len() + 4;
    let capability = count + 4;
    // A second one is said to be there: what follows is no capability.
    assert_refused(&changed(start(), count + 3, &[2]), "capability", capability + 1 + "x-ignore-shared".len() + 1);
    assert_refused(&changed(start(), count, &[0xff; 4]), "capability", capability + 1 + "x-ignore-shared".len() + 1);
    assert_refused(&changed(start(), capability + 1, b"y"), "capability", capability + 1);

    // The same subsection again, in place of the record that follows.
    let (bytes, _) = start();
    let mut twice = bytes[..capabilities].to_vec();
    twice.extend(&bytes[page_bits..]);
    assert_refused(&twice, "configuration subsection", capabilities + 2);
}

#[test]
fn a_capability_twice() {
    let mut bytes =
        Vec::from(*b"QEVM\x00\x00\x00\x03\x07\x00\x00\x00\x02pc\x05\x1aconfiguration/capabilities\x00\x00\x00\x01");
    bytes.extend(b"\x00\x00\x00\x02\x0amapped-ram");
    let second = bytes.len() + 1;
    bytes.extend(b"\x0amapped-ram\x00");
    assert_refused(&bytes, "capability", second);
}

#[test]
fn commands() {
    let ping = || plain(|record| matches!(record, Record::Command(_)));
    let (_, place) = ping();
    assert_refused(&changed(ping(), 0, &[9]), "record type", place);
    assert_refused(&changed(ping(), 1, &[0, 0]), "command", place + 1);
    assert_refused(&changed(ping(), 1, &[0, 12]), "command", place + 1);
    // Longer and shorter than a ping, and another command with a ping's length.
    for length in [0u16, 3, 5] {
        assert_refused(&changed(ping(), 3, &length.to_be_bytes()), "command length", place + 3);
    }
    for number in [1u16, 3, 4, 5, 8, 9, 11] {
        assert_refused(&changed(ping(), 1, &number.to_be_bytes()), "command length", place + 3);
    }
    // A name that does not fill the command, a discard that is of another version.
    assert_refused(&changed(ping(), 1, b"\0\x0a\0\x04\x02abc"), "command length", place + 3);
    assert_refused(&changed(ping(), 1, &[0, 6, 0, 4, 1]), "discard version", place + 5);
    assert_refused(&changed(ping(), 1, &[0, 6, 0, 4, 0, 1, b'a', 1]), "end of the block name", place + 8);
}

#[test]
fn the_list_of_blocks() {
    let start = || plain(|record| matches!(record, Record::RamStart { .. }));
    let (_, place) = start();
    // type 1, section 4, name 1 + 3, instance 4, version 4, total 8
    assert_refused(&changed(start(), 6, b"x"), "section", place + 6);
    assert_refused(&changed(start(), 12, &[1]), "section instance", place + 9);
    assert_refused(&changed(start(), 16, &[3]), "section version", place + 13);
    assert_refused(&changed(start(), 24, &[5]), "RAM total", place + 17);
    // A page more than 256 TiB.
    assert_refused(&changed(start(), 17, &((1_u64 << 48) + PAGE + 4).to_be_bytes()), "RAM total", place + 17);
    let blocks = place + 25;
    // Another total: the first block is too long for it, or enough, or something else is taken for a third.
    assert_refused(&changed(start(), 23, &[0x10]), "block length", blocks);
    assert_refused(&changed(start(), 23, &[0x20]), "RAM record", blocks + 7 + 8);
    let third = blocks + 7 + 8 + 4 + 8;
    assert_refused(&changed(start(), 23, &[0x40]), "block name", third);
    for length in [0, PAGE + 1, u64::MAX - PAGE + 1, 1 << 56] {
        assert_refused(&changed(start(), 25 + 7, &length.to_be_bytes()), "block length", blocks + 7);
    }
    assert_refused(&changed(start(), 25, &[0]), "block name", blocks);
    assert_refused(&changed(start(), 26, &[0x1b]), "block name", blocks + 1);
    let behind = || plain(|record| *record == Record::EndOfBody);
    let (_, place) = behind();
    assert_refused(&changed(behind(), 0, &[0; 8]), "RAM record", place);
    assert_refused(&changed(behind(), 7, &[0x02]), "RAM record", place);
    assert_refused(&changed(behind(), 8, &[0]), "footer", place + 8);
    assert_refused(&changed(behind(), 12, &[8]), "footer", place + 9);
}

#[test]
fn the_same_block_twice_and_too_many_blocks() {
    let list = |names: &[String]| {
        let mut writer = StreamWriter::new(0, 1);
        writer.header().configuration(&Configuration::new(name("pc"))).ram_start(names.len() as u64 * PAGE);
        let mut last = 0;
        for text in names {
            last = writer.position();
            writer.block(&Block { name: name(text), used_bytes: PAGE, gpa: None, mapped: None });
        }
        writer.end_of_section().end().end_of_section();
        (writer.take_bytes(), last as usize)
    };
    let many: Vec<_> = (0..=MAX_BLOCKS).map(|number| number.to_string()).collect();
    assert_eq!(read(&list(&many[1..]).0), Ok(()));
    let (bytes, last) = list(&many);
    assert_refused(&bytes, "block number", last);
    let (bytes, last) = list(&["a", "b", "a"].map(String::from));
    assert_refused(&bytes, "block name", last);
}

#[test]
fn parts_and_pages() {
    let part = || plain(|record| matches!(record, Record::Part { .. }));
    let (bytes, place) = part();
    assert_refused(&changed(part(), 0, &[0]), "record type", place);
    assert_refused(&changed(part(), 0, &[4]), "section name", place + 5);
    assert_refused(&changed(part(), 0, &[5]), "record type", place);
    assert_refused(&changed(part(), 4, &[6]), "section number", place + 1);
    // The first page: W, name, fill byte.
    let page = place + 5;
    let word = |word: u64| changed(part(), 5, &word.to_be_bytes());
    for flags in [0x00, 0x01, 0x04, 0x06, 0x20, 0x80, 0x30, 0x210, 0x400, 0x12] {
        assert_refused(&word(flags), "RAM record", page);
    }
    assert_refused(&word(0x22), "RAM record", page);
    assert_refused(&word(PAGE | 0x10), "RAM record", page);
    assert_refused(&word((2 * PAGE) | 0x02), "page offset", page);
    assert_refused(&word((1 << 63) | 0x02), "page offset", page);
    assert_refused(&changed(part(), 5 + 9, b"x"), "block name", page + 9);
    assert_refused(&word(0x100), "compressed length", page + 8 + 7);
    // Two more pages of the block that was named, one beyond its end.
    let second = page + 8 + 7 + 1;
    assert_refused(&changed(part(), second - place, &((2 * PAGE) | 0x28).to_be_bytes()), "page offset", second);
    assert_refused(&changed(part(), second - place, &(PAGE | 0x120).to_be_bytes()), "compressed length", second + 8);
    // Cut behind the first part, and the sections that follow instead.
    let cut = second + 8 + PAGE_BYTES + 8 + 4 + 1 + 8 + 5;
    for (kind, field, offset) in [
        (&b"\x00"[..], "record type", cut),
        (b"\x04\0\0\0\x09\x05timer", "section", cut + 6),
        (b"\x01\0\0\0\x09\x0cdirty-bitmap", "section", cut + 6),
        (b"\x01\0\0\0\x09\x03ram", "section", cut + 6),
        (b"\x06", "record type", cut),
        (b"\x07", "record type", cut),
        (b"\x7e", "record type", cut),
    ] {
        assert_refused(&[&bytes[..cut], kind].concat(), field, offset);
    }
}

/// The devices' blocks may be listed when they are known, behind pages of the others.
#[test]
fn a_second_list_of_blocks() {
    let list = |writer: &mut StreamWriter, text: &str, mapped: Option<Mapped>| {
        let block = Block { name: name(text), used_bytes: PAGE, gpa: None, mapped };
        writer.ram_start(PAGE).block(&block).end_of_section();
    };
    let mut writer = StreamWriter::new(0, 7);
    writer.header().configuration(&Configuration::new(name("m")));
    list(&mut writer, "pc.ram", None);
    writer.part().zero_page(&name("pc.ram"), 0).end_of_section();
    let at = writer.position() as usize;
    list(&mut writer, "pc.rom", None);
    writer.end().page(&name("pc.rom"), 0, &[1; PAGE_BYTES]).zero_page(&name("pc.ram"), 0).end_of_section().eof();
    let bytes = writer.take_bytes();
    let mut pages = Vec::new();
    let reader = read_all(&bytes, StreamReader::new(), |record, _, _| {
        if let Record::Page(page) = record {
            pages.push(page.block);
        }
    });
    assert_eq!(reader.unwrap().blocks().len(), 2);
    assert_eq!(pages, [0, 1, 0]);

    // Of another section; the same block again; more than can be counted.
    assert_refused(&changed((bytes.clone(), at), 4, &[8]), "section", at + 6);
    assert_refused(&changed((bytes.clone(), at), 26, b"pc.ram"), "block name", at + 25);
    let mut most = bytes.clone();
    most[at + 17..at + 25].copy_from_slice(&(u64::MAX << 12 | 4).to_be_bytes());
    assert_refused(&most, "RAM total", at + 17);

    let mapped = Configuration { mapped_ram: true, ..Configuration::new(name("m")) };
    let mut writer = StreamWriter::new(0, 7);
    writer.header().configuration(&mapped);
    writer.ram_start(PAGE).mapped_block(&name("pc.ram"), PAGE, None);
    writer.end_of_section();
    let at = writer.position();
    writer.ram_start(PAGE).mapped_block(&name("pc.rom"), PAGE, None);
    let mut file = vec![0; writer.position() as usize];
    for piece in writer.take() {
        file[piece.position as usize..][..piece.bytes.len()].copy_from_slice(&piece.bytes);
    }
    assert_refused(&file, "section", at as usize + 6);
}

#[test]
fn sections_before_the_list_of_blocks() {
    let (bytes, place) = plain(|record| matches!(record, Record::RamStart { .. }));
    for kind in [2, 3] {
        let mut bytes = bytes[..place].to_vec();
        bytes.extend([kind, 0, 0, 0, 7]);
        assert_refused(&bytes, "section number", place + 1);
    }
}

#[test]
fn encoded_pages() {
    let (bytes, place) = plain(|record| matches!(record, Record::Part { .. }));
    let with = |record: &[u8]| [&bytes[..place + 5], record, b"\0\0\0\0\0\0\0\x10"].concat();
    let mut contents = Vec::new();
    let mut take = |bytes: &[u8]| {
        let reader = read_all(bytes, StreamReader::new(), |record, _, _| {
            if let Record::Page(page) = record {
                contents.push(format!("{:?}", page.content));
            }
        });
        assert!(matches!(reader, Err(Error::Truncated { field: "footer", .. })));
    };
    take(&with(b"\0\0\0\0\0\0\x10\x40\x06pc.ram\x01\0\x03abc"));
    take(&with(b"\0\0\0\0\0\0\x11\0\x06pc.ram\0\0\0\x02xy"));
    assert_eq!(contents, ["Xbzrle([97, 98, 99])", "Compressed([120, 121])"]);

    let behind_name = place + 5 + 8 + 7;
    assert_refused(&with(b"\0\0\0\0\0\0\0\x40\x06pc.ram\x02\0\x03abc"), "xbzrle encoding", behind_name);
    assert_refused(&with(b"\0\0\0\0\0\0\0\x40\x06pc.ram\x01\x10\x01"), "xbzrle length", behind_name + 1);
    assert_refused(&with(b"\0\0\0\0\0\0\x01\0\x06pc.ram\0\0\x20\x01"), "compressed length", behind_name);
}

#[test]
fn differences() {
    let decode = |encoded: &[u8]| xbzrle::decode(encoded, 1000, &mut [0; PAGE_BYTES]).map_err(|error| error.place());
    assert_eq!(decode(&[]), Ok(()));
    assert_eq!(decode(&[0, 1, 9]), Ok(()));
    assert_eq!(decode(&[0xff, 0x1f, 1, 9]), Ok(()), "the last byte of the page");
    assert_eq!(decode(&[0x80, 0x20, 1, 9]), Err(("changed run", 1002)), "one behind it");
    assert_eq!(decode(&[0x81, 0x20, 1, 9]), Err(("unchanged run", 1000)));
    assert_eq!(decode(&[0xff, 0xff, 1]), Err(("unchanged run", 1000)));
    assert_eq!(decode(&[0, 0]), Err(("changed run", 1001)));
    assert_eq!(decode(&[0, 1, 9, 0, 1, 9]), Err(("unchanged run", 1003)));
    assert_eq!(decode(&[0]), Err(("changed run", 1001)));
    assert_eq!(decode(&[0x80]), Err(("unchanged run", 1001)));
    assert_eq!(decode(&[0, 2, 9]), Err(("changed bytes", 1002)));
}

#[test]
fn blocks_of_huge_pages_with_postcopy() {
    let mut writer = StreamWriter::new(0, 1);
    let sizes = PageSizes { blocks: 0x20_1000, guest: 0x1000 };
    writer.header().configuration(&Configuration::new(name("pc"))).command(&Command::PostcopyAdvise(Some(sizes)));
    writer.ram_start(PAGE);
    let place = writer.position() as usize;
    assert_refused(&writer.take_bytes(), "section", place);
}

#[test]
fn replies() {
    let refused = |bytes: &[u8], field: &str, offset: usize| {
        let error = Reply::read(bytes, 40).unwrap_err();
        assert_eq!(error.place(), (field, 40 + offset), "{error}");
    };
    refused(b"\0\0\0\0", "reply type", 0);
    refused(b"\0\x08\0\0", "reply type", 0);
    for kind in 1..=7u8 {
        refused(&[0, kind, 0xff, 0xff], "reply length", 2);
        let wrong = if kind == 7 { 4 } else { 0 };
        refused(&[0, kind, 0, wrong, 0, 0, 0, 0], "reply length", 2);
    }
    refused(b"\0\x06\0\x04\0\0\0\x02", "resume acknowledgement", 4);
    refused(b"\0\x05\0\x03\x01a\0", "reply length", 5);
    refused(b"\0\x03\0\x0f\0\0\0\0\0\0\0\0\0\0\0\0\x01ab", "reply length", 17);
}

#[test]
fn names() {
    assert_eq!(Name::new(&"é".repeat(127)).unwrap().len(), 254);
    for text in ["", &"a".repeat(256), "a\0", "\u{7f}", "a\u{9b}31m"] {
        assert!(Name::new(text).is_err(), "{text:?}");
    }
}
