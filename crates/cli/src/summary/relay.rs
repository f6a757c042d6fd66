//! The result of a relay.
use transship_engine::{Error, MethodBytes, RelayReport, Report};

use super::common::{self, Rows};
use crate::{
    failure::Failure,
    units::{Bytes, Time},
};

/// Prints the result and yields how the command ends.
pub(crate) fn relayed(outcome: Result<(), Error>, report: Report, json: bool) -> Result<(), Failure> {
    common::end(outcome, report, json, "the guest was handed over", table)
}

/// How one of many went.
pub(crate) fn relayed_in_a_line(outcome: &Result<(), Error>, report: &Report) -> String {
    let link = report.relay.as_ref().map(|relay| {
        format!(
            ", {} of QEMU as {} on the link",
            Bytes(relay.from_qemu.max(relay.to_qemu)),
            Bytes(relay.link_out.max(relay.link_in))
        )
    });
    let (link, time) = (link.unwrap_or_default(), Time::from_ms(report.total_ms));
    match outcome {
        Ok(()) => format!("handed over in {time}{link}"),
        Err(error) => format!("failed after {time}{link}: {error}"),
    }
}

fn table(report: &Report) -> String {
    let mut rows = Rows::new(report);
    if let Some(RelayReport { connections, from_qemu, to_qemu, link_out, link_in, ratio, methods }) = &report.relay {
        rows.add("connections", connections);
        rows.add("QEMU", format!("{} received, {} sent", Bytes(*from_qemu), Bytes(*to_qemu)));
        rows.add("link", format!("{} out, {} in (ratio {ratio:.2})", Bytes(*link_out), Bytes(*link_in)));
        let methods: Vec<_> = methods.iter().map(describe).collect();
        if !methods.is_empty() {
            rows.add("sent", methods.join(", "));
        }
    }
    if report.bytes.encoder_in > 0 {
        rows.add("encoders", format!("all busy for {:.0} % of the packets", report.busy_ratio * 100.0));
    }
    rows.add_speed(report);
    rows.into_text()
}

fn describe(MethodBytes { method, bytes, made }: &MethodBytes) -> String {
    match method.as_str() {
        "none" => format!("{} as they were", Bytes(*bytes)),
        _ => format!("{} by {method} as {}", Bytes(*bytes), Bytes(*made)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use transship_engine::{ByteCounts, Status};

    #[test]
    fn the_table_says_what_a_person_wants_to_know() {
        let method = |method: &str, bytes, made| MethodBytes { method: method.into(), bytes, made };
        let relay = RelayReport {
            connections: 5,
            from_qemu: 4 << 30,
            to_qemu: 1 << 10,
            link_out: 1 << 30,
            link_in: 1 << 10,
            ratio: 4.0,
            methods: vec![method("none", 1 << 20, 1 << 20), method("zstd", 3 << 30, 1 << 29)],
        };
        let report = Report {
            status: Status::Completed,
            relay: Some(relay),
            bytes: ByteCounts { encoder_in: 1, ..ByteCounts::default() },
            busy_ratio: 0.5,
            ..Report::default()
        };
        let text = table(&report);
        for part in [
            "completed in",
            "4.0 GiB received, 1.0 KiB sent",
            "1.0 GiB out, 1.0 KiB in (ratio 4.00)",
            "1.0 MiB as they were, 3.0 GiB by zstd as 512 MiB",
            "all busy for 50 %",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }
}
