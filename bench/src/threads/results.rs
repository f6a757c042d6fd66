//! What follows from the runs: the tables, the aims, and the picture.
use std::path::Path;

use serde::Serialize;

use super::{
    FEW, Guest, WhenBusy,
    runs::{Comparison, MOVES_HEAD, PASSES_HEAD, Run, Series},
};
use crate::{
    aims::{Aim, Aims, Bound},
    corpus::Corpus,
    limits,
    machine::Machine,
    plot::{Bar, Chart, Group, Line, Side},
    rows::{FRESH, Row},
    table::aligned,
    units,
};

/// Of the time that few encoders take.
const MANY_SHARE: f64 = 1.1;
const HAND_OVER_NS: f64 = 1000.0;

/// Everything.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Results {
    pub(crate) machine: Machine,
    /// As it calls itself; none: there was no guest for it.
    pub(crate) qemu: Option<String>,
    pub(crate) guest_bytes: u64,
    pub(crate) corpus: String,
    pub(crate) load: Load,
    pub(crate) channels: u8,
    pub(crate) link_mbit: Option<u32>,
    pub(crate) runs: u32,
    pub(crate) moves: Vec<Series>,
    pub(crate) one_process: Vec<Comparison>,
}

/// What the guests do.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Load {
    /// What they were told.
    pub(crate) mib_per_s: u32,
    pub(crate) writers: u8,
    pub(crate) hot_bytes: u64,
    /// What QEMU's guest did before the first move.
    pub(crate) qemu_mib_per_s: Option<f64>,
}

impl Results {
    fn setting(&self) -> String {
        let memory = units::bytes(self.guest_bytes);
        let link = self.link_mbit.map_or_else(|| "unix socket".to_owned(), |mbit| format!("TCP, {mbit} Mbit/s"));
        let plural = if self.runs == 1 { "run" } else { "runs" };
        let Self { corpus, runs, channels, .. } = self;
        let machine = self.machine.title(self.qemu.as_deref().unwrap_or("not used"));
        format!("{memory} of {corpus}, zstd, {channels} channels, {link}, {runs} {plural} · {machine}")
    }

    fn load(&self) -> String {
        let Load { mib_per_s, writers, hot_bytes, qemu_mib_per_s } = self.load;
        let hot = units::bytes(hot_bytes);
        let qemu = qemu_mib_per_s.map_or_else(
            || "there was no QEMU guest".into(),
            |rate| format!("QEMU's guest writes with one thread, {} MiB/s before its first move", units::short(rate)),
        );
        format!("transship's guest writes {hot} again and again with {writers} threads, {mib_per_s} MiB/s; {qemu}")
    }

    pub(crate) fn table(&self) -> String {
        let moves = std::iter::once(MOVES_HEAD.map(str::to_owned)).chain(self.moves.iter().map(Series::cells));
        let mut text = format!("{}\n{}\n{}\n", self.setting(), self.load(), self.machine.warning());
        text.push_str(&aligned(3, &moves.collect::<Vec<_>>()));
        text.push_str(
            "\nMedians. Busy: packets that found all encoders busy. All CPU: both sides' transship; with QEMU's own migration both\n\
             QEMUs and the guest in them.\n\nThe same corpus through zstd encoders in one process:\n\n",
        );
        let passes =
            std::iter::once(PASSES_HEAD.map(str::to_owned)).chain(self.one_process.iter().map(Comparison::cells));
        text.push_str(&aligned(1, &passes.collect::<Vec<_>>()));
        text.push_str(
            "\nOld: a request, a mutex and a condition variable for each thread. ns: a hand-over that finds a free place at once,\n\
             median; wake ns: one to encoders that all sleep. CPU us: of the submitting thread, with its waiting, for each packet\n\
             of 512 KiB.\n",
        );
        text
    }

    /// What all tables say alike: of the guest that both move. A move that did not arrive has no time.
    pub(crate) fn rows(&self, base: &Path, corpus: &Corpus) -> Result<Vec<Row>, String> {
        let ms = |series: &Series| {
            let arrived = |run: &Run| if run.arrived() { run.ms } else { f64::NAN };
            series.runs.iter().map(arrived).collect::<Vec<_>>()
        };
        let of_both = |ours: &&Series| ours.guest == Guest::Qemu && ours.side == Side::Ours;
        let beside = |ours: &Series| {
            self.moves.iter().find(|series| series.side == Side::Qemu && series.encoders == ours.encoders)
        };
        let limit = |ours: &Series| match (self.link_mbit, ours.when_busy) {
            (Some(mbit), _) => Ok(Some(limits::link(mbit, ours.wire_bytes()))),
            (None, Some(WhenBusy::Wait)) => limits::codec("zstd", corpus, self.guest_bytes, Some((base, FRESH))),
            // What finds no encoder goes as it is, which may be all.
            (None, _) => limits::copy(base, self.guest_bytes, FRESH).map(Some),
        };
        let row = |ours: &Series| {
            let limit = limit(ours)?;
            let Some(qemu) = beside(ours) else {
                return Ok(Row::of(ours.title(), FRESH, ms(ours), Vec::new()).limit(limit));
            };
            let wire = |series: &Series| units::bytes(series.wire_bytes() as u64);
            let downtime = |series: &Series| units::short(series.spread(|run| run.downtime_ms).median);
            let row = Row::of(ours.title(), FRESH, ms(ours), ms(qemu)).limit(limit);
            let row = row.fact("wire", wire(ours), wire(qemu));
            Ok(row.fact("downtime ms, as reported", downtime(ours), downtime(qemu)))
        };
        self.moves.iter().filter(of_both).map(row).collect()
    }

    pub(crate) fn aims(&self) -> Aims {
        let moves = self.many_against_few();
        let passes = self.one_process.iter().flat_map(|comparison| {
            let aim = |what: &str, of| {
                let what = format!("rings, {} encoders: a hand-over{what}", comparison.encoders);
                Aim::new(what, Bound::AtMost, HAND_OVER_NS, comparison.both(of)[0], "ns")
            };
            [aim("", |pass| pass.hand_over_ns), aim(" to a sleeper", |pass| pass.wake_ns)]
        });
        moves.into_iter().chain(self.many_in_one_process()).chain(passes).collect()
    }

    /// For each guest: the most encoders, which wait. Those that send raw do so less often when they are more, and so
    /// have more to do.
    fn many_against_few(&self) -> Vec<Aim> {
        let most = |series: &&Series| series.encoders == self.most() && series.when_busy == Some(WhenBusy::Wait);
        let aim = |many: &Series| {
            let alike =
                |few: &&Series| few.encoders == FEW && (few.guest, few.when_busy) == (many.guest, many.when_busy);
            let few = self.moves.iter().find(alike)?;
            // Times until a verdict say nothing about speed: where few end with one there is nothing to compare with.
            let moved = |series: &Series| series.status() == "moved";
            if !moved(few) {
                return None;
            }
            let share = if moved(many) { many.ms().median / few.ms().median } else { f64::NAN };
            let what = format!("{}: time, of {FEW} encoders'", many.title());
            Some(Aim::new(what, Bound::AtMost, MANY_SHARE, share, "of it"))
        };
        self.moves.iter().filter(most).filter_map(aim).collect()
    }

    fn many_in_one_process(&self) -> Option<Aim> {
        let of = |encoders| self.one_process.iter().find(|comparison| comparison.encoders == encoders);
        let [many, few] = [of(self.most())?, of(FEW)?].map(|comparison| comparison.both(|pass| pass.ms)[0]);
        let what = format!("rings, {} encoders in one process: time, of {FEW} encoders'", self.most());
        Some(Aim::new(what, Bound::AtMost, MANY_SHARE, many / few, "of it"))
    }

    fn most(&self) -> u8 {
        self.moves.iter().map(|series| series.encoders).max().unwrap_or(FEW)
    }

    pub(crate) fn svg(&self) -> String {
        let guest = |guest, title: &str| Group { title: title.to_owned(), lines: self.lines(guest) };
        let one_process = self.one_process.iter().map(|comparison| {
            let [rings, old] = comparison.both(|pass| pass.ms);
            let bar = |side, ms| Bar { side, ms, remark: String::new() };
            Line {
                title: format!("{} encoders", comparison.encoders),
                bars: vec![bar(Side::Ours, rings), bar(Side::OldModel, old)],
                note: format!("old by rings {:.2}", old / rings),
            }
        });
        let one_process = Group { title: "The same pages in one process".to_owned(), lines: one_process.collect() };
        let mut groups = vec![guest(Guest::Synthetic, "transship's guest"), guest(Guest::Qemu, "QEMU's guest")];
        groups.push(one_process);
        groups.retain(|group| !group.lines.is_empty());
        let chart = Chart {
            title: "Moving guests that keep writing, compressed by many threads",
            setting: &self.setting(),
            legend: &[
                (Side::Ours, "transship"),
                (Side::Qemu, "QEMU (multifd zstd, a channel for each encoder)"),
                (Side::OldModel, "one lock a thread"),
            ],
            notes: "",
            axis: "time for all memory",
            groups,
        };
        chart.svg()
    }

    fn lines(&self, guest: Guest) -> Vec<Line> {
        let ours = self.moves.iter().filter(|series| series.guest == guest && series.side == Side::Ours);
        let bar = |series: &Series| Bar {
            side: series.side,
            ms: series.ms().median,
            remark: if series.status() == "moved" { String::new() } else { format!(", {}", series.status()) },
        };
        let line = |series: &Series| {
            // QEMU's is drawn once.
            let once = series.when_busy == Some(WhenBusy::Wait);
            let beside = self.moves.iter().filter(|other| {
                once && (other.guest, other.side, other.encoders) == (guest, Side::Qemu, series.encoders)
            });
            let busy = series.spread(|run| run.busy_ratio.unwrap_or(f64::NAN)).median;
            Line {
                title: series.how(),
                bars: [bar(series)].into_iter().chain(beside.map(bar)).collect(),
                note: format!("busy {} %", units::short(busy * 100.0)),
            }
        };
        ours.map(line).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{
        super::{one_process::Pass, runs::COMPLETED},
        *,
    };

    fn series(guest: Guest, encoders: u8, when_busy: Option<WhenBusy>, ms: f64, status: &str) -> Series {
        let run = Run {
            status: status.into(),
            ms,
            rounds: 3,
            downtime_ms: 12.0,
            wire_bytes: 1 << 20,
            busy_ratio: when_busy.map(|_| 0.25),
            raw_busy_pages: when_busy.map(|_| 0),
            main_cpu_seconds: when_busy.map(|_| 0.1),
            encoders_cpu_seconds: when_busy.map(|_| 1.0),
            channels_cpu_seconds: when_busy.map(|_| 0.2),
            cpu_seconds: Some(2.0),
        };
        let side = if when_busy.is_some() { Side::Ours } else { Side::Qemu };
        Series { guest, side, encoders, when_busy, runs: vec![run; 3] }
    }

    fn results() -> Results {
        let pass = |ms, hand_over_ns| Pass {
            ms,
            hand_over_ns,
            wake_ns: 990.0,
            at_once: 9,
            submitter_cpu_us: 4.0,
            encoded_bytes: 1,
        };
        let comparison = |encoders, rings, old| Comparison { encoders, rings: vec![rings; 3], old_model: vec![old; 3] };
        let (wait, raw) = (Some(WhenBusy::Wait), Some(WhenBusy::Raw));
        Results {
            machine: Machine::here(),
            qemu: Some("10.0.2".into()),
            guest_bytes: 512 << 20,
            corpus: "data".into(),
            load: Load { mib_per_s: 32, writers: 4, hot_bytes: 128 << 20, qemu_mib_per_s: Some(30.0) },
            channels: 4,
            link_mbit: None,
            runs: 3,
            moves: vec![
                series(Guest::Synthetic, 2, wait, 1000.0, COMPLETED),
                series(Guest::Synthetic, 2, raw, 900.0, COMPLETED),
                series(Guest::Synthetic, 16, wait, 1050.0, COMPLETED),
                series(Guest::Synthetic, 16, raw, 990.1, COMPLETED),
                series(Guest::Qemu, 2, wait, 1000.0, COMPLETED),
                series(Guest::Qemu, 16, wait, 1000.0, "not-converging"),
                series(Guest::Qemu, 16, None, 3000.0, COMPLETED),
            ],
            one_process: vec![
                comparison(2, pass(1000.0, 200.0), pass(1100.0, 900.0)),
                comparison(16, pass(1200.0, 1500.0), pass(1800.0, 5000.0)),
            ],
        }
    }

    fn line(text: &str, part: &str) -> String {
        let line = text.lines().find(|line| line.contains(part)).unwrap_or_else(|| panic!("no {part:?} in\n{text}"));
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn aims_are_met_or_missed_by_their_own_bound() {
        let text = results().aims().to_string();
        for (part, verdict) in [
            ("transship's guest, 16, wait: time", "met"),
            ("QEMU's guest, 16, wait: time", "MISSED"),
            ("16 encoders in one process: time", "MISSED"),
            ("rings, 2 encoders: a hand-over ", "met"),
            ("rings, 16 encoders: a hand-over ", "MISSED"),
            ("rings, 16 encoders: a hand-over to a sleeper", "met"),
        ] {
            assert!(line(&text, part).starts_with(verdict), "{part}: {text}");
        }
    }

    #[test]
    fn lines_have_the_verdict_and_what_qemu_does_not_tell_is_empty() {
        let text = results().table();
        let verdict = line(&text, "not-converging");
        assert_eq!(verdict, "QEMU's guest 16, wait not-converging 1000 (1000) 3 25 0 12 1 MiB 0.1 1 2");
        let qemus = line(&text, "16 channels");
        assert_eq!(qemus, "QEMU's guest QEMU's, 16 channels moved 3000 (3000) 3 - - 12 1 MiB - - 2");
        assert!(
            text.lines().any(|line| line.split_whitespace().eq("16 1200 1800 1.50 1500 5000 990 990 4 4".split(' '))),
            "{text}"
        );
    }

    #[test]
    fn the_picture_has_a_bar_for_each() {
        let svg = results().svg();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let texts: Vec<_> = document.descendants().filter_map(|node| node.text()).collect();
        for wanted in ["1000 ms, not-converging", "3000 ms", "1800 ms", "old by rings 1.50", "busy 25 %"] {
            assert!(texts.contains(&wanted), "{wanted}: {texts:?}");
        }
    }
}
