//! Save images of libvirt's, read: what stands before the stream, and the stream as QEMU wrote it.
use std::{
    fs::File,
    io::{self, BufReader, Read},
    os::unix::fs::FileExt,
    sync::Arc,
};

use bzip2::bufread::MultiBzDecoder;
use flate2::bufread::MultiGzDecoder;
use lzma_rust2::XzReader;
use transship_secure::{ENCRYPTED_MAGIC, Identities, NotOpened};
use transship_wire::{
    Error as WireError,
    libvirt::{Definition, Encoding, HEADER_BYTES, Header, MAGIC_BYTES, MAGIC_PARTIAL},
    qemu::StreamReader,
};

use super::file::{origin::Origin, target::Target};
use crate::{
    Error,
    stream::{
        records::Input,
        whence::{damaged, wrong},
    },
};

/// What a decompressor may take. libvirt has xz compress at a level for which it takes 9 MiB; the highest takes 65.
const XZ_KIB_MAX: u32 = 128 << 10;
/// The same for zstd, as a power of two: what the program itself decompresses without being asked.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;
/// Read at once to be decompressed.
const CHUNK: usize = 256 << 10;

/// Which file has the key is not known to the file that needs it.
const LOCKED: &str = "it is encrypted; name the file that has its key with --identity";
/// Else another file could be put in place of the one that was meant, by those who have no key at all.
const OPEN: &str =
    "it is not encrypted, though a key for it was given; leave out --identity if that is as it should be";

/// What libvirt has put before a stream.
pub(crate) struct SaveImage {
    pub(crate) header: Header,
    pub(crate) definition: Definition,
}

/// A file whose stream is about to be read.
pub(super) struct Begun {
    pub(super) image: Option<SaveImage>,
    pub(super) input: Input,
    pub(super) reader: StreamReader,
}

/// Finds out what it is, and reads up to where the stream begins.
///
/// # Errors
/// A save image that is damaged or compressed by something that is not known here; the system's own.
pub(super) fn begin(origin: &Origin, identities: Option<&Identities>) -> Result<Begun, Error> {
    let mut bytes = bytes_of(origin)?;
    let failed = |source| Error::Io { what: format!("read {}", origin.name), source };
    let mut first = Vec::new();
    bytes.by_ref().take(MAGIC_BYTES as u64).read_to_end(&mut first).map_err(failed)?;
    if first == ENCRYPTED_MAGIC[..MAGIC_BYTES] {
        let identities = identities.ok_or_else(|| wrong(&origin.name, LOCKED))?;
        let pipe = identities.open(io::Cursor::new(first).chain(bytes)).map_err(|why| not_opened(origin, why))?;
        return Ok(Begun { image: None, input: Input::Encrypted { pipe, position: 0 }, reader: StreamReader::new() });
    }
    if identities.is_some() {
        return Err(wrong(&origin.name, OPEN));
    }
    if !Header::is_of_image(&first) {
        let (input, reader) = match origin.bytes {
            Some(_) => stream_in_file(origin, origin.offset),
            None => {
                (Input::Pipe { pipe: Box::new(io::Cursor::new(first).chain(bytes)), position: 0 }, StreamReader::new())
            }
        };
        return Ok(Begun { image: None, input, reader });
    }
    let rest = (HEADER_BYTES - first.len()) as u64;
    bytes.by_ref().take(rest).read_to_end(&mut first).map_err(failed)?;
    let bad = |error| damaged(&origin.name, error);
    let header = first.as_slice().try_into().map_err(|_| {
        let (field, missing) = ("image header", HEADER_BYTES - first.len());
        bad(WireError::Truncated { field, offset: first.len(), missing })
    })?;
    let header = Header::decode(header).map_err(bad)?;
    let mut definition = Vec::new();
    let length = header.definition_bytes() as u64;
    bytes.by_ref().take(length).read_to_end(&mut definition).map_err(failed)?;
    let definition = Definition::decode(&header, &definition).map_err(bad)?;
    let (input, reader) = match (header.encoding, origin.bytes) {
        (Encoding::Raw | Encoding::Sparse, Some(_)) => stream_in_file(origin, origin.offset + header.bytes()),
        (Encoding::Raw | Encoding::Sparse, None) => {
            let position = header.bytes();
            (Input::Pipe { pipe: bytes, position }, StreamReader::at(position))
        }
        (encoding, _) => {
            let pipe = decompressed(origin, &header, encoding, bytes)?;
            (Input::Decompressed { pipe, position: 0 }, StreamReader::new())
        }
    };
    Ok(Begun { image: Some(SaveImage { header, definition }), input, reader })
}

fn not_opened(origin: &Origin, why: NotOpened) -> Error {
    match why {
        NotOpened::Io(source) => Error::Io { what: format!("read {}", origin.name), source },
        why => wrong(&origin.name, why),
    }
}

fn stream_in_file(origin: &Origin, at: u64) -> (Input, StreamReader) {
    let length = origin.bytes.unwrap_or(0);
    (Input::File(Arc::clone(&origin.file)), StreamReader::at(at).within(length))
}

/// All of it, from where the user says that it begins.
fn bytes_of(origin: &Origin) -> Result<Box<dyn Read + Send>, Error> {
    if origin.bytes.is_some() {
        return Ok(Box::new(FromFile { file: Arc::clone(&origin.file), at: origin.offset }));
    }
    let pipe = origin.file.try_clone();
    Ok(Box::new(pipe.map_err(|source| Error::Io { what: format!("open {}", origin.name), source })?))
}

/// Begins a file that is to be one.
///
/// # Errors
/// The user has named a place within a file; the system's own.
pub(crate) fn put_before(
    target: &mut Target,
    definition: &Definition,
    ran: bool,
    encoding: Encoding,
) -> Result<(), Error> {
    if target.offset() > 0 {
        let why = "virsh restore loads an image only from the beginning of a file; leave out the offset";
        return Err(Error::file(format!("{}: {why}", target.uri)));
    }
    target.put_before(definition.encode(ran, encoding), &MAGIC_PARTIAL)
}

/// A file from a place on; others may read it elsewhere.
struct FromFile {
    file: Arc<File>,
    at: u64,
}

impl Read for FromFile {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.file.read_at(into, self.at).inspect(|count| self.at += *count as u64)
    }
}

fn decompressed(
    origin: &Origin,
    header: &Header,
    encoding: Encoding,
    bytes: Box<dyn Read + Send>,
) -> Result<Box<dyn Read + Send>, Error> {
    let bytes = BufReader::with_capacity(CHUNK, bytes);
    Ok(match encoding {
        Encoding::Gzip => Box::new(MultiGzDecoder::new(bytes)),
        Encoding::Bzip2 => Box::new(MultiBzDecoder::new(bytes)),
        Encoding::Xz => Box::new(XzReader::new_mem_limit(bytes, true, XZ_KIB_MAX)),
        Encoding::Zstd => {
            let failed = |source| Error::Io { what: format!("decompress {}", origin.name), source };
            let mut decoder = zstd::stream::read::Decoder::with_buffer(bytes).map_err(failed)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG_MAX).map_err(failed)?;
            Box::new(decoder)
        }
        Encoding::Raw | Encoding::Sparse => Box::new(bytes),
        Encoding::Lzop => {
            let (name, from) = (&origin.name, origin.offset + header.bytes() + 1);
            let what = format!(
                "its stream is compressed by lzop, which transship does not know; decompress it: \
                 tail -c +{from} {name} | lzop -dc, and name - or fd:0 instead of the file"
            );
            return Err(wrong(name, what));
        }
    })
}
