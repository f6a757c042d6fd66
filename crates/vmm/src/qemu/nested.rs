//! Guests that the guest runs itself. KVM writes control structures of theirs past the mapping that is tracked.
use serde_json::json;

use super::qmp::Qmp;

/// VMXE in CR4: Intel's way is switched on.
const VMXE: u64 = 1 << 13;
/// SVME in EFER: AMD's way is.
const SVME: u64 = 1 << 12;

/// Why the guest may have guests of its own. What its first vCPU has switched on it has for all of them. Whether there
/// are any guests nobody says from outside. Without KVM all that they write is tracked.
pub(super) fn doubt(qmp: &mut Qmp) -> Option<String> {
    let kvm = qmp.execute("query-kvm", json!({})).ok()?;
    if kvm["enabled"] != true {
        return None;
    }
    let registers = qmp.execute("human-monitor-command", json!({ "command-line": "info registers" })).ok()?;
    let text = registers.as_str()?;
    let is_on = |name, bit| register(text, name).is_some_and(|value| value & bit != 0);
    let what = match (is_on("CR4", VMXE), is_on("EFER", SVME)) {
        (true, _) => "CR4.VMXE",
        (_, true) => "EFER.SVME",
        _ => return None,
    };
    Some(format!(
        "the guest has switched virtualization on ({what}), and may run guests of its own: some of their pages are \
         written without transship seeing it, so end those guests before it is moved or saved"
    ))
}

/// As QEMU shows it: `CR4=00372678`.
fn register(text: &str, name: &str) -> Option<u64> {
    let value = text.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))?;
    u64::from_str_radix(value, 16).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::qemu::qmp::tests::peer;

    /// Of a QEMU that shows these registers, as the last lines of many.
    fn doubt_about(kvm: bool, cr4: &str, efer: &str) -> Option<String> {
        let registers = format!(
            "RIP=ffffffff81e3a0bf RFL=00000246\\r\\nCR0=80050033 CR2=00 CR3=02a CR4={cr4}\\r\\nEFER={efer}\\r\\nFCW=037f"
        );
        let answers = [
            format!(r#"{{"return": {{"enabled": {kvm}, "present": true}}, "id": ID}}"#),
            format!(r#"{{"return": "{registers}", "id": ID}}"#),
        ];
        let (_dir, path) = peer(&answers.each_ref().map(String::as_str));
        doubt(&mut Qmp::connect(&path).unwrap())
    }

    #[test]
    fn a_guest_that_may_have_guests_is_doubted() {
        assert!(doubt_about(true, "00372678", "0000000000000d01").unwrap().contains("CR4.VMXE"));
        assert!(doubt_about(true, "003506f0", "0000000000001d01").unwrap().contains("EFER.SVME"));
        assert_eq!(doubt_about(true, "003506f0", "0000000000000d01"), None);
        assert_eq!(doubt_about(false, "00372678", "0000000000001d01"), None, "its writes are seen");
        assert_eq!(doubt_about(true, "?", ""), None);
    }
}
