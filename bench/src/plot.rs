//! The picture: a bar for each side of each row, on a logarithmic scale. Written by hand, since it's text.
pub(crate) mod curves;

use std::fmt::Write;

use crate::{
    content::Content,
    results::{Results, Row},
    units,
};

const WIDTH: f64 = 960.0;
/// Where the bars begin and may end; left of it are names, right of it numbers and notes.
const LEFT: f64 = 150.0;
const RIGHT: f64 = WIDTH - 190.0;
const TOP: f64 = 92.0;
const BAR: f64 = 13.0;
const GROUP_HEAD: f64 = 26.0;
const BOTTOM: f64 = 50.0;
/// A letter of the legend is about so wide.
const LETTER: f64 = 7.0;

/// Whose time it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Ours,
    Qemu,
    OldModel,
    Disk,
}

/// Times to be drawn.
pub(crate) struct Chart<'a> {
    pub(crate) title: &'a str,
    /// On what it was measured.
    pub(crate) setting: &'a str,
    pub(crate) legend: &'a [(Side, &'a str)],
    /// What the notes at the right are.
    pub(crate) notes: &'a str,
    /// What takes the time.
    pub(crate) axis: &'a str,
    pub(crate) groups: Vec<Group>,
}

/// Lines with a title of their own.
pub(crate) struct Group {
    pub(crate) title: String,
    pub(crate) lines: Vec<Line>,
}

/// What is compared.
pub(crate) struct Line {
    pub(crate) title: String,
    pub(crate) bars: Vec<Bar>,
    pub(crate) note: String,
}

/// One time, in milliseconds.
pub(crate) struct Bar {
    pub(crate) side: Side,
    pub(crate) ms: f64,
    /// Behind the number.
    pub(crate) remark: String,
}

impl Side {
    fn colour(self) -> &'static str {
        match self {
            Self::Ours => "#1f6feb",
            Self::Qemu => "#9aa4ae",
            Self::OldModel => "#d4a72c",
            Self::Disk => "#57ab5a",
        }
    }
}

impl Group {
    /// Lines in their order, each with the title of its group: those behind each other with the same one are a group.
    pub(crate) fn of(lines: impl IntoIterator<Item = (String, Line)>) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for (title, line) in lines {
            match groups.last_mut().filter(|group| group.title == title) {
                Some(group) => group.lines.push(line),
                None => groups.push(Self { title, lines: vec![line] }),
            }
        }
        groups
    }
}

impl Line {
    fn height(&self) -> f64 {
        self.bars.len() as f64 * BAR + 10.0
    }
}

/// The picture of `zero-pages`.
pub(crate) fn svg(results: &Results) -> String {
    let bar = |side, ms| Bar { side, ms, remark: String::new() };
    let line = |row: &&Row| Line {
        title: row.mode.title(),
        bars: vec![bar(Side::Ours, row.our_ms().median), bar(Side::Qemu, row.qemu_ms().median)],
        note: format!("{} ×", units::short(row.ratio())),
    };
    let groups = groups(&results.rows)
        .into_iter()
        .map(|(content, rows)| Group { title: content.title().to_owned(), lines: rows.iter().map(line).collect() });
    let chart = Chart {
        title: "Moving a guest's memory: transship and QEMU's own migration",
        setting: &results.setting(),
        legend: &[(Side::Ours, "transship"), (Side::Qemu, "QEMU (multifd, the same channels)")],
        notes: "ratio",
        axis: "time to move all memory",
        groups: groups.collect(),
    };
    chart.svg()
}

/// Rows of one kind of memory, in their order.
fn groups(rows: &[Row]) -> Vec<(Content, Vec<&Row>)> {
    let mut groups: Vec<(Content, Vec<&Row>)> = Vec::new();
    for row in rows {
        match groups.iter_mut().find(|(content, _)| *content == row.content) {
            Some((_, group)) => group.push(row),
            None => groups.push((row.content, vec![row])),
        }
    }
    groups
}

impl Chart<'_> {
    /// As an SVG file.
    pub(crate) fn svg(&self) -> String {
        self.begun(self.height()).finish()
    }

    fn lines(&self) -> impl Iterator<Item = &Line> {
        self.groups.iter().flat_map(|group| &group.lines)
    }

    fn height(&self) -> f64 {
        TOP + GROUP_HEAD * self.groups.len() as f64 + self.lines().map(Line::height).sum::<f64>() + BOTTOM
    }

    /// All of it, in a picture of this height.
    fn begun(&self, height: f64) -> Svg {
        let scale = Scale::of(self.lines().flat_map(|line| &line.bars).map(|bar| bar.ms));
        let mut svg = Svg::new(height);
        self.head(&mut svg);
        scale.draw(&mut svg, self.height() - BOTTOM, self.axis);
        let mut y = TOP;
        for group in &self.groups {
            svg.text(16.0, y + 17.0, "bold", &group.title);
            y += GROUP_HEAD;
            for line in &group.lines {
                draw(&mut svg, &scale, line, y);
                y += line.height();
            }
        }
        svg
    }

    fn head(&self, svg: &mut Svg) {
        svg.text(16.0, 26.0, "title", self.title);
        svg.text(16.0, 46.0, "small", self.setting);
        let mut x = 16.0;
        for (side, name) in self.legend {
            svg.bar(x, 60.0, 24.0, side.colour());
            svg.text(x + 30.0, 71.0, "", name);
            x += 50.0 + LETTER * name.chars().count() as f64;
        }
        svg.text(RIGHT + 180.0, 71.0, "end", self.notes);
    }
}

fn draw(svg: &mut Svg, scale: &Scale, line: &Line, y: f64) {
    let middle = y + (line.bars.len() as f64 * BAR) / 2.0 + 4.0;
    svg.text(LEFT - 10.0, middle, "end", &line.title);
    for (number, Bar { side, ms, remark }) in line.bars.iter().enumerate() {
        let y = y + number as f64 * BAR;
        let end = scale.x(*ms);
        svg.bar(LEFT, y, end - LEFT, side.colour());
        svg.text(end + 5.0, y + 10.5, "small", &format!("{} ms{remark}", units::short(*ms)));
    }
    svg.text(RIGHT + 180.0, middle, "end", &line.note);
}

/// Milliseconds to places, whole decades from the least to the most.
struct Scale {
    first: i32,
    last: i32,
}

impl Scale {
    fn of(times: impl Iterator<Item = f64>) -> Self {
        let decades: Vec<f64> = times.filter(|ms| ms.is_finite() && *ms > 0.0).map(f64::log10).collect();
        let first = decades.iter().copied().fold(f64::INFINITY, f64::min).floor();
        let last = decades.iter().copied().fold(f64::NEG_INFINITY, f64::max).ceil();
        if decades.is_empty() {
            return Self { first: 0, last: 1 };
        }
        Self { first: first as i32, last: (last as i32).max(first as i32 + 1) }
    }

    fn x(&self, ms: f64) -> f64 {
        let decades = f64::from(self.last - self.first);
        let place = (ms.log10() - f64::from(self.first)) / decades;
        if place.is_finite() { LEFT + (RIGHT - LEFT) * place.clamp(0.0, 1.0) } else { LEFT }
    }

    fn draw(&self, svg: &mut Svg, bottom: f64, axis: &str) {
        for decade in self.first..=self.last {
            let ms = 10_f64.powi(decade);
            let x = self.x(ms);
            svg.line(x, TOP, x, bottom);
            svg.text(x, bottom + 18.0, "middle", &format!("{} ms", units::short(ms)));
        }
        let axis = format!("{axis} (logarithmic, shorter is better)");
        svg.text((LEFT + RIGHT) / 2.0, bottom + 38.0, "middle", &axis);
    }
}

/// Writes elements. Whatever comes as text is escaped here.
struct Svg(String);

impl Svg {
    fn new(height: f64) -> Self {
        Self(format!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">
<style>
text {{ font: 13px sans-serif; fill: #24292f; }}
.title {{ font-size: 17px; font-weight: bold; }}
.bold {{ font-weight: bold; }}
.small {{ font-size: 11px; fill: #57606a; }}
.middle {{ text-anchor: middle; }}
.end {{ text-anchor: end; }}
</style>
<rect width="100%" height="100%" fill="#ffffff"/>
"##
        ))
    }

    fn bar(&mut self, x: f64, y: f64, width: f64, colour: &str) {
        let height = BAR - 1.0;
        // Writing to a string does not fail; so below.
        let _ = writeln!(
            self.0,
            r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" fill="{colour}"/>"#
        );
    }

    fn line(&mut self, x1: f64, y1: f64, x2: f64, y2: f64) {
        let _ = writeln!(self.0, r##"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" stroke="#d8dee4"/>"##);
    }

    /// A line through these places, with a dot at each.
    fn curve(&mut self, places: &[(f64, f64)], colour: &str) {
        let points = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect::<Vec<_>>().join(" ");
        let _ = writeln!(self.0, r#"<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>"#);
        for (x, y) in places {
            let _ = writeln!(self.0, r#"<circle cx="{x:.1}" cy="{y:.1}" r="3" fill="{colour}"/>"#);
        }
    }

    fn text(&mut self, x: f64, y: f64, class: &str, text: &str) {
        let _ = writeln!(self.0, r#"<text x="{x:.1}" y="{y:.1}" class="{class}">{}</text>"#, escaped(text));
    }

    fn finish(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }
}

pub(crate) fn escaped(text: &str) -> String {
    let visible = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>();
    visible.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::results::tests::{CHANNELS_2, results, row};

    fn bar_widths(svg: &str) -> Vec<f64> {
        let document = roxmltree::Document::parse(svg).unwrap();
        let bars = document.descendants().filter(|node| {
            node.attribute("x") == Some("150.0") && node.has_tag_name(("http://www.w3.org/2000/svg", "rect"))
        });
        bars.map(|bar| bar.attribute("width").unwrap().parse().unwrap()).collect()
    }

    #[test]
    fn it_is_valid_xml_whatever_qemu_calls_itself() {
        let svg = svg(&results());
        let document = roxmltree::Document::parse(&svg).unwrap();
        let texts: Vec<_> = document.descendants().filter_map(|node| node.text()).collect();
        assert!(texts.iter().any(|text| text.contains("QEMU 10.0.2 <&\">")), "{texts:?}");
        assert!(texts.contains(&"70 ×"), "{texts:?}");
        assert_eq!(escaped("a\u{0}\nb"), "a  b");
    }

    #[test]
    fn bars_are_as_long_as_the_logarithm_of_their_time() {
        let mut results = results();
        results.rows =
            vec![row(Content::Zero, CHANNELS_2, 10.0, 1000.0), row(Content::Random, CHANNELS_2, 100.0, 10000.0)];
        let all = RIGHT - LEFT;
        let wanted = [0.0, all * 2.0 / 3.0, all / 3.0, all];
        for (width, wanted) in bar_widths(&svg(&results)).into_iter().zip(wanted) {
            assert!((width - wanted).abs() < 0.2, "{width}, wanted {wanted}");
        }
        assert_eq!(bar_widths(&svg(&results)).len(), 4);
    }

    #[test]
    fn times_that_can_not_be_drawn_do_no_harm() {
        let mut results = results();
        results.rows = vec![row(Content::Zero, CHANNELS_2, 0.0, f64::NAN)];
        assert_eq!(bar_widths(&svg(&results)), [0.0, 0.0]);
        results.rows.clear();
        roxmltree::Document::parse(&svg(&results)).unwrap();
    }
}
