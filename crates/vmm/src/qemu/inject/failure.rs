//! Why the visit failed, in eight bytes on the way from the child and in words for people.
use std::io;

use rustix::io::Errno;

use super::super::security_module;

/// In place of a failure: all is done.
pub(super) const DONE: [u8; 8] = [0; 8];

/// Which step failed, and with which errno.
#[derive(Debug, Clone, Copy)]
pub(super) struct InjectionFailure {
    pub(super) step: Step,
    pub(super) errno: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Step {
    Seize = 1,
    Stop = 2,
    Registers = 3,
    Mode = 4,
    Userfaultfd = 5,
    Take = 6,
    Gone = 7,
    Filter = 8,
    Trapped = 9,
    /// With the descriptor in place of an errno.
    Foreign = 10,
    GiveBack = 11,
}

impl InjectionFailure {
    pub(super) fn new(step: Step) -> Self {
        // SAFETY: errno is a thread-local integer that is always there.
        Self { step, errno: unsafe { *libc::__errno_location() } }
    }

    pub(super) fn to_bytes(self) -> [u8; 8] {
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&(self.step as i32).to_ne_bytes());
        bytes[4..].copy_from_slice(&self.errno.to_ne_bytes());
        bytes
    }

    pub(super) fn from_bytes(bytes: [u8; 8]) -> Self {
        let [a, b, c, d, e, f, g, h] = bytes;
        let step = i32::from_ne_bytes([a, b, c, d]);
        let steps = [
            Step::Seize,
            Step::Stop,
            Step::Registers,
            Step::Mode,
            Step::Userfaultfd,
            Step::Take,
            Step::Filter,
            Step::Trapped,
            Step::Foreign,
            Step::GiveBack,
        ];
        let step = steps.into_iter().find(|known| *known as i32 == step).unwrap_or(Step::Gone);
        Self { step, errno: i32::from_ne_bytes([e, f, g, h]) }
    }

    pub(super) fn explain(self, pid: i32) -> String {
        let system = io::Error::from_raw_os_error(self.errno);
        match self.step {
            Step::Seize => {
                let module = security_module::hint(pid, Errno::from_raw_os_error(self.errno));
                format!(
                    "can't trace it: {system}{module}; run as root or as QEMU's user, with no debugger attached to it"
                )
            }
            Step::Stop => "its thread does not stop; it waits for a disk, or is frozen".to_owned(),
            Step::Registers => format!("can't read its registers: {system}"),
            Step::Mode => "it is not a 64-bit x86 program".to_owned(),
            Step::Userfaultfd => format!(
                "the system call failed there: {system}; is it missing in the kernel (CONFIG_USERFAULTFD), or forbidden \
                 by a security module?"
            ),
            Step::Filter if self.errno == libc::EINVAL => {
                "can't suspend a seccomp filter that may kill it for this call: the kernel lacks \
                 CONFIG_CHECKPOINT_RESTORE; start QEMU with no filter except its own -sandbox on"
                    .to_owned()
            }
            Step::Filter => format!(
                "can't suspend a seccomp filter that may kill it for this call: {system}; run transship as root \
                 (CAP_SYS_ADMIN), itself under no such filter, or start QEMU with no filter except its own -sandbox \
                 on"
            ),
            Step::Trapped => {
                "the system call was trapped there (SIGSYS), and nothing changed; a seccomp filter forbids it: run \
                 transship as root (CAP_SYS_ADMIN)"
                    .to_owned()
            }
            Step::Foreign => format!("the system call gave descriptor {}, which is not a userfaultfd", self.errno),
            Step::GiveBack => format!(
                "the system call failed there: {system}; memory that is locked (-overcommit mem-lock=on) can't be given \
                 back, and that of huge pages only from Linux 5.18 on"
            ),
            Step::Take => format!("can't take its descriptor: {system}"),
            Step::Gone => format!("process {pid} ended meanwhile"),
        }
    }
}
