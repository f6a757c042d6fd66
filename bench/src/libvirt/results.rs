//! Single runs, and what follows from them: the table, its aims, and the picture.
use std::path::Path;

use serde::Serialize;
use transship_lab::Scratch;
use transship_memory::PAGE;

use super::{By, Deed};
use crate::{
    aims::{Aim, Aims, Bound},
    files::disk,
    limits,
    machine::Machine,
    pair::text,
    plot::{Bar, Chart, Group, Line, Side},
    results::Spread,
    rows::{Limit, Row},
    table::aligned,
    units,
    verdict::compare,
};

/// For which a domain may stand still that is saved.
const DOWNTIME_MS: f64 = 30.0;
/// Of the time of virsh until the image is on the disk.
const SAVE_TIMES: f64 = 1.0;
/// Of the time of a migration without relays.
const MIGRATE_TIMES: f64 = 2.0;

const HEAD: [&str; 7] = ["what", "by", "ms", "(least)", "stands still ms", "image", "× virsh"];
const LEFT_COLUMNS: usize = 2;

/// One save or migration.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Once {
    pub(crate) ms: f64,
    pub(crate) downtime_ms: f64,
    /// Of the image, or on the link between relays.
    pub(crate) bytes: Option<u64>,
}

/// All in one way.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Series {
    pub(crate) what: Deed,
    pub(crate) by: By,
    pub(crate) runs: Vec<Once>,
}

impl Series {
    pub(crate) fn new(what: Deed, by: By) -> Self {
        Self { what, by, runs: Vec::new() }
    }

    pub(crate) fn title(&self) -> String {
        format!("{}, {}", self.what.title(), self.by())
    }

    fn by(&self) -> &'static str {
        match (self.by, self.what) {
            (By::Transship, Deed::Migrate | Deed::MigrateParallel) => "virsh through relays",
            (By::Transship, Deed::Save | Deed::SaveSparse) => "transship",
            (By::Virsh, _) => "virsh",
        }
    }

    fn numbers(&self, of: impl Fn(&Once) -> f64) -> Vec<f64> {
        self.runs.iter().map(of).collect()
    }

    fn ms(&self) -> Vec<f64> {
        self.numbers(|once| once.ms)
    }

    fn downtime(&self) -> f64 {
        Spread::of(self.numbers(|once| once.downtime_ms)).median
    }

    fn bytes(&self) -> Option<u64> {
        self.runs.iter().filter_map(|once| once.bytes).max()
    }

    fn image(&self) -> String {
        self.bytes().filter(|_| !self.what.is_migration()).map(units::bytes).unwrap_or_default()
    }
}

/// Everything.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Results {
    pub(crate) machine: Machine,
    /// Its version and that of QEMU; none: it can't run here.
    pub(crate) libvirt: Option<(String, String)>,
    pub(crate) guest_bytes: u64,
    pub(crate) corpus: String,
    pub(crate) link_mbit: u32,
    pub(crate) runs: u32,
    pub(crate) series: Vec<Series>,
}

impl Results {
    fn setting(&self) -> String {
        let plural = if self.runs == 1 { "run" } else { "runs" };
        let (memory, Self { corpus, runs, link_mbit, .. }) = (units::bytes(self.guest_bytes), self);
        let (libvirt, qemu) = self.libvirt.as_ref().map_or(("-", "-"), |(libvirt, qemu)| (libvirt, qemu));
        let machine = self.machine.title(qemu);
        format!("{memory}, corpus: {corpus}, {link_mbit} Mbit/s, {runs} {plural} · libvirt {libvirt}, {machine}")
    }

    /// The same by virsh alone.
    fn by_virsh(&self, series: &Series) -> Option<&Series> {
        self.series.iter().find(|other| other.by == By::Virsh && other.what == series.what)
    }

    fn ours(&self) -> impl Iterator<Item = &Series> {
        self.series.iter().filter(|series| series.by == By::Transship)
    }

    /// How many times as fast as virsh, pair by pair.
    fn times(&self, series: &Series) -> Option<f64> {
        Some(compare(&series.ms(), &self.by_virsh(series)?.ms())?.times)
    }

    pub(crate) fn table(&self) -> String {
        if self.libvirt.is_none() {
            return "Left out: libvirtd can't run here; it needs root, libvirtd and virsh.\n".into();
        }
        let cells = |series: &Series| {
            let ms = Spread::of(series.ms());
            let times = (series.by == By::Transship).then(|| self.times(series)).flatten();
            [
                series.what.title().to_owned(),
                series.by().to_owned(),
                units::short(ms.median),
                format!("({})", units::short(ms.least)),
                units::short(series.downtime()),
                series.image(),
                times.map_or_else(String::new, |times| format!("{times:.2}")),
            ]
        };
        let head = HEAD.map(str::to_owned);
        let lines: Vec<_> = std::iter::once(head).chain(self.series.iter().map(cells)).collect();
        format!(
            "{}\n{}\n{}\nMedian (and least) times until the image is on the disk, or the domain is on the other host. × virsh: the time of\n\
             virsh alone by ours, median of the pairs. A domain that virsh saves stands still from the beginning, and ends.\n",
            self.setting(),
            self.machine.warning(),
            aligned(LEFT_COLUMNS, &lines)
        )
    }

    /// What all tables say alike. `dir`: where images are.
    pub(crate) fn rows(&self, dir: &Path) -> Result<Vec<Row>, String> {
        self.ours().map(|series| Ok(self.row(series).limit(self.limit(series, dir)?))).collect()
    }

    fn row(&self, series: &Series) -> Row {
        let virsh = self.by_virsh(series);
        let row = Row::of(series.title(), "", series.ms(), virsh.map(Series::ms).unwrap_or_default());
        let still = |series: &Series| format!("{} ms", units::short(series.downtime()));
        row.fact("stands still", still(series), virsh.map(still).unwrap_or_default())
    }

    fn limit(&self, series: &Series, dir: &Path) -> Result<Option<Limit>, String> {
        let Some(bytes) = series.bytes() else { return Ok(None) };
        if series.what.is_migration() {
            return Ok(Some(limits::link(self.link_mbit, bytes as f64)));
        }
        let folder = Scratch::within(dir).map_err(text)?;
        if !disk::does_direct_io(folder.path())? {
            return Ok(None);
        }
        // Direct I/O takes whole pages.
        let whole = bytes.next_multiple_of(PAGE);
        let value = limits::quickest(|| Ok(disk::written(folder.path(), whole)?.ms))?;
        Ok(Some(Limit { what: "the disk written".into(), value }))
    }

    pub(crate) fn aims(&self) -> Aims {
        self.ours().flat_map(|series| self.aims_of(series)).collect()
    }

    fn aims_of(&self, series: &Series) -> Vec<Aim> {
        let title = |what: &str| format!("{}: {what}", series.title());
        let times =
            |what: &str, wanted: f64| Some(Aim::new(title(what), Bound::AtLeast, wanted, self.times(series)?, "times"));
        let aims = match series.what {
            Deed::Migrate | Deed::MigrateParallel => vec![times("as fast as without relays", MIGRATE_TIMES)],
            Deed::Save | Deed::SaveSparse => vec![
                Some(Aim::new(title("stands still"), Bound::AtMost, DOWNTIME_MS, series.downtime(), "ms")),
                times("on the disk as soon as by virsh", SAVE_TIMES),
            ],
        };
        aims.into_iter().flatten().collect()
    }

    pub(crate) fn svg(&self) -> String {
        let bar = |side, series: &Series| {
            let remark = format!(", {} ms still", units::short(series.downtime()));
            Bar { side, ms: Spread::of(series.ms()).median, remark }
        };
        let group = |series: &Series| {
            let virsh = self.by_virsh(series).map(|virsh| bar(Side::Qemu, virsh));
            Group {
                title: series.what.title().into(),
                lines: vec![Line {
                    title: String::new(),
                    bars: std::iter::once(bar(Side::Ours, series)).chain(virsh).collect(),
                    note: self.times(series).map_or_else(String::new, |times| format!("{times:.2} ×")),
                }],
            }
        };
        Chart {
            title: "A domain of libvirt, saved and migrated",
            setting: &self.setting(),
            legend: &[(Side::Ours, "transship, or virsh through its relays"), (Side::Qemu, "virsh alone")],
            notes: "ratio",
            axis: "time until the image is on the disk, or the domain on the other host",
            groups: self.ours().map(group).collect(),
        }
        .svg()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn series(what: Deed, by: By, ms: f64, downtime_ms: f64) -> Series {
        let bytes = (!what.is_migration()).then_some(1 << 30);
        Series { what, by, runs: vec![Once { ms, downtime_ms, bytes }; 3] }
    }

    fn results() -> Results {
        Results {
            machine: Machine::here(),
            libvirt: Some(("11.3.0".into(), "10.0.2".into())),
            guest_bytes: 1 << 30,
            corpus: "files".into(),
            link_mbit: 1000,
            runs: 3,
            series: vec![
                series(Deed::Save, By::Transship, 2000.0, 25.0),
                series(Deed::Save, By::Virsh, 1900.0, 1900.0),
                series(Deed::SaveSparse, By::Transship, 1000.0, 31.0),
                series(Deed::SaveSparse, By::Virsh, 1500.0, 1500.0),
                series(Deed::Migrate, By::Transship, 4000.0, 120.0),
                series(Deed::Migrate, By::Virsh, 9000.0, 200.0),
            ],
        }
    }

    fn line(text: &str, part: &str) -> String {
        let line = text.lines().find(|line| line.contains(part)).unwrap_or_default();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn ours_are_compared_with_virsh() {
        let text = results().table();
        assert_eq!(line(&text, "(2000)"), "save transship 2000 (2000) 25 1 GiB 0.95", "{text}");
        assert_eq!(line(&text, "(4000)"), "migrate virsh through relays 4000 (4000) 120 2.25", "{text}");
        let rows: Vec<_> = results().ours().map(|series| results().row(series)).collect();
        assert_eq!(rows.len(), 3);
        assert!(Results { libvirt: None, ..results() }.table().starts_with("Left out"));
    }

    #[test]
    fn aims_are_met_or_missed_by_their_own_bound() {
        let text = results().aims().to_string();
        let verdict = |part: &str| line(&text, part).split(' ').next().unwrap().to_owned();
        assert_eq!(verdict("save, transship: stands still"), "met");
        assert_eq!(verdict("save, transship: on the disk"), "MISSED");
        assert_eq!(verdict("save, sparse, transship: stands still"), "MISSED");
        assert_eq!(verdict("save, sparse, transship: on the disk"), "met");
        assert_eq!(verdict("relays: as fast"), "met", "2.25 times");
    }

    #[test]
    fn the_picture_has_a_bar_for_each() {
        let svg = results().svg();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let texts: Vec<_> = document.descendants().filter_map(|node| node.text()).collect();
        for wanted in ["2000 ms, 25 ms still", "2.25 ×", "migrate"] {
            assert!(texts.contains(&wanted), "{wanted} is not in {texts:?}");
        }
    }
}
