//! An image: a folder with guest memory as it is, one file a region, which any number of guests can map at once.
//!
//! ```text
//!   DIR/memory         region 0, byte by byte; a hole where nothing was     (memory.1, memory.2 … of more regions)
//!   DIR/state          a mapped-ram file that leaves guest memory out: machine, memory of devices, device sections
//!   DIR/manifest.json  what the others are: sizes, checksums, and which files they were when all was complete
//! ```
//!
//! - `manifest`: the last of these; `checksum`: of a file with holes
//! - `arguments`: what a QEMU is started with that is to be a clone
//! - `complete`: the last step of making one; `opened`: one that is read
pub(crate) mod arguments;
mod checksum;
mod complete;
pub(crate) mod manifest;
pub(crate) mod opened;

use crate::{Error, snapshot::file::target::Target};

/// The name of the file that has everything but guest memory.
pub(crate) const STATE: &str = "state";
pub(crate) const MANIFEST: &str = "manifest.json";

/// One more region's file, of so many bytes.
///
/// # Errors
/// The system's own.
pub(crate) fn add_memory_file(target: &Target, bytes: u64) -> Result<usize, Error> {
    target.add_file(&memory_name(target.files() - 1), bytes)
}

/// The file of a region.
fn memory_name(region: usize) -> String {
    if region == 0 { "memory".into() } else { format!("memory.{region}") }
}

/// Whether a block with this name is the guest's own memory, where only its name is known. That of devices has the path
/// of the device in its name, or that of a ROM, or is called as the machine calls it.
pub(crate) fn is_guest_memory(name: &str) -> bool {
    const MACHINES: [&str; 7] = ["pc.bios", "pc.rom", "isa-bios", "isa-debug", "vga.vram", "vga.rom", "virt.flash"];
    let bare = name.strip_prefix("/objects/").unwrap_or(name);
    !bare.contains(['/', ':', '@']) && !MACHINES.contains(&bare) && !bare.starts_with("system.flash")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use transship_memory::{PAGE, PageCount, PageRange};

    use super::*;

    /// A guest that runs on clones of an image keeps nobody from making the file longer.
    #[test]
    fn pages_behind_those_of_a_region_are_not_looked_at() {
        let file = tempfile::tempfile().unwrap();
        for page in [2, 3, 9] {
            std::os::unix::fs::FileExt::write_all_at(&file, &[1; PAGE as usize], page * PAGE).unwrap();
        }
        let found = |pages| opened::data(&file, pages).unwrap().ranges().collect::<Vec<_>>();
        assert_eq!(
            (found(PageCount::new(3)), found(PageCount::new(7))),
            (vec![PageRange::new(2, 1)], vec![PageRange::new(2, 2)])
        );
    }

    /// As QEMU 7.2 to 11.1 call them.
    #[test]
    fn guest_memory_is_known_by_its_name() {
        for name in ["pc.ram", "mem0", "/objects/mem0", "ram-node1", "m"] {
            assert!(is_guest_memory(name), "{name}");
        }
        for name in ["0000:00:02.0/vga.vram", "/rom@etc/acpi/tables", "pc.bios", "pc.rom", "system.flash0", "vga.vram"]
        {
            assert!(!is_guest_memory(name), "{name}");
        }
    }
}
