//! The lines as types, and the checks on what a guest process says of itself.
use std::os::fd::OwnedFd;

use rustix::fs::{FileType, Stat, fstat};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use transship_lines::{Line, MAX_FDS};
use transship_memory::{Area, PAGE_BYTES, PageNumber};
use transship_wire::{GuestDescription, RegionDescription};

/// The version of the protocol that this is.
pub const VERSION: u32 = 1;

/// The optional call by which writes come to wait for transship.
pub(super) const PROTECT: &str = "protect";
/// The optional call by which pages that are not there come to be waited for.
pub(super) const MISSING: &str = "missing";

const MAX_NAME_BYTES: usize = 255;
/// User addresses end below this on every 64-bit Linux.
const MAX_ADDRESS: u64 = 1 << 56;

/// What the client asks for. Fields that are not known are ignored: later versions may add some.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) id: u64,
    pub(super) call: String,
}

/// What the server answers: one of `ok` and `error`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    pub(super) id: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ok: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
}

impl Answer {
    pub(super) fn parse(line: &Line) -> Result<Self, String> {
        let answer: Self =
            serde_json::from_slice(&line.text).map_err(|e| format!("it sent something other than an answer: {e}"))?;
        if answer.ok.is_some() == answer.error.is_some() {
            return Err(format!("its answer {} does not have exactly one of \"ok\" and \"error\"", answer.id));
        }
        Ok(answer)
    }
}

/// `{"bytes": N}`: how much device state was written or read.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StateBytes {
    pub(super) bytes: u64,
}

/// The answer to `check`: what a guest that can check itself found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckResult {
    /// Pages looked at.
    pub pages: u64,
    /// Of these, pages that did not hold what they must hold, now or when the guest arrived here.
    pub wrong: u64,
    /// Pages written by the guest in all its life.
    pub writes: u64,
}

impl std::fmt::Display for CheckResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "checked {} pages: {} wrong", self.pages, self.wrong)
    }
}

/// The answer to `describe`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Description {
    pub(super) version: u32,
    pub(super) machine: String,
    pub(super) running: bool,
    pub(super) waiting: bool,
    pub(super) pid: u32,
    pub(super) regions: Vec<RegionEntry>,
    /// Names of calls that are optional and answered here.
    #[serde(default)]
    pub(super) offers: Vec<String>,
}

/// A region as it is described; its file travels with the line.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RegionEntry {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) file_offset: u64,
    pub(super) address: u64,
}

/// A region whose numbers were checked against each other and against its file.
#[derive(Debug)]
pub(super) struct CheckedRegion {
    pub(super) entry: RegionEntry,
    pub(super) file: OwnedFd,
    pub(super) device: u64,
    pub(super) inode: u64,
}

/// A description whose every field was checked.
#[derive(Debug)]
pub(super) struct CheckedDescription {
    pub(super) machine: String,
    pub(super) running: bool,
    pub(super) waiting: bool,
    pub(super) regions: Vec<CheckedRegion>,
    pub(super) offers: Vec<String>,
}

impl CheckedDescription {
    pub(super) fn new(description: Description, fds: Vec<OwnedFd>) -> Result<Self, String> {
        let Description { version, machine, running, waiting, regions, offers, pid: _ } = description;
        if version != VERSION {
            return Err(format!(
                "it speaks version {version} of the hand-off protocol, but this transship speaks version {VERSION}"
            ));
        }
        check_text("machine", &machine)?;
        if running && waiting {
            return Err("it reports that it runs and that it waits for a guest".into());
        }
        if regions.is_empty() || regions.len() > MAX_FDS {
            return Err(format!("it has {} regions; 1 to {MAX_FDS} are possible", regions.len()));
        }
        if fds.len() != regions.len() {
            return Err(format!("{} file descriptors came with its {} regions", fds.len(), regions.len()));
        }
        let regions: Vec<_> = regions.into_iter().zip(fds).map(CheckedRegion::new).collect::<Result<_, _>>()?;
        check_no_two(&regions)?;
        Ok(Self { machine, running, waiting, regions, offers })
    }

    /// Where the guest process maps its regions.
    pub(super) fn areas(&self) -> Vec<Area> {
        let area = |(region, r): (usize, &CheckedRegion)| Area {
            region,
            first_page: PageNumber::FIRST,
            address: r.entry.address,
            bytes: r.entry.bytes,
        };
        self.regions.iter().enumerate().map(area).collect()
    }

    pub(super) fn guest(&self) -> GuestDescription {
        let region = |r: &CheckedRegion| RegionDescription { name: r.entry.name.clone(), bytes: r.entry.bytes };
        GuestDescription { machine: self.machine.clone(), regions: self.regions.iter().map(region).collect() }
    }
}

impl CheckedRegion {
    fn new((entry, file): (RegionEntry, OwnedFd)) -> Result<Self, String> {
        check_text("region name", &entry.name)?;
        let name = &entry.name;
        let page = PAGE_BYTES as u64;
        for (field, value) in [("bytes", entry.bytes), ("file_offset", entry.file_offset), ("address", entry.address)] {
            if value % page != 0 {
                return Err(format!("region {name:?}: {field} is {value}, not a multiple of {page}"));
            }
        }
        if entry.bytes == 0 {
            return Err(format!("region {name:?}: bytes is 0"));
        }
        if entry.address.checked_add(entry.bytes).is_none_or(|end| end > MAX_ADDRESS) {
            let RegionEntry { address, bytes, .. } = entry;
            return Err(format!("region {name:?}: {bytes} bytes at address {address:#x} are not user memory"));
        }
        let stat = fstat(&file).map_err(|e| format!("region {name:?}: can't inspect its file: {e}"))?;
        check_file(&entry, &stat)?;
        Ok(Self { entry, file, device: stat.st_dev, inode: stat.st_ino })
    }

    fn file_end(&self) -> u64 {
        self.entry.file_offset + self.entry.bytes
    }

    fn address_end(&self) -> u64 {
        self.entry.address + self.entry.bytes
    }
}

fn check_file(entry: &RegionEntry, stat: &Stat) -> Result<(), String> {
    let name = &entry.name;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(format!("region {name:?}: its file descriptor is not a memory file"));
    }
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    if entry.file_offset.checked_add(entry.bytes).is_none_or(|end| end > size) {
        let RegionEntry { bytes, file_offset, .. } = entry;
        return Err(format!(
            "region {name:?}: it needs {bytes} bytes from offset {file_offset}, but its file has {size}"
        ));
    }
    Ok(())
}

fn check_text(field: &str, text: &str) -> Result<(), String> {
    if text.is_empty() || text.len() > MAX_NAME_BYTES || text.chars().any(char::is_control) {
        return Err(format!("{field} {:?} is not 1 to {MAX_NAME_BYTES} bytes of printable text", one_line(text)));
    }
    Ok(())
}

/// No name, no byte of a file and no address may belong to two regions.
fn check_no_two(regions: &[CheckedRegion]) -> Result<(), String> {
    for (i, a) in regions.iter().enumerate() {
        for b in &regions[..i] {
            let (x, y) = (&a.entry, &b.entry);
            let same_file = (a.device, a.inode) == (b.device, b.inode);
            let what = if x.name == y.name {
                "have the same name"
            } else if x.address < b.address_end() && y.address < a.address_end() {
                "overlap in its address space"
            } else if same_file && x.file_offset < b.file_end() && y.file_offset < a.file_end() {
                "overlap in their file"
            } else {
                continue;
            };
            return Err(format!("regions {:?} and {:?} {what}", y.name, x.name));
        }
    }
    Ok(())
}

/// Words of the other side, fit for a message: one line, bounded, nothing that a terminal would obey.
pub(super) fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(1000).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn file(bytes: u64) -> OwnedFd {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, bytes).unwrap();
        fd
    }

    fn two_regions() -> Description {
        let region = |name: &str, address| RegionEntry { name: name.into(), bytes: MIB, file_offset: 0, address };
        Description {
            version: VERSION,
            machine: "test".into(),
            running: true,
            waiting: false,
            pid: 1,
            regions: vec![region("a", MIB), region("b", 2 * MIB)],
            offers: vec![],
        }
    }

    #[test]
    fn a_good_description_passes() {
        let checked = CheckedDescription::new(two_regions(), vec![file(MIB), file(MIB)]).unwrap();
        let names: Vec<_> = checked.guest().regions.into_iter().map(|r| (r.name, r.bytes)).collect();
        assert_eq!(names, [("a".into(), MIB), ("b".into(), MIB)]);
    }

    #[test]
    fn each_bad_field_is_named() {
        type Break = fn(&mut Description);
        let cases: [(&str, Break); 14] = [
            ("version 2", |d| d.version = 2),
            ("machine", |d| d.machine.clear()),
            ("machine", |d| d.machine = "\u{1b}[2J".into()),
            ("runs and", |d| d.waiting = true),
            ("0 regions", |d| d.regions.clear()),
            ("2 file descriptors came with its 1", |d| d.regions.truncate(1)),
            ("name", |d| d.regions[0].name = "x".repeat(256)),
            ("same name", |d| d.regions[1].name = "a".into()),
            ("bytes is 0", |d| d.regions[0].bytes = 0),
            ("bytes is 4097", |d| d.regions[0].bytes = 4097),
            ("file_offset is 1", |d| d.regions[0].file_offset = 1),
            ("its file has 1048576", |d| d.regions[0].file_offset = u64::MAX - 4095),
            ("not user memory", |d| d.regions[0].address = u64::MAX - 4095),
            ("overlap in its address", |d| d.regions[1].address = MIB + 4096),
        ];
        for (expected, spoil) in cases {
            let mut description = two_regions();
            spoil(&mut description);
            let error = CheckedDescription::new(description, vec![file(MIB), file(MIB)]).unwrap_err();
            assert!(error.contains(expected), "{error:?} should say {expected:?}");
        }
    }

    #[test]
    fn files_are_checked() {
        let one = file(MIB);
        let same = vec![one.try_clone().unwrap(), one];
        assert!(CheckedDescription::new(two_regions(), same).unwrap_err().contains("overlap in their file"));
        let short = vec![file(MIB), file(MIB - 4096)];
        assert!(CheckedDescription::new(two_regions(), short).unwrap_err().contains("its file has 1044480"));
        let device = vec![file(MIB), std::fs::File::open("/dev/zero").unwrap().into()];
        assert!(CheckedDescription::new(two_regions(), device).unwrap_err().contains("not a memory file"));
        assert!(CheckedDescription::new(two_regions(), vec![file(MIB)]).unwrap_err().contains("1 file descriptors"));
    }

    #[test]
    fn an_answer_is_one_of_two() {
        let parse = |text: &str| Answer::parse(&Line { text: text.into(), fds: vec![] });
        assert!(parse(r#"{"id":1,"ok":{}}"#).is_ok());
        assert!(parse(r#"{"id":1,"error":"no"}"#).is_ok());
        for bad in [r#"{"id":1}"#, r#"{"id":1,"ok":{},"error":"no"}"#, r#"{"ok":{}}"#, "", "[]", r#"{"id":-1,"ok":{}}"#]
        {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
