//! The filter of system calls.
use std::{collections::BTreeMap, env::consts::ARCH, io};

use rustix::io::Errno;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, SeccompRule, TargetArch, apply_filter_all_threads};

use super::{
    Left,
    calls::{self, Calls},
};

/// Programs for the kernel; all of them judge each call, and the strictest wins.
pub(super) struct Filter(Vec<BpfProgram>);

/// Lets through these calls, and what else it takes to have what is left. Answers "operation not permitted" to all
/// others. Such an answer, rather than the end of the process, leaves it to the code that asked how the guest is left
/// behind.
pub(super) fn of(calls: &[Calls], left: Left<'_>) -> io::Result<Filter> {
    let mut allowed: BTreeMap<i64, Vec<SeccompRule>> = calls.iter().flat_map(|calls| calls.list()).collect();
    if let Left::MemoryOf(process) = left {
        allowed.extend([calls::reading(process)]);
    }
    let allow = program(allowed, SeccompAction::Errno(Errno::PERM.raw_os_error() as u32), SeccompAction::Allow)?;
    // Its flags are in memory, where no filter can see them.
    let unseen = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let lacking = program(unseen, SeccompAction::Allow, SeccompAction::Errno(Errno::NOSYS.raw_os_error() as u32))?;
    Ok(Filter(vec![lacking, allow]))
}

fn program(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    else_: SeccompAction,
    then: SeccompAction,
) -> io::Result<BpfProgram> {
    let arch = TargetArch::try_from(ARCH).map_err(io::Error::other)?;
    let filter = SeccompFilter::new(rules, else_, then, arch).map_err(io::Error::other)?;
    filter.try_into().map_err(io::Error::other)
}

impl Filter {
    /// For all threads, and for good. The last one forbids to add another.
    pub(super) fn apply(&self) -> io::Result<()> {
        self.0.iter().try_for_each(|program| apply_filter_all_threads(program).map_err(io::Error::other))
    }
}
