//! Forks: a guest that runs on, and many that go on from the same moment.
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use transship_lab::{Count, LabError, Qemu, QemuBuilder, Result, Scratch, Sweep, Transship, Workload, wait_until};

use crate::{
    clones::{self, assert_unchanged},
    restoring::assert_goes_on,
};

/// The QEMUs that a fork has started. They end with this.
struct Clones {
    folder: PathBuf,
    pids: Vec<u32>,
}

impl Drop for Clones {
    fn drop(&mut self) {
        for pid in self.pids.iter().filter_map(|pid| Pid::from_raw(*pid as i32)) {
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }
}

impl Clones {
    fn of(report: &Value, folder: &Path) -> Self {
        let clones = report["clones"].as_array().into_iter().flatten();
        let pids = clones.filter_map(|clone| clone["pid"].as_u64().map(|pid| pid as u32)).collect();
        Self { folder: folder.to_owned(), pids }
    }

    /// What the guest has said.
    fn lines(&self, number: usize) -> Result<Vec<String>> {
        let text = std::fs::read(self.folder.join(format!("{number}.serial")))?;
        Ok(String::from_utf8_lossy(&text).lines().map(str::to_owned).collect())
    }

    /// All write, and find all their pages as they wrote them.
    fn assert_go_on(&self, count: usize) -> Result<()> {
        assert_eq!(self.pids.len(), count);
        for number in 1..=count {
            wait_until(&format!("clone {number}"), || {
                let lines = self.lines(number)?;
                let sweeps: Vec<Sweep> = lines.iter().filter_map(|line| Sweep::read(line)).collect();
                let counts: Vec<Count> = lines.iter().filter_map(|line| Count::read(line)).collect();
                assert!(sweeps.iter().all(|sweep| sweep.errors == 0), "clone {number}: {sweeps:?}");
                assert!(counts.iter().all(|count| count.errors == 0), "clone {number}: {counts:?}");
                let written = counts.last().zip(counts.first()).is_some_and(|(last, first)| last.count > first.count);
                // The first one may have begun before.
                Ok(sweeps.len() >= 2 && written)
            })?;
        }
        Ok(())
    }
}

/// One that looks at all its memory by itself: nobody can ask clones that others start.
fn guest() -> QemuBuilder {
    clones::guest().workload(Workload { sweep_ms: 500, ..Workload::MULTIBOOT })
}

/// How a QEMU of such a guest is started.
fn exec(builder: &QemuBuilder) -> Result<String> {
    let mut words = builder.words_of_a_clone()?;
    words.extend(["-serial".into(), "file:{dir}/{n}.serial".into()]);
    words.extend(["-qmp".into(), "unix:{dir}/{n}.qmp,server=on,wait=off".into()]);
    let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
    Ok(format!("exec {} {{args}}", quoted.join(" ")))
}

fn forking(of: &Qemu, into: &Path, count: &str, exec: &str) -> transship_lab::transship::TransshipBuilder {
    let into = into.to_string_lossy();
    Transship::command(["fork", "--vm", &of.vm(), "--into", &*into, "--count", count, "--exec", exec, "--json"])
}

fn fork_into(count: usize, builder: &QemuBuilder) -> Result<()> {
    let folder = Scratch::new()?;
    let (path, source) = (folder.join("image"), builder.clone().booted()?);
    let report = forking(&source, &path, &count.to_string(), &exec(builder)?).run()?.expect_code(0)?.report()?;
    let clones = Clones::of(&report, &path);
    for clone in report["clones"].as_array().into_iter().flatten() {
        assert_eq!(clone["clone"]["memory"], "mapped", "{clone}");
    }
    clones.assert_go_on(count)?;
    assert_unchanged(&path)?;
    assert_goes_on(&source)
}

#[test]
fn a_guest_is_forked_into_four() -> Result<()> {
    fork_into(4, &guest())
}

#[test]
#[ignore = "long: make test-long"]
fn a_guest_is_forked_into_sixteen() -> Result<()> {
    fork_into(16, &guest())
}

/// With a real kernel.
#[test]
#[ignore = "takes minutes"]
fn a_linux_guest_is_forked_into_sixteen() -> Result<()> {
    let workload = Workload { mib: 16, rate: 200, ..Workload::LINUX };
    fork_into(16, &Qemu::linux().workload(workload))
}

/// Whenever a fork is killed, the guest runs on, no clone runs that was not complete, and the next fork succeeds.
#[test]
#[ignore = "takes a minute: make test-long"]
fn a_fork_that_is_killed_harms_nobody() -> Result<()> {
    let folder = Scratch::new()?;
    let source = guest().booted()?;
    let exec = exec(&guest())?;
    let steps = ["save.created", "save.stopped", "save.protected", "save.image-written", "save.synced", "save.renamed"];
    for (number, step) in steps.iter().chain(&["clone.memory", "clone.loaded", "clone.started"]).enumerate() {
        let path = folder.join(&format!("image{number}"));
        let killed = forking(&source, &path, "2", &exec).env("TRANSSHIP_FAIL_POINT", format!("{step}=kill")).run()?;
        let clones = Clones { folder: path.clone(), pids: started_from(&path)? };
        assert_ne!(killed.code(), Some(0), "{step}: {killed}");
        source.wait_status("running")?;
        assert_goes_on(&source).map_err(|e| LabError(format!("{step}: {e}")))?;
        assert_eq!(clones.pids.is_empty(), !step.starts_with("clone."), "{step}");
        assert_eq!(
            path.join("manifest.json").exists(),
            step.starts_with("clone.") || *step == "save.renamed",
            "{step}"
        );
        if path.exists() {
            assert_unchanged(&path)?;
        }
        drop(clones);
        // What a dead one has left is in nobody's way.
        if !path.exists() {
            let report = forking(&source, &path, "1", &exec).run()?.expect_code(0)?.report()?;
            Clones::of(&report, &path).assert_go_on(1).map_err(|e| LabError(format!("{step}: {e}")))?;
        }
    }
    Ok(())
}

/// The processes that run with this image: they lead groups of their own.
fn started_from(image: &Path) -> Result<Vec<u32>> {
    let wanted = format!("mem-path={}", image.join("memory").display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if String::from_utf8_lossy(&line).contains(&wanted) {
            found.push(pid);
        }
    }
    Ok(found)
}

/// Those that can't start are named with what they said; the guest and the others go on.
#[test]
fn a_fork_tells_of_clones_that_do_not_start() -> Result<()> {
    let folder = Scratch::new()?;
    let (path, source) = (folder.join("image"), guest().booted()?);
    let exec = exec(&guest())?;
    let second_fails = format!("if [ {{n}} = 2 ]; then echo no such luck >&2; exit 3; fi; {exec}");
    let failed = forking(&source, &path, "3", &second_fails).run()?.expect_code(1)?;
    let report = failed.report()?;
    let clones = Clones::of(&report, &path);
    let text = failed.to_string();
    assert!(text.contains("1 of 3 clones failed") && text.contains("no such luck"), "{text}");
    let ran = report["clones"].as_array().into_iter().flatten().filter(|clone| clone["error"].is_null()).count();
    assert_eq!(ran, 2, "{report}");
    drop(clones);
    assert_goes_on(&source)
}
