//! The process of a domain's QEMU: libvirt does not say, but QEMU knows the threads of its vCPUs.
use std::fs;

use serde_json::Value;

/// The process that has these threads (`query-cpus-fast`), and runs this domain.
///
/// # Errors
/// It is not on this host, or in another container.
pub(super) fn of(cpus: &Value, uuid: &str) -> Result<i32, String> {
    let thread = cpus[0]["thread-id"].as_i64().ok_or("QEMU does not say which threads run its vCPUs")?;
    let status = fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let pid = status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse::<i32>().ok());
    match pid.filter(|pid| runs(*pid, uuid)) {
        Some(pid) => Ok(pid),
        None => Err(format!(
            "QEMU says that thread {thread} runs its first vCPU, but here that is no QEMU of this domain; run transship on the \
             domain's host, and in the same container (PID namespace) as its QEMU"
        )),
    }
}

/// libvirt names the domain among QEMU's arguments.
fn runs(pid: i32, uuid: &str) -> bool {
    let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    words.split(|byte| *byte == 0).any(|word| word.eq_ignore_ascii_case(uuid.as_bytes()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    #[test]
    fn only_a_process_that_names_the_domain_is_taken() {
        let uuid = "3d4f8c1e-0000-4000-8000-00000000beef";
        let mut sleeper = std::process::Command::new("sh")
            .args(["-c", "read x", uuid])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let cpus = json!([{ "thread-id": sleeper.id() }]);
        // Until it is the shell, it is still us.
        while of(&cpus, uuid).is_err() && sleeper.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        assert_eq!(of(&cpus, uuid).unwrap(), sleeper.id() as i32);
        assert!(of(&cpus, "another").unwrap_err().contains("PID namespace"));
        assert!(of(&json!([{ "thread-id": i32::MAX }]), uuid).is_err());
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }
}
