//! How control sockets are called.

/// A name of a socket may have no more than 107 bytes together with its folder.
const NAME_MAX: usize = 40;

/// What a socket is called: the process, and what a person would call the VM.
pub(super) fn name(pid: u32, vm: &str) -> String {
    format!("{pid}-{}", short(vm))
}

/// The last part of a VM's address, of letters that any name can have.
pub(super) fn short(vm: &str) -> String {
    let last = vm.rsplit(['/', ':', '#']).next().unwrap_or_default();
    let plain = last.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' });
    plain.take(NAME_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_process_and_vm() {
        assert_eq!(name(17, "qemu:/run/vm 1.qmp"), "17-vm_1.qmp");
        assert_eq!(name(17, "libvirt:qemu:///system#g1"), "17-g1");
        assert_eq!(name(17, &format!("handoff:/{}", "é".repeat(200))), format!("17-{}", "_".repeat(40)));
    }
}
