//! A move by transship: two processes beside the two guests.
use std::time::Instant;

use serde_json::Value;
use transship_lab::{Finished, SlowLink, Transship};

use crate::{
    ends::Ends,
    pair::{Pair, text},
    processes::{self, Used},
    results::{Cpu, OurRun, Sides},
};

/// A move that has ended, one way or the other.
pub(crate) struct Moved {
    /// The source's.
    pub(crate) report: Value,
    pub(crate) used: Sides<Used>,
    sending: Finished,
    receiving: Finished,
}

/// An address to call, and more arguments for the one that calls.
pub(crate) type Called = Result<(String, Vec<String>), String>;

/// How the two find each other.
pub(crate) struct Meeting<'a> {
    pub(crate) listen: &'a str,
    /// More arguments for the one that listens.
    pub(crate) receiving: &'a [String],
    /// What the other one does when the first listens at an address.
    pub(crate) call: &'a dyn Fn(&Transship, String) -> Called,
}

/// Runs `transship receive` and `transship move` to their end.
pub(crate) fn transfer(ends: &Ends<'_>, arguments: &[String]) -> Result<Moved, String> {
    transfer_to(ends, &[], arguments)
}

/// As [`transfer`], with more arguments for the one that listens.
pub(crate) fn transfer_to(ends: &Ends<'_>, receiving: &[String], arguments: &[String]) -> Result<Moved, String> {
    let listen = match ends.link {
        None => format!("unix:{}", ends.folder.join("move").display()),
        Some(_) => "tcp:0.0.0.0:0".to_owned(),
    };
    let call = |_: &Transship, to: String| match ends.link {
        Some(link) => Ok((link.destination_uri(port(&to)?), Vec::new())),
        None => Ok((to, Vec::new())),
    };
    transfer_by(ends, &Meeting { listen: &listen, receiving, call: &call }, arguments)
}

/// The port that transship has chosen.
pub(crate) fn port(uri: &str) -> Result<u16, String> {
    let port = uri.rsplit(':').next().and_then(|port| port.parse().ok());
    port.ok_or_else(|| format!("transship listens at {uri}, which has no port"))
}

/// Starts a relay on each side of the link. The source's QEMU is to connect to `near`, and the one that waits is at
/// `far`. `more`: arguments for the relay near the source, which comes first.
pub(crate) fn relays(link: &SlowLink, near: &str, far: &str, more: &[&str]) -> Result<[Transship; 2], String> {
    let there = ["relay", "--listen", "relay:tcp:0.0.0.0:0", "--to", far, "--insecure"];
    let there = Transship::command(there).prefix(&link.destination()).start().map_err(text)?;
    let to = format!("relay:{}", link.destination_uri(port(&there.listening().map_err(text)?)?));
    let here = Transship::command(["relay", "--listen", near, "--to", &to, "--insecure"]).args(more.iter().copied());
    let here = here.prefix(&link.source()).start().map_err(text)?;
    here.listening().map_err(text)?;
    Ok([here, there])
}

/// Bytes that went over the link between two relays that have nothing more to do, and of which the near one reports.
pub(crate) fn relayed(relays: [Transship; 2]) -> Result<u64, String> {
    let [near, far] = relays.map(|relay| relay.wait().and_then(|ended| ended.expect_code(0)).map_err(text));
    far?;
    Ok(number(&near?.report().map_err(text)?, "/relay/link_out")? as u64)
}

/// As [`transfer`], where the two meet so.
pub(crate) fn transfer_by(ends: &Ends<'_>, meeting: &Meeting<'_>, arguments: &[String]) -> Result<Moved, String> {
    let prefix = |of: fn(&SlowLink) -> Vec<String>| ends.link.map(of).unwrap_or_default();
    let receiving = Transship::receiving(&ends.destination, meeting.listen).prefix(&prefix(SlowLink::destination));
    let mut receiving = receiving.args(meeting.receiving).start().map_err(text)?;
    let to = receiving.listening().map_err(text)?;
    let (to, more) = (meeting.call)(&receiving, to)?;
    let begin = Instant::now();
    let moving = Transship::moving(&ends.source, &to).prefix(&prefix(SlowLink::source)).args(arguments).args(more);
    let mut moving = moving.start().map_err(text)?;
    let [source, destination] = processes::follow([moving.process(), receiving.process()], begin)?;
    let (sending, receiving) = (moving.wait().map_err(text)?, receiving.wait().map_err(text)?);
    let report = sending.report().map_err(text)?;
    Ok(Moved { report, used: Sides { source, destination }, sending, receiving })
}

impl Moved {
    /// Itself, if the guest has arrived.
    pub(crate) fn arrived(self) -> Result<Self, String> {
        let [sending, receiving] = [self.sending, self.receiving].map(|finished| finished.expect_code(0).map_err(text));
        Ok(Self { sending: sending?, receiving: receiving?, ..self })
    }

    /// The destination's report.
    pub(crate) fn received(&self) -> Result<Value, String> {
        self.receiving.report().map_err(text)
    }

    /// A number of the report, by its JSON pointer.
    pub(crate) fn number(&self, path: &str) -> Result<f64, String> {
        number(&self.report, path)
    }
}

/// Moves the guest, and says what it took.
pub(crate) fn run(pair: &Pair<'_>, arguments: &[String]) -> Result<OurRun, String> {
    ran(pair, |ends| transfer(ends, arguments))
}

/// As [`run`], where the two meet so.
pub(crate) fn run_by(pair: &Pair<'_>, meeting: &Meeting<'_>, arguments: &[String]) -> Result<OurRun, String> {
    ran(pair, |ends| transfer_by(ends, meeting, arguments))
}

fn ran(pair: &Pair<'_>, transfer: impl FnOnce(&Ends<'_>) -> Result<Moved, String>) -> Result<OurRun, String> {
    let before = pair.cpu_seconds()?;
    let moved = transfer(&pair.ends())?.arrived()?;
    let after = pair.cpu_seconds()?;
    let used = &moved.used;
    Ok(OurRun {
        ms: moved.number("/total_ms")?,
        process_ms: used.source.ended_after.as_secs_f64() * 1e3,
        setup_ms: moved.number("/setup_ms")?,
        downtime_ms: moved.number("/downtime_ms")?,
        rounds_ms: rounds_ms(&moved.report)?,
        pages_read: (moved.number("/pages/normal")? + moved.number("/pages/zero")?) as u64,
        wire_bytes: carried_bytes(&moved.report)?,
        cpu: Cpu {
            qemu: after.less(before),
            transship: Sides { source: used.source.cpu_seconds, destination: used.destination.cpu_seconds },
        },
        anonymous_bytes_max: Sides {
            source: used.source.anonymous_bytes_max,
            destination: used.destination.anonymous_bytes_max,
        },
        equal: None,
    })
}

fn rounds_ms(report: &Value) -> Result<f64, String> {
    let rounds = report["rounds"].as_array().ok_or_else(|| format!("transship's report has no rounds: {report}"))?;
    rounds.iter().map(|round| number(round, "/ms")).sum()
}

/// What the destination got, over connections or by reading it itself.
pub(crate) fn carried_bytes(report: &Value) -> Result<u64, String> {
    Ok((number(report, "/bytes/wire")? + number(report, "/bytes/lent")?) as u64)
}

/// A number of a report, by its JSON pointer.
pub(crate) fn number(report: &Value, path: &str) -> Result<f64, String> {
    report
        .pointer(path)
        .and_then(Value::as_f64)
        .ok_or_else(|| format!("transship's report has no number {path}: {report}"))
}
