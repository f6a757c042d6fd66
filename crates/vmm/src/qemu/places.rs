//! Where a QEMU has its memory that does not say so itself, as versions before 8.2 do not.
//!
//! Of a block that the machine shows to its guest, the monitor tells the address (`gpa2hva`). The others are found by
//! their sizes, among the mappings that QEMU has made as it makes blocks: a process that forks does not inherit them,
//! and nothing may be touched right behind them. Where several blocks have one size, what is in them decides. Where it
//! does not, there is no answer: it would be a guess.
use std::os::unix::fs::FileExt;

use serde_json::json;
use transship_guest::GuestError;
use transship_memory::PAGE;

use super::{blocks::RamBlock, maps::Mapping, qmp::Qmp};

/// What is compared is a ROM, or a table; more than any has.
const COMPARED_MAX: u64 = 4 << 20;

/// Adds the address to each block of which it is certain.
pub(super) fn add(qmp: &mut Qmp, blocks: &mut [RamBlock]) -> Result<(), GuestError> {
    if blocks.iter().all(|block| block.address.is_some()) {
        return Ok(());
    }
    let pid = qmp.pid();
    let unread = |what: &str, e: std::io::Error| {
        GuestError::Unfit(format!("can't read /proc/{pid}/{what}: {e}; run as root or as QEMU's user"))
    };
    let text = qmp.process().smaps().map_err(|e| unread("smaps", e))?;
    let mappings = Advised::read(&String::from_utf8_lossy(&text));
    let shown = Shown::read(&monitor(qmp, "info mtree -f")?);
    let names: Vec<String> = blocks.iter().map(|block| block.name.clone()).collect();
    for block in blocks.iter_mut().filter(|block| block.address.is_none()) {
        block.address = shown_at(qmp, &shown, block, &names)?.filter(|start| begins_there(&mappings, *start));
    }
    let memory = qmp.process().memory().map_err(|e| unread("mem", e))?;
    let read = |start: u64, bytes: u64| {
        let mut content = vec![0; bytes as usize];
        memory.read_exact_at(&mut content, start).ok().map(|()| content)
    };
    by_size(blocks, &free_ones(&mappings, blocks), read);
    Ok(())
}

fn monitor(qmp: &mut Qmp, line: &str) -> Result<String, GuestError> {
    let text = qmp.execute("human-monitor-command", json!({ "command-line": line }))?;
    Ok(text.as_str().unwrap_or_default().to_owned())
}

/// A mapping, and what was advised for it.
struct Advised {
    mapping: Mapping,
    /// A fork does not inherit it (MADV_DONTFORK).
    is_not_inherited: bool,
}

impl Advised {
    /// From `/proc/PID/smaps`, ascending.
    fn read(text: &str) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for line in text.lines() {
            if let Some(mapping) = Mapping::parse(line) {
                all.push(Self { mapping, is_not_inherited: false });
            } else if let (Some(flags), Some(last)) = (line.strip_prefix("VmFlags:"), all.last_mut()) {
                last.is_not_inherited = flags.split_ascii_whitespace().any(|flag| flag == "dc");
            }
        }
        all
    }

    fn is_of_a_block(&self) -> bool {
        self.is_not_inherited && self.mapping.is_writable
    }
}

fn begins_there(mappings: &[Advised], start: u64) -> bool {
    mappings.iter().any(|one| one.mapping.start == start && one.is_of_a_block())
}

/// Stretches of memory that look like a block and are none of those that were found. (The kernel splits a mapping whose
/// parts were advised differently.)
fn free_ones(mappings: &[Advised], found: &[RamBlock]) -> Vec<(u64, u64)> {
    let mut stretches: Vec<(u64, u64)> = Vec::new();
    for one in mappings.iter().filter(|one| one.is_of_a_block() && !one.mapping.is_shared && !one.mapping.has_file()) {
        match stretches.last_mut() {
            Some((_, end)) if *end == one.mapping.start => *end = one.mapping.end,
            _ => stretches.push((one.mapping.start, one.mapping.end)),
        }
    }
    let is_guarded = |end: u64| {
        mappings.iter().any(|one| one.mapping.start == end && !one.mapping.is_readable && !one.mapping.is_writable)
    };
    let is_known = |start: u64| found.iter().any(|block| block.address == Some(start));
    stretches.into_iter().filter(|(start, end)| is_guarded(*end) && !is_known(*start)).collect()
}

/// Memory that the guest sees: the address where it does, how far from the memory's beginning that is, and its name.
#[derive(Debug, PartialEq, Eq)]
struct Shown {
    guest_address: u64,
    offset: u64,
    name: String,
}

impl Shown {
    /// From `info mtree -f`: that of the view that is called memory.
    fn read(text: &str) -> Vec<Self> {
        let mut shown = Vec::new();
        for view in text.split("FlatView #").filter(|view| view.contains("AS \"memory\"")) {
            shown.extend(view.lines().filter_map(Self::line));
        }
        shown
    }

    /// `  0000000000100000-000000000fffffff (prio 0, ram): pc.ram @0000000000100000`
    fn line(line: &str) -> Option<Self> {
        let (range, rest) = line.trim().split_once(" (prio ")?;
        let (kind, name) = rest.split_once("): ")?;
        if !["ram", "rom"].contains(&kind.rsplit_once(", ")?.1) {
            return None;
        }
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let mut words = name.split_ascii_whitespace();
        let name = words.next()?.to_owned();
        let offset = words.next().and_then(|word| word.strip_prefix('@')).map_or(Some(0), hex)?;
        Some(Self { guest_address: hex(range.split_once('-')?.0)?, offset, name })
    }
}

/// The name that the memory itself has: the block's is longer by the device's.
fn own_name(block: &str) -> &str {
    block.rsplit('/').next().unwrap_or(block)
}

/// Where the block begins, by all that the guest sees of it.
fn shown_at(qmp: &mut Qmp, shown: &[Shown], block: &RamBlock, names: &[String]) -> Result<Option<u64>, GuestError> {
    let own = own_name(&block.name);
    // Two devices of one kind call their memory the same.
    if names.iter().filter(|name| own_name(name) == own).count() != 1 {
        return Ok(None);
    }
    let parts: Vec<&Shown> = shown.iter().filter(|part| own_name(&part.name) == own).collect();
    let mut start = None;
    for part in [parts.first(), parts.last()].into_iter().flatten() {
        let answer = monitor(qmp, &format!("gpa2hva {:#x}", part.guest_address))?;
        let here = host_address(&answer, &part.name).and_then(|address| address.checked_sub(part.offset));
        if here.is_none() || start.is_some_and(|start| Some(start) != here) {
            return Ok(None);
        }
        start = here;
    }
    Ok(start)
}

/// `Host virtual address for 0x0 (pc.ram) is 0x7fb003e00000`
fn host_address(answer: &str, name: &str) -> Option<u64> {
    let (about, address) = answer.trim().rsplit_once(" is 0x")?;
    if !about.ends_with(&format!("({name})")) {
        return None;
    }
    u64::from_str_radix(address, 16).ok()
}

/// Gives the blocks that have no address the stretches that can only be theirs.
fn by_size(blocks: &mut [RamBlock], free: &[(u64, u64)], read: impl Fn(u64, u64) -> Option<Vec<u8>>) {
    let bytes_of = |block: &RamBlock| block.max_bytes.next_multiple_of(PAGE);
    let mut sizes: Vec<u64> = blocks.iter().filter(|block| block.address.is_none()).map(bytes_of).collect();
    sizes.sort_unstable();
    sizes.dedup();
    for size in sizes {
        let here: Vec<u64> = free.iter().filter(|(start, end)| end - start == size).map(|(start, _)| *start).collect();
        let mut wanting: Vec<&mut RamBlock> =
            blocks.iter_mut().filter(|block| block.address.is_none() && bytes_of(block) == size).collect();
        match (wanting.as_mut_slice(), here.as_slice()) {
            ([block], [start]) => block.address = Some(*start),
            (several, _) if several.len() == here.len() && size <= COMPARED_MAX => {
                let contents: Option<Vec<(u64, Vec<u8>)>> =
                    here.iter().map(|&start| read(start, size).map(|content| (start, content))).collect();
                if let Some(contents) = contents {
                    by_content(several, contents);
                }
            }
            _ => {}
        }
    }
}

/// Blocks of one size, and as many stretches.
fn by_content(blocks: &mut [&mut RamBlock], mut stretches: Vec<(u64, Vec<u8>)>) {
    while blocks.iter().any(|block| block.address.is_none()) {
        let mut found = None;
        for (n, block) in blocks.iter().enumerate().filter(|(_, block)| block.address.is_none()) {
            let mut fitting = stretches.iter().filter(|(_, content)| can_be(block, content));
            let Some((start, content)) = fitting.next() else { return };
            // Whichever of several that are the same.
            if fitting.all(|(_, other)| other == content) {
                found = Some((n, *start));
                break;
            }
        }
        let Some((n, start)) = found else { return };
        blocks[n].address = Some(start);
        stretches.retain(|(other, _)| *other != start);
    }
}

/// Whether that may be the block's content. What a block can grow into is empty; a PCI device's ROM and the
/// firmware's tables begin as such.
fn can_be(block: &RamBlock, content: &[u8]) -> bool {
    const ROM: [u8; 2] = [0x55, 0xaa];
    let beyond = content.get(block.used_bytes.next_multiple_of(PAGE) as usize..).unwrap_or_default();
    let is_pci_rom = block.name.ends_with(".rom") && block.name.contains('/');
    let is_table = block.name.contains("rom@etc/");
    beyond.iter().all(|byte| *byte == 0)
        && (!is_pci_rom || content.starts_with(&ROM))
        && (!is_table || !content.starts_with(&ROM))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn block(name: &str, used_bytes: u64, max_bytes: u64) -> RamBlock {
        RamBlock { name: name.into(), page_bytes: 4096, used_bytes, max_bytes, address: None }
    }

    /// Lines of QEMU 7.2.
    #[test]
    fn the_guests_view_is_read() {
        let text = "FlatView #0\n AS \"cpu-smm-0\", root: memory\n  0000000000000000-00000000000bffff (prio 0, ram): pc.ram\n\n\
                    FlatView #3\n AS \"memory\", root: system\n AS \"cpu-memory-0\", root: system\n\
                    \x20 0000000000000000-000000000009ffff (prio 0, ram): pc.ram\n\
                    \x20 00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem\n\
                    \x20 00000000000c0000-00000000000cbfff (prio 0, rom): pc.ram @00000000000c0000\n\
                    \x20 00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram\n";
        let shown = |guest_address, offset, name: &str| Shown { guest_address, offset, name: name.into() };
        assert_eq!(
            Shown::read(text),
            [shown(0, 0, "pc.ram"), shown(0xc0000, 0xc0000, "pc.ram"), shown(0xfd00_0000, 0, "vga.vram")]
        );
        let answer = "Host virtual address for 0xfffc0000 (pc.bios) is 0x7fb061e00000\r\n";
        assert_eq!(host_address(answer, "pc.bios"), Some(0x7fb0_61e0_0000));
        assert_eq!(host_address(answer, "bios"), None);
        assert_eq!(host_address("No memory is mapped at address 0x1", "pc.bios"), None);
    }

    #[test]
    fn only_guarded_memory_that_a_fork_does_not_inherit_is_a_block() {
        let text = "7f00-7f01 rw-p 00000000 00:00 0 \nVmFlags: rd wr mr mw me dc ac hg mg \n";
        let text = [
            &text.replace("7f00-7f01", "10000-20000"),
            &text.replace("7f00-7f01", "20000-30000"),
            "30000-31000 ---p 00000000 00:00 0 \nVmFlags: mr mw me \n",
            &text.replace("7f00-7f01", "40000-50000"),
            "60000-70000 rw-p 00000000 00:00 0 \nVmFlags: rd wr mr mw me ac \n",
            "70000-71000 ---p 00000000 00:00 0 \n",
        ]
        .concat();
        let mappings = Advised::read(&text);
        assert_eq!(free_ones(&mappings, &[]), [(0x10000, 0x30000)]);
        assert!(begins_there(&mappings, 0x40000) && !begins_there(&mappings, 0x60000));
        let known = RamBlock { address: Some(0x10000), ..block("pc.ram", 0, 0) };
        assert_eq!(free_ones(&mappings, &[known]), []);
    }

    #[test]
    fn a_size_that_one_block_has_decides_and_else_what_is_in_it() {
        let rom = |fill: u8| [&[0x55, 0xaa][..], &[fill; 0xfffe]].concat();
        let table = [&[1_u8][..], &[0; 0xffff]].concat();
        let addresses = |stretches: &[(u64, Vec<u8>)], blocks: &[(&str, u64)]| -> Vec<Option<u64>> {
            let mut blocks: Vec<RamBlock> = blocks.iter().map(|(name, used)| block(name, *used, 0x10000)).collect();
            let free: Vec<(u64, u64)> = stretches.iter().map(|(start, _)| (*start, start + 0x10000)).collect();
            by_size(&mut blocks, &free, |start, _| {
                stretches.iter().find(|(at, _)| *at == start).map(|(_, c)| c.clone())
            });
            blocks.iter().map(|block| block.address).collect()
        };
        let (vga, loader) = (("0000:00:01.0/vga.rom", 0x10000), ("/rom@etc/table-loader", 0x1000));
        let net = |n: u64| (if n == 2 { "0000:00:02.0/net.rom" } else { "0000:00:03.0/net.rom" }, 0x10000);
        assert_eq!(addresses(&[(0x10_0000, rom(0))], &[vga]), [Some(0x10_0000)]);
        let two = [(0x10_0000, table.clone()), (0x20_0000, rom(7))];
        assert_eq!(addresses(&two, &[vga, loader]), [Some(0x20_0000), Some(0x10_0000)]);
        // The same ROM twice, and another.
        assert_eq!(
            addresses(&[(0x10_0000, rom(7)), (0x20_0000, rom(7))], &[net(2), net(3)]),
            [Some(0x10_0000), Some(0x20_0000)]
        );
        assert_eq!(addresses(&[(0x10_0000, rom(7)), (0x20_0000, rom(8))], &[net(2), net(3)]), [None, None]);
        assert_eq!(addresses(&[(0x10_0000, rom(7)), (0x20_0000, rom(8))], &[vga]), [None]);
        assert_eq!(addresses(&[], &[vga]), [None]);
        // More than it uses.
        assert_eq!(addresses(&[(0x10_0000, rom(7)), (0x20_0000, rom(7))], &[loader, vga]), [None, None]);
    }
}
