//! What libvirt itself has under way for a domain: nobody else may change the domain meanwhile.
use super::connection::Domain;

/// libvirt's operations, by their numbers.
const OPERATIONS: [&str; 11] = [
    "an operation",
    "a start",
    "a save",
    "a restore",
    "a migration to this host",
    "a migration away",
    "a snapshot",
    "a return to a snapshot",
    "a dump",
    "a backup",
    "the removal of a snapshot",
];

/// An error if there is something.
pub(super) fn refuse(domain: &Domain) -> Result<(), String> {
    // A libvirt that can't say is one that is busy.
    let job = domain.job().map_err(|failure| format!("can't ask libvirt what it does: {}", failure.why))?;
    let Some(number) = job else { return Ok(()) };
    let name = usize::try_from(number).ok().and_then(|number| OPERATIONS.get(number)).unwrap_or(&OPERATIONS[0]);
    Err(format!(
        "libvirt has {name} of the domain under way (virsh domjobinfo shows it); wait for it, or end it: virsh domjobabort"
    ))
}
