//! What a run of all tables consists of.
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What `all` was asked for. Each table makes its own runs of the command of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// Less of everything.
    pub(crate) quick: bool,
    /// Of guests; none: each table's own choice.
    pub(crate) mem: Option<u64>,
    /// Of runs by both.
    pub(crate) pairs: u32,
    pub(crate) dir: PathBuf,
    pub(crate) corpus: Option<PathBuf>,
    pub(crate) peer: String,
    /// The kind of guest memory, where it can be chosen.
    pub(crate) backend: String,
    /// Only these tables; empty: all.
    pub(crate) tables: Vec<String>,
}

impl Default for Plan {
    fn default() -> Self {
        let (dir, peer, backend) = (".".into(), "qemu-system-x86_64".into(), "file".into());
        Self { quick: false, mem: None, pairs: 9, dir, corpus: None, peer, backend, tables: Vec::new() }
    }
}

/// One run of the command: what is measured, or measured again, as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Job {
    /// Of its files.
    pub(crate) name: String,
    /// Behind `transship bench`.
    pub(crate) arguments: Vec<String>,
    /// What it takes on two cores, by experience: for the time left.
    pub(crate) seconds: u32,
}

impl Job {
    /// A part of a table; without a name it is all of it.
    pub(crate) fn new(table: &str, part: &str, seconds: u32) -> Self {
        let name = if part.is_empty() { table.to_owned() } else { format!("{table}-{part}") };
        Self { name, arguments: vec![table.to_owned()], seconds }
    }

    /// The table's name on the command line.
    pub(crate) fn table(&self) -> &str {
        &self.arguments[0]
    }

    /// More arguments.
    pub(crate) fn with(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|&argument| argument.to_owned()));
        self
    }

    /// The guest's memory, where the plan says.
    pub(crate) fn mem(self, plan: &Plan) -> Self {
        match plan.mem {
            Some(bytes) => self.with(&["--mem", &format!("{}M", bytes >> 20)]),
            None => self,
        }
    }

    /// How often, by the flag that the table has for that.
    pub(crate) fn runs(self, flag: &str, runs: u32) -> Self {
        self.with(&[flag, &runs.max(1).to_string()])
    }

    /// A folder on the disk.
    pub(crate) fn dir(self, plan: &Plan) -> Self {
        self.with(&["--dir", &plan.dir.to_string_lossy()])
    }

    /// The files to compress.
    pub(crate) fn corpus(self, plan: &Plan) -> Self {
        match &plan.corpus {
            Some(folder) => self.with(&["--corpus", &folder.to_string_lossy()]),
            None => self,
        }
    }

    /// The QEMU to compare with.
    pub(crate) fn peer(self, plan: &Plan) -> Self {
        self.with(&["--peer", &plan.peer])
    }

    /// The kind of guest memory, unless it is the usual one.
    pub(crate) fn memory(self, plan: &Plan) -> Self {
        if plan.backend == "file" { self } else { self.with(&["--backend", &plan.backend]) }
    }

    /// As people type it.
    pub(crate) fn command(&self) -> String {
        let quoted = |word: &String| match word.chars().all(|c| c.is_ascii_alphanumeric() || "-_./,=:+".contains(c)) {
            true => word.clone(),
            false => format!("'{}'", word.replace('\'', r"'\''")),
        };
        let words: Vec<String> = self.arguments.iter().map(quoted).collect();
        format!("transship bench {}", words.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_typed_as_it_is_run() {
        let plan = Plan { mem: Some(512 << 20), corpus: Some("/my files/it's".into()), ..Plan::default() };
        let job = Job::new("codecs", "zstd", 9).mem(&plan).corpus(&plan).runs("--runs", 0).peer(&plan);
        assert_eq!((job.name.as_str(), job.table()), ("codecs-zstd", "codecs"));
        assert_eq!(
            job.command(),
            r"transship bench codecs --mem 512M --corpus '/my files/it'\''s' --runs 1 --peer qemu-system-x86_64"
        );
        assert_eq!(Job::new("limits", "", 1).name, "limits");
    }
}
