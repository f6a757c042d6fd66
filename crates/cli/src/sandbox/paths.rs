//! Landlock: no path, and no address of a network, whatever the user may do otherwise.
use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};

use super::Left;

/// The newest that is asked for; an older kernel does what it can.
const WANTED: ABI = ABI::V6;

/// Where the system says which file system is full.
const MOUNTS: &str = "/proc/self/mountinfo";

/// Leaves this thread nothing of all paths but `left`. Where the kernel lacks Landlock, or a part of it, the rest of
/// the sandbox is what there is.
pub(super) fn confine(left: Left<'_>) {
    match restrict(left) {
        Ok(RulesetStatus::FullyEnforced) => {}
        Ok(RulesetStatus::PartiallyEnforced) => tracing::debug!("this kernel has only a part of Landlock"),
        Ok(RulesetStatus::NotEnforced) => tracing::info!("this kernel has no Landlock, or it is turned off"),
        Err(error) => tracing::info!("can't use Landlock: {error}"),
    }
}

fn restrict(left: Left<'_>) -> Result<RulesetStatus, RulesetError> {
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(WANTED))?
        .handle_access(AccessNet::from_all(WANTED))?
        .scope(Scope::from_all(WANTED))?
        .create()?;
    let rules = match left {
        Left::Nothing | Left::MemoryOf(_) => rules,
        Left::Room(room) => allow(rules, room, AccessFs::MakeSock | AccessFs::RemoveFile)?,
        Left::Folder(folder) | Left::FolderOfImages(folder) => {
            let rules = allow(rules, Path::new(MOUNTS), AccessFs::ReadFile.into())?;
            let reads = AccessFs::ReadFile | AccessFs::ReadDir;
            let files = AccessFs::WriteFile | AccessFs::Truncate | AccessFs::MakeReg | AccessFs::RemoveFile;
            // A folder is given its name as a file is.
            let folders = AccessFs::MakeDir | AccessFs::RemoveDir;
            allow(rules, folder, reads | files | folders)?
        }
    };
    Ok(rules.restrict_self()?.ruleset)
}

/// What can't be opened even now is not missed.
fn allow(rules: RulesetCreated, path: &Path, access: BitFlags<AccessFs>) -> Result<RulesetCreated, RulesetError> {
    match PathFd::new(path) {
        Ok(there) => rules.add_rule(PathBeneath::new(there, access)),
        Err(_) => Ok(rules),
    }
}
