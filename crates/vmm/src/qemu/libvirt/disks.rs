//! The disks in a domain's definition, and what libvirt is told so that it takes a snapshot of them.
use std::path::PathBuf;

use roxmltree::{Document, Node};

use super::overlays::{DefinedDisk, DiskPlace, Overlays};

/// Those of a definition as the domain runs.
///
/// # Errors
/// It is not what libvirt writes.
pub(super) fn defined(live: &str) -> Result<Vec<DefinedDisk>, String> {
    let document = Document::parse(live).map_err(|error| format!("it is no XML: {error}"))?;
    let devices = document.root_element().children().filter(|child| child.has_tag_name("devices"));
    let disks = devices.flat_map(|devices| devices.children()).filter(|child| child.has_tag_name("disk"));
    disks.map(of).collect()
}

fn of(disk: Node<'_, '_>) -> Result<DefinedDisk, String> {
    let name = child(disk, "target").and_then(|target| target.attribute("dev"));
    let name = name.ok_or("a disk has no name")?.to_owned();
    let device = child(disk, "alias").and_then(|alias| alias.attribute("name")).unwrap_or_default().to_owned();
    Ok(DefinedDisk { name, device, place: place(disk) })
}

fn place(disk: Node<'_, '_>) -> DiskPlace {
    let has = |name| disk.descendants().any(|node| node.has_tag_name(name));
    let Some(source) = child(disk, "source") else { return DiskPlace::NotWritten };
    if child(disk, "readonly").is_some() || disk.attribute("device") == Some("cdrom") {
        return DiskPlace::NotWritten;
    }
    for (is_so, why) in [
        (child(disk, "shareable").is_some(), "others may write to it, too"),
        (child(disk, "transient").is_some(), "it forgets what is written to it (transient)"),
        (disk.attribute("device") == Some("lun"), "the guest has the device itself (lun)"),
        (has("encryption"), "it is encrypted, and its overlay would not be"),
    ] {
        if is_so {
            return DiskPlace::Unfit(why);
        }
    }
    let path = match disk.attribute("type") {
        Some("file") => source.attribute("file"),
        Some("block") => source.attribute("dev"),
        _ => None,
    };
    let format = child(disk, "driver").and_then(|driver| driver.attribute("type"));
    match (path, format) {
        (Some(path), Some(format)) => DiskPlace::File { path: PathBuf::from(path), format: format.to_owned() },
        _ => DiskPlace::Unfit("it is no file or device of this host"),
    }
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|child| child.has_tag_name(name))
}

/// Every disk is named: one that is not would get a file that libvirt chooses.
pub(super) fn snapshot_xml(overlays: &Overlays) -> String {
    let mut disks = String::new();
    for overlay in overlays.all() {
        let (disk, file) = (escaped(&overlay.disk), escaped(&overlay.overlay.to_string_lossy()));
        let source = format!("<driver type='qcow2'/><source file='{file}'/>");
        disks.push_str(&format!("<disk name='{disk}' snapshot='external' type='file'>{source}</disk>"));
    }
    for other in overlays.left_out() {
        disks.push_str(&format!("<disk name='{}' snapshot='no'/>", escaped(other)));
    }
    format!("<domainsnapshot><disks>{disks}</disks></domainsnapshot>")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn of_disk(kind: &str, within: &str) -> DefinedDisk {
        let (target, alias) = ("<target dev='vda' bus='virtio'/>", "<alias name='virtio-disk0'/>");
        let xml =
            format!("<domain><devices><disk type='{kind}'>{within}{target}{alias}</disk></devices><disk/></domain>");
        let mut disks = defined(&xml).unwrap();
        assert_eq!(disks.len(), 1, "{xml}");
        disks.remove(0)
    }

    #[test]
    fn a_disk_is_a_file_or_has_its_reason() {
        let raw = "<driver name='qemu' type='raw' cache='none'/>";
        let file = |path: &str| DiskPlace::File { path: path.into(), format: "raw".into() };
        let disk = of_disk("file", &format!("{raw}<source file='/images/a.raw' index='1'/><backingStore/>"));
        assert_eq!((disk.name.as_str(), disk.device.as_str()), ("vda", "virtio-disk0"));
        assert_eq!(disk.place, file("/images/a.raw"));
        assert_eq!(of_disk("block", &format!("{raw}<source dev='/dev/vg/a'/>")).place, file("/dev/vg/a"));
        let source = "<source file='/images/a.iso'/>";
        assert_eq!(of_disk("file", &format!("{raw}{source}<readonly/>")).place, DiskPlace::NotWritten);
        assert_eq!(of_disk("file", raw).place, DiskPlace::NotWritten, "an empty drive");
        for (kind, within) in [
            ("file", format!("{raw}{source}<shareable/>")),
            ("file", format!("{raw}{source}<transient/>")),
            ("file", format!("{raw}<source file='/a'><encryption format='luks'/></source>")),
            ("network", format!("{raw}<source protocol='rbd' name='pool/a'/>")),
            ("file", source.to_owned()),
        ] {
            assert!(matches!(of_disk(kind, &within).place, DiskPlace::Unfit(_)), "{kind} {within}");
        }
        assert!(defined("no XML").is_err() && defined("<d><devices><disk/></devices></d>").is_err());
    }

    #[test]
    fn names_of_files_are_text_in_what_libvirt_is_told() {
        assert_eq!(escaped("a&b<'c'"), "a&amp;b&lt;&apos;c&apos;");
    }
}
