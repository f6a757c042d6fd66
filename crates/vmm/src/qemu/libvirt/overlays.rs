//! A snapshot of a guest's disks: from a moment on the guest writes to overlays, and the files below them stay as they
//! were. Overlays are made while it runs, so that little is left to be done while it stands still. Then the program
//! that keeps the guest (libvirt) takes them into use.
use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{SystemTime, UNIX_EPOCH},
};

use serde_json::Value;
use transship_guest::{DiskSnapshot, GuestError};

use super::calls::Failure;

/// A disk, as who keeps the guest has defined it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DefinedDisk {
    /// Such as `vda`.
    pub(super) name: String,
    /// QEMU's name of the device.
    pub(super) device: String,
    pub(super) place: DiskPlace,
}

#[cfg_attr(not(feature = "libvirt"), allow(dead_code, reason = "nobody else defines any"))]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum DiskPlace {
    File {
        path: PathBuf,
        format: String,
    },
    /// It has nothing to be kept.
    NotWritten,
    /// Why it can have no overlay.
    Unfit(&'static str),
}

/// The program that keeps the guest.
pub(super) trait Keeper {
    /// Its disks as they are now.
    ///
    /// # Errors
    /// Nobody knows.
    fn disks(&mut self) -> Result<Vec<DefinedDisk>, Failure>;
    /// Has it write to these overlays: all of them or none.
    ///
    /// # Errors
    /// It may have been done all the same, if the answer got lost.
    fn use_overlays(&mut self, overlays: &Overlays) -> Result<(), Failure>;
}

/// What has become of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Planned,
    /// All are there, and nobody uses them.
    Made,
    /// The guest writes to them, or may do so.
    InUse,
}

/// Those of all disks that the guest writes to. Files that were made and not used go when this is dropped.
#[derive(Debug)]
pub(super) struct Overlays {
    all: Vec<DiskSnapshot>,
    /// Beside each: the format of the file below it, and the size of the disk.
    forms: Vec<(String, u64)>,
    /// Disks that have none.
    left_out: Vec<String>,
    stage: Stage,
    /// Files of ours that are there.
    made: usize,
}

impl Overlays {
    /// For the disks as they are now, and what QEMU says of them (`query-block`). `folder`: none: beside them.
    ///
    /// # Errors
    /// One can have none.
    pub(super) fn plan(disks: Vec<DefinedDisk>, blocks: &Value, folder: Option<&Path>) -> Result<Self, GuestError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let (all, forms, left_out) = (Vec::new(), Vec::new(), Vec::new());
        let mut overlays = Self { all, forms, left_out, stage: Stage::Planned, made: 0 };
        for disk in disks {
            let unfit = |why: &str| {
                let name = &disk.name;
                GuestError::Unfit(format!(
                    "disk {name} can have no overlay: {why}; have the storage take a snapshot by --at-stop CMD"
                ))
            };
            let (path, format) = match &disk.place {
                DiskPlace::NotWritten => {
                    overlays.left_out.push(disk.name);
                    continue;
                }
                DiskPlace::Unfit(why) => return Err(unfit(why)),
                DiskPlace::File { path, format } => (path, format),
            };
            let bytes = size(blocks, &disk.device).ok_or_else(|| unfit("QEMU does not say how large it is"))?;
            let overlay = beside(path, folder)?.join(file_name(path, &disk.name, now));
            overlays.forms.push((format.clone(), bytes));
            overlays.all.push(DiskSnapshot { kept: path.clone(), overlay, disk: disk.name });
        }
        match overlays.all.is_empty() {
            true => Err(GuestError::Unfit("the guest writes to no disk; leave out --disks".into())),
            false => Ok(overlays),
        }
    }

    pub(super) fn all(&self) -> &[DiskSnapshot] {
        &self.all
    }

    pub(super) fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// Makes the files. They read as what is below them.
    ///
    /// # Errors
    /// The system's, or those of qemu-img.
    pub(super) fn make(&mut self) -> Result<(), GuestError> {
        if self.stage != Stage::Planned {
            return Ok(());
        }
        for (snapshot, (format, bytes)) in self.all.iter().zip(&self.forms) {
            let file = reserve(snapshot)?;
            self.made += 1;
            format_overlay(snapshot, format, *bytes)?;
            file.sync_all().map_err(failed("write", &snapshot.overlay))?;
        }
        self.stage = Stage::Made;
        Ok(())
    }

    /// Has the guest, which stands still, write to them from now on, by who keeps it.
    ///
    /// # Errors
    /// Its disks are as they were; or the text says that it may be otherwise.
    pub(super) fn take_into_use(&mut self, keeper: &mut impl Keeper) -> Result<(), Failure> {
        if self.stage != Stage::Made {
            return Err(Failure::unfit("the overlays of the guest's disks were not made"));
        }
        let Err(error) = keeper.use_overlays(self) else {
            self.stage = Stage::InUse;
            return Ok(());
        };
        // A call whose answer got lost may have been carried out.
        match keeper.disks() {
            Ok(disks) if !self.all.iter().any(|snapshot| uses(&disks, &snapshot.overlay)) => Err(error),
            Ok(disks) if self.all.iter().all(|snapshot| uses(&disks, &snapshot.overlay)) => {
                self.stage = Stage::InUse;
                Ok(())
            }
            _ => {
                self.stage = Stage::InUse;
                let files: Vec<_> = self.all.iter().map(|snapshot| snapshot.overlay.display().to_string()).collect();
                Err(Failure::unfit(format!(
                    "{}; whether the guest writes to overlays now is not known (virsh domblklist shows it). \
                     Remove those that it does not use: {}",
                    error.text,
                    files.join(", ")
                )))
            }
        }
    }
}

impl Drop for Overlays {
    fn drop(&mut self) {
        if self.stage != Stage::InUse {
            self.all[..self.made].iter().for_each(|snapshot| remove(&snapshot.overlay));
        }
    }
}

fn uses(disks: &[DefinedDisk], overlay: &Path) -> bool {
    disks.iter().any(|disk| matches!(&disk.place, DiskPlace::File { path, .. } if path == overlay))
}

/// What became of overlays whose process has died.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Settled {
    /// The guest writes to these.
    pub(super) used: Vec<PathBuf>,
    /// Nobody uses these, and they are there.
    pub(super) left: Vec<PathBuf>,
}

/// Those that nobody uses are removed if they are `ours` to remove.
pub(super) fn settle(overlays: Vec<PathBuf>, disks: &[DefinedDisk], ours: bool) -> Settled {
    let (used, mut left): (Vec<_>, Vec<_>) = overlays.into_iter().partition(|overlay| uses(disks, overlay));
    if ours {
        left.iter().for_each(|overlay| remove(overlay));
    }
    left.retain(|overlay| overlay.exists());
    Settled { used, left }
}

fn remove(overlay: &Path) {
    match fs::remove_file(overlay) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("can't remove {}, which is not used: {error}", overlay.display());
        }
        _ => {}
    }
}

/// Of the disk of a device.
fn size(blocks: &Value, device: &str) -> Option<u64> {
    let is_it = |block: &&Value| block["qdev"].as_str().is_some_and(|path| path.split('/').any(|part| part == device));
    blocks.as_array()?.iter().find(is_it)?["inserted"]["image"]["virtual-size"].as_u64()
}

fn beside(disk: &Path, folder: Option<&Path>) -> Result<PathBuf, GuestError> {
    if let Some(folder) = folder {
        return Ok(folder.to_owned());
    }
    let is_device = fs::metadata(disk).is_ok_and(|meta| meta.file_type().is_block_device());
    match disk.parent().filter(|_| !is_device) {
        Some(folder) => Ok(folder.to_owned()),
        None => Err(GuestError::Unfit(format!(
            "{} is a device, beside which there is no room for a file; name a folder for its overlay: --disks=FOLDER",
            disk.display()
        ))),
    }
}

/// Named after the file below, or the first one of several overlays.
fn file_name(disk: &Path, name: &str, now: u64) -> String {
    let stem = disk.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let first = match stem.rsplit_once(&format!("-{name}-")) {
        Some((first, time)) if is_number(time) => first,
        _ => &stem,
    };
    format!("{first}-{name}-{now}.qcow2")
}

/// An empty file, for those who may use the file below.
fn reserve(snapshot: &DiskSnapshot) -> Result<File, GuestError> {
    let DiskSnapshot { kept, overlay, .. } = snapshot;
    let below = fs::metadata(kept).map_err(failed("look at", kept))?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(overlay);
    let file = file.map_err(failed("make", overlay))?;
    let given = fchown(&file, Some(below.uid()), Some(below.gid()))
        .and_then(|()| file.set_permissions(fs::Permissions::from_mode(below.mode() & 0o666)));
    if let Err(error) = given {
        remove(overlay);
        return Err(failed("give away", overlay)(error));
    }
    Ok(file)
}

/// By QEMU's own tool. It doesn't look at the file below, which the guest uses.
fn format_overlay(snapshot: &DiskSnapshot, format: &str, bytes: u64) -> Result<(), GuestError> {
    let DiskSnapshot { kept, overlay, .. } = snapshot;
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-u", "-f", "qcow2", "-F", format, "-b"]).arg(kept).arg(overlay);
    let output = command.arg(bytes.to_string()).stdin(Stdio::null()).output().map_err(|source| GuestError::System {
        what: "run qemu-img, which makes overlays of disks".into(),
        source,
        cure: "install it (Debian: qemu-utils, Fedora: qemu-img)",
    })?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
            Err(GuestError::Unfit(format!("can't make an overlay of disk {}: {said}", snapshot.disk)))
        }
    }
}

fn failed(what: &str, path: &Path) -> impl FnOnce(io::Error) -> GuestError {
    GuestError::system(format!("{what} {}", path.display()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn an_overlay_is_named_after_the_first_file() {
        let name = |path: &str| file_name(Path::new(path), "vda", 7);
        assert_eq!(name("/images/g.raw"), "g-vda-7.qcow2");
        assert_eq!(name("/images/g-vda-6.qcow2"), "g-vda-7.qcow2");
        assert_eq!(name("/images/g-vda-x.qcow2"), "g-vda-x-vda-7.qcow2");
        assert_eq!(name("/dev/vg/g-vda-"), "g-vda--vda-7.qcow2");
    }

    #[test]
    fn the_size_is_that_of_the_device() {
        let block = |qdev: &str, size: u64| json!({ "qdev": qdev, "inserted": { "image": { "virtual-size": size } } });
        let blocks = json!([
            block("/machine/peripheral/virtio-disk1/virtio-backend", 1),
            block("/machine/peripheral/virtio-disk10/virtio-backend", 2),
            block("sata0-0-0", 3),
            { "qdev": "sata0-0-1" },
        ]);
        assert_eq!(size(&blocks, "virtio-disk10"), Some(2));
        assert_eq!(size(&blocks, "sata0-0-0"), Some(3));
        assert_eq!(size(&blocks, "sata0-0-1"), None, "nothing is in it");
        assert_eq!(size(&blocks, "virtio-disk"), None);
    }

    fn overlays(folder: &Path) -> Overlays {
        let kept = folder.join("disk.raw");
        fs::write(&kept, [7; 4096]).unwrap();
        let all = ["vda", "vdb"].map(|disk| {
            let overlay = folder.join(format!("{disk}.qcow2"));
            DiskSnapshot { disk: disk.into(), kept: kept.clone(), overlay }
        });
        let forms = vec![("raw".to_owned(), 4096); 2];
        Overlays { all: all.into(), forms, left_out: Vec::new(), stage: Stage::Planned, made: 0 }
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_not_used_goes() {
        let folder = tempfile::tempdir().unwrap();
        let mut made = overlays(folder.path());
        made.make().unwrap();
        assert_eq!(names(folder.path()), ["disk.raw", "vda.qcow2", "vdb.qcow2"]);
        let first = fs::read(folder.path().join("vda.qcow2")).unwrap();
        assert!(first.starts_with(b"QFI\xfb"), "{:?}", &first[..4]);
        drop(made);
        assert_eq!(names(folder.path()), ["disk.raw"]);
    }

    /// A file of that name is somebody else's, and stays.
    #[test]
    fn no_file_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let other = folder.path().join("vdb.qcow2");
        fs::write(&other, "other").unwrap();
        let mut refused = overlays(folder.path());
        assert!(matches!(refused.make(), Err(GuestError::System { .. })));
        drop(refused);
        assert_eq!(names(folder.path()), ["disk.raw", "vdb.qcow2"]);
        assert_eq!(fs::read_to_string(&other).unwrap(), "other");
    }

    #[test]
    fn of_what_a_dead_process_left_that_in_use_stays() {
        let folder = tempfile::tempdir().unwrap();
        let mut made = overlays(folder.path());
        made.make().unwrap();
        made.stage = Stage::InUse;
        let [one, two] = [0, 1].map(|number| made.all[number].overlay.clone());
        drop(made);
        let place = DiskPlace::File { path: two.clone(), format: "qcow2".into() };
        let disks = [DefinedDisk { name: "vdb".into(), device: String::new(), place }];
        let used = vec![two.clone()];
        let not_ours = settle(vec![one.clone(), two.clone()], &disks, false);
        assert_eq!(not_ours, Settled { used: used.clone(), left: vec![one.clone()] });
        assert_eq!(settle(vec![one.clone(), two], &disks, true), Settled { used: used.clone(), left: Vec::new() });
        assert_eq!(settle(vec![one], &disks, false), Settled::default(), "it is gone");
        assert_eq!(names(folder.path()), ["disk.raw", "vdb.qcow2"]);
    }
}
