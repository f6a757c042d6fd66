//! Whether a thread's seccomp filter is known to let our calls pass.
//!
//! A filter may kill for a call that it does not know, and only who may suspend it may read it. One is known all the
//! same: QEMU's own (`-sandbox on`) answers what is in its list, and userfaultfd, which QEMU needs for its own
//! migration, is not.
use std::fs;

use super::super::rights;

/// Whether the kernel lets us suspend a filter: it asks for this right, and for no filter of our own.
pub(super) fn can_be_suspended() -> bool {
    const CAP_SYS_ADMIN: u32 = 21;
    rights::has("self", CAP_SYS_ADMIN) && rights::field("self", "Seccomp").as_deref() == Some("0")
}

/// The thread is under no filter, or under QEMU's own alone.
pub(super) fn lets_pass(pid: i32, thread: i32) -> bool {
    // What can't be read is not known to be harmless.
    let status = fs::read_to_string(format!("/proc/{pid}/task/{thread}/status")).unwrap_or_default();
    let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    match (line("Seccomp:"), line("Seccomp_filters:")) {
        (Some("0"), _) => true,
        // A QEMU that was told to, and runs, has its own: if there is one, it's that.
        (Some("2"), Some("1")) => fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| sandboxes_itself(&line)),
        _ => false,
    }
}

fn sandboxes_itself(command_line: &[u8]) -> bool {
    let arguments: Vec<&[u8]> = command_line.split(|byte| *byte == 0).collect();
    let mut sandboxes = arguments.windows(2).filter(|two| [b"-sandbox".as_slice(), b"--sandbox"].contains(&two[0]));
    let (first, second) = (sandboxes.next(), sandboxes.next());
    // Of two, one might turn off what the other turns on.
    let Some([_, options]) = first.filter(|_| second.is_none()) else { return false };
    options.split(|byte| *byte == b',').next().is_some_and(|first| [b"on".as_slice(), b"enable=on"].contains(&first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_sandbox_that_is_surely_on_counts() {
        for on in ["-sandbox\0on", "--sandbox\0enable=on,spawn=deny", "-m\x001G\0-sandbox\0on,obsolete=deny\0-S"] {
            assert!(sandboxes_itself(format!("qemu\0{on}\0").as_bytes()), "{on}");
        }
        for off in ["-S", "-sandbox", "-sandbox\0off", "-sandbox\0one", "-name\0on", "-sandbox\0on\0-sandbox\0off"] {
            assert!(!sandboxes_itself(format!("qemu\0{off}\0").as_bytes()), "{off}");
        }
    }
}
