//! libvirt's save images: one that libvirt itself wrote, and what no libvirt writes.
use proptest::prelude::*;
use transship_wire::{
    Error,
    libvirt::{
        Definition, DiskFiles, Encoding, HEADER_BYTES, Header, MAGIC, MAGIC_PARTIAL, MAX_DEFINITION_BYTES,
        PADDING_BYTES,
    },
};

const XML: &str =
    "<domain type='kvm'>\n  <name>g1</name>\n  <currentMemory unit='KiB'>65536</currentMemory>\n</domain>\n";
const COOKIE: &str = "<cookie>\n  <slirpHelper/>\n</cookie>\n";

fn definition() -> Definition {
    Definition::new(XML.into(), Some(COOKIE.into())).unwrap()
}

fn image() -> Vec<u8> {
    definition().encode(true, Encoding::Zstd)
}

/// As `virsh save` of libvirt 11.3 begins a file (image format zstd): what it wrote for a definition of 2475 bytes with
/// a cookie.
const STOCK: &str = "4c6962766972745165 6d756453617665 02000000 980a0100 01000000 05000000 ac090000";

fn stock() -> [u8; HEADER_BYTES] {
    let digits: String = STOCK.split_whitespace().collect();
    let mut bytes: Vec<u8> =
        (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect();
    bytes.resize(HEADER_BYTES, 0);
    bytes.try_into().unwrap()
}

fn header(bytes: &[u8]) -> Result<Header, Error> {
    Header::decode(bytes[..HEADER_BYTES].try_into().unwrap())
}

/// All of it, as a reader goes about it.
fn read(bytes: &[u8]) -> Result<(Header, Definition), Error> {
    let header = header(bytes)?;
    Ok((header, Definition::decode(&header, &bytes[HEADER_BYTES..])?))
}

#[test]
fn libvirts_own_header_is_read() {
    let header = Header::decode(&stock()).unwrap();
    assert_eq!((header.ran, header.encoding.name(), header.definition_bytes()), (true, "zstd", 68248));
    assert_eq!(header.bytes(), 92 + 68248);
}

#[test]
fn what_is_written_is_laid_out_as_libvirt_does_it() {
    let bytes = image();
    assert!(Header::is_of_image(&bytes) && Header::is_of_image(&MAGIC_PARTIAL) && !Header::is_of_image(b"QEVM"));
    let numbers: Vec<u32> = bytes[16..36].as_chunks().0.iter().map(|number| u32::from_le_bytes(*number)).collect();
    let length = XML.len() + 1 + COOKIE.len() + 1 + PADDING_BYTES;
    assert_eq!(numbers, [2, length as u32, 1, 5, XML.len() as u32 + 1]);
    assert_eq!(bytes[92..92 + XML.len()], *XML.as_bytes());
    assert_eq!(bytes[92 + XML.len() + 1..][..COOKIE.len()], *COOKIE.as_bytes());
    assert!(bytes.len() == 92 + length && bytes.ends_with(&[0; PADDING_BYTES + 1]));
    let (header, read) = read(&bytes).unwrap();
    assert_eq!(read, definition());
    assert_eq!((read.name(), read.xml(), read.cookie()), ("g1", XML, Some(COOKIE)));
    assert_eq!(header.bytes(), bytes.len() as u64);
}

#[test]
fn one_without_a_cookie_and_one_of_the_other_byte_order_are_read() {
    let plain = Definition::new(XML.into(), None).unwrap();
    assert_eq!(read(&plain.encode(false, Encoding::Raw)).unwrap().1, plain);
    let mut swapped = image();
    swapped[16..36].as_chunks_mut::<4>().0.iter_mut().for_each(|number| number.reverse());
    assert_eq!(read(&swapped).unwrap(), read(&image()).unwrap());
}

#[test]
fn a_balloon_does_not_make_another_machine() {
    let with = |from: &str, to: &str| Definition::new(XML.replace(from, to), Some(COOKIE.into())).unwrap();
    assert!(definition().is_same_machine(&with("65536", "32768"), DiskFiles::Same));
    assert!(!definition().is_same_machine(&with("kvm", "qemu"), DiskFiles::Same));
    assert!(!definition().is_same_machine(&Definition::new(XML.into(), None).unwrap(), DiskFiles::Same));
}

#[test]
fn a_bad_field_is_named_with_its_offset() {
    let changed = |at: usize, bytes: &[u8]| {
        let mut image = image();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        read(&image).unwrap_err().to_string()
    };
    let length = (image().len() - HEADER_BYTES) as u32;
    for (at, bytes, expected) in [
        (0, &MAGIC_PARTIAL[..], "image magic \"LibvirtQemudPart\" at offset 0: libvirt has not finished writing it"),
        (0, b"QEVM", "image magic \"QEVMirtQemudSave\" at offset 0"),
        (16, &0_u32.to_le_bytes(), "image version at offset 16 is 0x0"),
        (16, &[0xff; 4], "image version at offset 16 is 0xffffffff"),
        (20, &0_u32.to_le_bytes(), "definition length at offset 20 is 0x0"),
        (20, &(MAX_DEFINITION_BYTES + 1).to_le_bytes(), "definition length at offset 20 is 0x1000001"),
        (24, &2_u32.to_le_bytes(), "running at offset 24 is 0x2"),
        (28, &7_u32.to_le_bytes(), "image format at offset 28 is 0x7: a format of a later libvirt"),
        (32, &length.to_le_bytes(), "cookie offset at offset 32"),
        (91, &[1], "unused part of the header at offset 91 is 0x1"),
        (92, b"x", "definition \"xdomain type='kv\" at offset 92: it is no XML"),
        (92, &[0xff], "definition at offset 92 is not UTF-8"),
        (92, &[0], "it is no XML"),
        (92 + XML.len() + 3, &[0xff], "cookie at offset"),
        (92 + XML.len(), b"x", "definition at offset 92 is"),
    ] {
        let error = changed(at, bytes);
        assert!(error.contains(expected), "{error} instead of {expected}");
    }
    assert!(changed(20, &(XML.len() as u32 + 4).to_le_bytes()).contains("cookie at offset"));
    for xml in ["<network><name>g1</name></network>", "<domain/>", "<domain><name> </name></domain>", "g1", "a\0b"] {
        assert!(Definition::new(xml.into(), None).is_err(), "{xml}");
    }
    let long = "x".repeat(MAX_DEFINITION_BYTES as usize);
    let error = Definition::new(XML.into(), Some(long)).unwrap_err();
    let is_too_long = |bytes| bytes > u64::from(MAX_DEFINITION_BYTES);
    assert!(matches!(error, Error::Invalid { field: "definition", value, .. } if is_too_long(value)), "{error}");
}

#[test]
fn a_definition_that_is_cut_anywhere_is_refused() {
    let image = image();
    let header = header(&image).unwrap();
    for cut in 0..header.definition_bytes() {
        let error = Definition::decode(&header, &image[HEADER_BYTES..HEADER_BYTES + cut]).unwrap_err();
        let missing = header.definition_bytes() - cut;
        assert_eq!(error, Error::Truncated { field: "definition", offset: HEADER_BYTES, missing });
    }
}

proptest! {
    /// Whatever is changed, it is read as something or refused, and what is read can be written.
    #[test]
    fn changed_bytes_do_no_harm(changes in prop::collection::vec((0..500_usize, any::<u8>()), 1..8)) {
        let mut image = image();
        changes.into_iter().for_each(|(at, byte)| image[at] = byte);
        if let Ok((header, definition)) = read(&image) {
            prop_assert_eq!(&image[..16], &MAGIC[..]);
            prop_assert_eq!(read(&definition.encode(header.ran, header.encoding)).unwrap().1, definition);
        }
    }
}
