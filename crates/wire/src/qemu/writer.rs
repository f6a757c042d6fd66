//! The writer of a stream, byte for byte as QEMU writes it. It can't fail: what it is given can be written.
use super::fields::put_name;
use super::page::{CONTINUE, EOS, MEM_SIZE, MULTIFD_FLUSH, PAGE, XBZRLE, XBZRLE_ENCODING, ZERO, put_page_header};
use super::record::{END, EOF, FOOTER, FULL, PART, START, VMDESC};
use super::stream::{MAGIC, RAM, RAM_VERSION, VERSION};
use super::{Block, Command, Configuration, Geometry, Mapped, Name};
use crate::PAGE_BYTES;

/// Bytes that belong at a place of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The place, counted from the beginning of the file.
    pub position: u64,
    /// What belongs there. Never empty.
    pub bytes: Vec<u8>,
}

/// Puts records one after the other, into memory: take them out with [`StreamWriter::take`] as often as you like.
///
/// The caller sees to the order of the records (section 1.5), to offsets being within their blocks, and to lengths
/// adding up. The writer knows what QEMU leaves out: the block of a page record is named only when it is another than
/// before.
#[derive(Debug, Clone)]
pub struct StreamWriter {
    pieces: Vec<Piece>,
    position: u64,
    ram_section: u32,
    named: Option<Name>,
}

impl StreamWriter {
    /// A writer of a stream that begins at `base` of its file, and whose RAM section has this number. Any number that
    /// no other section of the stream has will do.
    pub fn new(base: u64, ram_section: u32) -> Self {
        StreamWriter { pieces: Vec::new(), position: base, ram_section, named: None }
    }

    /// Where the next record begins.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// How many bytes wait to be taken.
    pub fn buffered(&self) -> usize {
        self.pieces.iter().map(|piece| piece.bytes.len()).sum()
    }

    /// What has been written since the last time: one piece, and one more for each block of a mapped-ram file that was
    /// jumped over.
    pub fn take(&mut self) -> Vec<Piece> {
        std::mem::take(&mut self.pieces)
    }

    /// The same for a stream that is all in one piece.
    ///
    /// # Panics
    /// When a block of a mapped-ram file was jumped over.
    pub fn take_bytes(&mut self) -> Vec<u8> {
        let mut pieces = self.take();
        assert!(pieces.len() <= 1, "a stream with gaps was taken as one without");
        pieces.pop().map_or(Vec::new(), |piece| piece.bytes)
    }

    /// Magic and version.
    pub fn header(&mut self) -> &mut Self {
        self.put(|out| {
            out.extend(MAGIC);
            out.extend(VERSION.to_be_bytes());
        })
    }

    /// The configuration, directly behind the header.
    pub fn configuration(&mut self, configuration: &Configuration) -> &mut Self {
        self.put(|out| configuration.write(out))
    }

    /// A command. What [`Command::Packaged`] announces is the caller's to append.
    ///
    /// # Panics
    /// When a [`RamDiscard`](super::RamDiscard) has more ranges than its length can say: 4000 always fit.
    pub fn command(&mut self, command: &Command) -> &mut Self {
        self.put(|out| command.write(out))
    }

    /// The beginning of the RAM section. The blocks, of `total` bytes together (a multiple of 4096), follow, then
    /// [`StreamWriter::end_of_section`].
    pub fn ram_start(&mut self, total: u64) -> &mut Self {
        let section = self.ram_section;
        let name = Name::new(RAM).expect("it is short");
        self.put(|out| {
            put_section(out, START, section, &name, 0, RAM_VERSION);
            out.extend((total | MEM_SIZE).to_be_bytes());
        })
    }

    /// An entry of the list of blocks. When it has pages in the file, the writer goes on behind them.
    pub fn block(&mut self, block: &Block) -> &mut Self {
        self.put(|out| block.write(out));
        if let Some(geometry) = block.geometry() {
            self.position = geometry.pages(block.used_bytes).end;
        }
        self
    }

    /// The same for a mapped-ram file, with bitmap and pages where stock QEMU would place them.
    pub fn mapped_block(&mut self, name: &Name, used_bytes: u64, gpa: Option<u64>) -> Block {
        let no_place = Mapped::At(Geometry { bitmap_offset: 0, pages_offset: 0 });
        let mut block = Block { name: name.clone(), used_bytes, gpa, mapped: Some(no_place) };
        block.mapped = Some(Mapped::At(Geometry::stock(self.position + block.entry_bytes(), used_bytes)));
        self.block(&block);
        block
    }

    /// The beginning of a part with pages, before the guest is stopped.
    pub fn part(&mut self) -> &mut Self {
        let section = self.ram_section;
        self.put(|out| put_id(out, PART, section))
    }

    /// The beginning of the last part.
    pub fn end(&mut self) -> &mut Self {
        let section = self.ram_section;
        self.put(|out| put_id(out, END, section))
    }

    /// A page of zeros at `offset` of the block.
    pub fn zero_page(&mut self, block: &Name, offset: u64) -> &mut Self {
        self.page_record(ZERO, block, offset).put(|out| out.push(0))
    }

    /// A page at `offset` of the block.
    pub fn page(&mut self, block: &Name, offset: u64, page: &[u8; PAGE_BYTES]) -> &mut Self {
        self.page_header(block, offset).raw(page)
    }

    /// The record of a page without the page itself: its 4096 bytes must follow, by [`StreamWriter::raw`].
    pub fn page_header(&mut self, block: &Name, offset: u64) -> &mut Self {
        self.page_record(PAGE, block, offset)
    }

    /// What has changed in a page since its last record: a difference as [`xbzrle`](super::xbzrle) reads it.
    ///
    /// # Panics
    /// When it is longer than the length field can say. A page's is never longer than the page.
    pub fn xbzrle_page(&mut self, block: &Name, offset: u64, delta: &[u8]) -> &mut Self {
        let length = u16::try_from(delta.len()).expect("a difference is not longer than its page");
        self.page_record(XBZRLE, block, offset).put(|out| {
            out.push(XBZRLE_ENCODING);
            out.extend(length.to_be_bytes());
            out.extend(delta);
        })
    }

    fn page_record(&mut self, kind: u64, block: &Name, offset: u64) -> &mut Self {
        if self.named.as_ref() == Some(block) {
            return self.put(|out| put_page_header(out, kind | CONTINUE, offset, None));
        }
        self.named = Some(block.clone());
        self.put(|out| put_page_header(out, kind, offset, Some(block)))
    }

    /// The main stream's half of a barrier with the multifd channels (section 6.4).
    pub fn multifd_flush(&mut self) -> &mut Self {
        self.put(|out| out.extend(MULTIFD_FLUSH.to_be_bytes()))
    }

    /// The end of what began with [`ram_start`](StreamWriter::ram_start), [`part`](StreamWriter::part) or
    /// [`end`](StreamWriter::end), and its footer.
    pub fn end_of_section(&mut self) -> &mut Self {
        let section = self.ram_section;
        self.put(|out| {
            out.extend(EOS.to_be_bytes());
            put_id(out, FOOTER, section);
        })
    }

    /// A whole section with its footer: the state of a device.
    pub fn full(&mut self, section: u32, name: &Name, instance: u32, version: u32, body: &[u8]) -> &mut Self {
        self.put(|out| {
            put_section(out, FULL, section, name, instance, version);
            out.extend(body);
            put_id(out, FOOTER, section);
        })
    }

    /// Bytes as they are: a tail that came from elsewhere, an early section, the rest of a page.
    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        if bytes.is_empty() { self } else { self.put(|out| out.extend(bytes)) }
    }

    /// The end of the sections.
    pub fn eof(&mut self) -> &mut Self {
        self.put(|out| out.push(EOF))
    }

    /// The trailer, a JSON text: [`describe`](super::describe).
    ///
    /// # Panics
    /// When it is 4 GiB long.
    pub fn vmdesc(&mut self, json: &str) -> &mut Self {
        let length = u32::try_from(json.len()).expect("a description is far shorter than 4 GiB");
        self.put(|out| {
            put_id(out, VMDESC, length);
            out.extend(json.as_bytes());
        })
    }

    /// Appends to the piece that ends here, or begins a new one.
    fn put(&mut self, write: impl FnOnce(&mut Vec<u8>)) -> &mut Self {
        let ends_here = |piece: &Piece| piece.position + piece.bytes.len() as u64 == self.position;
        if !self.pieces.last().is_some_and(ends_here) {
            self.pieces.push(Piece { position: self.position, bytes: Vec::new() });
        }
        let piece = self.pieces.last_mut().expect("one was pushed if there was none");
        write(&mut piece.bytes);
        self.position = piece.position + piece.bytes.len() as u64;
        self
    }
}

fn put_id(out: &mut Vec<u8>, kind: u8, number: u32) {
    out.push(kind);
    out.extend(number.to_be_bytes());
}

fn put_section(out: &mut Vec<u8>, kind: u8, section: u32, name: &Name, instance: u32, version: u32) {
    put_id(out, kind, section);
    put_name(out, name);
    out.extend(instance.to_be_bytes());
    out.extend(version.to_be_bytes());
}
