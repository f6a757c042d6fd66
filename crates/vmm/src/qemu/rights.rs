//! Which capabilities a process has (`/proc/PID/status`).
use std::fs;

/// Whether the process (its number, or `self`) has this capability now.
pub(super) fn has(process: &str, capability: u32) -> bool {
    effective(process).is_some_and(|set| set >> capability & 1 == 1)
}

/// Whether we have all that there are.
pub(super) fn has_all() -> bool {
    let last = fs::read_to_string("/proc/sys/kernel/cap_last_cap").ok().and_then(|last| last.trim().parse().ok());
    effective("self").zip(last).is_some_and(|(effective, last): (u64, u32)| effective.count_ones() > last)
}

fn effective(process: &str) -> Option<u64> {
    u64::from_str_radix(&field(process, "CapEff")?, 16).ok()
}

/// What its status says under a name.
pub(super) fn field(process: &str, name: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(value.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_gone_has_none() {
        assert!(!has(&i32::MAX.to_string(), 0));
        assert_eq!(field("self", "Pid"), Some(std::process::id().to_string()));
        assert_eq!(field("self", "Pi"), None);
    }
}
