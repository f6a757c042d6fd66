//! libvirt's save images: what stands in a file before QEMU's stream. `virsh save` writes them, `virsh restore` loads
//! them.
//!
//! | offset | bytes | field |
//! | ---: | ---: | --- |
//! | 0 | 16 | `LibvirtQemudSave`, or `LibvirtQemudPart` while it is being written |
//! | 16 | 4 | version, 1 or 2 |
//! | 20 | 4 | length of the definition, below |
//! | 24 | 4 | 1 if the domain ran, else 0 |
//! | 28 | 4 | what the stream is in: [`Encoding`] |
//! | 32 | 4 | where in the definition the cookie begins; 0: there is none |
//! | 36 | 56 | unused, zero |
//! | 92 | … | the definition: XML, a zero byte, the cookie, a zero byte, zeros |
//! | … | … | QEMU's stream |
//!
//! Numbers have the byte order of the host that wrote them. Places in the stream count from the beginning of the file.
use crate::Error;
use crate::reader::Reader;

/// Size of the header in bytes.
pub const HEADER_BYTES: usize = 92;
/// Bytes of a magic.
pub const MAGIC_BYTES: usize = 16;
/// The first bytes of an image that is complete.
pub const MAGIC: [u8; MAGIC_BYTES] = *b"LibvirtQemudSave";
/// The same as long as it is not.
pub const MAGIC_PARTIAL: [u8; MAGIC_BYTES] = *b"LibvirtQemudPart";
/// Room behind a definition, so that it can be edited in place.
pub const PADDING_BYTES: usize = 64 << 10;
/// The most that a definition may take with its padding. Those of the largest domains have some hundred KiB.
pub const MAX_DEFINITION_BYTES: u32 = 16 << 20;

const VERSION: u32 = 2;

/// What the stream is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// As QEMU wrote it.
    Raw,
    /// By gzip.
    Gzip,
    /// By bzip2.
    Bzip2,
    /// By xz.
    Xz,
    /// By lzop.
    Lzop,
    /// By zstd.
    Zstd,
    /// A mapped-ram file, since libvirt 11.2.
    Sparse,
}

/// Their numbers in the header.
const ENCODINGS: [Encoding; 7] =
    [Encoding::Raw, Encoding::Gzip, Encoding::Bzip2, Encoding::Xz, Encoding::Lzop, Encoding::Zstd, Encoding::Sparse];

impl Encoding {
    /// libvirt's name of it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Gzip => "gzip",
            Self::Bzip2 => "bzip2",
            Self::Xz => "xz",
            Self::Lzop => "lzop",
            Self::Zstd => "zstd",
            Self::Sparse => "sparse",
        }
    }

    fn number(self) -> u32 {
        ENCODINGS.iter().position(|encoding| *encoding == self).map_or(0, |number| number as u32)
    }
}

/// The header of an image that is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Whether the domain ran, and so whether it is to run.
    pub ran: bool,
    /// What the stream is in.
    pub encoding: Encoding,
    definition_bytes: u32,
    cookie_offset: u32,
}

impl Header {
    /// Whether a file that begins so is an image, complete or not.
    pub fn is_of_image(first: &[u8]) -> bool {
        first.starts_with(&MAGIC) || first.starts_with(&MAGIC_PARTIAL)
    }

    /// # Errors
    /// An image that is not complete, of a later version, or none.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, Error> {
        let swapped = {
            let mut version = Reader::new(&bytes[MAGIC_BYTES..], MAGIC_BYTES);
            version.u32("image version")? > VERSION
        };
        let mut reader = Reader::new(bytes, 0);
        let magic: [u8; MAGIC_BYTES] = reader.array("image magic")?;
        if magic == MAGIC_PARTIAL {
            let why = "libvirt has not finished writing it";
            return Err(Error::Refused { field: "image magic", name: text(&magic), offset: 0, why });
        }
        if magic != MAGIC {
            let why = "not that of a save image of libvirt's";
            return Err(Error::Refused { field: "image magic", name: text(&magic), offset: 0, why });
        }
        let mut number = |field| reader.u32(field).map(|number| if swapped { number.swap_bytes() } else { number });
        let version = number("image version")?;
        let invalid = |field, offset, value: u32, why| Error::Invalid { field, offset, value: value.into(), why };
        if !(1..=VERSION).contains(&version) {
            return Err(invalid("image version", 16, version, "only versions 1 and 2 are known"));
        }
        let definition_bytes = number("definition length")?;
        if !(1..=MAX_DEFINITION_BYTES).contains(&definition_bytes) {
            return Err(invalid("definition length", 20, definition_bytes, "must be from 1 byte to 16 MiB"));
        }
        let ran = number("running")?;
        if ran > 1 {
            return Err(invalid("running", 24, ran, "must be 0 or 1"));
        }
        let encoding = number("image format")?;
        let Some(&encoding) = ENCODINGS.get(encoding as usize) else {
            return Err(invalid("image format", 28, encoding, "a format of a later libvirt"));
        };
        let cookie_offset = number("cookie offset")?;
        if cookie_offset >= definition_bytes {
            return Err(invalid("cookie offset", 32, cookie_offset, "beyond the end of the definition"));
        }
        reader.reserved::<56>("unused part of the header")?;
        Ok(Self { ran: ran == 1, encoding, definition_bytes, cookie_offset })
    }

    /// Bytes that follow the header before the stream.
    pub fn definition_bytes(&self) -> usize {
        self.definition_bytes as usize
    }

    /// Bytes before the stream.
    pub fn bytes(&self) -> u64 {
        HEADER_BYTES as u64 + u64::from(self.definition_bytes)
    }
}

/// A domain as libvirt restores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Definition {
    xml: String,
    cookie: Option<String>,
    name: String,
}

impl Definition {
    /// `xml`: what `virsh dumpxml --migratable --security-info` says. `cookie`: what libvirt has to know beside.
    ///
    /// # Errors
    /// No XML of a domain; too long.
    pub fn new(xml: String, cookie: Option<String>) -> Result<Self, Error> {
        let zero = |text: &str| text.bytes().position(|byte| byte == 0);
        if let Some(at) = zero(&xml).or(cookie.as_deref().and_then(zero)) {
            return Err(Error::Invalid { field: "definition", offset: at, value: 0, why: "a zero byte" });
        }
        let bytes = xml.len() + cookie.as_ref().map_or(0, |cookie| cookie.len() + 1) + 1 + PADDING_BYTES;
        if bytes > MAX_DEFINITION_BYTES as usize {
            let why = "longer than any domain's";
            return Err(Error::Invalid { field: "definition", offset: 0, value: bytes as u64, why });
        }
        let name = domain_name(&xml)?;
        Ok(Self { xml, cookie, name })
    }

    /// Of the bytes that follow the header: [`Header::definition_bytes`] of them.
    ///
    /// # Errors
    /// They are no definition.
    pub fn decode(header: &Header, bytes: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader::new(bytes, HEADER_BYTES);
        let all = reader.bytes("definition", header.definition_bytes())?;
        let cookie_offset = header.cookie_offset as usize;
        let (xml, cookie) = match cookie_offset {
            0 => (all, None),
            offset => (&all[..offset], Some(&all[offset..])),
        };
        let xml = until_zero("definition", HEADER_BYTES, xml)?;
        let cookie = cookie.map(|cookie| until_zero("cookie", HEADER_BYTES + cookie_offset, cookie)).transpose()?;
        Ok(Self { xml: xml.to_owned(), cookie: cookie.map(str::to_owned), name: domain_name(xml)? })
    }

    /// All that stands before the stream in an image that is complete: header, definition, and room to edit it.
    pub fn encode(&self, ran: bool, encoding: Encoding) -> Vec<u8> {
        let cookie = self.cookie.as_deref();
        let mut definition = [self.xml.as_bytes(), &[0]].concat();
        let cookie_offset = cookie.map_or(0, |_| definition.len() as u32);
        if let Some(cookie) = cookie {
            definition.extend([cookie.as_bytes(), &[0]].concat());
        }
        definition.resize(definition.len() + PADDING_BYTES, 0);
        let numbers = [VERSION, definition.len() as u32, ran.into(), encoding.number(), cookie_offset];
        let mut out = MAGIC.to_vec();
        out.extend(numbers.into_iter().flat_map(u32::to_le_bytes));
        out.resize(HEADER_BYTES, 0);
        out.extend(definition);
        out
    }

    /// The domain's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its XML.
    pub fn xml(&self) -> &str {
        &self.xml
    }

    /// What libvirt wants to know beside the XML.
    pub fn cookie(&self) -> Option<&str> {
        self.cookie.as_deref()
    }

    /// The files and devices that its disks are in, those below overlays included as far as it names them; none if a
    /// disk is known by another name than a path, such as that of a volume.
    pub fn disk_paths(&self) -> Option<Vec<String>> {
        let document = roxmltree::Document::parse(&self.xml).ok()?;
        let devices = document.root_element().children().filter(|child| child.has_tag_name("devices"));
        let disks = devices.flat_map(|devices| devices.children().filter(|child| child.has_tag_name("disk")));
        let mut paths = Vec::new();
        for source in disks.flat_map(|disk| disk.descendants().filter(|node| node.has_tag_name("source"))) {
            // What it is of says its kind: the disk, or a file below it.
            match source.parent().and_then(|place| place.attribute("type")) {
                None | Some("file" | "block") => {
                    paths.extend(source.attribute("file").or(source.attribute("dev")).map(str::to_owned));
                }
                // It is no file of a host.
                Some("network" | "nvme" | "vhostuser" | "vhostvdpa") => {}
                Some(_) => return None,
            }
        }
        Some(paths)
    }

    /// Whether a guest saved with one can be loaded with the other: all but the memory that a balloon has left it.
    /// `files`: whether its disks must be in the same files.
    pub fn is_same_machine(&self, other: &Self, files: DiskFiles) -> bool {
        let without = |xml: &str| -> Vec<String> {
            let xml = match files {
                DiskFiles::Same => xml.to_owned(),
                DiskFiles::Any => without_disk_files(xml),
            };
            let counts = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with("<currentMemory ");
            xml.lines().filter(counts).map(str::to_owned).collect()
        };
        without(&self.xml) == without(&other.xml) && self.cookie == other.cookie
    }
}

/// What is asked of the files that the disks of two definitions are in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskFiles {
    /// They are the same.
    Same,
    /// The disks are the same, whatever files they are in.
    Any,
}

/// A definition without the parts of its disks that say what they are in.
fn without_disk_files(xml: &str) -> String {
    let Ok(document) = roxmltree::Document::parse(xml) else { return xml.to_owned() };
    let disks = document.descendants().filter(|node| node.has_tag_name("disk"));
    let of_files = |node: &roxmltree::Node<'_, '_>| {
        ["driver", "source", "backingStore"].iter().any(|name| node.has_tag_name(*name))
    };
    let parts = disks.flat_map(|disk| disk.children().filter(of_files).map(|part| part.range()));
    let (mut rest, mut end) = (String::new(), 0);
    for part in parts {
        rest.push_str(&xml[end..part.start]);
        end = part.end;
    }
    rest + &xml[end..]
}

/// A text that a zero byte ends.
fn until_zero<'a>(field: &'static str, offset: usize, bytes: &'a [u8]) -> Result<&'a str, Error> {
    let Some(end) = bytes.iter().position(|&byte| byte == 0) else {
        let why = "no zero byte ends it";
        return Err(Error::Invalid { field, offset, value: bytes.len() as u64, why });
    };
    std::str::from_utf8(&bytes[..end])
        .map_err(|error| Error::Text { field, offset: offset.saturating_add(error.valid_up_to()) })
}

/// The domain that an XML defines.
fn domain_name(xml: &str) -> Result<String, Error> {
    let refused = |why| Error::Refused {
        field: "definition",
        name: text(xml.as_bytes().get(..MAGIC_BYTES).unwrap_or(xml.as_bytes())),
        offset: HEADER_BYTES,
        why,
    };
    let document = roxmltree::Document::parse(xml).map_err(|_| refused("it is no XML"))?;
    let domain = document.root_element();
    let name = domain.children().find(|child| child.has_tag_name("name")).and_then(|name| name.text());
    match name.map(str::trim) {
        Some(name) if domain.has_tag_name("domain") && !name.is_empty() && !name.contains(char::is_control) => {
            Ok(name.to_owned())
        }
        _ => Err(refused("it defines no domain with a name")),
    }
}

/// Bytes as messages show them.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_definition_names_the_files_of_its_disks() {
        let paths = |disks: &str| {
            let xml = format!(
                "<domain><name>g</name><devices>{disks}<interface><source dev='e'/></interface></devices></domain>"
            );
            Definition::new(xml, None).unwrap().disk_paths()
        };
        let chain = "<disk type='file'><source file='/a'/><backingStore type='block'><source dev='/dev/b'/>\
                     <backingStore/></backingStore></disk>";
        assert_eq!(paths(chain), Some(vec!["/a".to_owned(), "/dev/b".to_owned()]));
        assert_eq!(paths("<disk type='file' device='cdrom'/>"), Some(Vec::new()), "an empty drive");
        assert_eq!(paths("<disk type='network'><source protocol='nbd' name='x'/></disk>"), Some(Vec::new()));
        assert_eq!(paths("<disk type='volume'><source pool='p' volume='v'/></disk>"), None);
    }

    #[test]
    fn a_machine_may_have_its_disks_in_other_files() {
        let domain = |memory: u32, disk: &str| {
            let disk = format!("<disk type='file'>\n{disk}\n<target dev='vda'/>\n</disk>");
            let xml = format!(
                "<domain>\n<name>g</name>\n<currentMemory unit='KiB'>{memory}</currentMemory>\n<devices>\n{disk}\n\
                 <rng/></devices></domain>"
            );
            Definition::new(xml, None).unwrap()
        };
        let raw = domain(1, "<driver type='raw'/>\n<source file='/a'/>");
        let overlay = "<driver type='qcow2'/>\n<source file='/b'/>\n<backingStore type='file'>\n<source file='/a'/>\n\
                       </backingStore>";
        let (overlay, plugged) = (domain(2, overlay), domain(1, "</disk><disk><target dev='vdb'/>"));
        assert!(raw.is_same_machine(&domain(2, "<driver type='raw'/>\n<source file='/a'/>"), DiskFiles::Same));
        assert!(!raw.is_same_machine(&overlay, DiskFiles::Same));
        assert!(raw.is_same_machine(&overlay, DiskFiles::Any));
        assert!(!raw.is_same_machine(&plugged, DiskFiles::Any), "another disk");
    }
}
