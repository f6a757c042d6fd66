//! Stock QEMU, attached from outside: nothing of it is patched, and nothing of ours stays in it.
//!
//! ```text
//!   qmp          commands and events on QEMU's control socket
//!   holder       who holds that socket, if it is not us
//!   libvirt      the same where libvirt keeps that socket
//!   questions    what it is asked together
//!   machine      what QEMU says of its machine
//!   survey       all that attaching looks at; look: the same for people who ask before
//!   checks       what we refuse, and the line that cures it
//!   writers      who writes guest memory behind the tracker
//!   blocks       QEMU's own list of its memory, and whether all of it is in these files
//!   places       where that is, of versions that do not say it
//!   memory       what holds the guest's memory, and where QEMU has it
//!   maps         what a process has mapped
//!   opened       what is open of QEMU's own process
//!   inject       a userfaultfd made by QEMU, taken over by us
//!   faults       which kind of userfaultfd, and the right to it
//!   emptying     private memory that QEMU gives back, before its pages are brought
//!   rights       which capabilities a process has
//!   security_module  which one may have refused something
//!   tracking     how writes are found, by what the kernel can
//!   vcpus        whose writes may be held for a moment
//!   balloon      the balloon that a process of ours is, which QEMU can't save: unplugged, and plugged in again
//!   giving_back  memory that the guest gives back, which must not happen while others wait for pages
//!   given_away   a mark in a QEMU whose guest is somewhere else, where it would not know that itself
//!   migration    QEMU's own migration, used for the device state only
//!   device_state the device state without it, where QEMU's migration would take the memory along
//!   saving       the device state by QEMU's migration: what is set for it, and its channel
//!   disk_files   the files that the disks are in
//!   state_channel  the connection that QEMU saves the device state to
//!   state_stream the device state as QEMU writes it
//!   source, destination    the two adapters made of these
//!   abandoned    a guest whose transship died
//! ```
pub(crate) mod abandoned;
mod back_ends;
mod balloon;
mod blocks;
mod checks;
mod destination;
mod device_state;
mod disk_files;
mod emptying;
mod faults;
mod given_away;
mod giving_back;
mod held;
mod holder;
#[allow(unsafe_code)]
mod inject;
pub mod libvirt;
mod look;
mod machine;
mod maps;
mod memory;
mod migration;
mod nested;
mod networks;
mod opened;
mod places;
mod qmp;
mod questions;
mod rights;
mod saving;
mod security_module;
mod source;
mod state_channel;
mod state_stream;
mod survey;
mod tracking;
mod vcpus;
mod writers;

use std::path::Path;

use serde_json::json;
use transship_guest::GuestError;
use transship_wire::GuestDescription;

pub use abandoned::GivenAway;
pub use destination::QemuDestination;
pub use emptying::{give_back_by, give_back_there};
pub use held::processors_to_hold;
pub use look::{look, look_at_domain};
pub use source::QemuSource;
pub use vcpus::threads_that_may_wait;
pub use writers::look_for_writers;

use memory::Backend;
use qmp::Qmp;

/// The process that may have the disks of a source's guest, in words.
const DESTINATION: &str = "the destination's QEMU";

/// What the other side must match: the canonical machine type, and all backends by name and size.
fn describe(qmp: &mut Qmp, backends: &[Backend]) -> Result<GuestDescription, GuestError> {
    let kind = qmp.execute("qom-get", json!({ "path": "/machine", "property": "type" }))?;
    let kind = kind.as_str().unwrap_or("of unknown type");
    Ok(GuestDescription {
        machine: format!("qemu {}", kind.strip_suffix("-machine").unwrap_or(kind)),
        regions: backends.iter().map(Backend::description).collect(),
    })
}

/// The machine's type as QEMU's own stream names it.
fn bare_machine(guest: &GuestDescription) -> &str {
    guest.machine.strip_prefix("qemu ").unwrap_or(&guest.machine)
}

/// The command line by which a person lets a guest run.
fn cont_by_hand(socket: &Path) -> String {
    by_hand(socket, r#"{"execute":"cont"}"#)
}

/// The command line by which a person has QEMU execute something.
fn by_hand(socket: &Path, command: &str) -> String {
    let address = format!("UNIX-CONNECT:{}", socket.display()).replace('\'', r"'\''");
    format!(r#"echo '{{"execute":"qmp_capabilities"}}{command}' | socat -t 5 - '{address}'"#)
}
