//! Adapters: how to attach to a virtual machine from outside.
//!
//! - `qemu:/run/vm.qmp`: a stock QEMU, by its QMP socket (module `qemu`)
//! - `libvirt:g1`: the same of a domain of libvirt, which keeps that socket (module `qemu::libvirt`)
//! - `handoff:/run/guest.sock`: a VMM that hands its memory over by itself (module `handoff`), such as the synthetic
//!   guest
#![deny(unsafe_code)]
use std::path::{Path, PathBuf};

use transship_guest::{DestinationGuest, GuestError, Hints, LastWill, SourceGuest};
use transship_memory::{GuestMemory, PageSet};

mod connecting;
mod freeze;
pub mod handoff;
mod looked;
pub mod qemu;
pub mod synthetic;
mod tracking;

pub use connecting::connect_by;
pub use freeze::{Freezer, freeze_by};
pub use qemu::{GivenAway, give_back_by, give_back_there, look_for_writers, processors_to_hold, threads_that_may_wait};
pub use tracking::Tracking;

pub use looked::{DeviceFound, DiskFound, Looked, MemoryFound, Use};

/// How a user names a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VmAddress {
    /// A stock QEMU, by its QMP socket.
    Qemu(PathBuf),
    /// A stock QEMU, by the domain that it is to libvirt.
    Libvirt(qemu::libvirt::Address),
    /// A VMM that hands its guest over, by the socket that it listens on.
    Handoff(PathBuf),
}

/// Choices about attaching.
#[derive(Debug, Clone, Default)]
pub struct AttachOptions {
    /// Go on although devices write behind the tracker (vhost-user, VFIO). The user says that they are quiet.
    pub allow_untracked_writers: bool,
    /// How its writes are tracked.
    pub tracking: Tracking,
    /// The guest has this balloon: it may be there until it is unplugged.
    pub balloon: Option<Balloon>,
}

/// A balloon that is a process beside the VMM.
#[derive(Debug, Clone)]
pub struct Balloon {
    /// Where its other end listens.
    pub socket: PathBuf,
    /// How it is asked for hints about the guest's memory. None: it can't be asked, which is no reason to fail, and the
    /// user was told so.
    pub connect: fn(&Path, &GuestMemory) -> Option<Box<dyn Hints>>,
}

impl std::str::FromStr for VmAddress {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let path = |p: &str| if p.is_empty() { Err(format!("{text:?} names no socket")) } else { Ok(p.into()) };
        match text.split_once(':') {
            Some(("qemu", p)) => Ok(Self::Qemu(path(p)?)),
            Some(("libvirt", domain)) => Ok(Self::Libvirt(domain.parse()?)),
            Some(("handoff", p)) => Ok(Self::Handoff(path(p)?)),
            _ => Err(format!(
                "{text:?} is not a VM; write qemu:/path/to/qmp.sock, libvirt:DOMAIN or handoff:/path/to/guest.sock"
            )),
        }
    }
}

/// Attaches to a guest that is to be moved away. Changes nothing in it yet.
pub fn attach_source(vm: &VmAddress, options: AttachOptions) -> Result<Box<dyn SourceGuest>, GuestError> {
    match vm {
        VmAddress::Qemu(path) => Ok(Box::new(qemu::QemuSource::attach(path, options)?)),
        VmAddress::Libvirt(address) => Ok(Box::new(qemu::QemuSource::attach_domain(address, options)?)),
        VmAddress::Handoff(_) if options.balloon.is_some() => {
            Err(GuestError::Unfit("a balloon is a device of a QEMU; leave out --balloon".to_owned()))
        }
        VmAddress::Handoff(path) => {
            options.tracking.here()?;
            Ok(Box::new(handoff::HandoffSource::attach(path)?.with_tracking(options.tracking)))
        }
    }
}

/// Looks at a VM, and says what would work with it. Changes nothing in it.
///
/// # Errors
/// It does not answer, or is of a kind that says nothing before it is attached to.
pub fn look(vm: &VmAddress, options: &AttachOptions) -> Result<Looked, GuestError> {
    match vm {
        VmAddress::Qemu(path) => qemu::look(path, options),
        VmAddress::Libvirt(address) => qemu::look_at_domain(address, options),
        VmAddress::Handoff(_) => Err(GuestError::Unfit(
            "a VMM that hands its guest over by itself says only then what is in the way; check is for a QEMU".into(),
        )),
    }
}

/// Lets a guest run again that a source stopped and then left by dying, before it had given it up. The caller knows
/// that it is so.
///
/// # Errors
/// The guest is gone, or does not answer.
pub fn resume_abandoned(vm: &VmAddress) -> Result<(), GuestError> {
    settle_abandoned(vm, LastWill::default(), true)
}

/// Puts a guest back as it was that a source stopped and then left by dying, before it had given it up. The caller
/// knows that it is so. `will`: what [`SourceGuest::last_will`] said before that. `run`: the guest ran, and is to run
/// again.
///
/// # Errors
/// The guest is gone, or does not answer.
pub fn settle_abandoned(vm: &VmAddress, will: LastWill, run: bool) -> Result<(), GuestError> {
    match vm {
        VmAddress::Qemu(path) => qemu::abandoned::settle(path, will, run),
        VmAddress::Libvirt(address) => qemu::libvirt::settle(address, &will.text, run),
        VmAddress::Handoff(path) if run => handoff::resume_abandoned(path),
        VmAddress::Handoff(_) => Ok(()),
    }
}

/// Looks for the memory of a guest that was given away before all of it was sent. Changes nothing in the VMM.
///
/// # Errors
/// The guest was not given away, or its VMM is gone, does not answer, or is of a kind that keeps no memory.
pub fn given_away(vm: &VmAddress) -> Result<GivenAway, GuestError> {
    match vm {
        VmAddress::Qemu(path) => qemu::abandoned::given_away(path),
        VmAddress::Libvirt(address) => Err(GuestError::Unfit(format!("{address}: {}", qemu::libvirt::NO_MOVES))),
        VmAddress::Handoff(_) => Err(GuestError::Unfit(
            "a VMM that hands its guest over by itself gives its memory to nobody afterwards; only the second process of \
             the move has it"
                .into(),
        )),
    }
}

/// Puts back what a restore that has died had changed in a VMM beside its guest. `will`: what
/// [`DestinationGuest::last_will`] said before.
///
/// # Errors
/// The VMM is gone, does not answer, or takes the old settings no more.
pub fn settle_restored(vm: &VmAddress, will: &str) -> Result<(), GuestError> {
    match vm {
        VmAddress::Qemu(path) => qemu::abandoned::loaded(path, will),
        VmAddress::Libvirt(_) | VmAddress::Handoff(_) => Ok(()),
    }
}

/// Lets a guest run that was handed over to a receiver which died before it had done so. One that runs is left alone.
///
/// # Errors
/// It can't be started, or is gone.
pub fn start_abandoned(vm: &VmAddress) -> Result<(), GuestError> {
    match vm {
        VmAddress::Qemu(path) => qemu::abandoned::start(path),
        VmAddress::Libvirt(address) => Err(not_a_destination(address)),
        VmAddress::Handoff(path) => handoff::start_abandoned(path),
    }
}

/// Stops a guest whose lazy restore has died, because its memory can't be brought any more; a VMM that does not answer
/// is frozen with it. Returns what a person finds, and how to end it: the rest of a sentence. Until this has returned,
/// the pages that are missing must stay so.
///
/// # Errors
/// It does not stop, or is gone.
pub fn stop_abandoned(vm: &VmAddress) -> Result<String, GuestError> {
    match vm {
        VmAddress::Qemu(path) => qemu::abandoned::stop(path),
        VmAddress::Libvirt(address) => Err(not_a_destination(address)),
        VmAddress::Handoff(path) => handoff::stop_abandoned(path),
    }
}

/// libvirt starts the domains that wait for a guest, and brings the guest itself.
fn not_a_destination(address: &qemu::libvirt::Address) -> GuestError {
    GuestError::Unfit(format!(
        "{address}: a domain of libvirt takes its guest from libvirt alone: virsh restore, or virsh migrate"
    ))
}

/// For those who are to wait for pages that are not there: a page that is there would never be brought.
fn check_holes(memory: &GuestMemory, lacks: &[PageSet]) -> Result<(), GuestError> {
    for (region, lacks) in memory.regions().iter().zip(lacks) {
        let mut there = region.not_missing()?;
        there.intersect_with(lacks);
        if let Some(there) = there.ranges().next() {
            return Err(GuestError::Unfit(format!(
                "guest memory {:?} is not empty: pages {}..{} are there; does another process use it?",
                region.name(),
                there.first,
                there.end()
            )));
        }
    }
    Ok(())
}

/// Nobody listens at the socket any more: there is nothing left to wait for.
fn is_gone(socket: &Path) -> bool {
    use std::io::ErrorKind::{ConnectionRefused, NotFound};
    connecting::connect(socket).is_err_and(|e| matches!(e.kind(), ConnectionRefused | NotFound))
}

/// Attaches to a guest that waits for its memory.
pub fn attach_destination(vm: &VmAddress) -> Result<Box<dyn DestinationGuest>, GuestError> {
    match vm {
        VmAddress::Qemu(path) => Ok(Box::new(qemu::QemuDestination::attach(path)?)),
        VmAddress::Libvirt(address) => Err(not_a_destination(address)),
        VmAddress::Handoff(path) => Ok(Box::new(handoff::HandoffDestination::attach(path)?)),
    }
}
