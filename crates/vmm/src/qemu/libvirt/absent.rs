//! A build without libvirt.
use transship_guest::GuestError;

use super::{ActiveDomain, Address};
use crate::qemu::qmp::Qmp;

fn absent() -> GuestError {
    GuestError::Unfit(
        "this transship was built without libvirt; build it with the feature libvirt, which is on by default".into(),
    )
}

/// There is nobody to ask.
pub(in crate::qemu) fn attach(_: &Address) -> Result<Qmp, GuestError> {
    Err(absent())
}

/// Nor anything to record.
pub(in crate::qemu) fn will(_: i32, _: Vec<std::path::PathBuf>) -> Result<String, GuestError> {
    Err(absent())
}

/// Nor anything to put back.
pub(crate) fn settle(_: &Address, _: &str, _: bool) -> Result<(), GuestError> {
    Err(absent())
}

/// Nor anybody to list.
pub fn active(_: Option<&str>) -> Result<Vec<ActiveDomain>, GuestError> {
    Err(absent())
}

/// Nor anybody to speak to.
pub fn reach_domain_by(_: std::os::unix::net::UnixStream) {}

/// Nor for.
pub fn serve_domain(_: std::os::unix::net::UnixStream, _: &Address, _: &super::Purpose) {}
