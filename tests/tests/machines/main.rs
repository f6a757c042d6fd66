//! What wants another kernel than this host's, or one that is set up in another way: each test boots a virtual machine
//! that is emulated, with the built command in it, and that tells line by line what it has found. They take minutes of
//! one processor each.
mod old_kernel;
mod selinux;
mod vhost_net;

use std::{fmt, path::Path, time::Duration};

use transship_lab::{Initrd, LabError, Result, Scratch, lacks};

/// Everything is emulated, some of it twice, and the host may be busy.
const PATIENCE: Duration = Duration::from_secs(2400);

/// A folder for the files of a machine.
fn folder() -> Result<Scratch> {
    Scratch::on_disk()
}

/// Whether one of these files is not here. That is noted, with who makes it.
fn are_lacking(files: &[&Path], maker: &str) -> bool {
    let lacking = files.iter().find(|file| !file.exists());
    lacking.inspect(|file| lacks(format_args!("{} ({maker})", file.display()))).is_some()
}

/// Boots a machine of these files, and waits for its end. What it says for us begins with `prefix`.
fn run(files: &Initrd, kernel: &Path, arguments: &str, prefix: &'static str) -> Result<Said> {
    let mut machine = files.boot(kernel, arguments)?;
    machine.wait(PATIENCE)?;
    Ok(Said { prefix, lines: machine.stdout().to_the_end()? })
}

/// What a machine has said. The lines that are for us begin with a word and a colon.
struct Said {
    prefix: &'static str,
    lines: Vec<String>,
}

impl Said {
    /// The first line about something.
    fn of(&self, what: &str) -> Result<&str> {
        self.all(what).next().ok_or_else(|| LabError(format!("no word of {what:?}:\n{self}")))
    }

    fn all(&self, what: &str) -> impl Iterator<Item = &str> {
        let begin = format!("{}: {what} ", self.prefix);
        // A command's progress may stand before it.
        self.lines.iter().filter_map(move |line| Some(line.split_once(&begin)?.1.trim()))
    }
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines.join("\n"))
    }
}
