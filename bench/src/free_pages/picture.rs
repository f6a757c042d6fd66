//! The picture: a bar for each side of each way.
use clap::ValueEnum;

use super::{
    cases::{Case, Load, Way},
    results::{Mean, Results, Series},
};
use crate::{
    files::By,
    plot::{Bar, Chart, Group, Line, Side},
    units,
};

impl Results {
    pub(super) fn svg(&self) -> String {
        let groups = self.groups().into_iter().map(|(guest_bytes, load)| Group {
            title: format!("{}, {}", units::bytes(guest_bytes), load.title()),
            lines: Way::value_variants().iter().filter_map(|way| self.line(guest_bytes, load, *way)).collect(),
        });
        let chart = Chart {
            title: "Moving a guest whose free memory is full of old data: transship and QEMU's own migration",
            setting: &self.setting(),
            legend: &[(Side::Ours, "transship"), (Side::Qemu, "QEMU, with the same feature")],
            notes: "QEMU by ours",
            axis: "time of a move",
            groups: groups.collect(),
        };
        chart.svg()
    }

    fn line(&self, guest_bytes: u64, load: Load, way: Way) -> Option<Line> {
        let sides = [By::Transship, By::Qemu].map(|by| self.of(Case { guest_bytes, load, way, by }));
        let bars: Vec<Bar> = sides.into_iter().flatten().map(bar).collect();
        let note = match sides {
            [Some(ours), Some(qemu)] => format!("{} ×", units::short(qemu.ms().mean / ours.ms().mean)),
            _ => String::new(),
        };
        (!bars.is_empty()).then(|| Line { title: way.title().into(), bars, note })
    }
}

fn bar(series: &Series) -> Bar {
    let Mean { mean, deviation } = series.ms();
    Bar { side: series.case.by.side(), ms: mean, remark: format!(" ± {}", units::short(deviation)) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::free_pages::results::tests::results;

    #[test]
    fn there_is_a_bar_for_each() {
        let svg = results().svg();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let texts: Vec<_> =
            document.descendants().filter(|node| node.is_text()).filter_map(|node| node.text()).collect();
        for wanted in ["2 GiB, busy", "4 GiB, idle", "500 ms ± 14.1", "2.4 ×", "5 ×"] {
            assert!(texts.contains(&wanted), "{wanted}: {texts:?}");
        }
    }
}
