//! The table for people.
use std::fmt::Write;

use crate::{
    results::{Results, Row, Spread},
    units,
};

const HEAD: [&str; 12] = [
    "memory",
    "zero check",
    "ours ms",
    "(least)",
    "QEMU ms",
    "(least)",
    "ours GB/s",
    "QEMU GB/s",
    "ours wire",
    "QEMU wire",
    "CPU s ours/QEMU",
    "ratio",
];
/// Those with words.
const LEFT_COLUMNS: usize = 2;

/// Everything that was measured.
pub(crate) fn of(results: &Results) -> String {
    let mut text = format!("{}\n", results.setting());
    text.push_str(results.machine.warning());
    for scan in &results.scan {
        let plural = if scan.threads == 1 { "thread reads" } else { "threads read" };
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{} {plural} {} GB/s of private memory here",
            scan.threads,
            units::short(scan.bytes_per_s / 1e9)
        );
    }
    text.push('\n');
    let head = HEAD.map(str::to_owned);
    let lines: Vec<[String; 12]> = std::iter::once(head).chain(results.rows.iter().map(cells)).collect();
    text.push_str(&aligned(LEFT_COLUMNS, &lines));
    text.push_str(
        "\nMedian (and least) times; ratio: QEMU's median by ours. CPU: both sides, all processes. GB: 10^9 bytes.\n",
    );
    text
}

fn cells(row: &Row) -> [String; 12] {
    let (ours, qemu) = (row.our_ms(), row.qemu_ms());
    let least = |spread: Spread| format!("({})", units::short(spread.least));
    [
        row.content.title().to_owned(),
        row.mode.title(),
        units::short(ours.median),
        least(ours),
        units::short(qemu.median),
        least(qemu),
        units::short(row.gb_per_s(ours.median)),
        units::short(row.gb_per_s(qemu.median)),
        units::bytes(row.our_wire_bytes()),
        units::bytes(row.qemu_wire_bytes()),
        format!("{:.2}/{:.2}", row.our_cpu_seconds(), row.qemu_cpu_seconds()),
        format!("{:.2}", row.ratio()),
    ]
}

/// Columns as wide as their widest cell; words stand left, numbers right.
pub(crate) fn aligned<const N: usize>(left: usize, lines: &[[String; N]]) -> String {
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let mut text = String::new();
    for line in lines {
        let padded = line.iter().zip(widths).enumerate().map(|(column, (cell, width))| {
            if column < left { format!("{cell:width$}") } else { format!("{cell:>width$}") }
        });
        text.push_str(padded.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::results;

    #[test]
    fn columns_are_aligned() {
        let line = |cells: [&str; 3]| cells.map(str::to_owned);
        let text = aligned(2, &[line(["kind", "mode", "ms"]), line(["a", "longer", "1000"]), line(["ä", "b", "5"])]);
        assert_eq!(text, "kind  mode      ms\na     longer  1000\nä     b          5\n");
    }

    #[test]
    fn a_row_has_both_sides_and_their_ratio() {
        let text = of(&results());
        let line = text.lines().find(|line| line.starts_with("never touched")).expect("a line for it");
        let words: Vec<_> = line.split_whitespace().collect();
        let wanted = "never touched 2 channels 40 (40) 2800 (2800) 25 0.357 1000 B 8.58 MiB 1.00/3.00 70.00";
        assert_eq!(words.join(" "), wanted);
        assert!(text.contains("2 threads read 12 GB/s"), "{text}");
        assert_eq!(text.contains("debug build"), cfg!(debug_assertions));
    }
}
