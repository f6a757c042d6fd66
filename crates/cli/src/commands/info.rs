//! `transship info`: what a snapshot file holds.
use std::fmt::Write as _;

use transship_engine::{BlockInfo, DisksInfo, FilePlace, FileUri, SnapshotInfo, inspect};
use transship_memory::PAGE;

use crate::{
    args::InfoArgs,
    checks::Checks,
    failure::Failure,
    keys, output,
    sandbox::{Role, Sandbox},
    units::{Bytes, Count},
};

pub(crate) fn run(args: &InfoArgs) -> Result<(), Failure> {
    let mut checks = Checks::default();
    let from = checks.read("FILE", &args.file, place);
    let sandbox = Sandbox::check(&args.sandbox, &mut checks);
    let identities = keys::identities(&mut checks, &args.identity);
    let ((from, sandbox), identities) = checks.finish(from.zip(sandbox).zip(identities))?;
    sandbox.confine_when_opened(Role::Info);
    let info = inspect(&from, identities.as_ref(), args.check)?;
    if args.json {
        output::json(&info)?
    } else {
        output::result(&text(&info))?
    }
    Ok(())
}

/// `-` is standard input, as everywhere.
pub(super) fn place(text: &str) -> Result<FileUri, String> {
    match text {
        "-" => Ok(FileUri { place: FilePlace::Fd(0), offset: 0 }),
        text => text.parse(),
    }
}

/// The view for people.
fn text(info: &SnapshotInfo) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let mut row = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<13}{value}");
    };
    row("file", info.file.clone());
    row("format", format(info));
    if let Some(libvirt) = &info.libvirt {
        row("domain", format!("{} of libvirt, {}", libvirt.domain, libvirt.encoding));
    }
    row("machine", info.machine.clone());
    if let Some(uuid) = &info.uuid {
        row("uuid", uuid.clone());
    }
    row("guest", info.state.clone().unwrap_or_else(|| "the file does not say whether it ran".into()));
    row("size", size(info));
    let memory: u64 = info.blocks.iter().map(|block| block.bytes).sum();
    let stored: u64 = info.blocks.iter().map(|block| block.stored).sum();
    row("memory", format!("{} in {} blocks, {} stored", Bytes(memory), info.blocks.len(), Bytes(stored * PAGE)));
    row("devices", devices(info));
    row(
        "checked",
        if info.checked { "all of it was read" } else { "headers, bitmaps and device sections (--check reads all)" }
            .into(),
    );
    if let Some(disks) = &info.disks {
        row("disks", whose_disks(disks));
    }
    if let Some(why) = &info.refusal {
        row("restore", format!("not possible: {why}"));
    }
    if let Some(why) = &info.not_for_clones {
        row("clones", format!("not possible: {why}"));
    }
    blocks(&mut text, &info.blocks);
    sections(&mut text, info);
    text
}

fn whose_disks(disks: &DisksInfo) -> String {
    match disks {
        DisksInfo::NotKnown => {
            "not known: what the image was made of does not say which its guest had; give each clone disks of its own"
                .into()
        }
        DisksInfo::Files(files) if files.is_empty() => "its guest had none".into(),
        DisksInfo::Files(files) => format!("of its guest, not for clones to write to: {}", files.join(", ")),
    }
}

fn format(info: &SnapshotInfo) -> String {
    let capabilities = match info.capabilities.is_empty() {
        true => String::new(),
        false => format!(" (capabilities: {})", info.capabilities.join(", ")),
    };
    let offset = if info.offset > 0 { format!(", from offset {:#x} on", info.offset) } else { String::new() };
    let encrypted = if info.encrypted { ", encrypted" } else { "" };
    format!("{}{capabilities}{encrypted}{offset}", info.format)
}

fn size(info: &SnapshotInfo) -> String {
    match info.allocated {
        Some(allocated) => format!("{}, {} on the disk", Bytes(info.bytes), Bytes(allocated)),
        None => Bytes(info.bytes).to_string(),
    }
}

fn devices(info: &SnapshotInfo) -> String {
    match info.described {
        true => format!("{} in {} sections", Bytes(info.device_bytes), info.sections.len()),
        false => format!("{}; the file does not describe them", Bytes(info.device_bytes)),
    }
}

fn blocks(text: &mut String, blocks: &[BlockInfo]) {
    let _ = writeln!(text, "\n{:<32} {:>10} {:>12} {:>12}", "block", "size", "stored", "zero");
    for block in blocks {
        let BlockInfo { name, bytes, stored, zero, other, left_out, .. } = block;
        let _ = write!(text, "{name:<32} {:>10}", Bytes(*bytes).to_string());
        let _ = match left_out {
            true => writeln!(text, " {:>25}", "in a file of its own"),
            false => {
                writeln!(text, " {:>12} {:>12}{}", Count(*stored).to_string(), Count(*zero).to_string(), others(*other))
            }
        };
    }
}

fn others(count: u64) -> String {
    if count == 0 { String::new() } else { format!("  {} compressed", Count(count)) }
}

fn sections(text: &mut String, info: &SnapshotInfo) {
    if info.sections.is_empty() {
        return;
    }
    let _ = writeln!(text, "\n{:<40} {:>8} {:>8} {:>10}", "device section", "instance", "version", "bytes");
    for section in &info.sections {
        let (name, instance, version) = (&section.name, section.instance, section.version);
        let _ = writeln!(text, "{name:<40} {instance:>8} {version:>8} {:>10}", Count(section.bytes).to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dash_is_standard_input() {
        assert_eq!(place("-"), Ok(FileUri { place: FilePlace::Fd(0), offset: 0 }));
        assert_eq!(place("a-"), Ok(FileUri::path("a-")));
    }

    #[test]
    fn the_text_has_what_people_look_for() {
        let block = BlockInfo {
            name: "pc.ram".into(),
            bytes: 4 << 30,
            pages: 1 << 20,
            stored: 1000,
            zero: 5,
            ..Default::default()
        };
        let left = BlockInfo { name: "mem0".into(), bytes: 1 << 30, left_out: true, ..Default::default() };
        let info = SnapshotInfo {
            file: "a.snap".into(),
            format: "mapped-ram".into(),
            offset: 4096,
            bytes: 5 << 30,
            allocated: Some(8 << 20),
            machine: "pc-q35-10.0".into(),
            capabilities: vec!["mapped-ram"],
            uuid: None,
            state: Some("running".into()),
            refusal: None,
            not_for_clones: None,
            disks: Some(DisksInfo::NotKnown),
            libvirt: None,
            blocks: vec![block, left],
            sections: Vec::new(),
            device_bytes: 300 << 10,
            described: false,
            encrypted: true,
            checked: true,
        };
        let text = text(&info);
        for part in [
            "format       mapped-ram (capabilities: mapped-ram), encrypted, from offset 0x1000 on",
            "machine      pc-q35-10.0",
            "guest        running",
            "disks        not known: ",
            "size         5.0 GiB, 8.0 MiB on the disk",
            "memory       5.0 GiB in 2 blocks, 3.9 MiB stored",
            "300 KiB; the file does not describe them",
            "pc.ram                              4.0 GiB        1,000            5",
            "in a file of its own",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }
}
