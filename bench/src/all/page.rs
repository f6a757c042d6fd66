//! The page: one file that needs nothing else, in light and in dark.
use std::fmt::Write;

use super::{
    folder::{Done, Setup},
    plan::Job,
};
use crate::{
    plot::escaped,
    rows::{Row, Side},
    units,
    verdict::{Compared, Verdict},
};

const STYLE: &str = include_str!("style.css");
const BARS_WIDTH: f64 = 200.0;
const BAR: f64 = 10.0;
/// An interval is drawn from a tenth to ten times, and ends at the edge beyond.
const DECADES_BESIDE_ONE: f64 = 1.0;
const INTERVAL_WIDTH: f64 = 130.0;

/// All results so far.
pub(super) fn page(setup: &Setup, results: &[&Done], failures: &[(Job, String)], jobs: usize) -> String {
    let mut page = Page::default();
    page.add("<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n");
    page.add("<meta name=\"viewport\" content=\"width=device-width\">\n<title>transship bench</title>\n");
    page.add(&format!("<style>\n{STYLE}</style>\n<h1>transship beside stock QEMU</h1>\n"));
    let plan = &setup.plan;
    let memory = plan
        .mem
        .map_or_else(|| "each table's own memory".to_owned(), |bytes| format!("{} guests", units::bytes(bytes)));
    let quick = if plan.quick { "--quick, " } else { "" };
    let open = if results.len() < jobs {
        format!(" {} of {jobs} parts are done so far.", results.len())
    } else {
        String::new()
    };
    page.paragraph(
        "soft",
        &format!("{quick}{memory}, {} pair{} a row.{open}", plan.pairs, if plan.pairs == 1 { "" } else { "s" }),
    );
    page.paragraph("soft", setup.machine.warning());
    page.machine(setup, results);
    page.counts(results);
    page.add(LEGEND);
    for (job, why) in failures {
        page.paragraph("failed", &format!("{} failed: {why}", job.name));
    }
    let mut tables: Vec<&str> = results.iter().map(|done| done.job.table()).collect();
    tables.dedup();
    for table in tables {
        page.table(table, results);
    }
    page.add("</html>\n");
    page.0
}

const LEGEND: &str = "<p class=\"legend\"><span><i style=\"background:var(--ours)\"></i>transship</span>\
    <span><i style=\"background:var(--qemu)\"></i>stock QEMU</span>\
    <span>bars: medians, the longer one fills the row; the line is from the least to the most of all runs</span>\
    <span>× QEMU: QEMU's time by ours, median of the pairs and 95 % interval, on a scale from 1/10 to 10</span></p>\n";

/// How many rows stand how.
pub(super) fn summary(results: &[&Done]) -> String {
    let count = |verdict| count(results, verdict);
    let (ahead, even, behind) = (count(Verdict::Ahead), count(Verdict::Even), count(Verdict::Behind));
    format!("{ahead} rows ahead, {even} even, {behind} behind")
}

fn count(results: &[&Done], verdict: Verdict) -> usize {
    let rows = results.iter().flat_map(|done| &done.rows);
    rows.filter(|row| row.compared.is_some_and(|compared| compared.verdict == verdict)).count()
}

#[derive(Default)]
struct Page(String);

impl Page {
    fn add(&mut self, html: &str) {
        self.0.push_str(html);
    }

    fn paragraph(&mut self, class: &str, text: &str) {
        if !text.is_empty() {
            // Writing to a string does not fail; so below.
            let _ = writeln!(self.0, "<p class=\"{class}\">{}</p>", escaped(text));
        }
    }

    /// What it was measured on, and what that does by itself.
    fn machine(&mut self, setup: &Setup, results: &[&Done]) {
        let machine = &setup.machine;
        let mut facts = vec![
            ("processor".to_owned(), format!("{}, {} cores", machine.cpu, machine.cores)),
            ("memory".to_owned(), units::bytes(machine.memory_bytes)),
            ("kernel".to_owned(), format!("Linux {}", machine.kernel)),
            ("transship".to_owned(), format!("{} ({})", machine.transship, setup.build)),
            ("QEMU".to_owned(), setup.qemu.clone()),
        ];
        let limits = results.iter().filter(|done| done.job.table() == "limits").flat_map(|done| &done.rows);
        facts.extend(limits.map(|row| {
            let memory = if row.memory.is_empty() { String::new() } else { format!(", {}", row.memory) };
            let speed = row.facts.iter().rfind(|fact| fact.name == "GB/s").map_or("", |fact| &fact.ours);
            (format!("{}{memory}", row.title), format!("{speed} GB/s"))
        }));
        self.add("<dl>\n");
        for (name, value) in facts {
            let _ = writeln!(self.0, "<div><dt>{}</dt><dd>{}</dd></div>", escaped(&name), escaped(&value));
        }
        self.add("</dl>\n");
    }

    fn counts(&mut self, results: &[&Done]) {
        self.add("<p class=\"counts\">");
        for verdict in [Verdict::Ahead, Verdict::Even, Verdict::Behind, Verdict::TooFew] {
            let count = count(results, verdict);
            if count > 0 || verdict != Verdict::TooFew {
                let _ = write!(self.0, "<span class=\"chip {}\">{count} {}</span>", class(verdict), verdict.title());
            }
        }
        self.add("</p>\n");
    }

    /// All parts of a table, one below the other.
    fn table(&mut self, name: &str, results: &[&Done]) {
        let parts = || results.iter().filter(|done| done.job.table() == name);
        let _ = writeln!(self.0, "<h2>{}</h2>", escaped(name));
        let rows = || parts().flat_map(|done| &done.rows);
        let columns = Columns {
            beside: rows().any(|row| !row.qemu.is_empty()),
            limits: rows().any(|row| row.of_limits().next().is_some()),
            most: rows().map(most).fold(0.0, f64::max),
        };
        let qemu = if columns.beside {
            "<th class=\"number\">QEMU</th><th></th><th colspan=\"2\">× QEMU</th><th>verdict</th>"
        } else {
            "<th></th>"
        };
        let _ = writeln!(
            self.0,
            "<div class=\"wide\"><table>\n<tr><th>row</th><th>memory</th><th class=\"number\">ours</th>{qemu}\
             {}<th>also</th></tr>",
            if columns.limits { "<th>of its limits</th>" } else { "" }
        );
        for row in rows() {
            self.row(row, &columns);
        }
        self.add("</table></div>\n");
        for done in parts() {
            let _ = writeln!(
                self.0,
                "<details><summary><code>{}</code> took {}, load before it {:.1}</summary><pre>{}</pre></details>",
                escaped(&done.job.command()),
                escaped(&seconds(done.took_s)),
                done.load_before,
                text(&done.text)
            );
        }
    }

    fn row(&mut self, row: &Row, columns: &Columns) {
        let number = |side| match row.median(side) {
            median if median.is_finite() => format!("{} {}", units::short(median), row.unit),
            _ => "–".to_owned(),
        };
        let _ = write!(
            self.0,
            "<tr><td>{}</td><td class=\"soft\">{}</td><td class=\"number\">{}</td>",
            escaped(&row.title),
            escaped(&row.memory),
            escaped(&number(Side::Ours))
        );
        if columns.beside {
            let _ = write!(self.0, "<td class=\"number\">{}</td>", escaped(&number(Side::Qemu)));
        }
        // Rows of one side stand beside each other.
        let scale = if columns.beside { most(row) } else { columns.most };
        let _ = write!(self.0, "<td>{}</td>", bars(row, scale));
        if columns.beside {
            self.verdict(row.compared);
        }
        if columns.limits {
            let lines = row.of_limits().map(|(share, limit)| escaped(&format!("{share:.2} of {}", limit.what)));
            let lines: Vec<_> = lines.collect();
            let _ = write!(self.0, "<td>{}</td>", lines.join("<br>"));
        }
        self.add("<td class=\"facts\">");
        for fact in &row.facts {
            let both = if fact.qemu.is_empty() { fact.ours.clone() } else { format!("{} · {}", fact.ours, fact.qemu) };
            let _ = write!(self.0, "<span>{}: {}</span>", escaped(&fact.name), escaped(&both));
        }
        self.add("</td></tr>\n");
    }

    fn verdict(&mut self, compared: Option<Compared>) {
        let Some(compared) = compared else { return self.add("<td></td><td></td><td></td>") };
        let Compared { times, low, high, verdict, .. } = compared;
        let _ = write!(
            self.0,
            "<td class=\"number\">{times:.2}<br><span class=\"soft\">{low:.2}–{high:.2}</span></td>\
             <td class=\"{0}\">{1}</td><td class=\"verdict {0}\"><span class=\"chip\">{2}</span></td>",
            class(verdict),
            interval(compared),
            verdict.title()
        );
    }
}

fn class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Ahead => "ahead",
        Verdict::Even => "even",
        Verdict::Behind => "behind",
        Verdict::TooFew => "too-few",
    }
}

/// What a table shows, and what fills a bar where there is one side.
struct Columns {
    beside: bool,
    limits: bool,
    most: f64,
}

/// The longest run of a row.
fn most(row: &Row) -> f64 {
    let all = [Side::Ours, Side::Qemu].into_iter().flat_map(|side| row.numbers(side));
    all.filter(|ms| ms.is_finite()).fold(0.0, f64::max)
}

/// Ours above QEMU's, each with the line of its spread.
fn bars(row: &Row, most: f64) -> String {
    let sides = [(Side::Ours, "ours"), (Side::Qemu, "qemu")];
    let all = |side| row.numbers(side).into_iter().filter(|ms| ms.is_finite());
    if most <= 0.0 {
        return String::new();
    }
    let height = 2.0 * BAR + 2.0;
    let mut svg = format!("<svg width=\"{BARS_WIDTH}\" height=\"{height}\" role=\"img\" aria-label=\"bars\">");
    let shown = sides.into_iter().filter(|&(side, _)| all(side).next().is_some());
    for (number, (side, class)) in shown.enumerate() {
        let x = |ms: f64| ms / most * (BARS_WIDTH - 1.0);
        let y = number as f64 * (BAR + 2.0);
        let (width, middle) = (x(row.median(side)), y + BAR / 2.0);
        let (least, greatest) = (x(all(side).fold(f64::INFINITY, f64::min)), x(all(side).fold(0.0, f64::max)));
        let _ = write!(
            svg,
            "<rect class=\"{class}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{BAR}\" rx=\"1.5\"/>\
             <line class=\"spread\" x1=\"{least:.1}\" x2=\"{greatest:.1}\" y1=\"{middle:.1}\" y2=\"{middle:.1}\"/>"
        );
    }
    svg.push_str("</svg>");
    svg
}

/// The interval on a logarithmic scale, and where 1 is.
fn interval(compared: Compared) -> String {
    let x = |times: f64| {
        let place = (times.log10() / DECADES_BESIDE_ONE).clamp(-1.0, 1.0);
        INTERVAL_WIDTH / 2.0 + place * (INTERVAL_WIDTH / 2.0 - 4.0)
    };
    let (low, high, dot, one) = (x(compared.low), x(compared.high), x(compared.times), x(1.0));
    format!(
        "<svg width=\"{INTERVAL_WIDTH}\" height=\"20\" role=\"img\" aria-label=\"interval\">\
         <line class=\"one\" x1=\"{one:.1}\" x2=\"{one:.1}\" y1=\"0\" y2=\"20\"/>\
         <line class=\"interval\" x1=\"{low:.1}\" x2=\"{high:.1}\" y1=\"10\" y2=\"10\"/>\
         <circle class=\"dot\" cx=\"{dot:.1}\" cy=\"10\" r=\"4\"/></svg>"
    )
}

/// Text with its lines.
fn text(text: &str) -> String {
    text.lines().map(escaped).collect::<Vec<_>>().join("\n")
}

fn seconds(seconds: f64) -> String {
    if seconds < 90.0 { format!("{seconds:.0} s") } else { format!("{:.1} min", seconds / 60.0) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{all::plan::Plan, machine::Machine, rows::Limit};

    fn done(table: &str, rows: Vec<Row>) -> Done {
        let job = Job::new(table, "", 9);
        Done { job, rows, text: "printed <here>".into(), took_s: 75.0, ended_at: 1, load_before: 0.25 }
    }

    fn shown(results: &[&Done], failures: &[(Job, String)]) -> String {
        let plan = Plan { quick: true, ..Plan::default() };
        let setup = Setup { machine: Machine::here(), qemu: "10.0 <&>".into(), build: "1".into(), plan };
        page(&setup, results, failures, 3)
    }

    /// The part of the page that is XML, too: all but its head.
    fn body(page: &str) -> String {
        let start = page.find("<h1>").unwrap();
        format!("<body>{}</body>", page[start..].replace("</html>", "").replace("<br>", "<br/>"))
    }

    #[test]
    fn each_row_has_its_bars_its_interval_and_its_verdict() {
        let limit = Limit { what: "copy, fresh".into(), value: 90.0 };
        let rows = vec![
            Row::of("random <1>", "fresh", vec![100.0; 3], vec![200.0; 3]).limit(Some(limit)),
            Row::of("slower", "warm", vec![300.0; 3], vec![200.0; 3]).fact("wire", "1 MiB", "2 MiB"),
            Row::of("no end", "fresh", vec![f64::NAN], vec![]),
        ];
        let zero = done("zero-pages", rows);
        let page = shown(&[&zero], &[(Job::new("files", "", 1), "no <disk>".into())]);
        let body = body(&page);
        let document = roxmltree::Document::parse(&body).unwrap_or_else(|error| panic!("{error}\n{body}"));
        let count = |class: &str| document.descendants().filter(|node| node.attribute("class") == Some(class)).count();
        assert_eq!((count("ours"), count("qemu"), count("interval")), (2, 2, 2), "{body}");
        assert_eq!((count("verdict ahead"), count("verdict behind")), (1, 1));
        let texts: Vec<_> = document.descendants().filter_map(|node| node.text()).collect();
        for wanted in ["random <1>", "0.90 of copy, fresh", "wire: 1 MiB · 2 MiB", "1 ahead", "10.0 <&>"] {
            assert!(texts.contains(&wanted), "{wanted:?} is not in {texts:?}");
        }
        assert!(page.contains("files failed: no &lt;disk&gt;") && page.contains("1 of 3 parts are done"), "{page}");
    }

    #[test]
    fn it_needs_nothing_from_anywhere() {
        let page = shown(&[&done("limits", vec![Row::of("copy", "fresh", vec![1.0], vec![])])], &[]);
        for outside in ["http:", "https:", "src=", "@import", "url(", "<script"] {
            assert!(!page.contains(outside), "{outside}");
        }
        assert!(page.contains("prefers-color-scheme: dark"));
    }
}
