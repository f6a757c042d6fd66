//! QEMU's own list of its memory: what its blocks are called, where they are, and whether all that is the guest's
//! memory is in backends.
use serde_json::{Value, json};
use transship_guest::{DeviceBlock, GuestError, StateFormat};

use super::{
    memory::{Backend, cure},
    places,
    qmp::{Qmp, QmpError, Question},
};

/// A block with a name, of those that QEMU's own stream lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RamBlock {
    pub(super) name: String,
    /// Size of its pages.
    pub(super) page_bytes: u64,
    pub(super) used_bytes: u64,
    /// What it can grow to.
    pub(super) max_bytes: u64,
    /// Where QEMU has it. Versions before 8.2 do not say: see [`placed`].
    pub(super) address: Option<u64>,
}

/// All of the guest's memory must be in backends, or a part of it would stay behind.
pub(super) fn check_all_covered(qmp: &mut Qmp, backends: &[Backend], list: &[RamBlock]) -> Result<(), GuestError> {
    let summary = qmp.execute("query-memory-size-summary", json!({}))?;
    let size = |name: &str| summary[name].as_u64().unwrap_or(0);
    let guest = size("base-memory") + size("plugged-memory");
    let plugged = qmp.execute("query-memory-devices", json!({}))?;
    let known: u64 = guest_memory(backends, list, &plugged).map(|backend| backend.bytes).sum();
    if backends.is_empty() || known < guest {
        return Err(GuestError::Unfit(format!(
            "the guest has {guest} bytes of memory, but only {known} in memory backends that are known; give all of it in one, such as {}",
            cure(guest)
        )));
    }
    Ok(())
}

/// Those that are the guest's memory. A backend that a device shows (ivshmem) has the device's name before its own, and
/// one that nothing uses is not in the list. What is plugged in need not be in the list, but says what it is made of.
fn guest_memory<'a>(backends: &'a [Backend], list: &[RamBlock], plugged: &Value) -> impl Iterator<Item = &'a Backend> {
    let mut names: Vec<String> = list.iter().map(|block| bare(&block.name).to_owned()).collect();
    let memdev = |device: &Value| Some(bare(device["data"]["memdev"].as_str()?).to_owned());
    names.extend(plugged.as_array().into_iter().flatten().filter_map(memdev));
    backends.iter().filter(move |backend| names.contains(&backend.id))
}

/// Machines up to version 3.1 have the path of the object in the name.
fn bare(name: &str) -> &str {
    name.strip_prefix("/objects/").unwrap_or(name)
}

/// The block that a backend is.
pub(super) fn find<'a>(list: &'a [RamBlock], backend: &str) -> Option<&'a RamBlock> {
    list.iter().find(|block| bare(&block.name) == backend)
}

/// Names of the backends' memory in QEMU's own stream. A backend that nothing uses is not in it, and keeps its id here.
pub(super) fn state_format(qmp: &mut Qmp, backends: &[Backend]) -> Result<StateFormat, GuestError> {
    let list = list(qmp)?;
    let blocks = block_names(&list, backends);
    let others = list.into_iter().filter(|block| !blocks.contains(&block.name));
    let others = others.map(|block| DeviceBlock { name: block.name, max_bytes: block.max_bytes }).collect();
    Ok(StateFormat::Qemu { others, blocks })
}

fn block_names(list: &[RamBlock], backends: &[Backend]) -> Vec<String> {
    let name = |backend: &Backend| find(list, &backend.id).map_or(&backend.id, |block| &block.name).clone();
    backends.iter().map(name).collect()
}

/// All blocks that have a name: others are not in QEMU's stream.
pub(super) fn list(qmp: &mut Qmp) -> Result<Vec<RamBlock>, QmpError> {
    let (command, arguments) = question();
    Ok(parse(qmp.execute(command, arguments)?.as_str().unwrap_or_default()))
}

/// What [`list`] asks.
pub(super) fn question() -> Question {
    ("human-monitor-command", json!({ "command-line": "info ramblock" }))
}

/// These blocks with the addresses of all of which they are certain, also where QEMU does not say them.
pub(super) fn placed(qmp: &mut Qmp, mut list: Vec<RamBlock>) -> Result<Vec<RamBlock>, GuestError> {
    places::add(qmp, &mut list)?;
    Ok(list)
}

fn parse(list: &str) -> Vec<RamBlock> {
    // Behind the line of titles.
    list.lines().skip(1).filter_map(ram_block).collect()
}

/// A line of `info ramblock`: name, size of the pages and its unit, and as `0x…` offset, length, length at most and
/// address.
fn ram_block(line: &str) -> Option<RamBlock> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let first = words.iter().position(|word| word.starts_with("0x"))?;
    let [name, .., size, unit] = &words[..first] else { return None };
    let unit = match *unit {
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => 1,
    };
    let number = |at: usize| u64::from_str_radix(words.get(first + at)?.strip_prefix("0x")?, 16).ok();
    let used_bytes = number(1)?;
    // All devices together have a bound of their own.
    let (max_bytes, address) = (number(2).unwrap_or(u64::MAX), number(3));
    let page_bytes = size.parse::<u64>().ok()?.checked_mul(unit)?;
    Some(RamBlock { name: (*name).to_owned(), page_bytes, used_bytes, max_bytes, address })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_block_is_named_after_its_backend_as_the_machine_does_it() {
        let list = "              Block Name    PSize              Offset               Used\n\
                    \x20                   mem0    4 KiB  0x0000000000000000 0x0000000004000000\n\
                    \x20  0000:00:01.0/vga.vram    4 KiB  0x0000000004480000 0x0000000001000000\n\
                    \x20                           4 KiB  0x0000000004000000 0x0000000000400000\r\n";
        let backends = [Backend::test("mem0", 64 << 20), Backend::test("spare", 1 << 20)];
        assert_eq!(block_names(&parse(list), &backends), ["mem0", "spare"]);
        let old = parse(&list.replace("         mem0", "/objects/mem0"));
        assert_eq!(block_names(&old, &backends), ["/objects/mem0", "spare"]);
    }

    /// Lines of QEMU 10.0.2, of huge pages, and of 7.2.
    #[test]
    fn a_block_is_where_its_line_says() {
        let title = "              Block Name    PSize              Offset               Used              Total                HVA  RO\n";
        let acpi = "    /rom@etc/acpi/tables    4 KiB  0x0000000011100000 0x0000000000020000 0x0000000000200000 0x00007efe4d200000  ro\r\n";
        let huge = "                      m0    2 MiB  0x0000000000000000 0x0000000010000000 0x0000000010000000 0x00007f30affff000  rw\n";
        let old = "                  pc.ram    4 KiB  0x0000000000000000 0x0000000010000000 0x0000000010000000\n";
        let block = |name: &str, page_bytes, used_bytes, max_bytes, address| RamBlock {
            name: name.into(),
            page_bytes,
            used_bytes,
            max_bytes,
            address,
        };
        assert_eq!(
            parse(&[title, acpi, huge, old].concat()),
            [
                block("/rom@etc/acpi/tables", 4096, 0x20000, 0x20_0000, Some(0x7efe_4d20_0000)),
                block("m0", 2 << 20, 0x1000_0000, 0x1000_0000, Some(0x7f30_afff_f000)),
                block("pc.ram", 4096, 0x1000_0000, 0x1000_0000, None),
            ]
        );
    }

    /// Lists of QEMU 7.2 and 10.0.2.
    #[test]
    fn what_a_device_shows_and_what_nothing_uses_is_not_the_guests_memory() {
        let list = "              Block Name    PSize              Offset               Used              Total\r\n\
                    \x20            /objects/nv    4 KiB  0x0000000004000000 0x0000000008000000 0x0000000008000000\r\n\
                    \x20                           4 KiB  0x000000000c000000 0x0000000008000000 0x0000000008000000\r\n\
                    0000:00:02.0//objects/shm    4 KiB  0x0000000000000000 0x0000000004000000 0x0000000004000000\r\n\
                    \x20                 pc.ram    4 KiB  0x0000000014000000 0x0000000004000000 0x0000000004000000\r\n";
        let plugged = json!([
            {"type": "nvdimm", "data": {"memdev": "/objects/nv", "size": 134217728, "id": "nv0"}},
            {"type": "virtio-pmem", "data": {"memdev": "/objects/pm", "size": 134217728, "id": "pm0"}}
        ]);
        let backends = ["nv", "pm", "shm", "spare"].map(|id| Backend::test(id, 64 << 20));
        let ids = |list: &str| -> Vec<String> {
            guest_memory(&backends, &parse(list), &plugged).map(|backend| backend.id.clone()).collect()
        };
        assert_eq!(ids(list), ["nv", "pm"]);
        assert_eq!(ids(&list.replace("/objects/", "")), ["nv", "pm"]);
    }
}
