//! The device state of a guest, saved without a migration of QEMU's.
//!
//! `x-ignore-shared` leaves out shared files that have a name, and nothing else. For any other memory, and where it is
//! quicker ([`is_quicker`]), there is `xen-save-devices-state`: it saves the sections of all devices and no memory, be
//! it the guest's or a device's (video memory, ROMs). So this makes a stream as QEMU would write it: the header, a
//! configuration of our own, a RAM section that lists all blocks and has the pages of the devices' ones, which are read
//! from QEMU's process, and then the sections as they were saved.
//!
//! What the command leaves out without a word is refused before ([`checks::state_without_memory`]); that something in
//! the machine can't be saved QEMU says in `blocked-reasons`.
//!
//! [`checks::state_without_memory`]: super::checks::state_without_memory
use std::{
    fs::File,
    io::{Read, Seek},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    panic::resume_unwind,
    sync::Arc,
    thread,
};

use rustix::fs::{MemfdFlags, Mode, OFlags};
use serde_json::json;
use transship_guest::{GuestError, StateFormat};
use transship_memory::{Access, InProcess, PAGE_BYTES, PageCount, PageRange, Process, Region, WINDOW_PAGES};
use transship_wire::GuestDescription;
use transship_wire::qemu::{Block, Configuration, GlobalState, Name, RunState, StreamWriter};

use super::{
    back_ends,
    blocks::{self, RamBlock},
    checks, machine,
    maps::Mapping,
    memory::open_process,
    qmp::{Added, Command, Keeper, Qmp, Question, WithStop},
};

/// Magic number and version of a stream.
const HEADER: [u8; 8] = *b"QEVM\0\0\0\x03";
/// The number of the RAM section, which QEMU takes from its header.
const RAM_SECTION: u32 = 2;
/// Pages of a device that are read at once: those of a mask.
const PIECE_PAGES: PageCount = WINDOW_PAGES;
/// Reading so much takes less time than asking the kernel what there is.
const READ_WHOLE_BYTES: u64 = 1 << 20;
/// More than any device has.
const DEVICE_BYTES_MAX: u64 = 1 << 30;

/// Whether QEMU can save the state so also where it could leave all memory out of a migration, which takes longer: it
/// begins by tracking all memory. Asked of both ends, so that the destination expects what the source will send.
pub(super) fn is_quicker(qmp: &mut Qmp) -> Result<bool, GuestError> {
    // A guest that stays after all must have its disks again, also if it is not to run then: older ones can't do that,
    // and end by an assertion at the next save.
    if qmp.version() < (10, 0) {
        return Ok(false);
    }
    Ok(checks::with_memory_of_its_own(qmp)?.is_none() && back_ends::devices_of_others(qmp)?.is_empty())
}

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
    /// QEMU has it: already, to save to it, or still, after a save that was in a hurry.
    added: Option<Added>,
    /// Blocks that were looked at right before the stop.
    seen: Option<Vec<Seen>>,
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
        let known = blocks::list(qmp)?;
        let known = blocks::placed(qmp, known)?;
        known.iter().filter(|block| !guest.contains(&block.name)).try_for_each(|block| place(block, qmp).map(drop))?;
        // It is sent, too, once the right to open it is gone.
        qmp.process().mappings()?;
        Ok(Self {
            process: open_process(qmp.pid(), Access::Read)?,
            machine,
            guest,
            file: StateFile::make()?,
            added: None,
            seen: None,
        })
    }

    /// What is asked of a guest that was stopped, before its state is saved. `seen`: its blocks of memory were.
    fn questions(seen: bool) -> Vec<Question> {
        [vec![checks::migration_question()], Self::questions_of_stopped(seen)].concat()
    }

    /// Without what is as true before the stop: what can't be saved is in the way whether the guest runs or not.
    fn questions_of_stopped(seen: bool) -> Vec<Question> {
        let blocks = (!seen).then(blocks::question);
        [machine::state_question()].into_iter().chain(blocks).collect()
    }

    /// Does what can be done while the guest still runs, for the next save. `known`: the blocks of memory as they are
    /// now, if it is checked after the stop whether they are still the same.
    ///
    /// # Errors
    /// QEMU does not take the file that it is to save to; memory of its devices can't be found.
    pub(super) fn prepare(&mut self, qmp: &mut Qmp, known: Option<&[RamBlock]>) -> Result<(), GuestError> {
        self.seen = known.map(|known| self.look(known.to_vec(), qmp)).transpose()?;
        if self.added.is_none() {
            self.added = Some(qmp.add_fd(self.file.rewound()?, &[])?);
        }
        Ok(())
    }

    /// What QEMU is told with the stop, if the save comes right behind it.
    pub(super) fn with_stop(&self, disks: Disks) -> WithStop {
        let next = self.added.as_ref().map(|added| command(added, disks));
        let questions = Self::questions_of_stopped(self.seen.is_some());
        WithStop { before: vec![checks::migration_question()], questions, next }
    }

    /// There will be no save, or it is over, and nobody waits for it.
    pub(super) fn undo(&mut self, qmp: &mut Qmp) {
        if let Some(added) = self.added.take() {
            qmp.remove_fd(&added);
        }
    }

    /// The state of the guest, which stands still, as a stream of QEMU's. In it the guest does. `at_once`: the guest
    /// was stopped just now, and what was prepared, and asked with the stop, counts; QEMU has the file until
    /// [`DeviceState::undo`]. Else the blocks of memory have been asked ahead when this returns.
    ///
    /// # Errors
    /// QEMU refuses; memory of its devices can't be read.
    pub(super) fn save(&mut self, qmp: &mut Qmp, disks: Disks, at_once: bool) -> Result<Vec<u8>, GuestError> {
        let seen = self.seen.take().filter(|_| at_once);
        let asked = Self::questions(seen.is_some());
        if !at_once {
            qmp.forget_answers_to(&asked);
        }
        // Through libvirt one is asked after the other. These go first there: a daemon that was restarted is found by a
        // question, and nothing is done twice that changes something.
        let early = (qmp.keeper() == Keeper::Libvirt).then(|| can_be_saved(qmp)).transpose()?;
        let file = self.file.rewound()?;
        let added = self.added.take().map_or_else(|| qmp.add_fd(file, &asked), Ok)?;
        // What was not asked on the way.
        qmp.ask_ahead(&asked)?;
        let state = early.map_or_else(|| can_be_saved(qmp), Ok);
        let saved = state.and_then(|state| Ok((state, self.save_to(&added, qmp, disks, seen)?)));
        if at_once {
            self.added = Some(added);
        } else {
            qmp.remove_fd(&added);
        }
        qmp.forget_answers_to(&Self::questions(true));
        let (state, (mut writer, mut tail)) = saved?;
        if let Some(mut global) = GlobalState::find(&tail, 0).map_err(strange)? {
            // The command calls every guest a running one.
            global.patch(&mut tail, state);
        }
        writer.raw(&tail);
        Ok(writer.take_bytes())
    }

    /// The start of the stream, up to the end of all memory, and the sections of all devices with the end of the
    /// stream. QEMU's own stream, too, has the memory of devices before their state: it is read while that is saved.
    fn save_to(
        &self,
        added: &Added,
        qmp: &mut Qmp,
        disks: Disks,
        seen: Option<Vec<Seen>>,
    ) -> Result<(StreamWriter, Vec<u8>), GuestError> {
        let seen = match seen {
            Some(seen) => seen,
            None => self.look(blocks::list(qmp)?, qmp)?,
        };
        let (memory, saved) = thread::scope(|scope| {
            let memory = scope.spawn(|| self.memory(&seen));
            let (command, arguments) = command(added, disks);
            let saved = qmp.execute(command, arguments);
            (memory.join().unwrap_or_else(|panic| resume_unwind(panic)), saved)
        });
        saved?;
        Ok((memory?, self.file.sections()?))
    }

    /// Where these blocks of memory are that are a device's.
    fn look(&self, blocks: Vec<RamBlock>, qmp: &mut Qmp) -> Result<Vec<Seen>, GuestError> {
        let _mappings = qmp.process().hold_mappings();
        blocks::placed(qmp, blocks)?.into_iter().map(|block| self.looked_at(block, qmp)).collect()
    }

    /// The start of the stream: what blocks of memory there are, and what is in those of devices.
    fn memory(&self, blocks: &[Seen]) -> Result<StreamWriter, GuestError> {
        let mut writer = StreamWriter::new(0, RAM_SECTION);
        writer.header().configuration(&Configuration::new(self.machine.clone()));
        writer.ram_start(blocks.iter().map(|seen| seen.block.used_bytes).sum());
        for Seen { block, .. } in blocks {
            let name = Name::new(&block.name).map_err(strange)?;
            writer.block(&Block { name, used_bytes: block.used_bytes, gpa: None, mapped: None });
        }
        writer.end_of_section().end();
        for Seen { block, device } in blocks {
            if let Some(device) = device {
                self.device(block, device, &mut writer)?;
            }
        }
        writer.end_of_section();
        Ok(writer)
    }

    /// Where the memory is, if it is a device's.
    fn looked_at(&self, block: RamBlock, qmp: &mut Qmp) -> Result<Seen, GuestError> {
        if self.guest.contains(&block.name) {
            return Ok(Seen { block, device: None });
        }
        let address = place(&block, qmp)?;
        let may_have_holes = is_worth_a_look(qmp, address, block.used_bytes)?;
        Ok(Seen { block, device: Some(DeviceMemory { address, may_have_holes }) })
    }

    /// All pages of a device's memory. Those of zeros are written too: there may be others at the destination.
    fn device(&self, block: &RamBlock, device: &DeviceMemory, writer: &mut StreamWriter) -> Result<(), GuestError> {
        let name = Name::new(&block.name).map_err(strange)?;
        let (address, bytes) = (device.address, block.used_bytes);
        let memory =
            InProcess { process: Arc::clone(&self.process), address, bytes, page_bytes: PAGE_BYTES as u64, file: None };
        let region = Region::in_process(&block.name, memory, Access::Read).map_err(unread)?;
        let data = if device.may_have_holes { Some(region.data().map_err(unread)?) } else { None };
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

/// Has QEMU save to that file.
fn command(added: &Added, disks: Disks) -> Command {
    let file = format!("/dev/fdset/{}", added.set);
    ("xen-save-devices-state", json!({ "filename": file, "live": disks == Disks::Released }))
}

/// A block of QEMU's memory.
struct Seen {
    block: RamBlock,
    /// If it is a device's.
    device: Option<DeviceMemory>,
}

/// Where QEMU has a device's memory.
struct DeviceMemory {
    address: u64,
    /// The page table says where there is nothing.
    may_have_holes: bool,
}

/// Whether the page table says which pages of a device's memory hold anything, and that is quicker than to read them
/// all.
fn is_worth_a_look(qmp: &mut Qmp, address: u64, bytes: u64) -> Result<bool, GuestError> {
    if bytes <= READ_WHOLE_BYTES {
        return Ok(false);
    }
    // Of memory that it shares it does not.
    let is_own = |mapping: &Mapping| {
        (mapping.start..mapping.end).contains(&address)
            && address + bytes <= mapping.end
            && !mapping.is_shared
            && !mapping.has_file()
    };
    Ok(qmp.process().mappings()?.iter().any(is_own))
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

/// What a guest arrives as whose state is about to be saved.
///
/// # Errors
/// It runs; or it has got a device since it was attached to that QEMU can't save. A migration refuses such a guest, but
/// QEMU that is to save the state by itself dies of it (seen with 10.0 and an nvme disk).
fn can_be_saved(qmp: &mut Qmp) -> Result<RunState, GuestError> {
    let state = machine::run_state(qmp)?;
    machine::stands(&state)?;
    checks::savable(qmp).map(|()| RunState::of_stopped(&state))
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

    /// Emptied, to be written to.
    fn rewound(&self) -> Result<BorrowedFd<'_>, GuestError> {
        let (ours, mut qemus) = (&self.ours, &self.qemus);
        ours.set_len(0).and_then(|()| qemus.rewind()).map_err(strange)?;
        Ok(qemus.as_fd())
    }

    /// What QEMU has written, behind the header.
    fn sections(&self) -> Result<Vec<u8>, GuestError> {
        let (mut ours, mut bytes) = (&self.ours, Vec::new());
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
