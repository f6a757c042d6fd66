//! What this machine can do.
use crate::{Accel, Qemu};
use std::sync::OnceLock;

/// Does KVM run a guest here? Found out once, by running guest/kvm.c until it reports: `/dev/kvm` alone promises
/// little.
pub fn kvm_works() -> bool {
    static WORKS: OnceLock<bool> = OnceLock::new();
    *WORKS.get_or_init(|| std::fs::File::open("/dev/kvm").is_ok() && runs_a_guest())
}

fn runs_a_guest() -> bool {
    let guest = Qemu::multiboot_under(Accel::Kvm).start();
    let seen = guest.and_then(|guest| guest.ready());
    if let Err(error) = &seen {
        // Tests that want KVM run emulated then; nobody should wonder why.
        eprintln!("lab: KVM does not run a guest here: {error}");
    }
    seen.is_ok()
}
