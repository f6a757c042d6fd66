//! The captured streams, and what the tests do with them.
#![allow(dead_code, clippy::unwrap_used)]
use std::io::Read;
use std::path::Path;

use serde_json::Value;
use transship_wire::qemu::{Block, PageContent, Record, Step, StreamReader};
use transship_wire::{Error, PAGE_BYTES};

fn data(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)).unwrap()
}

/// The bytes of a captured stream: `sample("plain-10.0.2")`.
pub(crate) fn sample(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(&*data(&format!("{name}.bin.gz"))).read_to_end(&mut bytes).unwrap();
    bytes
}

/// What the manifest says of it.
pub(crate) fn facts(name: &str) -> Value {
    let manifest: Value = serde_json::from_slice(&data("manifest.json")).unwrap();
    manifest["samples"][format!("{name}.bin")].clone()
}

/// Calls `each` with every record up to and with `Tail`, and the bytes that it is made of. Returns the reader.
pub(crate) fn read_all(
    bytes: &[u8],
    reader: StreamReader,
    mut each: impl FnMut(&Record<'_>, &[u8], &StreamReader),
) -> Result<StreamReader, Error> {
    let mut reader = reader;
    loop {
        let rest = bytes.get(reader.position() as usize..).unwrap_or(&[]);
        match reader.next(rest)? {
            Step::Done { record, used } => {
                each(&record, &rest[..used], &reader);
                if record == Record::Tail {
                    return Ok(reader);
                }
            }
            Step::More { at_least } => {
                assert!(at_least > rest.len(), "it was given {} bytes, and asks for {at_least}", rest.len());
                return Err(reader.cut_short(rest));
            }
        }
    }
}

/// The memory of a guest, block by block, as a stream makes it.
pub(crate) struct Memory {
    pub(crate) blocks: Vec<Block>,
    pub(crate) bytes: Vec<Vec<u8>>,
    pub(crate) normal: u64,
    pub(crate) zero: u64,
}

impl Memory {
    pub(crate) fn new() -> Self {
        Memory { blocks: Vec::new(), bytes: Vec::new(), normal: 0, zero: 0 }
    }

    pub(crate) fn apply(&mut self, record: &Record<'_>) {
        match record {
            Record::Block(block) => {
                self.blocks.push(block.clone());
                self.bytes.push(vec![0; block.used_bytes as usize]);
            }
            Record::Page(page) => {
                let place = &mut self.bytes[page.block][page.offset as usize..][..PAGE_BYTES];
                match page.content {
                    PageContent::Fill(byte) => {
                        self.zero += 1;
                        place.fill(byte);
                    }
                    PageContent::Normal(bytes) => {
                        self.normal += 1;
                        place.copy_from_slice(bytes);
                    }
                    other => panic!("no sample has {other:?}"),
                }
            }
            _ => {}
        }
    }

    /// Compares with the manifest's list of blocks.
    pub(crate) fn check(&self, facts: &Value) {
        let facts = facts.as_array().unwrap();
        assert_eq!(self.blocks.len(), facts.len());
        for ((block, bytes), facts) in self.blocks.iter().zip(&self.bytes).zip(facts) {
            assert_eq!(&*block.name, facts["name"].as_str().unwrap());
            assert_eq!(block.used_bytes, facts["used_length"].as_u64().unwrap());
            let pages = bytes.chunks_exact(PAGE_BYTES);
            let not_zero = pages.filter(|page| page.iter().any(|&byte| byte != 0)).count();
            assert_eq!(not_zero as u64, facts["nonzero_pages"].as_u64().unwrap(), "{}", block.name);
            let mut crc = flate2::Crc::new();
            crc.update(bytes);
            assert_eq!(format!("{:08x}", crc.sum()), facts["crc32"].as_str().unwrap(), "{}", block.name);
        }
    }
}
