//! Beside other implementations: what a stock QEMU sent, and what plain zlib, zstd and gzip make of our packets.
#![allow(unsafe_code)]
use crate::common::{PAGE, encode, page};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use transship_codec::{Method, Setting};

fn sample(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(std::fs::File::open(path).unwrap()).read_to_end(&mut bytes).unwrap();
    bytes
}

fn be32(bytes: &[u8], at: usize) -> usize {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

/// Applies one channel's packets to the memory of the guest, by block.
fn load_channel(method: Method, mut bytes: &[u8], blocks: &mut HashMap<String, Vec<u8>>) {
    let mut decoder = method.stock_decoder().unwrap();
    bytes = &bytes[64..];
    while !bytes.is_empty() {
        let (header, rest) = bytes.split_at(1344);
        let normal = be32(header, 16);
        let (payload, rest) = rest.split_at(if normal == 0 { 0 } else { be32(header, 20) });
        bytes = rest;
        if normal == 0 {
            continue;
        }
        let name = std::str::from_utf8(&header[64..320]).unwrap().trim_end_matches('\0');
        let mut pages = vec![0; normal * PAGE];
        decoder.decode(payload, &mut pages).unwrap();
        for (i, page) in pages.chunks(PAGE).enumerate() {
            let at = be32(header, 320 + 8 * i + 4);
            blocks.get_mut(name).unwrap()[at..at + PAGE].copy_from_slice(page);
        }
    }
}

#[test]
fn stock_channels_are_read() {
    let lengths = [
        ("pc.ram", 16 << 20, 0x5b6a_034e),
        ("/rom@etc/acpi/tables", 131_072, 0x56d3_ab2d),
        ("pc.rom", 131_072, 0x7ee8_cdcd),
        ("pc.bios", 65_536, 0x4a69_4fb4),
        ("/rom@etc/table-loader", 4096, 0x82a6_fe63),
        ("/rom@etc/acpi/rsdp", 4096, 0x8101_e52f),
    ];
    for method in [Method::Zlib, Method::Zstd] {
        let mut blocks: HashMap<String, Vec<u8>> =
            lengths.iter().map(|(name, length, _)| (name.to_string(), vec![0; *length])).collect();
        for channel in 0..2 {
            load_channel(method, &sample(&format!("multifd-{method}-10.0.2-ch{channel}.bin.gz")), &mut blocks);
        }
        for (name, _, crc) in lengths {
            assert_eq!(transship_isal::crc32(0, &blocks[name]), crc, "{method}: {name}");
        }
    }
}

/// Packets of several encoders at several levels, as they may meet on one channel.
fn channel(method: Method, levels: &[i32]) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let packets: Vec<Vec<u8>> = [1usize, 128, 7, 64]
        .iter()
        .enumerate()
        .map(|(n, count)| (0..*count).flat_map(|i| page(((i + n) % 4) as u8, (i * n) as u64)).collect())
        .collect();
    let encoded = packets
        .iter()
        .zip(levels.iter().cycle())
        .map(|(p, l)| encode(Setting::new(method, Some(*l)).unwrap(), p))
        .collect();
    (packets, encoded)
}

/// As QEMU's receiver does it: one inflater a channel, a page at a time, each call must say "OK".
#[test]
fn plain_zlib_reads_a_channel_page_by_page() {
    for levels in [&[1][..], &[0], &[2, 3], &[6], &[1, 6, 0, 3]] {
        let (packets, mut encoded) = channel(Method::Zlib, levels);
        encoded[0].splice(0..0, transship_codec::ZLIB_STREAM_HEADER);
        let mut inflater = PlainZlib::new();
        for (packet, bytes) in packets.iter().zip(&encoded) {
            assert!(inflater.read_pages(bytes, packet.len()) == *packet, "levels {levels:?}");
        }
    }
}

#[test]
fn streaming_zstd_reads_a_channel_page_by_page() {
    let (packets, encoded) = channel(Method::Zstd, &[1, -5, 6]);
    let mut context = zstd_safe::DCtx::create();
    for (packet, bytes) in packets.iter().zip(&encoded) {
        let mut input = zstd_safe::InBuffer::around(bytes);
        for page in packet.chunks(PAGE) {
            let mut got = [0; PAGE];
            let mut output = zstd_safe::OutBuffer::around(&mut got[..]);
            while output.pos() < PAGE {
                context.decompress_stream(&mut output, &mut input).unwrap();
            }
            assert!(got == *page);
        }
        assert_eq!(input.pos, bytes.len());
    }
}

#[test]
fn gzip_reads_qatzip_packets() {
    let (packets, encoded) = channel(Method::Qatzip, &[1, 6, 3]);
    let mut gzip = Command::new("gzip").arg("-dc").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = gzip.stdin.take().unwrap();
    let writing = std::thread::spawn(move || encoded.iter().for_each(|bytes| stdin.write_all(bytes).unwrap()));
    let output = gzip.wait_with_output().unwrap();
    writing.join().unwrap();
    assert!(output.status.success());
    assert!(output.stdout == packets.concat());
}

/// zlib itself, which stock QEMU links.
struct PlainZlib(Box<libz_sys::z_stream>);

impl PlainZlib {
    fn new() -> Self {
        // SAFETY: an all-zero z_stream is what inflateInit asks for: no input, the default allocator (Option::None).
        #[allow(invalid_value)]
        let mut stream: Box<libz_sys::z_stream> = unsafe { Box::new(std::mem::MaybeUninit::zeroed().assume_init()) };
        // SAFETY: the stream is zeroed and boxed, so that it stays where it is.
        let code = unsafe {
            libz_sys::inflateInit_(&raw mut *stream, libz_sys::zlibVersion(), size_of::<libz_sys::z_stream>() as i32)
        };
        assert_eq!(code, libz_sys::Z_OK);
        Self(stream)
    }

    fn read_pages(&mut self, bytes: &[u8], length: usize) -> Vec<u8> {
        let mut pages = vec![0; length];
        self.0.next_in = bytes.as_ptr().cast_mut();
        self.0.avail_in = bytes.len() as u32;
        let count = length / PAGE;
        for (i, page) in pages.chunks_mut(PAGE).enumerate() {
            self.0.next_out = page.as_mut_ptr();
            self.0.avail_out = PAGE as u32;
            let flush = if i + 1 == count { libz_sys::Z_SYNC_FLUSH } else { libz_sys::Z_NO_FLUSH };
            loop {
                // SAFETY: next_in and next_out point at slices of avail_in and avail_out bytes, alive in this call.
                let code = unsafe { libz_sys::inflate(&raw mut *self.0, flush) };
                assert_eq!(code, libz_sys::Z_OK);
                if self.0.avail_in == 0 || self.0.avail_out == 0 {
                    break;
                }
            }
            assert_eq!(self.0.avail_out, 0, "page {i}");
        }
        assert_eq!(self.0.avail_in, 0, "the packet is used up");
        pages
    }
}

impl Drop for PlainZlib {
    fn drop(&mut self) {
        // SAFETY: the stream was made by inflateInit and ends once, here.
        unsafe { libz_sys::inflateEnd(&raw mut *self.0) };
    }
}

/// The form of QEMU's old capability `compress`: a zlib stream for each page, with its checksum.
#[test]
fn a_page_in_a_stream_of_its_own_is_read_and_nothing_else() {
    let before = page(2, 7);
    let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::new(1));
    encoder.write_all(&before).unwrap();
    let encoded = encoder.finish().unwrap();
    let mut after = vec![0; PAGE];
    transship_codec::inflate_page(&encoded, &mut after).unwrap();
    assert_eq!(after, before);
    for cut in 0..encoded.len() {
        transship_codec::inflate_page(&encoded[..cut], &mut after).unwrap_err();
    }
    for at in 0..encoded.len() {
        let mut changed = encoded.clone();
        changed[at] ^= 4;
        // The checksum sees to it.
        assert!(transship_codec::inflate_page(&changed, &mut after).is_err() || after == before, "byte {at}");
    }
    transship_codec::inflate_page(&[&encoded[..], &[0]].concat(), &mut after).unwrap_err();
    transship_codec::inflate_page(&encoded, &mut vec![0; PAGE - 1]).unwrap_err();
    transship_codec::inflate_page(&encoded, &mut vec![0; PAGE + 1]).unwrap_err();
}
