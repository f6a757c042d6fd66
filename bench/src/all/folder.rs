//! The folder of a run: what was asked for, and what is done. A result is there completely or not at all, so that a run
//! that was interrupted at any moment can be taken up again.
use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::plan::{Job, Plan};
use crate::{machine::Machine, rows::Row};

/// What has to be the same for results to stand side by side.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) machine: Machine,
    /// As it calls itself.
    pub(crate) qemu: String,
    /// Of both programs, by their bytes.
    pub(crate) build: String,
    pub(crate) plan: Plan,
}

/// What a finished job has left, and how it went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Done {
    pub(crate) job: Job,
    pub(crate) rows: Vec<Row>,
    /// What the table says beside its rows.
    pub(crate) text: String,
    /// Seconds that it took.
    pub(crate) took_s: f64,
    /// Seconds since 1970 at its end.
    pub(crate) ended_at: u64,
    /// Load of the machine (processes that want to run) right before it.
    pub(crate) load_before: f64,
}

/// A folder of results.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
}

const SETUP: &str = "run.json";

impl Folder {
    /// For a new run, or for one that goes on if it has the same setup.
    pub(crate) fn open(path: &Path, resume: bool, setup: &Setup) -> Result<Self, String> {
        let folder = Self { path: path.to_owned() };
        let name = path.display();
        let there: Option<Setup> = folder.read(SETUP)?;
        match (there, resume) {
            (Some(there), true) => match differences(&there, setup)? {
                none if none.is_empty() => Ok(folder),
                list => Err(format!(
                    "can't go on with the run in {name}: {}; measure into another folder, or undo the change",
                    list.join("; ")
                )),
            },
            (Some(_), false) => {
                Err(format!("{name} has a run already: go on with it by --resume, or name another folder"))
            }
            (None, true) => Err(format!("there is no run to go on with in {name}: leave out --resume")),
            (None, false) => {
                fs::create_dir_all(path).map_err(|error| format!("can't make {name}: {error}"))?;
                folder.write_json(SETUP, setup)?;
                Ok(folder)
            }
        }
    }

    /// A path in it.
    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// What is known of a job, if it is done.
    pub(crate) fn done(&self, job: &Job) -> Result<Option<Done>, String> {
        self.read(&format!("{}.done.json", job.name))
    }

    /// Keeps a job's result.
    pub(crate) fn keep(&self, done: &Done) -> Result<(), String> {
        self.write_json(&format!("{}.done.json", done.job.name), done)
    }

    /// Writes a file that is there completely, or as it was.
    pub(crate) fn write(&self, name: &str, text: &str) -> Result<(), String> {
        let (path, new) = (self.join(name), self.join(&format!("{name}.new")));
        let written = fs::write(&new, text).and_then(|()| fs::rename(&new, &path));
        written.map_err(|error| format!("can't write {}: {error}", path.display()))
    }

    fn write_json(&self, name: &str, value: &impl Serialize) -> Result<(), String> {
        let text = serde_json::to_string_pretty(value).map_err(|error| format!("{name}: {error}"))?;
        self.write(name, &format!("{text}\n"))
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, String> {
        let path = self.join(name);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            Err(error) => return Err(format!("can't read {}: {error}", path.display())),
        };
        let read = serde_json::from_slice(&bytes);
        read.map(Some).map_err(|error| {
            format!("{} is not as this program writes it: {error}; remove it to measure it again", path.display())
        })
    }
}

/// What is not as it was, each in words.
fn differences(there: &Setup, here: &Setup) -> Result<Vec<String>, String> {
    let fields = |setup: &Setup| match serde_json::to_value(setup) {
        Ok(serde_json::Value::Object(fields)) => Ok(fields),
        other => Err(format!("a setup that is no object: {other:?}")),
    };
    let flat = |setup: &Setup| {
        let mut all = Vec::new();
        for (name, value) in fields(setup)? {
            match value {
                serde_json::Value::Object(inner) => all.extend(inner),
                value => all.push((name, value)),
            }
        }
        Ok::<_, String>(all)
    };
    let (there, here) = (flat(there)?, flat(here)?);
    let differs = there.iter().filter_map(|(name, was)| {
        let is = here.iter().find(|(other, _)| other == name).map(|(_, value)| value)?;
        (is != was).then(|| format!("{name} was {was} and is {is}"))
    });
    Ok(differs.collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn setup() -> Setup {
        Setup { machine: Machine::here(), qemu: "10.0.2".into(), build: "1".into(), plan: Plan::default() }
    }

    #[test]
    fn only_the_same_run_goes_on() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("results");
        let refused = |resume, setup: &Setup| Folder::open(&path, resume, setup).unwrap_err();
        assert!(refused(true, &setup()).contains("there is no run to go on with"));
        Folder::open(&path, false, &setup()).unwrap();
        assert!(refused(false, &setup()).contains("--resume"));
        Folder::open(&path, true, &setup()).unwrap();
        let mut other = setup();
        (other.qemu, other.plan.pairs, other.machine.cores) = ("11.1.0".into(), 5, 99);
        let error = refused(true, &other);
        for reason in [r#"qemu was "10.0.2" and is "11.1.0""#, "pairs was 9 and is 5", "cores was"] {
            assert!(error.contains(reason), "{error}");
        }
        let built = Setup { build: "2".into(), ..setup() };
        assert!(refused(true, &built).contains("build"), "another program");
    }

    #[test]
    fn a_result_is_kept_and_a_broken_one_is_named() {
        let home = tempfile::tempdir().unwrap();
        let folder = Folder::open(home.path(), false, &setup()).unwrap();
        let job = Job::new("zero-pages", "random", 9);
        assert_eq!(folder.done(&job), Ok(None));
        let rows = vec![Row::of("random", "fresh", vec![1.0, f64::NAN], vec![2.0, 3.0])];
        let text = "as printed".to_owned();
        let done = Done { job: job.clone(), rows, text, took_s: 1.5, ended_at: 7, load_before: 0.5 };
        folder.keep(&done).unwrap();
        assert_eq!(folder.done(&job), Ok(Some(done)));
        fs::write(folder.join("zero-pages-random.done.json"), "{").unwrap();
        assert!(folder.done(&job).unwrap_err().contains("zero-pages-random.done.json"));
    }
}
