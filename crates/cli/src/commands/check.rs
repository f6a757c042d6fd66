//! `transship check`: what a VM is made of, what would work with it, and the cure for what would not.
use std::fmt::Write as _;

use transship_vmm::{AttachOptions, Balloon, Looked, Use, VmAddress, look};

use crate::{args::CheckArgs, checks::Checks, failure::Failure, output, units::Bytes};

pub(crate) fn run(args: &CheckArgs) -> Result<(), Failure> {
    let mut checks = Checks::default();
    let vm = checks.read("--vm", &args.vm, str::parse::<VmAddress>);
    let vm = checks.finish(vm)?;
    // Nobody asks the balloon for hints.
    let balloon = args.balloon.clone().map(|socket| Balloon { socket, connect: |_, _| None });
    let found = look(&vm, &AttachOptions { balloon, ..AttachOptions::default() })?;
    if args.json {
        output::json(&found)?;
    } else {
        output::result(&text(&found))?;
    }
    if found.is_fit() {
        return Ok(());
    }
    let what = found.uses.first().map_or("nothing", |first| &first.what);
    Err(Failure::Failed(format!("`{what}` would be refused; the line above says why, and what to do")))
}

/// The view for people.
fn text(found: &Looked) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: String| {
        // Writing to a string does not fail. The VMM chose some of these words.
        let _ = writeln!(text, "{name:<24}{}", output::one_line(&value));
    };
    row("vmm", format!("{} (process {})", found.vmm, found.pid));
    row("machine", found.machine.clone().unwrap_or_else(|| "unknown".to_owned()));
    row("state", found.state.clone());
    row("kernel", format!("Linux {}", found.kernel));
    for memory in &found.memory {
        let pages = Bytes(memory.page_bytes);
        row("memory", format!("{}: {}, {}, pages of {pages}", memory.name, Bytes(memory.bytes), memory.kind));
    }
    for disk in &found.disks {
        let how = if disk.direct { ", past the page cache" } else { "" };
        row("disk", format!("{}: {}{how}", disk.name, disk.driver));
    }
    for device in &found.devices {
        row("device", format!("{}: {}", device.name, device.kind));
    }
    for of in found.rights.iter().chain(&found.uses) {
        row(&of.what, verdict(of));
    }
    for doubt in &found.doubts {
        row("beware", doubt.clone());
    }
    text
}

fn verdict(of: &Use) -> String {
    if of.works { "yes".to_owned() } else { format!("no: {}", of.why_not.join(" | ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use transship_vmm::{DeviceFound, DiskFound, MemoryFound};

    #[test]
    fn people_read_a_line_for_each_thing() {
        let of = |what: &str, why: &[&str]| Use {
            what: what.to_owned(),
            works: why.is_empty(),
            why_not: why.iter().map(|why| (*why).to_owned()).collect(),
        };
        let found = Looked {
            vmm: "QEMU 10.0.2".into(),
            pid: 7,
            machine: None,
            state: "running".into(),
            kernel: "6.18.1".into(),
            memory: vec![MemoryFound {
                name: "pc.ram".into(),
                bytes: 4 << 30,
                kind: "private".into(),
                page_bytes: 4096,
            }],
            disks: vec![DiskFound { name: "d\n0".into(), driver: "file".into(), direct: true }],
            devices: vec![DeviceFound { name: "n0".into(), kind: "virtio-net-pci".into() }],
            rights: vec![of("trace the VMM", &[])],
            uses: vec![of("move", &["this", "and that"]), of("watch", &[])],
            doubts: vec!["something".into()],
        };
        assert_eq!(
            text(&found),
            "vmm                     QEMU 10.0.2 (process 7)\n\
             machine                 unknown\n\
             state                   running\n\
             kernel                  Linux 6.18.1\n\
             memory                  pc.ram: 4.0 GiB, private, pages of 4.0 KiB\n\
             disk                    d 0: file, past the page cache\n\
             device                  n0: virtio-net-pci\n\
             trace the VMM           yes\n\
             move                    no: this | and that\n\
             watch                   yes\n\
             beware                  something\n"
        );
        assert!(!found.is_fit());
    }
}
