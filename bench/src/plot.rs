//! The picture: a bar for each side of each row, on a logarithmic scale. Written by hand, since it's text.
use std::fmt::Write;

use crate::{
    content::Content,
    results::{Results, Row},
    units,
};

const WIDTH: f64 = 960.0;
/// Where the bars begin and may end; left of it are names, right of it numbers and ratios.
const LEFT: f64 = 150.0;
const RIGHT: f64 = WIDTH - 190.0;
const TOP: f64 = 92.0;
const BAR: f64 = 13.0;
const ROW: f64 = 2.0 * BAR + 10.0;
const GROUP_HEAD: f64 = 26.0;
const BOTTOM: f64 = 50.0;
const OURS: &str = "#1f6feb";
const QEMU: &str = "#9aa4ae";

/// As an SVG file.
pub(crate) fn svg(results: &Results) -> String {
    let scale = Scale::of(&results.rows);
    let groups = groups(&results.rows);
    let bars: f64 = groups.iter().map(|(_, rows)| GROUP_HEAD + ROW * rows.len() as f64).sum();
    let mut svg = Svg::new(TOP + bars + BOTTOM);
    head(&mut svg, results);
    scale.draw(&mut svg, TOP + bars);
    let mut y = TOP;
    for (content, rows) in groups {
        svg.text(16.0, y + 17.0, "bold", content.title());
        y += GROUP_HEAD;
        for row in rows {
            draw(&mut svg, &scale, row, y);
            y += ROW;
        }
    }
    svg.finish()
}

fn head(svg: &mut Svg, results: &Results) {
    svg.text(16.0, 26.0, "title", "Moving a guest's memory: transship and QEMU's own migration");
    svg.text(16.0, 46.0, "small", &results.setting());
    svg.bar(16.0, 60.0, 24.0, OURS);
    svg.text(46.0, 71.0, "", "transship");
    svg.bar(126.0, 60.0, 24.0, QEMU);
    svg.text(156.0, 71.0, "", "QEMU (multifd, the same channels)");
    svg.text(RIGHT + 180.0, 71.0, "end", "ratio");
}

fn draw(svg: &mut Svg, scale: &Scale, row: &Row, y: f64) {
    svg.text(LEFT - 10.0, y + BAR + 4.0, "end", &row.mode.title());
    for (y, ms, colour) in [(y, row.our_ms().median, OURS), (y + BAR, row.qemu_ms().median, QEMU)] {
        let end = scale.x(ms);
        svg.bar(LEFT, y, end - LEFT, colour);
        svg.text(end + 5.0, y + 10.5, "small", &format!("{} ms", units::short(ms)));
    }
    svg.text(RIGHT + 180.0, y + BAR + 4.0, "end", &format!("{} ×", units::short(row.ratio())));
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

/// Milliseconds to places, whole decades from the least to the most.
struct Scale {
    first: i32,
    last: i32,
}

impl Scale {
    fn of(rows: &[Row]) -> Self {
        let times = rows.iter().flat_map(|row| [row.our_ms().median, row.qemu_ms().median]);
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

    fn draw(&self, svg: &mut Svg, bottom: f64) {
        for decade in self.first..=self.last {
            let ms = 10_f64.powi(decade);
            let x = self.x(ms);
            svg.line(x, TOP, x, bottom);
            svg.text(x, bottom + 18.0, "middle", &format!("{} ms", units::short(ms)));
        }
        svg.text(
            (LEFT + RIGHT) / 2.0,
            bottom + 38.0,
            "middle",
            "time to move all memory (logarithmic, shorter is better)",
        );
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

    fn text(&mut self, x: f64, y: f64, class: &str, text: &str) {
        let _ = writeln!(self.0, r#"<text x="{x:.1}" y="{y:.1}" class="{class}">{}</text>"#, escaped(text));
    }

    fn finish(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }
}

fn escaped(text: &str) -> String {
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
