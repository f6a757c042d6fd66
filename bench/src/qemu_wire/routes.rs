//! One move, from one of two to one of three.
use std::{
    fs,
    path::Path,
    time::{Instant, SystemTime},
};

use serde::Serialize;
use serde_json::json;
use transship_lab::Transship;

use crate::{
    codecs::{Method, qemu_parameters},
    ours,
    pair::{Pair, text},
    processes,
    results::{Cpu, Run, Sides},
    stock,
};

/// The sender and the receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Route {
    QemuToQemu,
    OursToQemu,
    QemuToOurs,
    QemuToFile,
    OursToOurs,
}

/// By what: the same at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Wire {
    pub(crate) channels: u8,
    pub(crate) method: Method,
}

impl Route {
    pub(crate) const ALL: [Self; 5] =
        [Self::QemuToQemu, Self::OursToQemu, Self::QemuToOurs, Self::QemuToFile, Self::OursToOurs];

    /// As it is called in tables.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::QemuToQemu => "QEMU to QEMU",
            Self::OursToQemu => "ours to QEMU",
            Self::QemuToOurs => "QEMU to ours",
            Self::QemuToFile => "QEMU to file",
            Self::OursToOurs => "ours to ours",
        }
    }
}

impl Wire {
    /// As it is called in tables.
    pub(crate) fn title(self) -> String {
        let plural = if self.channels == 1 { "" } else { "s" };
        format!("{} channel{plural}, {}", self.channels, self.method.name())
    }

    /// For `transship move`.
    fn arguments(self) -> Vec<String> {
        ["--channels", &self.channels.to_string(), "--compress", self.method.name()].map(str::to_owned).to_vec()
    }
}

/// Moves the guest, and compares its memory if that is wanted. A file is made in `folder`, and removed.
pub(crate) fn run(pair: &Pair<'_>, route: Route, wire: Wire, folder: &Path, compare: bool) -> Result<Run, String> {
    let run = match route {
        Route::QemuToQemu => {
            stock::with_return_path(&pair.source)?;
            stock::run(pair, qemu_parameters(wire.channels, wire.method))?.into()
        }
        Route::OursToOurs => ours::run(pair, &wire.arguments())?.into(),
        Route::OursToQemu => ours_to_qemu(pair, wire)?,
        Route::QemuToOurs => qemu_to_ours(pair, wire, &["--vm", &pair.destination.vm()])?,
        Route::QemuToFile => {
            let file = folder.join("received");
            let to = format!("file:{}", file.display());
            let received = qemu_to_ours(pair, wire, &["--to", &to]).and_then(|run| match compare {
                true => restore(pair, &to).map(|()| run),
                false => Ok(run),
            });
            // None is there if it failed early.
            let _ = fs::remove_file(&file);
            received?
        }
    };
    Ok(Run { equal: pair.compared(compare)?, ..run })
}

fn ours_to_qemu(pair: &Pair<'_>, wire: Wire) -> Result<Run, String> {
    stock::set(&pair.destination, &qemu_parameters(wire.channels, wire.method))?;
    let uri = stock::socket(pair);
    pair.destination.qmp("migrate-incoming", json!({ "uri": uri })).map_err(text)?;
    let before = pair.cpu_seconds()?;
    let begin = Instant::now();
    let moving = Transship::moving(&pair.source.vm(), &uri).args(["--peer", "qemu"]).args(wire.arguments());
    let mut moving = moving.start().map_err(text)?;
    let [used] = processes::follow([moving.process()], begin)?;
    let finished = moving.wait().and_then(|finished| finished.expect_code(0)).map_err(text)?;
    stock::completed(&pair.destination, "destination")?;
    let qemu = pair.cpu_seconds()?.less(before);
    let report = finished.report().map_err(text)?;
    Ok(Run {
        ms: ours::number(&report, "/total_ms")?,
        wire_bytes: ours::carried_bytes(&report)?,
        cpu: Cpu { qemu, transship: Sides { source: used.cpu_seconds, destination: 0.0 } },
        equal: None,
    })
}

/// QEMU says that it is completed when it has our word that everything is loaded, or that the file is on the disk.
fn qemu_to_ours(pair: &Pair<'_>, wire: Wire, into: &[&str]) -> Result<Run, String> {
    stock::with_return_path(&pair.source)?;
    stock::set(&pair.source, &qemu_parameters(wire.channels, wire.method))?;
    let uri = stock::socket(pair);
    let channels = wire.channels.to_string();
    let receiving =
        Transship::command(["receive", "--peer", "qemu", "--listen", &uri, "--channels", &channels, "--json"]);
    let mut receiving = receiving.args(into.iter().copied()).start().map_err(text)?;
    receiving.listening().map_err(text)?;
    let before = pair.cpu_seconds()?;
    let (begin, since) = (Instant::now(), SystemTime::now());
    pair.source.qmp("migrate", json!({ "uri": uri })).map_err(text)?;
    let [used] = processes::follow([receiving.process()], begin)?;
    receiving.wait().and_then(|finished| finished.expect_code(0)).map_err(text)?;
    let is_completed = |data: &serde_json::Value| data["status"] == "completed";
    let completed = pair.source.wait_event_time("MIGRATION", since, is_completed).map_err(text)?;
    let qemu = pair.cpu_seconds()?.less(before);
    let info = pair.source.qmp("query-migrate", json!({})).map_err(text)?;
    Ok(Run {
        ms: completed.duration_since(since).unwrap_or_default().as_secs_f64() * 1e3,
        wire_bytes: stock::number(&info, "/ram/transferred")? as u64,
        cpu: Cpu { qemu, transship: Sides { source: 0.0, destination: used.cpu_seconds } },
        equal: None,
    })
}

/// Into the destination, which did not take part so far, so that its memory can be compared.
fn restore(pair: &Pair<'_>, from: &str) -> Result<(), String> {
    let restoring = Transship::command(["restore", "--vm", &pair.destination.vm(), "--from", from, "--json"]);
    restoring.run().and_then(|finished| finished.expect_code(0)).map_err(text).map(drop)
}
