//! `transship bench`: a program of its own, which brings guests and stock QEMUs along. The command that people install
//! does without.
use std::{
    env,
    ffi::OsString,
    io::ErrorKind,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use crate::failure::Failure;

const PROGRAM: &str = "transship-bench";

/// Becomes that program. Returns only if it can't.
pub(crate) fn run(arguments: &[OsString]) -> Result<(), Failure> {
    let here = env::current_exe().unwrap_or_default();
    let program = beside(&here).unwrap_or_else(|| PROGRAM.into());
    let failed = Command::new(&program).args(arguments).exec();
    Err(Failure::Failed(match failed.kind() {
        ErrorKind::NotFound => format!(
            "there is no {PROGRAM} beside {} or in the PATH; build it in transship's source: cargo build --release -p \
             {PROGRAM}",
            here.display()
        ),
        _ => format!("can't start {}: {failed}", program.display()),
    }))
}

fn beside(program: &Path) -> Option<PathBuf> {
    Some(program.parent()?.join(PROGRAM)).filter(|path| path.is_file())
}
