//! Starts the guests, and looks at what they take.
use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant, SystemTime},
};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use transship_lab::{Qemu, QemuBuilder, Scratch, Transship, Workload};

use super::{
    Guest,
    results::{Row, Way},
};
use crate::{pair::text, stock, units::millis};

/// How long guests run before it is asked what they take.
const AT_REST: Duration = Duration::from_secs(3);

/// A running guest, and what it was saved to.
pub(super) struct Setting {
    source: Qemu,
    guest: QemuBuilder,
    guest_bytes: u64,
    folder: Scratch,
    /// Of the guest itself, in bytes.
    own_memory: u64,
}

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

impl Setting {
    pub(super) fn start(peer: &str, guest: Guest, guest_bytes: u64, content: u64) -> Result<Self, String> {
        let workload =
            Workload { mib: (content >> 20) as u32, rate: 1, hot_mib: None, idle: true, sweep_ms: 3_600_000 };
        let guest = match guest {
            Guest::Small => Qemu::multiboot_under(guest.accel()),
            Guest::Linux => Qemu::linux(),
        };
        let guest = guest.workload(workload).memory((guest_bytes >> 20) as u32).binary(peer);
        let source = guest.clone().start().map_err(text)?;
        source.ready().map_err(text)?;
        let folder = Scratch::new().map_err(text)?;
        let file = folder.join("mapped");
        let save = ["save", "--paused", "--vm", &source.vm(), "--to", &file.to_string_lossy()].map(str::to_owned);
        Transship::command(save).run().and_then(|ended| ended.expect_code(0)).map_err(text)?;
        let own_memory = memory(&[source.pid()])?;
        Ok(Self { source, guest, guest_bytes, folder, own_memory })
    }

    pub(super) fn version(&self) -> Result<String, String> {
        stock::version(&self.source)
    }

    pub(super) fn row(&self, way: Way, count: u32) -> Result<Row, String> {
        let mut row = Row { guest_bytes: self.guest_bytes, count, way, own_memory: self.own_memory, ..Row::default() };
        match way {
            Way::Clones => self.clones(&mut row)?,
            Way::Qemu => self.loaded(&mut row, &|guest, file| {
                let on = json!({ "capabilities": [{ "capability": "mapped-ram", "state": true }] });
                guest.qmp("migrate-set-capabilities", on).map_err(text)?;
                let since = SystemTime::now();
                guest.qmp("migrate-incoming", json!({ "uri": format!("file:{}", file.display()) })).map_err(text)?;
                let resumed = guest.wait_event_time("RESUME", since, |_| true).map_err(text)?;
                Ok(resumed.duration_since(since).unwrap_or_default())
            })?,
            Way::Lazy => self.loaded(&mut row, &|guest, file| {
                let (since, file) = (SystemTime::now(), file.to_string_lossy());
                let restore = ["restore", "--lazy", "--vm", &guest.vm(), "--from", &file].map(str::to_owned);
                Transship::command(restore).run().and_then(|ended| ended.expect_code(0)).map_err(text)?;
                let resumed = guest.wait_event_time("RESUME", since, |_| true).map_err(text)?;
                Ok(resumed.duration_since(since).unwrap_or_default())
            })?,
        }
        Ok(row)
    }

    fn clones(&self, row: &mut Row) -> Result<(), String> {
        let folder = Scratch::new().map_err(text)?;
        let image = folder.join("image");
        let mut words = self.guest.words_of_a_clone().map_err(text)?;
        words.extend(["-serial".into(), "null".into()]);
        words.extend(["-qmp".into(), "unix:{dir}/{n}.qmp,server=on,wait=off".into()]);
        let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
        let exec = format!("exec {} {{args}}", quoted.join(" "));
        let (into, count) = (image.to_string_lossy().into_owned(), row.count.to_string());
        let vm = self.source.vm();
        let fork = ["fork", "--vm", &vm, "--into", &into, "--count", &count, "--exec", &exec, "--json"];
        let ended = Transship::command(fork).run().map_err(text)?;
        let report = ended.report().map_err(text)?;
        let list: Vec<&Value> = report["clones"].as_array().into_iter().flatten().collect();
        let pids: Vec<u32> = list.iter().filter_map(|clone| Some(clone["pid"].as_u64()? as u32)).collect();
        let groups = Groups(pids);
        ended.expect_code(0).map_err(text)?;
        row.each_ms = list.iter().filter_map(|clone| clone["clone"]["runs_ms"].as_f64()).collect();
        row.start_ms = list.iter().filter_map(|clone| clone["start_ms"].as_f64()).collect();
        row.all_ms = report["clones_ms"].as_f64().unwrap_or(f64::NAN);
        row.downtime_ms = report["image"]["downtime_ms"].as_f64();
        row.memory = memory_at_rest(&groups.0)?;
        Ok(())
    }

    /// One after the other, by `load`: until its guest runs.
    fn loaded(&self, row: &mut Row, load: &dyn Fn(&Qemu, &Path) -> Result<Duration, String>) -> Result<(), String> {
        let file = self.folder.join("mapped");
        let begin = Instant::now();
        let mut guests = Vec::new();
        for _ in 0..row.count {
            let started = Instant::now();
            let guest = self.guest.clone().incoming().start().map_err(text)?;
            row.start_ms.push(millis(started.elapsed()));
            row.each_ms.push(millis(load(&guest, &file)?));
            guests.push(guest);
        }
        row.all_ms = millis(begin.elapsed());
        row.memory = memory_at_rest(&guests.iter().map(Qemu::pid).collect::<Vec<_>>())?;
        Ok(())
    }
}

/// The same once they have run for a while: what an idle guest touches, it has touched then.
fn memory_at_rest(pids: &[u32]) -> Result<u64, String> {
    thread::sleep(AT_REST);
    memory(pids)
}

/// What these processes take together: what several have is counted once.
fn memory(pids: &[u32]) -> Result<u64, String> {
    let of = |pid: &u32| -> Result<u64, String> {
        let path = format!("/proc/{pid}/smaps_rollup");
        let text = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        kib.map(|kib| kib << 10).ok_or_else(|| format!("{path} has no Pss"))
    };
    pids.iter().map(of).sum()
}
