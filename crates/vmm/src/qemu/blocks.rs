//! QEMU's own list of its memory: what its blocks are called, and whether all that is the guest's memory is in
//! backends.
use serde_json::{Value, json};
use transship_guest::{DeviceBlock, GuestError, StateFormat};

use super::{
    memory::{Backend, cure},
    qmp::{Qmp, QmpError},
};

/// All of the guest's memory must be in backends, or a part of it would stay behind.
pub(super) fn check_all_covered(qmp: &mut Qmp, backends: &[Backend]) -> Result<(), GuestError> {
    let summary = qmp.execute("query-memory-size-summary", json!({}))?;
    let size = |name: &str| summary[name].as_u64().unwrap_or(0);
    let guest = size("base-memory") + size("plugged-memory");
    let list = list(qmp)?;
    let plugged = qmp.execute("query-memory-devices", json!({}))?;
    let known: u64 = guest_memory(backends, &list, &plugged).map(|backend| backend.bytes).sum();
    if backends.is_empty() || known < guest {
        return Err(GuestError(format!(
            "the guest has {guest} bytes of memory, but only {known} in memory backends; all of it must be shared named \
             files: {}",
            cure(guest)
        )));
    }
    Ok(())
}

/// Those that are the guest's memory. A backend that a device shows (ivshmem) has the device's name before its own, and
/// one that nothing uses is not in the list. What is plugged in need not be in the list, but says what it is made of.
fn guest_memory<'a>(backends: &'a [Backend], list: &str, plugged: &Value) -> impl Iterator<Item = &'a Backend> {
    let mut names: Vec<String> = known_blocks(list).map(|name| bare(name).to_owned()).collect();
    let memdev = |device: &Value| Some(bare(device["data"]["memdev"].as_str()?).to_owned());
    names.extend(plugged.as_array().into_iter().flatten().filter_map(memdev));
    backends.iter().filter(move |backend| names.contains(&backend.id))
}

/// Machines up to version 3.1 have the path of the object in the name.
fn bare(name: &str) -> &str {
    name.strip_prefix("/objects/").unwrap_or(name)
}

/// Names of the backends' memory in QEMU's own stream. A backend that nothing uses is not in it, and keeps its id here.
pub(super) fn state_format(qmp: &mut Qmp, backends: &[Backend]) -> Result<StateFormat, GuestError> {
    let text = list(qmp)?;
    let blocks = block_names(&text, backends);
    // Behind the line of titles.
    let others = text.lines().skip(1).filter_map(device_block);
    let others = others.filter(|other| !blocks.contains(&other.name)).collect();
    Ok(StateFormat::Qemu { others, blocks })
}

fn list(qmp: &mut Qmp) -> Result<String, QmpError> {
    let text = qmp.execute("human-monitor-command", json!({ "command-line": "info ramblock" }))?;
    Ok(text.as_str().unwrap_or_default().to_owned())
}

/// The first column of `info ramblock`.
fn known_blocks(list: &str) -> impl Iterator<Item = &str> {
    list.lines().filter_map(|line| line.split_ascii_whitespace().next())
}

/// A line of `info ramblock`: name, size of the pages, and as `0x…` offset, length and length at most.
fn device_block(line: &str) -> Option<DeviceBlock> {
    let name = line.split_ascii_whitespace().next()?.to_owned();
    let mut numbers =
        line.split_ascii_whitespace().filter_map(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok());
    // All devices together have a bound of their own.
    let max_bytes = numbers.nth(2).unwrap_or(u64::MAX);
    Some(DeviceBlock { name, max_bytes })
}

fn block_names(list: &str, backends: &[Backend]) -> Vec<String> {
    let name = |backend: &Backend| {
        let named = known_blocks(list).find(|name| bare(name) == backend.id);
        named.unwrap_or(&backend.id).to_owned()
    };
    backends.iter().map(name).collect()
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
        assert_eq!(block_names(list, &backends), ["mem0", "spare"]);
        assert_eq!(block_names(&list.replace("         mem0", "/objects/mem0"), &backends), ["/objects/mem0", "spare"]);
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
            guest_memory(&backends, list, &plugged).map(|backend| backend.id.clone()).collect()
        };
        assert_eq!(ids(list), ["nv", "pm"]);
        assert_eq!(ids(&list.replace("/objects/", "")), ["nv", "pm"]);
    }
}
