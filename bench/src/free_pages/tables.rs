//! The table for people.
use super::results::{Mean, Results, Series};
use crate::{files::By, table::aligned, units};

const HEAD: [&str; 13] = [
    "memory",
    "guest",
    "free memory",
    "by",
    "ms",
    "(±)",
    "saved %",
    "rounds",
    "wire",
    "downtime ms",
    "work %",
    "lost s",
    "QEMU/ours",
];
/// Those with words.
const LEFT: usize = 4;

const NOTES: &str = "
Means of all moves (and standard deviations). Saved: of the time that the same side takes without. Work: what a busy guest does a second
while it is moved, of what it did before. Lost: so long it would have to work for what it did not do. Wire of QEMU: ram.transferred.
";

impl Results {
    pub(super) fn setting(&self) -> String {
        let times = if self.times == 1 { "once".to_owned() } else { format!("{} times", self.times) };
        let channels = if self.channels == 1 { "1 channel".to_owned() } else { format!("{} channels", self.channels) };
        format!("Linux, emulated, there and back {times}, {channels} · {}", self.machine.title(&self.qemu))
    }

    pub(super) fn table(&self) -> String {
        let of_group = |group: (u64, _)| {
            self.series.iter().filter(move |series| (series.case.guest_bytes, series.case.load) == group)
        };
        let lines = self.groups().into_iter().flat_map(of_group).map(|series| self.cells(series));
        let lines: Vec<_> = std::iter::once(HEAD.map(str::to_owned)).chain(lines).collect();
        format!("{}\n{}\n{}{NOTES}", self.setting(), self.machine.warning(), aligned(LEFT, &lines))
    }

    fn cells(&self, series: &Series) -> [String; 13] {
        let case = series.case;
        let Mean { mean, deviation } = series.ms();
        let percent = |share: f64| units::short(share * 100.0);
        [
            units::bytes(case.guest_bytes),
            case.load.title().to_owned(),
            case.way.title().to_owned(),
            case.by.title().to_owned(),
            units::short(mean),
            format!("({})", units::short(deviation)),
            self.gain(series).map_or_else(String::new, percent),
            units::short(series.rounds()),
            units::bytes(series.wire_bytes() as u64),
            units::short(series.downtime_ms().mean),
            percent(series.work_share()),
            units::short(series.lost_s()),
            self.ratio(series),
        ]
    }

    /// How many times as long as ours QEMU takes. Once, in our own line.
    fn ratio(&self, series: &Series) -> String {
        let qemu = if series.case.by == By::Transship { self.beside(series) } else { None };
        qemu.map_or_else(String::new, |qemu| format!("{:.2}", qemu.ms().mean / series.ms().mean))
    }
}

#[cfg(test)]
mod tests {
    use crate::free_pages::results::tests::results;

    #[test]
    fn each_series_has_a_line() {
        let text = results().table();
        let line = |begin: &str| {
            let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
            let found = text.lines().map(words).find(|line| line.starts_with(begin));
            found.unwrap_or_else(|| panic!("no {begin:?} in\n{text}"))
        };
        assert_eq!(
            line("2 GiB idle hints transship"),
            "2 GiB idle hints transship 500 (14.1) 75 3 128 MiB 50 - - 2.40"
        );
        assert_eq!(line("2 GiB idle hints QEMU"), "2 GiB idle hints QEMU 1200 (14.1) 52 3 256 MiB 50 - -");
        assert_eq!(
            line("2 GiB busy hints transship"),
            "2 GiB busy hints transship 1000 (14.1) 54.5 3 256 MiB 50 90 0.2 2.40"
        );
        assert!(text.starts_with("Linux, emulated, there and back once, 4 channels"), "{text}");
    }
}
