//! The same of mapped-ram files: places, geometries and bitmaps.
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
    assert_eq!(error.place(), ("bitmap offset", entry), "{error}");
}

#[test]
fn a_file_that_was_cut_short() {
    let (bytes, [_, second_entry]) = file([None, None]);
    let read = |file_bytes| read_all(&bytes, StreamReader::new().within(file_bytes), |_, _, _| {}).map(|_| ());
    assert_eq!(read(bytes.len() as u64), Ok(()));
    let end = Geometry::stock((second_entry + ENTRY) as u64, SIZE).pages(SIZE).end;
    assert_eq!(read(end - 1).unwrap_err().place(), ("pages offset", second_entry));
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
