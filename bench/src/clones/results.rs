//! What was measured, as a table, as aims and as a picture.
use serde::Serialize;
use transship_lab::Accel;

use super::Guest;
use crate::{
    aims::{Aim, Aims, Bound},
    limits::StateAlone,
    machine::Machine,
    plot::{
        Bar, Chart, Group, Line, Side,
        curves::{Curve, Curves},
    },
    results::Spread,
    rows::{self, FRESH},
    table::aligned,
    units,
};

const ALONE_MS: f64 = 15.0;
const DOWNTIME_MS: f64 = 15.0;
const CLONES_A_SECOND: f64 = 32.0;
const MIB_A_CLONE: f64 = 40.0;
/// From one size of memory to the next: no more than what measuring varies by.
const GROWTH: f64 = 1.5;
const MIB: f64 = (1 << 20) as f64;

/// How the guests come to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Way {
    /// They map the image.
    #[default]
    Clones,
    /// Stock QEMU loads a mapped-ram file.
    Qemu,
    /// `restore --lazy`.
    Lazy,
}

impl Way {
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Clones => "clones",
            Self::Qemu => "QEMU, mapped-ram",
            Self::Lazy => "restore --lazy",
        }
    }
}

/// So many guests.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Row {
    pub(super) guest_bytes: u64,
    pub(super) count: u32,
    pub(super) way: Way,
    /// From waiting to running.
    pub(super) each_ms: Vec<f64>,
    /// Until their QEMUs waited.
    pub(super) start_ms: Vec<f64>,
    /// All of it, QEMU's own start included.
    pub(super) all_ms: f64,
    /// How long the guest that they come from stood still.
    pub(super) downtime_ms: Option<f64>,
    /// Of all of them together, and of the guest that they come from.
    pub(super) memory: u64,
    pub(super) own_memory: u64,
}

impl Row {
    pub(super) fn ms(&self) -> Spread {
        Spread::of(self.each_ms.iter().copied())
    }

    fn start(&self) -> Spread {
        Spread::of(self.start_ms.iter().copied())
    }

    /// What they take beyond one guest, each. One clone alone takes less than a guest: nothing.
    fn mib_a_guest(&self) -> f64 {
        (self.memory as f64 - self.own_memory as f64).max(0.0) / MIB / f64::from(self.count)
    }
}

/// Everything.
#[derive(Debug, Serialize)]
pub(super) struct Results {
    pub(super) machine: Machine,
    pub(super) qemu: String,
    pub(super) guest: Guest,
    pub(super) kvm: bool,
    pub(super) content: u64,
    pub(super) rows: Vec<Row>,
}

impl Results {
    pub(super) fn new(machine: Machine, (guest, accel): (Guest, Accel), content: u64) -> Self {
        Self { machine, qemu: String::new(), guest, kvm: accel == Accel::Kvm, content, rows: Vec::new() }
    }

    /// With one row for each case, of all its runs.
    pub(super) fn merged(&self) -> Self {
        let mut rows: Vec<Row> = Vec::new();
        for row in &self.rows {
            let case = |row: &Row| (row.guest_bytes, row.count, row.way);
            match rows.iter_mut().find(|other| case(other) == case(row)) {
                None => rows.push(row.clone()),
                Some(merged) => {
                    merged.each_ms.extend(&row.each_ms);
                    merged.start_ms.extend(&row.start_ms);
                    // Of these, the worst run.
                    merged.all_ms = merged.all_ms.max(row.all_ms);
                    merged.memory = merged.memory.max(row.memory);
                    let worst = merged.downtime_ms.into_iter().chain(row.downtime_ms).reduce(f64::max);
                    merged.downtime_ms = worst;
                }
            }
        }
        let &Self { ref machine, ref qemu, guest, kvm, content, .. } = self;
        Self { machine: machine.clone(), qemu: qemu.clone(), guest, kvm, content, rows }
    }

    fn setting(&self) -> String {
        let accel = if self.kvm { "KVM" } else { "TCG" };
        let guest = if self.guest == Guest::Linux { "Linux guest" } else { "small guest" };
        format!(
            "{}; {guest}, {} of its memory filled, {accel}",
            self.machine.title(&self.qemu),
            units::bytes(self.content)
        )
    }

    pub(super) fn table(&self) -> String {
        let head = [
            "memory",
            "way",
            "guests",
            "each ms",
            "(most)",
            "QEMU's start ms",
            "all s",
            "parent's stop ms",
            "memory",
            "a guest",
            "beyond one, each",
        ];
        let cells = |row: &Row| {
            [
                units::bytes(row.guest_bytes),
                row.way.title().to_owned(),
                row.count.to_string(),
                units::short(row.ms().median),
                format!("({})", units::short(row.each_ms.iter().copied().fold(0.0, f64::max))),
                units::short(row.start().median),
                units::short(row.all_ms / 1e3),
                row.downtime_ms.map_or_else(String::new, units::short),
                units::bytes(row.memory),
                units::bytes(row.memory / u64::from(row.count)),
                units::bytes((row.mib_a_guest() * MIB) as u64),
            ]
        };
        let lines: Vec<[String; 11]> =
            std::iter::once(head.map(str::to_owned)).chain(self.rows.iter().map(cells)).collect();
        format!(
            "{}\n{}\n{}\nEach: median from a QEMU that waits to a guest that runs. Memory: of all together (PSS).\n",
            self.setting(),
            self.machine.warning(),
            aligned(2, &lines)
        )
    }

    fn clones(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| row.way == Way::Clones)
    }

    /// What all tables say alike: the time of one guest, run by run.
    pub(super) fn shared_rows(&self, state: Option<StateAlone>) -> Vec<rows::Row> {
        let mut cases: Vec<(u64, u32)> = self.clones().map(|row| (row.guest_bytes, row.count)).collect();
        cases.dedup();
        let row = |(guest_bytes, count): (u64, u32)| {
            let of = |way: Way| {
                let all = self.rows.iter();
                all.filter(move |row| (row.guest_bytes, row.count, row.way) == (guest_bytes, count, way))
            };
            let ms = |way| of(way).map(|row| row.ms().median).collect::<Vec<_>>();
            let memory = |way| units::bytes(Spread::of(of(way).map(|row| row.memory as f64)).median as u64);
            let title = format!("{}, {count} clones", units::bytes(guest_bytes));
            let row = rows::Row::of(title, FRESH, ms(Way::Clones), ms(Way::Qemu));
            let row = row.limit(state.map(|state| state.restored(count)));
            row.fact("memory of all", memory(Way::Clones), memory(Way::Qemu))
        };
        cases.into_iter().map(row).collect()
    }

    pub(super) fn aims(&self) -> Aims {
        self.clones().flat_map(|row| self.aims_of(row)).collect()
    }

    fn aims_of(&self, row: &Row) -> Vec<Aim> {
        let title = format!("{}, {} clones", units::bytes(row.guest_bytes), row.count);
        let mut aims = Vec::new();
        if row.count == 1 {
            aims.push(Aim::new(
                format!("{title}: from waiting to running"),
                Bound::AtMost,
                ALONE_MS,
                row.ms().median,
                "ms",
            ));
            let smaller = self.clones().filter(|other| other.count == 1 && other.guest_bytes < row.guest_bytes);
            if let Some(smaller) = smaller.max_by_key(|other| other.guest_bytes) {
                let times = row.ms().median / smaller.ms().median;
                aims.push(Aim::new(format!("{title}: as with less memory"), Bound::AtMost, GROWTH, times, "times"));
            }
        } else {
            // Two cores: while one QEMU starts the other clone is made, so its own work is what counts.
            let own_s = row.each_ms.iter().sum::<f64>() / 1e3 / 2.0;
            let rate = row.each_ms.len() as f64 / own_s;
            aims.push(Aim::new(
                format!("{title}: beside QEMU's start"),
                Bound::AtLeast,
                CLONES_A_SECOND,
                rate,
                "a second",
            ));
        }
        if let Some(downtime) = row.downtime_ms {
            aims.push(Aim::new(
                format!("{title}: the parent stands still"),
                Bound::AtMost,
                DOWNTIME_MS,
                downtime,
                "ms",
            ));
        }
        // What an emulator takes for translated code is not ours to bound.
        if self.kvm {
            let what = format!("{title}: memory beyond one guest, each");
            aims.push(Aim::new(what, Bound::AtMost, MIB_A_CLONE, row.mib_a_guest(), "MiB"));
        }
        aims
    }

    pub(super) fn svg(&self) -> String {
        let mut sizes: Vec<(u64, u32)> = self.clones().map(|row| (row.guest_bytes, row.count)).collect();
        sizes.dedup();
        let groups = sizes.into_iter().map(|(guest_bytes, count)| Group {
            title: format!("{}, {count} guests", units::bytes(guest_bytes)),
            lines: self
                .rows
                .iter()
                .filter(|row| (row.guest_bytes, row.count) == (guest_bytes, count))
                .map(|row| Line {
                    title: row.way.title().into(),
                    bars: vec![Bar {
                        side: if row.way == Way::Qemu { Side::Qemu } else { Side::Ours },
                        ms: row.ms().median,
                        remark: String::new(),
                    }],
                    note: units::bytes(row.memory),
                })
                .collect(),
        });
        Chart {
            title: "Guests from one moment of another",
            setting: &self.setting(),
            legend: &[(Side::Ours, "transship"), (Side::Qemu, "stock QEMU")],
            notes: "memory of all",
            axis: "time of one guest, from waiting to running",
            groups: groups.collect(),
        }
        .svg_above(&self.memory_over_number())
    }

    /// For each size of the guest's memory, what all guests together take.
    fn memory_over_number(&self) -> Vec<Curves> {
        let mut sizes: Vec<u64> = self.rows.iter().map(|row| row.guest_bytes).collect();
        sizes.dedup();
        let curve = |guest_bytes: u64, way: Way, side: Side| {
            let rows = self.rows.iter().filter(|row| (row.guest_bytes, row.way) == (guest_bytes, way));
            let mut points: Vec<(u32, u64)> = rows.map(|row| (row.count, row.memory)).collect();
            points.sort_unstable();
            Curve { title: way.title().into(), side, points }
        };
        let curves = |guest_bytes: u64| Curves {
            title: format!("Memory of all guests of {} together", units::bytes(guest_bytes)),
            axis: "guests",
            curves: [(Way::Clones, Side::Ours), (Way::Qemu, Side::Qemu), (Way::Lazy, Side::Disk)]
                .map(|(way, side)| curve(guest_bytes, way, side))
                .into(),
        };
        sizes.into_iter().map(curves).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn row(way: Way, count: u32, ms: f64) -> Row {
        Row {
            guest_bytes: 1 << 30,
            count,
            way,
            each_ms: vec![ms; count as usize],
            start_ms: vec![70.0],
            all_ms: 200.0,
            downtime_ms: (way == Way::Clones).then_some(4.0),
            memory: (100 + 30 * u64::from(count)) << 20,
            own_memory: 100 << 20,
        }
    }

    #[test]
    fn runs_of_one_case_are_one_row_for_people_and_a_pair_each_for_the_verdict() {
        let mut results = Results::new(Machine::here(), (Guest::Small, Accel::Kvm), 64 << 20);
        for (ours, qemu) in [(12.0, 250.0), (14.0, 240.0), (13.0, 260.0)] {
            results.rows.extend([row(Way::Clones, 1, ours), row(Way::Qemu, 1, qemu)]);
        }
        let merged = results.merged();
        assert_eq!(merged.rows.iter().map(|row| row.ms().median).collect::<Vec<_>>(), [13.0, 250.0]);
        let shared = results.shared_rows(None);
        assert_eq!((shared.len(), shared[0].compared.map(|compared| compared.pairs)), (1, Some(3)));
    }

    #[test]
    fn the_memory_of_emulated_guests_is_shown_and_has_no_aim() {
        let mut results = Results::new(Machine::here(), (Guest::Linux, Accel::Tcg), 64 << 20);
        results.rows = vec![Row { memory: 900 << 20, ..row(Way::Clones, 8, 10.0) }];
        let (aims, table) = (results.aims().to_string(), results.table());
        assert!(!aims.contains("memory beyond"), "{aims}");
        assert!(table.contains("Linux guest") && table.contains("100 MiB"), "{table}");
    }

    #[test]
    fn what_is_aimed_at_and_missed_is_seen() {
        let mut results = Results::new(Machine::here(), (Guest::Small, Accel::Kvm), 64 << 20);
        results.rows = vec![row(Way::Clones, 1, 12.5), row(Way::Qemu, 1, 250.0), row(Way::Clones, 8, 100.0)];
        let aims = results.aims().to_string();
        assert_eq!(aims.lines().filter(|line| line.contains("MISSED")).count(), 1, "{aims}");
        assert!(results.table().contains("12.5"), "{}", results.table());
        let svg = results.svg();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let texts: Vec<_> =
            document.descendants().filter(|node| node.is_text()).filter_map(|node| node.text()).collect();
        for wanted in ["1 GiB, 8 guests", "12.5 ms", "250 ms", "Memory of all guests of 1 GiB together"] {
            assert!(texts.contains(&wanted), "{wanted}: {texts:?}");
        }
        // 130 MiB of one clone and 340 MiB of eight, below each other; the axis ends at 512 MiB.
        let line = document.descendants().find(|node| node.has_tag_name("polyline"));
        let points = line.and_then(|line| line.attribute("points")).unwrap_or_default();
        let places: Vec<Vec<f64>> =
            points.split(' ').map(|place| place.split(',').map(|at| at.parse().unwrap()).collect()).collect();
        assert_eq!(places.len(), 2, "{points}");
        let (across, up) = (places[1][0] - places[0][0], places[0][1] - places[1][1]);
        assert!((across - 620.0 * 7.0 / 8.0).abs() < 0.2, "{across}");
        assert!((up - 230.0 * 210.0 / 512.0).abs() < 0.2, "{up}");
    }
}
