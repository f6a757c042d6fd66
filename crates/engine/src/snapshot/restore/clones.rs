//! A clone: a guest whose VMM has mapped the image's memory for itself, so that nothing is copied. What the VMM has
//! written there by itself is put back, its devices are loaded, and it runs.
use std::time::Instant;

use transship_memory::{GuestMemory, Region};

use super::{eager, lazy, restoring::Restore};
use crate::{
    CloneMemory, CloneReport, Error, FileReport, Phase, fail_point,
    filling::stand_in::StandIn,
    guest::{DestinationGuest, DiskFile},
    opened::all_is_open,
    snapshot::{
        Format,
        file::{filesystem, origin::Origin},
        image::opened::Image,
        mapped::plan::RestorePlan,
    },
    stream::whence::wrong,
};

/// How a region of the waiting guest holds what a file of the image holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holds {
    /// It is a private mapping of this very file.
    Maps,
    /// It is a private mapping of another file.
    MapsAnother,
    /// It is this very file: what the guest writes would be in the image.
    IsTheFile,
    /// It is memory of its own.
    Own,
}

/// Makes a clone of the guest in an image. `since`: when that began.
pub(super) fn clone(
    restore: &mut Restore<'_>,
    image: &Image,
    stand_in: Option<&mut dyn StandIn>,
    since: Instant,
) -> Result<(), Error> {
    image.check_pinned()?;
    check_disks(restore.guest, image)?;
    let (plan, origins) = RestorePlan::of_image(image, &restore.guest.description(), &restore.guest.state_format())?;
    let mut report = CloneReport { prepare_ms: ms(since), ..CloneReport::default() };
    let memory = restore.guest.memory();
    let way = how(image, &memory, &origins)?;
    // Others that use its disks were looked for, and all else that is needed is open.
    all_is_open()?;
    let outcome = match way {
        CloneMemory::Mapped => mapped(restore, image, &plan, &origins, &mut report),
        CloneMemory::Lazy => {
            restore.report.clone = Some(CloneReport { memory: CloneMemory::Lazy, ..report.clone() });
            match stand_in {
                Some(stand_in) => lazy::restore_from(restore, &image.snapshot, plan, &origins[0], stand_in),
                None => eager::restore_whole(restore, &image.snapshot, &plan, &origins),
            }
        }
        CloneMemory::Copied => eager::restore_whole(restore, &image.snapshot, &plan, &origins),
    };
    report.memory = way;
    // It runs before its VMM's settings are as they were.
    report.runs_ms = restore.guest.ran_since().map_or_else(|| ms(since), |ran| ms_between(since, ran));
    restore.report.clone = Some(report);
    outcome
}

fn ms(since: Instant) -> f64 {
    ms_between(since, Instant::now())
}

fn ms_between(since: Instant, until: Instant) -> f64 {
    until.duration_since(since).as_secs_f64() * 1e3
}

/// Which way all regions go.
fn how(image: &Image, memory: &GuestMemory, origins: &[Origin]) -> Result<CloneMemory, Error> {
    let name = &image.name;
    let cure = format!("start QEMU with what `transship clone --print-args {name}` prints");
    let mut mapped = 0;
    for (region, origin) in memory.regions().iter().zip(origins) {
        match holds(region, origin)? {
            Holds::Maps => mapped += 1,
            Holds::Own => {}
            Holds::IsTheFile => {
                let what = format!(
                    "memory {:?} of the waiting guest is a shared mapping of {}: what it writes would change the image \
                     and all its clones; share=off is needed: {cure}",
                    region.name(),
                    origin.name
                );
                return Err(wrong(name, what));
            }
            Holds::MapsAnother => {
                let what = format!(
                    "memory {:?} of the waiting guest is a private mapping of another file than {}; {cure}",
                    region.name(),
                    origin.name
                );
                return Err(wrong(name, what));
            }
        }
    }
    if mapped == origins.len() {
        return Ok(CloneMemory::Mapped);
    }
    if mapped > 0 {
        return Err(wrong(name, format!("only a part of the waiting guest's memory is a mapping of it; {cure}")));
    }
    Ok(match memory.regions() {
        [_] if memory.check_can_be_empty().is_ok() => CloneMemory::Lazy,
        _ => CloneMemory::Copied,
    })
}

fn holds(region: &Region, origin: &Origin) -> Result<Holds, Error> {
    let failed = |source: rustix::io::Errno| Error::Io { what: "inspect guest memory".into(), source: source.into() };
    let id = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
    let ours = rustix::fs::fstat(&origin.file).map(id).map_err(failed)?;
    if let Some((file, offset)) = region.file_below() {
        let same = rustix::fs::fstat(file).map(id).map_err(failed)? == ours && offset == 0;
        return Ok(if same { Holds::Maps } else { Holds::MapsAnother });
    }
    match region.shared_file() {
        Some((file, _)) if rustix::fs::fstat(file).map(id).map_err(failed)? == ours => Ok(Holds::IsTheFile),
        _ => Ok(Holds::Own),
    }
}

fn mapped(
    restore: &mut Restore<'_>,
    image: &Image,
    plan: &RestorePlan,
    origins: &[Origin],
    report: &mut CloneReport,
) -> Result<(), Error> {
    origins.iter().zip(&plan.sources).try_for_each(|(origin, source)| {
        let holes = source.stored.pages() - source.stored.count();
        check_room(origin, holes.bytes())
    })?;
    restore.report.setup_ms = restore.elapsed_ms();
    restore.report.file = Some(FileReport {
        bytes: origins.iter().filter_map(|origin| origin.bytes).sum(),
        allocated: origins.iter().map(Origin::allocated).sum(),
        ..image.snapshot.origin.report(Format::Raw, plan.stored_pages())
    });
    restore.progress.set_phase(Phase::Loading);
    for region in restore.guest.memory().regions() {
        report.pages_written += region.revert()?.get();
    }
    fail_point::reach("clone.memory")?;
    let begin = Instant::now();
    restore.load(&image.snapshot, plan)?;
    report.load_ms = ms(begin);
    fail_point::reach("clone.loaded")?;
    restore.start(plan.ran)?;
    fail_point::reach("clone.started")
}

/// A tmpfs makes a page of each hole that a clone touches, and a clone for which there is none dies.
fn check_room(origin: &Origin, holes: u64) -> Result<(), Error> {
    const TMPFS: u64 = 0x0102_1994;
    let is_tmpfs = rustix::fs::fstatfs(&origin.file).is_ok_and(|system| system.f_type as u64 == TMPFS);
    // One of unlimited size says that it has none at all.
    let limited = rustix::fs::fstatvfs(&origin.file).is_ok_and(|system| system.f_blocks > 0);
    let room = filesystem::available_bytes(&origin.file).unwrap_or(u64::MAX);
    if !is_tmpfs || !limited || room >= holes {
        return Ok(());
    }
    let what = format!(
        "the {} has {:.1} MB left, and clones may touch {:.1} MB of memory that is a hole, for each of which it takes a \
         page once; a clone that finds it full is killed: enlarge it (mount -o remount,size=…), or keep the image on a \
         disk",
        filesystem::name(&origin.file),
        room as f64 / 1e6,
        holes as f64 / 1e6
    );
    Err(wrong(&origin.name, what))
}

/// The guest of the image goes on elsewhere with its disks, or was stopped and may. Where it is not known which they
/// are, no other process may write to those of the clone.
fn check_disks(guest: &mut dyn DestinationGuest, image: &Image) -> Result<(), Error> {
    let parents = image.manifest.disks.as_deref();
    if parents.is_some_and(<[DiskFile]>::is_empty) {
        return Ok(());
    }
    let writable = guest.writable_disks()?;
    let shared = match parents {
        Some(parents) => writable
            .into_iter()
            .find(|ours| parents.iter().any(|theirs| theirs.is(ours)))
            .map(|ours| (ours.name, "is a disk of the guest that the image was made of".to_owned())),
        None => guest.written_elsewhere(&writable).map(|(ours, process)| {
            let whose =
                format!("{process} has open for writing, and which disks the guest of the image had is not known");
            (ours.name, whose)
        }),
    };
    match shared {
        None => Ok(()),
        Some((disk, whose)) => {
            let what = format!(
                "the waiting guest may write to {disk}, which {whose}; two guests on one disk destroy it: give the \
                 clone an overlay of its own: qemu-img create -f qcow2 -b {disk} -F FORMAT overlay.qcow2"
            );
            Err(wrong(&image.name, what))
        }
    }
}
