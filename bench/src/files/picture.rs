//! The picture: a bar for each side of each case.
use super::{
    cases::{By, Guest, LAYOUTS, Layout},
    results::{Results, Series},
};
use crate::{
    plot::{Bar, Chart, Group, Line, Side},
    results::Spread,
    units,
};

/// What takes the time.
#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Save,
    Restore,
}

impl Results {
    pub(super) fn svg(&self) -> String {
        let guests = [Guest::Paused, Guest::Live, Guest::Background, Guest::Sparse];
        let groups =
            guests.into_iter().flat_map(|guest| [What::Save, What::Restore].map(|what| self.group(guest, what)));
        let chart = Chart {
            title: "Saving a guest to a file, and restoring it: transship and QEMU's own migration",
            setting: &self.setting(),
            legend: &[
                (Side::Ours, "transship"),
                (Side::Qemu, "QEMU, asked for the same"),
                (Side::Disk, "the disk on its own"),
            ],
            notes: "QEMU by ours",
            axis: "time for all memory",
            groups: groups.filter(|group| !group.lines.is_empty()).collect(),
        };
        chart.svg()
    }

    fn group(&self, guest: Guest, what: What) -> Group {
        let title = match what {
            What::Save => format!("Save: {}", guest.title()),
            What::Restore => format!("Restore: saved {}", guest.title()),
        };
        Group { title, lines: LAYOUTS.into_iter().filter_map(|layout| self.line(guest, layout, what)).collect() }
    }

    fn line(&self, guest: Guest, layout: Layout, what: What) -> Option<Line> {
        let sides = [By::Transship, By::Qemu].map(|by| self.of(guest, layout, by));
        let mut bars: Vec<Bar> = sides.into_iter().flatten().filter_map(|series| bar(series, what)).collect();
        if bars.is_empty() {
            return None;
        }
        if layout == Layout::Direct && guest == Guest::Paused && !self.disk.is_empty() {
            let Spread { median: ms, .. } = if what == What::Save { self.disk_write() } else { self.disk_read() };
            bars.push(Bar { side: Side::Disk, ms, remark: String::new() });
        }
        let ours = self.of(guest, layout, By::Transship);
        let ratio = ours.and_then(|ours| Some(time(self.beside(ours)?, what) / time(ours, what))).unwrap_or(f64::NAN);
        let note = if ratio.is_finite() { format!("{} ×", units::short(ratio)) } else { String::new() };
        Some(Line { title: self.short_title(layout), bars, note })
    }

    /// There is less room than in a table, and each layout is the one before it and more.
    fn short_title(&self, layout: Layout) -> String {
        match layout {
            Layout::Plain => "file".into(),
            Layout::Mapped => "mapped".into(),
            Layout::Channels => format!("+ channels ({})", self.channels),
            Layout::Direct => "+ direct I/O".into(),
        }
    }
}

fn time(series: &Series, what: What) -> f64 {
    if what == What::Save { series.save_ms() } else { series.restore_ms() }
}

fn bar(series: &Series, what: What) -> Option<Bar> {
    let side = series.by.side();
    match what {
        What::Save if !series.ended() => {
            let remark = format!(", {}", series.status());
            Some(Bar { side, ms: series.save(|run| run.ms).median, remark })
        }
        What::Restore if series.restores.is_empty() => None,
        _ => Some(Bar { side, ms: time(series, what), remark: String::new() }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::files::results::tests::results;

    #[test]
    fn there_is_a_bar_for_each_and_the_disk() {
        let svg = results().svg();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let texts: Vec<_> =
            document.descendants().filter(|node| node.is_text()).filter_map(|node| node.text()).collect();
        let wanted =
            ["Save: live", "Restore: saved background", "9000 ms, no end: 4 GiB after 9 s", "960 ms", "1.36 ×"];
        for wanted in wanted {
            assert!(texts.contains(&wanted), "{wanted}: {texts:?}");
        }
        let count = |wanted: &str| texts.iter().filter(|text| **text == wanted).count();
        assert_eq!(count("1000 ms"), 3, "our save, the disk's reads, the scale");
        assert_eq!(count("960 ms"), 1, "the disk's writes, where nothing else takes the guest's time");
    }
}
