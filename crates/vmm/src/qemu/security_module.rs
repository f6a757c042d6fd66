//! Which security module (LSM) may have said no. The kernel gives the same errors for it as for a missing right.
use std::fs;

use rustix::io::Errno;

/// The end of a message about something that was refused to us on process `pid`; empty where no module confines it or
/// us.
pub(super) fn hint(pid: i32, error: Errno) -> String {
    if ![Errno::PERM, Errno::ACCESS].contains(&error) {
        return String::new();
    }
    let label = |process: &str| {
        let label = fs::read(format!("/proc/{process}/attr/current")).unwrap_or_default();
        String::from_utf8_lossy(&label).trim_end_matches(['\0', '\n']).to_owned()
    };
    said_of(&label("self"), &label(&pid.to_string()))
}

/// By the labels that both have.
fn said_of(ours: &str, theirs: &str) -> String {
    // user:role:type, and perhaps a level; AppArmor's are a profile and its mode.
    let is_selinux = |label: &str| label.split(':').count() >= 3 && !label.ends_with(')');
    let is_enforced = |label: &str| ["(enforce)", "(kill)"].iter().any(|mode| label.ends_with(mode));
    let (module, look) = if [ours, theirs].into_iter().any(is_enforced) {
        ("AppArmor", "dmesg shows it as apparmor=\"DENIED\"")
    } else if is_selinux(ours) && is_selinux(theirs) {
        ("SELinux", "ausearch -m avc shows it")
    } else {
        return String::new();
    };
    format!(" ({module} may have refused it to transship, as {ours:?}, on QEMU, as {theirs:?}: {look})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_named_by_its_labels() {
        let libvirts = "libvirt-6a1b (enforce)";
        assert!(said_of("unconfined", libvirts).contains("AppArmor"));
        assert!(said_of("transship (kill)", "unconfined").contains("as \"transship (kill)\", on QEMU"));
        assert!(
            said_of("unconfined_u:unconfined_r:unconfined_t:s0", "system_u:system_r:svirt_t:s0:c1,c2")
                .contains("SELinux")
        );
        for (ours, theirs) in
            [("", ""), ("unconfined", "unconfined"), ("unconfined", "a::b (complain)"), ("kernel", "")]
        {
            assert_eq!(said_of(ours, theirs), "", "{ours} {theirs}");
        }
        assert_eq!(hint(i32::MAX, Errno::SRCH), "");
    }
}
