//! `make demo`: moves a running guest before your eyes, and lets stock QEMU move an identical one; or forks one.
#[path = "demo/clones.rs"]
mod clones;

use serde_json::{Value, json};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use transship_lab::beats::{BEATS, heard, wait_for_beats};
use transship_lab::{Backend, LabError, PATIENCE, Qemu, Result, Scratch, Synthetic, Transship, Workload, binary};

/// A guest that has something to lose: it writes a quarter of its memory, and knows what it wrote.
const MEMORY_MIB: u32 = 1024;
const WORKLOAD: Workload = Workload { mib: 256, rate: 5000, hot_mib: None, idle: false, sweep_ms: 5000 };

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let vm = args.next().unwrap_or_else(|| "qemu".into());
    let flags: Vec<String> = args.collect();
    let outcome = match vm.as_str() {
        "qemu" => qemu(&flags),
        "synthetic" => synthetic(&flags),
        "clones" => clones::eight(),
        other => Err(LabError(format!("VM={other} is unknown: it can be qemu, synthetic or clones"))),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What a move took.
struct Cost {
    total_ms: f64,
    /// As the side that moved it reports it.
    downtime_ms: f64,
    /// As the guest is heard at the source and then at the destination.
    silence_ms: f64,
    bytes: f64,
}

fn qemu(flags: &[String]) -> Result<()> {
    say("Two stock QEMUs; in the first boots a Linux guest that writes and checks its memory.");
    let (source, destination, disk) = two_qemus()?;
    let before = show_guest("source", &source)?;

    say("transship moves it while it runs.");
    let folder = destination.folder().display().to_string();
    let ours =
        listening(&source, &destination, || move_with_transship(&source.vm(), &destination.vm(), &folder, flags))?;
    let after = show_guest("destination", &destination)?;
    if after < before {
        return Err(LabError(format!("the guest had written {before} pages, and {after} after the move")));
    }
    println!("  the source is {}, the guest went on: {} pages written since", source.status()?, after - before);
    drop((source, destination, disk));

    say("QEMU's own migration moves an identical guest.");
    let (source, destination, disk) = two_qemus()?;
    show_guest("source", &source)?;
    let theirs = listening(&source, &destination, || move_with_qemu(&source, &destination))?;
    show_guest("destination", &destination)?;
    drop((source, destination, disk));

    println!("\n{:26}{:>14}{:>14}", "", "transship", "QEMU's own");
    let row = |what: &str, ours: f64, theirs: f64, unit: &str| {
        println!("{what:26}{ours:>11.1} {unit:2}{theirs:>11.1} {unit}")
    };
    row("total time", ours.total_ms, theirs.total_ms, "ms");
    row("the guest was silent for", ours.silence_ms, theirs.silence_ms, "ms");
    row("downtime, as reported", ours.downtime_ms, theirs.downtime_ms, "ms");
    row("bytes on the wire", ours.bytes / 1e6, theirs.bytes / 1e6, "MB");
    println!(
        "(The guest beats every millisecond. QEMU's downtime leaves out what its destination does before the guest runs.)"
    );
    Ok(())
}

/// Listens to the guest, at both sides, from before the move until after it.
fn listening(source: &Qemu, destination: &Qemu, moved: impl FnOnce() -> Result<Cost>) -> Result<Cost> {
    wait_for_beats(source, 200)?;
    let since = Instant::now();
    let cost = moved()?;
    wait_for_beats(destination, 200)?;
    let silence = heard(source, destination, since)?.silence;
    Ok(Cost { silence_ms: silence.as_secs_f64() * 1e3, ..cost })
}

/// Two of the same, and the folder that holds their disk.
fn two_qemus() -> Result<(Qemu, Qemu, Scratch)> {
    // As most managers start it: memory of its own, and a disk past the page cache.
    let disk = Scratch::on_disk()?;
    let image = disk.join("disk");
    let made = std::fs::File::create(&image).and_then(|file| file.set_len(16 << 20));
    made.map_err(|e| LabError(format!("{}: {e}", image.display())))?;
    let drive = format!("file={},format=raw,if=none,id=disk,cache=none", image.display());
    let builder = Qemu::linux().memory(MEMORY_MIB).workload(WORKLOAD).append(BEATS).backend(Backend::Default);
    let builder = builder.args(["-drive", &drive, "-device", "virtio-blk-pci,drive=disk"]);
    let source = builder.clone().start()?;
    source.ready()?;
    Ok((source, builder.incoming().start()?, disk))
}

/// Prints how the guest is, by its own words, and gives its counter.
fn show_guest(place: &str, guest: &Qemu) -> Result<u64> {
    let count = guest.next_count()?.count;
    let sweep = guest.sweep()?;
    println!(
        "  the guest at the {place}: {count} pages written; checked all {} pages, {} errors",
        sweep.pages, sweep.errors
    );
    match sweep.errors {
        0 => Ok(count),
        errors => Err(LabError(format!("the guest found {errors} wrong pages"))),
    }
}

fn move_with_transship(from: &str, to: &str, folder: &str, flags: &[String]) -> Result<Cost> {
    let uri = format!("unix:{folder}/move");
    let receiving = Transship::receiving(to, &uri).start()?;
    receiving.listening()?;
    // Not by the lab: the progress bar belongs on this terminal.
    let mut command = Command::new(binary()?);
    command.args(["move", "--vm", from, "--to", &uri, "--json"]).args(flags).stderr(Stdio::inherit());
    println!("  $ transship receive --vm {to} --listen {uri} &");
    println!("  $ transship move --vm {from} --to {uri} {}", flags.join(" "));
    let output = command.output().map_err(|e| LabError(format!("transship move: {e}")))?;
    let received = receiving.wait()?;
    if !output.status.success() {
        return Err(LabError(format!("transship move failed; the other side: {received}")));
    }
    let report: Value = serde_json::from_slice(&output.stdout).map_err(|e| LabError(format!("report: {e}")))?;
    let pages = &report["pages"];
    let rounds = report["rounds"].as_array().map_or(0, Vec::len);
    let (normal, zero, hole) = (&pages["normal"], &pages["zero"], &pages["hole"]);
    println!("  {rounds} rounds; pages: {normal} with content, {zero} zero, {hole} never touched");
    let number = |value: &Value| value.as_f64().unwrap_or_default();
    let bytes = number(&report["bytes"]["wire"]);
    Ok(Cost {
        total_ms: number(&report["total_ms"]),
        downtime_ms: number(&report["downtime_ms"]),
        silence_ms: f64::NAN,
        bytes,
    })
}

/// Default settings, but as fast as it can.
fn move_with_qemu(source: &Qemu, destination: &Qemu) -> Result<Cost> {
    let uri = format!("unix:{}/move", destination.folder().display());
    println!("  $ migrate {uri}    (QMP, max-bandwidth unlimited)");
    destination.qmp("migrate-incoming", json!({ "uri": uri }))?;
    source.qmp("migrate-set-parameters", json!({ "max-bandwidth": 1_u64 << 40 }))?;
    let start = Instant::now();
    source.qmp("migrate", json!({ "uri": uri }))?;
    loop {
        let info = source.qmp("query-migrate", json!({}))?;
        match info["status"].as_str() {
            Some("completed") => {
                let total_ms = start.elapsed().as_secs_f64() * 1e3;
                let number = |value: &Value| value.as_f64().unwrap_or_default();
                let (downtime_ms, bytes) = (number(&info["downtime"]), number(&info["ram"]["transferred"]));
                return Ok(Cost { total_ms, downtime_ms, silence_ms: f64::NAN, bytes });
            }
            Some("failed" | "cancelled") => return Err(LabError(format!("QEMU's migration: {info}"))),
            _ if start.elapsed() > PATIENCE => return Err(LabError(format!("QEMU's migration does not end: {info}"))),
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn synthetic(flags: &[String]) -> Result<()> {
    say("Two synthetic guests of 1 GiB; the first writes 50 MB/s and knows what it wrote.");
    let builder = Synthetic::builder().memory("1G").hot_set("64M");
    let source = builder.clone().touched("50%").content("mixed").write_rate("50M").start()?;
    let destination = builder.incoming().start()?;
    let folder = destination.folder().display().to_string();
    let before = show_synthetic("source", &source)?;

    say("transship moves it while it runs.");
    let cost = move_with_transship(&source.vm(), &destination.vm(), &folder, flags)?;
    let after = show_synthetic("destination", &destination)?;
    println!("  the source is {:?}, the guest went on: {} pages written since", source.state()?, after - before);
    let Cost { total_ms, downtime_ms, bytes, .. } = cost;
    println!("\ntotal time {total_ms:.1} ms, downtime {downtime_ms:.1} ms, {:.1} MB on the wire", bytes / 1e6);
    Ok(())
}

fn show_synthetic(place: &str, guest: &Synthetic) -> Result<u64> {
    let check = guest.check()?;
    let (writes, pages, wrong) = (check.writes, check.pages, check.wrong);
    println!("  the guest at the {place}: {writes} pages written; checked {pages} pages, {wrong} errors");
    match wrong {
        0 => Ok(writes),
        _ => Err(LabError(format!("the guest found {wrong} wrong pages"))),
    }
}

fn say(text: &str) {
    println!("\n== {text}");
}
