//! Curves below the bars: something that grows with a number, on scales that begin at zero.
use super::{Chart, LEFT, RIGHT, Side, Svg};
use crate::units;

/// Of the whole part, and of its axes.
const HEIGHT: f64 = 340.0;
const TOP: f64 = 50.0;
const AXES: f64 = 230.0;
/// Lines across.
const STEPS: u32 = 4;

/// What grows.
pub(crate) struct Curves {
    pub(crate) title: String,
    /// What is counted along the horizontal axis.
    pub(crate) axis: &'static str,
    pub(crate) curves: Vec<Curve>,
}

/// One of them.
pub(crate) struct Curve {
    pub(crate) title: String,
    pub(crate) side: Side,
    /// Numbers, ascending, and the bytes of each.
    pub(crate) points: Vec<(u32, u64)>,
}

impl Chart<'_> {
    /// As an SVG file, with curves below the bars.
    pub(crate) fn svg_above(&self, below: &[Curves]) -> String {
        let mut bottom = self.height();
        let mut svg = self.begun(bottom + HEIGHT * below.len() as f64);
        for curves in below {
            curves.draw(&mut svg, bottom);
            bottom += HEIGHT;
        }
        svg.finish()
    }
}

impl Curves {
    fn draw(&self, svg: &mut Svg, top: f64) {
        let points = || self.curves.iter().flat_map(|curve| &curve.points);
        let most = f64::from(points().map(|(number, _)| *number).max().unwrap_or(1).max(1));
        let bytes = step(points().map(|(_, bytes)| *bytes).max().unwrap_or(1)) * u64::from(STEPS);
        let bottom = top + TOP + AXES;
        let x = |number: u32| LEFT + (RIGHT - LEFT) * f64::from(number) / most;
        let y = |of: u64| bottom - AXES * of as f64 / bytes as f64;
        svg.text(16.0, top + 24.0, "bold", &self.title);
        for part in 0..=STEPS {
            let of = bytes / u64::from(STEPS) * u64::from(part);
            svg.line(LEFT, y(of), RIGHT, y(of));
            svg.text(LEFT - 10.0, y(of) + 4.0, "end", &units::bytes(of));
        }
        let mut numbers: Vec<u32> = points().map(|(number, _)| *number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        for number in numbers {
            svg.text(x(number), bottom + 18.0, "middle", &number.to_string());
        }
        svg.text((LEFT + RIGHT) / 2.0, bottom + 38.0, "middle", self.axis);
        for curve in &self.curves {
            let places: Vec<(f64, f64)> = curve.points.iter().map(|(number, of)| (x(*number), y(*of))).collect();
            svg.curve(&places, curve.side.colour());
            if let (Some((x, y)), Some((_, of))) = (places.last(), curve.points.last()) {
                svg.text(x + 8.0, y + 4.0, "small", &format!("{} {}", curve.title, units::bytes(*of)));
            }
        }
    }
}

/// A power of two, so many of which reach as far as the most.
fn step(most: u64) -> u64 {
    most.div_ceil(u64::from(STEPS)).next_power_of_two()
}
