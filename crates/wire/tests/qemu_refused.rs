//! QEMU's formats with one field changed, and streams that mean harm: each is refused, and the error names field and
//! place.
#![allow(clippy::unwrap_used)]
mod streams;
use streams::*;
use transship_wire::qemu::*;
use transship_wire::{Error, PAGE_BYTES};

const PAGE: u64 = PAGE_BYTES as u64;

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn field_and_offset(error: &Error) -> (&'static str, usize) {
    match *error {
        Error::Truncated { field, offset, .. }
        | Error::Trailing { field, offset, .. }
        | Error::Invalid { field, offset, .. }
        | Error::Text { field, offset }
        | Error::Named { field, offset, .. }
        | Error::Refused { field, offset, .. } => (field, offset),
        ref other => panic!("an error without a place: {other:?}"),
    }
}

fn read(bytes: &[u8]) -> Result<(), Error> {
    read_all(bytes, StreamReader::new(), |_, _, _| {}).map(|_| ())
}

#[track_caller]
fn assert_refused(bytes: &[u8], field: &str, offset: usize) {
    let error = read(bytes).expect_err(&format!("{field} at {offset} should be refused"));
    assert_eq!(field_and_offset(&error), (field, offset), "{error}");
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
    let decode = |encoded: &[u8]| xbzrle::decode(encoded, 1000, &mut [0; PAGE_BYTES]).map_err(|e| field_and_offset(&e));
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

mod mapped_ram {
    use super::*;

    /// A file of two blocks of 64 pages, and where their entries begin.
    fn file(places: [Option<Geometry>; 2]) -> (Vec<u8>, [usize; 2]) {
        let mut writer = StreamWriter::new(0, 1);
        let configuration = Configuration { mapped_ram: true, ..Configuration::new(name("pc")) };
        writer.header().configuration(&configuration).ram_start(2 * 64 * PAGE);
        let entries = ["a", "b"].iter().zip(places).map(|(text, place)| {
            let entry = writer.position() as usize;
            match place {
                Some(geometry) => {
                    let mapped = Some(Mapped::At(geometry));
                    writer.block(&Block { name: name(text), used_bytes: 64 * PAGE, gpa: None, mapped });
                }
                None => {
                    writer.mapped_block(&name(text), 64 * PAGE, None);
                }
            }
            entry
        });
        let entries: Vec<_> = entries.collect();
        writer.end_of_section().eof();
        let pieces = writer.take();
        let end = pieces.iter().map(|piece| piece.position as usize + piece.bytes.len()).max().unwrap();
        let mut bytes = vec![0; end];
        // Where pieces overlap, the one that the reader comes to first is what counts.
        for piece in pieces.iter().rev() {
            bytes[piece.position as usize..][..piece.bytes.len()].copy_from_slice(&piece.bytes);
        }
        (bytes, entries.try_into().unwrap())
    }

    /// 1 + 1 name, 8 length, 28 header
    const ENTRY: usize = 38;
    const SIZE: u64 = 64 * PAGE;
    const MIB: u64 = 1 << 20;

    /// Neither PART nor END is needed, nor a device.
    #[test]
    fn a_file_without_parts() {
        assert_eq!(read(&file([None, None]).0), Ok(()));
    }

    #[test]
    fn the_header_of_a_block() {
        let (bytes, [entry, _]) = file([None, None]);
        let change = |offset: usize, new: &[u8]| changed((bytes.clone(), entry), offset, new);
        assert_refused(&change(13, &[2]), "mapped-ram version", entry + 10);
        assert_refused(&change(13, &[0]), "mapped-ram version", entry + 10);
        assert_refused(&change(14, &8192u64.to_be_bytes()), "mapped-ram page size", entry + 14);
        assert_refused(&change(22, &u64::MAX.to_be_bytes()), "bitmap offset", entry + 22);
        assert_refused(&change(30, &(MIB + 512).to_be_bytes()), "pages offset", entry + 30);
        assert_refused(&change(30, &(1u64 << 63).to_be_bytes()), "pages offset", entry + 30);
        assert_refused(&change(30, &0u64.to_be_bytes()), "pages offset", entry);
        // No pages at all are only there with x-ignore-shared.
        assert_refused(&change(22, &[0; 16]), "pages offset", entry);
    }

    #[test]
    fn no_pages_and_no_barriers_in_between() {
        let (bytes, _) = file([None, None]);
        let end = bytes.len() - 1;
        for record in [&b"\0\0\0\0\0\0\0\x02\x01a\0"[..], b"\0\0\0\0\0\0\x02\0"] {
            let part = [&bytes[..end], b"\x02\0\0\0\x01", record].concat();
            assert_refused(&part, "RAM record", end + 5);
        }
    }

    /// What stock QEMU would not write and yet load is taken: another order, gaps, pages at any page.
    #[test]
    fn unusual_places() {
        let bitmap_far = Geometry { bitmap_offset: 5001, pages_offset: 2 * PAGE };
        assert_eq!(read(&file([Some(bitmap_far), None]).0), Ok(()));
        // The second bitmap in the gap that the first block left.
        let first = Geometry { bitmap_offset: 200, pages_offset: MIB };
        let second = Geometry { bitmap_offset: 300, pages_offset: 2 * MIB };
        assert_eq!(read(&file([Some(first), Some(second)]).0), Ok(()));
    }

    #[test]
    fn parts_that_overlap() {
        let (_, [entry, second_entry]) = file([None, None]);
        let good = Geometry::stock((entry + ENTRY) as u64, SIZE);
        let check = |places: [Option<Geometry>; 2], field, offset| assert_refused(&file(places).0, field, offset);
        // The bitmap in the list of blocks, in its own pages, and where the rest of the stream is.
        check([Some(Geometry { bitmap_offset: entry as u64, ..good }), None], "bitmap offset", entry);
        check([Some(Geometry { bitmap_offset: MIB - 4, ..good }), None], "pages offset", entry);
        let rest = Geometry::stock((second_entry + ENTRY) as u64, SIZE).pages(SIZE).end;
        check([Some(Geometry { bitmap_offset: rest - 4, ..good }), None], "pages offset", second_entry);
        check([Some(Geometry { bitmap_offset: rest, ..good }), None], "bitmap offset", entry);
        check([Some(Geometry { bitmap_offset: 1 << 40, ..good }), None], "bitmap offset", entry);
        // The first bitmap where the second entry is.
        let there = Geometry { bitmap_offset: second_entry as u64 + 3, ..good };
        check([Some(there), None], "bitmap offset", entry);
        // The second block over the first one's bitmap and pages.
        let second = |bitmap_offset, pages_offset| [None, Some(Geometry { bitmap_offset, pages_offset })];
        check(second(good.bitmap_offset, 4 * MIB), "bitmap offset", second_entry);
        check(second(good.pages_offset + 1, 4 * MIB), "bitmap offset", second_entry);
        check(second((second_entry + ENTRY) as u64, good.pages_offset), "pages offset", second_entry);
    }

    /// What a file holds before its stream is none of its business.
    #[test]
    fn a_bitmap_before_the_stream() {
        let mut writer = StreamWriter::new(5000, 1);
        let configuration = Configuration { mapped_ram: true, ..Configuration::new(name("pc")) };
        writer.header().configuration(&configuration).ram_start(SIZE);
        let entry = writer.position() as usize;
        let mapped = Some(Mapped::At(Geometry { bitmap_offset: 4096, pages_offset: MIB }));
        writer.block(&Block { name: name("a"), used_bytes: SIZE, gpa: None, mapped });
        let Piece { position, bytes } = writer.take().remove(0);
        let bytes = [vec![0; position as usize], bytes].concat();
        let error = read_all(&bytes, StreamReader::at(5000), |_, _, _| {}).err().unwrap();
        assert_eq!(field_and_offset(&error), ("bitmap offset", entry), "{error}");
    }

    #[test]
    fn a_file_that_was_cut_short() {
        let (bytes, [_, second_entry]) = file([None, None]);
        let read = |file_bytes| read_all(&bytes, StreamReader::new().within(file_bytes), |_, _, _| {}).map(|_| ());
        assert_eq!(read(bytes.len() as u64), Ok(()));
        let end = Geometry::stock((second_entry + ENTRY) as u64, SIZE).pages(SIZE).end;
        assert_eq!(field_and_offset(&read(end - 1).unwrap_err()), ("pages offset", second_entry));
        let cut = &bytes[..end as usize + 3];
        assert_refused(cut, "RAM record", end as usize);
    }

    /// An error leaves the reader as it was: asked again, it says the same.
    #[test]
    fn the_same_error_twice() {
        let bad = Geometry { bitmap_offset: 1, pages_offset: MIB };
        let (bytes, _) = file([Some(bad), None]);
        let mut reader = StreamReader::new();
        let error = loop {
            match reader.next(&bytes[reader.position() as usize..]) {
                Ok(Step::Done { record, .. }) if record != Record::Tail => {}
                Ok(step) => panic!("it should be refused: {step:?}"),
                Err(error) => break error,
            }
        };
        let at = reader.position();
        assert_eq!(reader.next(&bytes[at as usize..]), Err(error));
        assert_eq!((reader.position(), reader.blocks().len()), (at, 0));
    }
}

mod channels {
    use super::*;

    #[test]
    fn greetings() {
        let good = Greeting { uuid: [3; 16], channel: 1 }.encode();
        for (place, byte, field, offset) in [
            (3, 0, "greeting magic", 0),
            (7, 2, "greeting version", 4),
            (24, 255, "greeting channel", 24),
            (25, 1, "greeting reserved", 25),
            (63, 1, "greeting reserved", 63),
        ] {
            let mut bytes = good;
            bytes[place] = byte;
            assert_eq!(field_and_offset(&Greeting::decode(&bytes).unwrap_err()), (field, offset));
        }
    }

    fn pages(method: Method) -> Vec<u8> {
        Pages::new(name("pc.ram"), &[0, PAGE], &[2 * PAGE], method, 100).encode().to_vec()
    }

    #[track_caller]
    fn refused(mut bytes: Vec<u8>, place: usize, new: &[u8], field: &str, offset: usize) {
        bytes[place..][..new.len()].copy_from_slice(new);
        let error = Packet::read(&bytes, 500).expect_err("it should be refused");
        assert_eq!(field_and_offset(&error), (field, 500 + offset), "{error}");
    }

    #[test]
    fn packets_with_pages() {
        let raw = || pages(Method::None);
        refused(raw(), 0, &[0], "packet magic", 0);
        refused(raw(), 7, &[2], "packet version", 4);
        for flags in [0x80u32, 1 << 31, 0x06, 0x0c, 0x3e] {
            refused(raw(), 8, &flags.to_be_bytes(), "packet flags", 8);
        }
        refused(raw(), 12, &129u32.to_be_bytes(), "packet capacity", 12);
        // Two normal pages and a zero page want room for three.
        refused(raw(), 12, &1u32.to_be_bytes(), "packet normal pages", 16);
        refused(raw(), 12, &2u32.to_be_bytes(), "packet zero pages", 32);
        refused(raw(), 16, &129u32.to_be_bytes(), "packet normal pages", 16);
        refused(raw(), 32, &127u32.to_be_bytes(), "packet zero pages", 32);
        refused(raw(), 32, &u32::MAX.to_be_bytes(), "packet zero pages", 32);
        refused(raw(), 20, &8191u32.to_be_bytes(), "packet payload", 20);
        refused(pages(Method::Zstd), 20, &0u32.to_be_bytes(), "packet payload", 20);
        refused(pages(Method::Zlib), 20, &(MAX_PAYLOAD_BYTES + 1).to_be_bytes(), "packet payload", 20);
        refused(raw(), 63, &[1], "packet reserved", 63);
        refused(raw(), 64, &[0], "packet block", 64);
        refused(raw(), 65, &[7], "packet block", 65);
        refused(raw(), 320, &1u64.to_be_bytes(), "packet offset", 320);
        refused(raw(), 336, &(1u64 << 56).to_be_bytes(), "packet offset", 336);
    }

    /// What 7.2 leaves behind in packets without pages is not looked at, also if it is nonsense.
    #[test]
    fn stale_fields() {
        let mut bytes = Pages::barrier().encode().to_vec();
        bytes[15] = 128;
        bytes[20..24].fill(0xff);
        bytes[64..].fill(0xff);
        let step = Packet::read(&bytes, 0).unwrap();
        assert_eq!(step, Step::Done { record: Packet::Pages(Pages::barrier()), used: PACKET_HEADER_BYTES });
    }

    #[test]
    fn packets_with_device_state() {
        let good = || Packet::DeviceState(DeviceState { name: name("vfio"), instance: 0, payload_bytes: 9 }).encode();
        refused(good(), 11, &[0x41], "packet flags", 8);
        refused(good(), 11, &[0x42], "packet flags", 8);
        refused(good(), 12, &[0], "packet device", 12);
        refused(good(), 275, &[0], "packet payload", 272);
    }
}

#[test]
fn replies() {
    let refused = |bytes: &[u8], field: &str, offset: usize| {
        let error = Reply::read(bytes, 40).unwrap_err();
        assert_eq!(field_and_offset(&error), (field, 40 + offset), "{error}");
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
