//! The device state of a guest whose memory QEMU would not leave out of its own migration stream.
//!
//! `x-ignore-shared` leaves out shared files that have a name, and nothing else. For any other memory there is
//! `xen-save-devices-state`: it saves the sections of all devices and no memory, be it the guest's or a device's (video
//! memory, ROMs). So this makes a stream as QEMU would write it: the header, a configuration of our own, a RAM section
//! that lists all blocks and has the pages of the devices' ones, which are read from QEMU's process, and then the
//! sections as they were saved.
//!
//! What the command leaves out without a word is refused before ([`checks::state_without_memory`]); that something in
//! the machine can't be saved QEMU says in `blocked-reasons`.
//!
//! [`checks::state_without_memory`]: super::checks::state_without_memory
use std::{
    fs::File,
    io::{Read, Seek},
    os::fd::{AsFd, AsRawFd},
    sync::Arc,
};

use rustix::fs::{MemfdFlags, Mode, OFlags};
use serde_json::json;
use transship_guest::{GuestError, StateFormat};
use transship_memory::{Access, InProcess, PAGE_BYTES, PageCount, PageRange, Process, Region, WINDOW_PAGES};
use transship_wire::GuestDescription;
use transship_wire::qemu::{Block, Configuration, GlobalState, Name, RunState, StreamWriter};

use super::{
    blocks::{self, RamBlock},
    maps::Mapping,
    memory::open_process,
    qmp::Qmp,
};

/// Magic number and version of a stream.
const HEADER: [u8; 8] = *b"QEVM\0\0\0\x03";
/// The number of the RAM section, which QEMU takes from its header.
const RAM_SECTION: u32 = 2;
/// Pages of a device that are read at once: those of a mask.
const PIECE_PAGES: PageCount = WINDOW_PAGES;
/// More than any device has.
const DEVICE_BYTES_MAX: u64 = 1 << 30;

/// What becomes of the guest's disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Disks {
    /// QEMU lets go of them, until `cont`: somebody else will have them.
    Released,
    /// It keeps them.
    Kept,
}

/// Saves the device state of one QEMU.
pub(super) struct DeviceState {
    process: Arc<Process>,
    machine: Name,
    /// Names of the blocks that are the guest's own memory.
    guest: Vec<String>,
    file: StateFile,
}

impl DeviceState {
    /// Of the QEMU whose guest memory is in these blocks.
    ///
    /// # Errors
    /// Memory of a device that can't be found.
    pub(super) fn of(qmp: &mut Qmp, guest: &GuestDescription, format: &StateFormat) -> Result<Self, GuestError> {
        let StateFormat::Qemu { blocks, .. } = format else {
            return Err(GuestError::Bug("a QEMU's device state is not in QEMU's format".to_owned()));
        };
        let (machine, guest) = (super::bare_machine(guest), blocks.clone());
        let machine =
            Name::new(machine).map_err(|e| GuestError::Unfit(format!("can't name the machine {machine:?}: {e}")))?;
        let known = blocks::with_places(qmp)?;
        known.iter().filter(|block| !guest.contains(&block.name)).try_for_each(|block| place(block, qmp).map(drop))?;
        // It is sent, too, once the right to open it is gone.
        qmp.process().mappings()?;
        Ok(Self { process: open_process(qmp.pid(), Access::Read)?, machine, guest, file: StateFile::make()? })
    }

    /// The state of the guest, which stands still, as a stream of QEMU's. In it the guest does.
    ///
    /// # Errors
    /// QEMU refuses; memory of its devices can't be read.
    pub(super) fn save(&self, qmp: &mut Qmp, disks: Disks) -> Result<Vec<u8>, GuestError> {
        let mut tail = self.file.sections(qmp, disks)?;
        let blocks = blocks::with_places(qmp)?;
        if let Some(mut state) = GlobalState::find(&tail, 0).map_err(strange)? {
            // The command calls every guest a running one.
            state.patch(&mut tail, RunState::Paused);
        }
        let mut writer = StreamWriter::new(0, RAM_SECTION);
        writer.header().configuration(&Configuration::new(self.machine.clone()));
        writer.ram_start(blocks.iter().map(|block| block.used_bytes).sum());
        for block in &blocks {
            let name = Name::new(&block.name).map_err(strange)?;
            writer.block(&Block { name, used_bytes: block.used_bytes, gpa: None, mapped: None });
        }
        writer.end_of_section().end();
        let mappings = qmp.process().mappings()?;
        for block in blocks.iter().filter(|block| !self.guest.contains(&block.name)) {
            self.device(qmp, block, &mappings, &mut writer)?;
        }
        writer.end_of_section().raw(&tail);
        Ok(writer.take_bytes())
    }

    /// All pages of a device's memory. Those of zeros are written too: there may be others at the destination.
    fn device(
        &self,
        qmp: &Qmp,
        block: &RamBlock,
        mappings: &[Mapping],
        writer: &mut StreamWriter,
    ) -> Result<(), GuestError> {
        let name = Name::new(&block.name).map_err(strange)?;
        let address = place(block, qmp)?;
        let bytes = block.used_bytes;
        let memory =
            InProcess { process: Arc::clone(&self.process), address, bytes, page_bytes: PAGE_BYTES as u64, file: None };
        let region = Region::in_process(&block.name, memory, Access::Read).map_err(unread)?;
        // Of memory that it shares the page table does not say what it holds.
        let own = mappings.iter().any(|mapping| {
            (mapping.start..mapping.end).contains(&address)
                && address + bytes <= mapping.end
                && !mapping.is_shared
                && !mapping.has_file()
        });
        let data = if own { Some(region.data().map_err(unread)?) } else { None };
        let mut piece = Vec::new();
        for pages in PageRange::all(region.pages()).parts(PIECE_PAGES) {
            let first = pages.first;
            let all = u128::MAX >> (WINDOW_PAGES - pages.count).get();
            let wanted = data.as_ref().map_or(all, |data| data.window(first));
            piece.clear();
            region.copy_out(first.masked(wanted), &mut piece).map_err(unread)?;
            let mut contents = piece.as_chunks::<PAGE_BYTES>().0.iter();
            for page in pages.iter() {
                let offset = page.offset();
                let there = wanted >> (page - first).get() & 1 == 1;
                match if there { contents.next() } else { None } {
                    Some(bytes) if bytes.iter().any(|byte| *byte != 0) => writer.page(&name, offset, bytes),
                    _ => writer.zero_page(&name, offset),
                };
            }
        }
        Ok(())
    }
}

/// Where QEMU has a device's memory.
fn place(block: &RamBlock, qmp: &Qmp) -> Result<u64, GuestError> {
    let (name, (major, minor)) = (&block.name, qmp.version());
    if block.used_bytes > DEVICE_BYTES_MAX {
        let most = DEVICE_BYTES_MAX >> 20;
        return Err(GuestError::Unfit(format!(
            "the device memory {name:?} has more than {most} MiB; remove that device"
        )));
    }
    block.address.ok_or_else(|| {
        GuestError::Unfit(format!(
            "QEMU {major}.{minor} does not say where in its process the device memory {name:?} is, and several pieces \
             of memory could be it; use QEMU 8.2 or newer, which says it, or start the guest with all of its memory \
             in shared named files"
        ))
    })
}

/// The file that QEMU saves to, in memory.
struct StateFile {
    ours: File,
    /// QEMU finds the descriptor of a set by how it is open: for writing only.
    qemus: File,
}

impl StateFile {
    fn make() -> Result<Self, GuestError> {
        let failed = || GuestError::system("get memory for the device state");
        let ours = rustix::fs::memfd_create("transship-state", MemfdFlags::CLOEXEC).map_err(failed())?;
        let path = format!("/proc/self/fd/{}", ours.as_raw_fd());
        let qemus = rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()).map_err(failed())?;
        Ok(Self { ours: ours.into(), qemus: qemus.into() })
    }

    /// The sections of all devices, as QEMU saves them, and the end of the stream.
    fn sections(&self, qmp: &mut Qmp, disks: Disks) -> Result<Vec<u8>, GuestError> {
        let (mut ours, mut qemus) = (&self.ours, &self.qemus);
        ours.set_len(0).and_then(|()| qemus.rewind()).map_err(strange)?;
        let (number, set) = qmp.add_fd(qemus.as_fd())?;
        let arguments = json!({ "filename": format!("/dev/fdset/{set}"), "live": disks == Disks::Released });
        let saved = qmp.execute("xen-save-devices-state", arguments);
        // If this fails QEMU keeps an open file that nobody uses, until we disconnect.
        let _ = qmp.execute("remove-fd", json!({ "fdset-id": set, "fd": number }));
        saved?;
        let mut bytes = Vec::new();
        ours.rewind().and_then(|()| ours.read_to_end(&mut bytes)).map_err(strange)?;
        match bytes.strip_prefix(&HEADER) {
            Some(sections) if !sections.is_empty() => Ok(sections.to_vec()),
            _ => Err(strange("it does not begin as a stream does")),
        }
    }
}

fn strange(error: impl std::fmt::Display) -> GuestError {
    GuestError::vmm(format!("can't read QEMU's device state: {error}"))
}

fn unread(error: transship_memory::Error) -> GuestError {
    GuestError::vmm(format!("can't read the memory of QEMU's devices: {error}"))
}
