//! A snapshot file as anybody would read it who knows the format and nothing of us.
use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::Path,
};

use rustix::fs::IFlags;
use transship_wire::{
    libvirt,
    qemu::{Configuration, GlobalState, PageContent, Record, Step, StreamReader, Tail},
};

/// Nothing can remove the files of an image before that, not even the end of a test.
fn let_go(image: &Path) {
    for entry in fs::read_dir(image).unwrap() {
        let file = File::open(entry.unwrap().path()).unwrap();
        // A file system that has no flags has set none.
        if let Ok(flags) = rustix::fs::ioctl_getflags(&file) {
            rustix::fs::ioctl_setflags(&file, flags - IFlags::IMMUTABLE).unwrap();
        }
    }
}

/// What is in the file.
pub struct Snapshot {
    pub configuration: Configuration,
    /// By block: its name and its bytes.
    pub names: Vec<String>,
    pub memory: Vec<Vec<u8>>,
    /// Pages whose bit is on, or that came with content.
    pub stored: u64,
    pub tail: Vec<u8>,
}

impl Snapshot {
    /// # Panics
    /// Whatever breaks a rule of the format.
    pub fn read(path: &Path, offset: u64) -> Self {
        let file = File::open(path).unwrap();
        let bytes = file.metadata().unwrap().len();
        let mut reader = StreamReader::at(offset).within(bytes);
        let mut snapshot = Self {
            configuration: Configuration::new("none".try_into().unwrap()),
            names: Vec::new(),
            memory: Vec::new(),
            stored: 0,
            tail: Vec::new(),
        };
        let mut window = vec![0; 1 << 17];
        loop {
            let at = reader.position();
            let length = (bytes - at).min(window.len() as u64) as usize;
            file.read_exact_at(&mut window[..length], at).unwrap();
            match reader.next(&window[..length]).unwrap() {
                Step::More { at_least } => panic!("{at_least} bytes are wanted at {at:#x} of {bytes:#x}"),
                Step::Done { record, .. } => match record {
                    Record::Configuration(configuration) => snapshot.configuration = configuration,
                    Record::Block(block) => {
                        let memory = match block.geometry() {
                            Some(place) => {
                                let mut bitmap = vec![0; (block.pages().div_ceil(64) * 8) as usize];
                                file.read_exact_at(&mut bitmap, place.bitmap_offset).unwrap();
                                snapshot.pages(&file, place.pages_offset, &bitmap, block.pages())
                            }
                            // Whatever a destination held: the stream says of every page what it is.
                            None => vec![0xee; block.used_bytes as usize],
                        };
                        snapshot.names.push(block.name.to_string());
                        snapshot.memory.push(memory);
                    }
                    Record::Page(page) => {
                        let memory = &mut snapshot.memory[page.block][page.offset as usize..][..4096];
                        match page.content {
                            PageContent::Fill(byte) => memory.fill(byte),
                            PageContent::Normal(bytes) => memory.copy_from_slice(bytes),
                            other => panic!("{other:?}"),
                        }
                    }
                    Record::Tail => {
                        if !snapshot.configuration.mapped_ram {
                            snapshot.count_stored();
                        }
                        break;
                    }
                    _ => {}
                },
            }
        }
        snapshot.tail = vec![0; (bytes - reader.position()) as usize];
        file.read_exact_at(&mut snapshot.tail, reader.position()).unwrap();
        snapshot
    }

    /// An image: a folder with the memory, and everything else beside it.
    pub fn read_folder(path: &Path) -> Self {
        let_go(path);
        let mut snapshot = Self::read(&path.join("state"), 0);
        let names = (0..snapshot.names.len()).map(|number| match number {
            0 => "memory".to_owned(),
            number => format!("memory.{number}"),
        });
        snapshot.memory = names.map(|name| fs::read(path.join(name)).unwrap()).collect();
        snapshot.count_stored();
        snapshot
    }

    /// A save image of libvirt's.
    pub fn read_image(path: &Path) -> Self {
        let mut header = [0; libvirt::HEADER_BYTES];
        File::open(path).unwrap().read_exact_at(&mut header, 0).unwrap();
        Self::read(path, libvirt::Header::decode(&header).unwrap().bytes())
    }

    /// Where the file does not say it: pages that are not zero.
    fn count_stored(&mut self) {
        let not_zero = |page: &&[u8]| *page != &[0; 4096][..page.len()];
        self.stored = self.memory.iter().flat_map(|memory| memory.chunks(4096)).filter(not_zero).count() as u64;
    }

    fn pages(&mut self, file: &File, at: u64, bitmap: &[u8], pages: u64) -> Vec<u8> {
        let mut memory = vec![0; pages as usize * 4096];
        for page in 0..pages as usize {
            if bitmap[page / 8] >> (page % 8) & 1 == 1 {
                self.stored += 1;
                file.read_exact_at(&mut memory[page * 4096..][..4096], at + page as u64 * 4096).unwrap();
            }
        }
        let beyond = (pages as usize..bitmap.len() * 8).filter(|page| bitmap[page / 8] >> (page % 8) & 1 == 1);
        assert_eq!(beyond.count(), 0, "bits of pages that the block does not have");
        memory
    }

    /// Whether the guest is to run when it is loaded.
    pub fn runs(&self) -> bool {
        GlobalState::find(&self.tail, 0).unwrap().is_none_or(|state| state.runs())
    }

    /// The device state of a guest that is no QEMU.
    pub fn opaque(&self) -> &[u8] {
        let tail = Tail::parse(&self.tail, 0).unwrap();
        assert!(tail.is_walked());
        let section = tail.section("transship/device-state").unwrap();
        let body = &self.tail[section.body.clone()];
        let (length, state) = body.split_first_chunk().unwrap();
        assert_eq!(u64::from_be_bytes(*length), state.len() as u64);
        state
    }
}
