//! Whether a snapshot is one of the guest that waits: looked at before anything is touched.
use transship_wire::{
    GuestDescription,
    qemu::{Block, Configuration},
};

use super::whence::misfit;
use crate::{
    Error, Misfit,
    guest::{DeviceBlock, StateFormat},
};

/// How a description names the machines of QEMU.
const QEMU: &str = "qemu ";
/// All memory of a guest's devices together is less than this: the largest are graphics adapters.
const MAX_DEVICE_BYTES: u64 = 16 << 30;

/// Which block of the file is what.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fit {
    /// By region: the index of its block.
    pub(crate) regions: Vec<usize>,
    /// The blocks that are not guest memory.
    pub(crate) devices: Vec<usize>,
}

/// Finds the regions of the guest among the blocks of the file.
///
/// # Errors
/// Another machine, other memory: which differs, and how.
pub(crate) fn fit(
    file: &str,
    configuration: &Configuration,
    blocks: &[Block],
    guest: &GuestDescription,
    format: &StateFormat,
) -> Result<Fit, Error> {
    let (machine, names) = expected(guest, format);
    check_machine(file, &configuration.machine, machine)?;
    let mut devices: Vec<usize> = (0..blocks.len()).collect();
    let mut regions = Vec::with_capacity(names.len());
    for (name, region) in names.iter().zip(&guest.regions) {
        let Some(index) = blocks.iter().position(|block| *block.name == **name) else {
            let there = list(blocks);
            return unfit(
                Misfit::Memory,
                file,
                format_args!("it has no memory {name:?}, which the waiting guest needs; it has {there}"),
            );
        };
        let (theirs, ours) = (blocks[index].used_bytes, region.bytes);
        if theirs != ours {
            return unfit(
                Misfit::Memory,
                file,
                format_args!("its memory {name:?} has {theirs} bytes, that of the waiting guest {ours}"),
            );
        }
        devices.retain(|device| *device != index);
        regions.push(index);
    }
    check_devices(file, devices.iter().map(|&device| &blocks[device]), format)?;
    Ok(Fit { regions, devices })
}

/// Whether the guest may have such blocks beside its memory.
///
/// # Errors
/// It has none of this name, or a smaller one.
pub(crate) fn check_devices<'b>(
    file: &str,
    mut blocks: impl Iterator<Item = &'b Block>,
    format: &StateFormat,
) -> Result<(), Error> {
    let others: &[DeviceBlock] = match format {
        StateFormat::Qemu { others, .. } if others.is_empty() => return Ok(()), // they are not known
        StateFormat::Qemu { others, .. } => others,
        StateFormat::Opaque => &[],
    };
    blocks.try_for_each(|block| match others.iter().find(|other| *other.name == *block.name) {
        None => {
            unfit(Misfit::Memory, file, format_args!("it has memory {:?}, which the waiting guest lacks", &*block.name))
        }
        Some(other) if block.used_bytes > other.max_bytes => unfit(
            Misfit::Memory,
            file,
            format_args!(
                "its memory {:?} has {} bytes, that of the waiting guest at most {}",
                &*block.name, block.used_bytes, other.max_bytes
            ),
        ),
        Some(_) => Ok(()),
    })
}

/// The machine's name in a file, and those of the blocks.
fn expected<'a>(guest: &'a GuestDescription, format: &'a StateFormat) -> (&'a str, Vec<&'a str>) {
    match format {
        StateFormat::Qemu { blocks, .. } => {
            let machine = guest.machine.strip_prefix(QEMU).unwrap_or(&guest.machine);
            (machine, blocks.iter().map(String::as_str).collect())
        }
        StateFormat::Opaque => (&guest.machine, guest.regions.iter().map(|region| region.name.as_str()).collect()),
    }
}

fn check_machine(file: &str, theirs: &str, ours: &str) -> Result<(), Error> {
    if theirs == ours {
        return Ok(());
    }
    unfit(Misfit::Machine, file, format_args!("its machine is {theirs:?}, that of the waiting guest {ours:?}"))
}

fn unfit<T>(kind: Misfit, file: &str, what: std::fmt::Arguments<'_>) -> Result<T, Error> {
    Err(misfit(
        kind,
        file,
        format_args!("{what}; start one with the same machine, memory and devices as the guest that was saved"),
    ))
}

/// A few of the names.
fn list(blocks: &[Block]) -> String {
    const SHOWN: usize = 8;
    let names: Vec<_> = blocks.iter().take(SHOWN).map(|block| format!("{:?}", &*block.name)).collect();
    let more = if blocks.len() > SHOWN { ", …" } else { "" };
    format!("{}{more}", names.join(", "))
}

/// # Errors
/// More than any device has: their bitmaps would not fit this process's memory.
pub(crate) fn check_sizes(file: &str, blocks: &[&Block]) -> Result<(), Error> {
    let largest = blocks.iter().max_by_key(|block| block.used_bytes);
    let total = blocks.iter().fold(0, |total: u64, block| total.saturating_add(block.used_bytes));
    match largest {
        Some(block) if total > MAX_DEVICE_BYTES => Err(misfit(
            Misfit::Memory,
            file,
            format_args!(
                "block {:?} of {} bytes is not among the memory of the waiting guest, whose devices together have \
                 less than {MAX_DEVICE_BYTES}",
                &*block.name, block.used_bytes
            ),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use transship_wire::{RegionDescription, qemu::Name};

    use super::*;

    fn block(name: &str, pages: u64) -> Block {
        Block { name: Name::new(name).unwrap(), used_bytes: pages * 4096, gpa: None, mapped: None }
    }

    fn guest(machine: &str, regions: &[(&str, u64)]) -> GuestDescription {
        let region = |(name, pages): &(&str, u64)| RegionDescription { name: (*name).into(), bytes: pages * 4096 };
        GuestDescription { machine: machine.into(), regions: regions.iter().map(region).collect() }
    }

    fn other(name: &str, pages: u64) -> DeviceBlock {
        DeviceBlock { name: name.into(), max_bytes: pages * 4096 }
    }

    fn refusal(machine: &str, blocks: &[Block], waiting: &GuestDescription, format: &StateFormat) -> Error {
        let configuration = Configuration::new(Name::new(machine).unwrap());
        fit("a.snap", &configuration, blocks, waiting, format).unwrap_err()
    }

    #[test]
    fn regions_are_found_by_the_names_of_their_blocks() {
        let blocks = [block("vga.vram", 4), block("/objects/mem1", 8), block("/objects/mem0", 16), block("pc.bios", 1)];
        let configuration = Configuration::new(Name::new("pc-q35-10.0").unwrap());
        let waiting = guest("qemu pc-q35-10.0", &[("mem0", 16), ("mem1", 8)]);
        let format = StateFormat::Qemu { blocks: vec!["/objects/mem0".into(), "/objects/mem1".into()], others: vec![] };
        let found = fit("f", &configuration, &blocks, &waiting, &format).unwrap();
        assert_eq!(found, Fit { regions: vec![2, 1], devices: vec![0, 3] });
    }

    #[test]
    fn the_text_names_what_differs() {
        let format = StateFormat::Qemu { blocks: vec!["mem0".into()], others: vec![other("pc.bios", 1)] };
        let waiting = guest("qemu pc-q35-10.0", &[("mem0", 16)]);
        let why = refusal("pc-i440fx-10.0", &[block("mem0", 16)], &waiting, &format).to_string();
        assert!(
            why.starts_with("a.snap: its machine is \"pc-i440fx-10.0\", that of the waiting guest \"pc-q35-10.0\""),
            "{why}"
        );
        let why = refusal("pc-q35-10.0", &[block("mem0", 17)], &waiting, &format).to_string();
        assert!(why.contains("\"mem0\" has 69632 bytes, that of the waiting guest 65536"), "{why}");
        let why = refusal("pc-q35-10.0", &[block("pc.ram", 16), block("pc.bios", 1)], &waiting, &format).to_string();
        assert!(why.contains("no memory \"mem0\"") && why.contains("\"pc.ram\", \"pc.bios\""), "{why}");
    }

    /// A graphics adapter on one side only.
    #[test]
    fn devices_with_memory_are_the_same() {
        let format = StateFormat::Qemu { blocks: vec!["mem0".into()], others: vec![other("pc.bios", 1)] };
        let waiting = guest("qemu pc", &[("mem0", 16)]);
        let why = refusal("pc", &[block("mem0", 16), block("pc.bios", 1), block("vga.vram", 4)], &waiting, &format);
        assert_eq!(why.misfit(), Some(Misfit::Memory), "{why}");
        let why = refusal("pc", &[block("mem0", 16), block("pc.bios", 2)], &waiting, &format);
        assert_eq!(why.misfit(), Some(Misfit::Memory), "{why}");
        let configuration = Configuration::new(Name::new("pc").unwrap());
        assert!(fit("f", &configuration, &[block("mem0", 16)], &waiting, &format).is_ok(), "it may have more itself");
    }

    #[test]
    fn a_guest_that_is_no_qemu_has_no_other_blocks() {
        let waiting = guest("synthetic", &[("ram0", 16)]);
        let why = refusal("synthetic", &[block("ram0", 16), block("ram1", 16)], &waiting, &StateFormat::Opaque);
        assert_eq!(why.misfit(), Some(Misfit::Memory), "{why}");
    }
}
