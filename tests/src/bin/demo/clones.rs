//! A guest that runs, forked into eight.
use std::{path::Path, process::Command};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use transship_lab::{Accel, Count, LabError, Qemu, Result, Scratch, Sweep, Workload, binary, kvm_works, wait_until};

use super::say;

const CLONES: usize = 8;
const MEMORY_MIB: u32 = 1024;
const WORKLOAD: Workload = Workload { mib: 64, rate: 2000, hot_mib: None, idle: false, sweep_ms: 2000 };

/// Process groups that end with this.
struct Groups(Vec<u32>);

impl Drop for Groups {
    fn drop(&mut self) {
        for pid in self.0.iter().filter_map(|pid| Pid::from_raw(*pid as i32)) {
            // It has ended by itself.
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }
}

pub(super) fn eight() -> Result<()> {
    say("A stock QEMU; in it a guest of 1 GiB writes and checks its memory.");
    let accel = if kvm_works() { Accel::Kvm } else { Accel::Tcg };
    let builder = Qemu::multiboot_under(accel).memory(MEMORY_MIB).workload(WORKLOAD);
    let parent = builder.clone().start()?;
    parent.ready()?;
    println!("  the guest: {} pages written", parent.next_count()?.count);

    say("transship forks it while it runs: an image, and eight stock QEMUs that map it.");
    let folder = Scratch::new()?;
    let image = folder.join("image");
    let mut words = builder.words_of_a_clone()?;
    words.extend(
        ["-serial", "file:{dir}/{n}.serial", "-qmp", "unix:{dir}/{n}.qmp,server=on,wait=off"].map(str::to_owned),
    );
    let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
    let exec = format!("exec {} {{args}}", quoted.join(" "));
    println!(
        "  $ transship fork --vm {} --into {} --count {CLONES} --exec '{} … {{args}}'",
        parent.vm(),
        image.display(),
        words[0]
    );
    let mut fork = Command::new(binary()?);
    fork.args(["fork", "--vm", &parent.vm(), "--json", "--count", &CLONES.to_string(), "--exec", &exec, "--into"]);
    let output = fork.arg(&image).output().map_err(|e| LabError(format!("transship fork: {e}")))?;
    let said = String::from_utf8_lossy(&output.stderr);
    let report: Value = serde_json::from_slice(&output.stdout).map_err(|e| LabError(format!("{e}: {said}")))?;
    let list: Vec<&Value> = report["clones"].as_array().into_iter().flatten().collect();
    let groups = Groups(list.iter().filter_map(|clone| Some(clone["pid"].as_u64()? as u32)).collect());
    if !output.status.success() {
        return Err(LabError(said.into_owned()));
    }
    let ms = |value: &Value| value.as_f64().unwrap_or_default();
    println!("  the guest stood still for {:.1} ms", ms(&report["image"]["downtime_ms"]));
    println!("\n{:8}{:>16}{:>20}{:>12}{:>8}", "clone", "QEMU's start", "waiting to running", "written", "errors");
    for (clone, number) in list.iter().zip(1..) {
        let (written, errors) = checked(&image, number)?;
        let (start, runs) = (ms(&clone["start_ms"]), ms(&clone["clone"]["runs_ms"]));
        println!("{number:<8}{start:>13.1} ms{runs:>17.1} ms{written:>12}{errors:>8}");
        if errors > 0 {
            return Err(LabError(format!("clone {number} found {errors} wrong pages")));
        }
    }
    println!("\nmemory of all eight: {} MiB (each has 1 GiB)", memory(&groups.0)?);
    let sweep = parent.sweep()?;
    println!("the guest that was forked runs on: {} pages checked, {} errors", sweep.pages, sweep.errors);
    Ok(())
}

/// Waits until a clone has looked at all its pages: what it has written, and how many were wrong.
fn checked(image: &Path, number: usize) -> Result<(u64, u64)> {
    let mut found = (0, 0);
    wait_until(&format!("clone {number}"), || {
        let text = std::fs::read(image.join(format!("{number}.serial"))).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        let sweeps: Vec<Sweep> = text.lines().filter_map(Sweep::read).collect();
        let count = text.lines().rev().find_map(Count::read);
        if let (Some(sweep), Some(count)) = (sweeps.last(), count) {
            found = (count.count, sweep.errors + count.errors);
        }
        // The first one may have begun before.
        Ok(sweeps.len() >= 2 && count.is_some())
    })?;
    Ok(found)
}

/// What all of them take together, in MiB.
fn memory(pids: &[u32]) -> Result<u64> {
    let of = |pid: &u32| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
        text.lines().find_map(|line| line.strip_prefix("Pss:"))?.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    let all: Option<Vec<u64>> = pids.iter().map(of).collect();
    all.map(|all| all.iter().sum::<u64>() >> 10).ok_or_else(|| LabError("can't see the memory of the clones".into()))
}
