//! Is a row ahead of QEMU, even with it, or behind? One answer for all tables, by an interval and not by a median.
//!
//! Each run of ours is divided into the run of QEMU's that was its neighbour: what the machine does by the hour is in
//! both, and falls out. The row's figure is the median of these ratios. Its interval comes from a bootstrap: the pairs
//! are drawn anew, with repetition, again and again, and 95 % of the medians lie in it.
use serde::{Deserialize, Serialize};

/// With fewer pairs there is no interval worth its name.
pub(crate) const PAIRS_MIN: usize = 3;
/// How often the pairs are drawn anew.
const DRAWS: usize = 2000;
/// Of the medians, what lies outside of the interval at each end.
const OUTSIDE: f64 = 0.025;
/// So that the same runs give the same interval on every machine.
const SEED: u64 = 0x7472_616e_7368_6970;

/// How a row stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Verdict {
    /// The whole interval is above 1: we are faster.
    Ahead,
    /// 1 lies in the interval: these runs do not show a difference.
    Even,
    /// The whole interval is below 1: QEMU is faster.
    Behind,
    /// There are too few pairs to say.
    TooFew,
}

/// Both sides of a row, pair by pair.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Compared {
    /// How many times as long as ours QEMU takes: the median of the pairs.
    pub(crate) times: f64,
    /// The interval of `times`.
    pub(crate) low: f64,
    pub(crate) high: f64,
    /// Pairs of two runs that both ended.
    pub(crate) pairs: usize,
    pub(crate) verdict: Verdict,
}

impl Verdict {
    /// As it is called in tables.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Ahead => "ahead",
            Self::Even => "even",
            Self::Behind => "behind",
            Self::TooFew => "too few pairs",
        }
    }

    fn of(low: f64, high: f64, pairs: usize) -> Self {
        match () {
            () if pairs < PAIRS_MIN => Self::TooFew,
            () if low > 1.0 => Self::Ahead,
            () if high < 1.0 => Self::Behind,
            () => Self::Even,
        }
    }
}

/// Compares two lists of times (or of anything of which less is better). Those with the same place were measured one
/// right after the other. A pair in which one did not end (no finite number above 0) does not count. None: no pair
/// does.
pub(crate) fn compare(ours: &[f64], qemu: &[f64]) -> Option<Compared> {
    let is_time = |ms: f64| ms.is_finite() && ms > 0.0;
    let pairs = ours.iter().zip(qemu).filter(|&(&ours, &qemu)| is_time(ours) && is_time(qemu));
    // In logarithms twice as fast and half as fast are equally far from even.
    let ratios: Vec<f64> = pairs.map(|(ours, qemu)| (qemu / ours).ln()).collect();
    if ratios.is_empty() {
        return None;
    }
    let mut random = Random(SEED);
    let mut draw = vec![0.0; ratios.len()];
    let mut medians: Vec<f64> = (0..DRAWS)
        .map(|_| {
            draw.iter_mut().for_each(|place| *place = ratios[random.below(ratios.len())]);
            median(&mut draw)
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    let outside = (DRAWS as f64 * OUTSIDE) as usize;
    let (low, high) = (medians[outside].exp(), medians[DRAWS - 1 - outside].exp());
    let times = median(&mut ratios.clone()).exp();
    Some(Compared { times, low, high, pairs: ratios.len(), verdict: Verdict::of(low, high, ratios.len()) })
}

fn median(numbers: &mut [f64]) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let half = numbers.len() / 2;
    if numbers.len() % 2 == 1 { numbers[half] } else { f64::midpoint(numbers[half - 1], numbers[half]) }
}

/// xorshift64*.
struct Random(u64);

impl Random {
    /// Less than `end`. The slight preference for small numbers is far below what a machine's noise does.
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as usize) % end
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn verdict(ours: &[f64], qemu: &[f64]) -> Verdict {
        compare(ours, qemu).unwrap().verdict
    }

    #[test]
    fn the_interval_decides_and_not_the_median() {
        let qemu = [100.0; 5];
        assert_eq!(verdict(&[80.0, 85.0, 90.0, 95.0, 99.0], &qemu), Verdict::Ahead);
        // A median of 1.11, with one pair beyond 1.
        let noisy = compare(&[80.0, 85.0, 90.0, 95.0, 105.0], &qemu).unwrap();
        assert_eq!((noisy.verdict, (noisy.times * 100.0).round()), (Verdict::Even, 111.0));
        assert_eq!(verdict(&[101.0, 102.0, 110.0, 120.0, 130.0], &qemu), Verdict::Behind);
        assert_eq!(verdict(&[100.0; 5], &qemu), Verdict::Even);
    }

    #[test]
    fn with_many_pairs_one_outlier_decides_nothing() {
        let mut ours = vec![80.0; 15];
        ours[7] = 500.0;
        assert_eq!(verdict(&ours, &[100.0; 15]), Verdict::Ahead);
    }

    #[test]
    fn two_pairs_are_too_few_however_clear() {
        assert_eq!(verdict(&[1.0, 1.0], &[50.0, 50.0]), Verdict::TooFew);
        assert_eq!(verdict(&[1.0; 3], &[50.0; 3]), Verdict::Ahead);
    }

    #[test]
    fn what_did_not_end_is_no_pair() {
        assert_eq!(compare(&[], &[]), None);
        assert_eq!(compare(&[f64::NAN, 5.0], &[5.0, f64::INFINITY]), None);
        let compared = compare(&[5.0, f64::NAN, 5.0, 0.0, 5.0], &[10.0; 5]).unwrap();
        assert_eq!((compared.pairs, compared.verdict), (3, Verdict::Ahead));
    }

    #[test]
    fn pairs_are_neighbours_and_not_ranks() {
        // The machine became three times as slow meanwhile, for both: each pair says 1.25.
        let compared = compare(&[80.0, 160.0, 240.0], &[100.0, 200.0, 300.0]).unwrap();
        assert!((compared.low - 1.25).abs() < 1e-9 && (compared.high - 1.25).abs() < 1e-9, "{compared:?}");
    }

    fn times() -> impl Strategy<Value = Vec<(f64, f64)>> {
        prop::collection::vec((0.1_f64..1e5, 0.1_f64..1e5), 1..30)
    }

    fn unzipped(pairs: &[(f64, f64)]) -> (Vec<f64>, Vec<f64>) {
        pairs.iter().copied().unzip()
    }

    fn close(one: f64, other: f64) -> bool {
        (one / other - 1.0).abs() < 1e-9
    }

    proptest! {
        // Each case draws the pairs anew thousands of times.
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn the_median_lies_in_the_interval_and_the_interval_among_the_pairs(pairs in times()) {
            let (ours, qemu) = unzipped(&pairs);
            let Compared { times, low, high, .. } = compare(&ours, &qemu).unwrap();
            let ratios = || pairs.iter().map(|(ours, qemu)| qemu / ours);
            let (least, most) = (ratios().fold(f64::INFINITY, f64::min), ratios().fold(0.0, f64::max));
            prop_assert!(least * 0.999_999 <= low && low <= times * 1.000_001);
            prop_assert!(times * 0.999_999 <= high && high <= most * 1.000_001);
        }

        #[test]
        fn sides_that_change_places_change_the_verdict_only(pairs in times()) {
            let (ours, qemu) = unzipped(&pairs);
            let (one, other) = (compare(&ours, &qemu).unwrap(), compare(&qemu, &ours).unwrap());
            prop_assert!(close(one.times, 1.0 / other.times), "{one:?} {other:?}");
            // The draws are the same, so the ends of one interval are those of the other, turned around.
            prop_assert!(close(one.low, 1.0 / other.high) && close(one.high, 1.0 / other.low), "{one:?} {other:?}");
            let turned = match one.verdict {
                Verdict::Ahead => Verdict::Behind,
                Verdict::Behind => Verdict::Ahead,
                same => same,
            };
            prop_assert_eq!(other.verdict, turned);
        }

        #[test]
        fn neither_the_unit_nor_a_slower_machine_matters(pairs in times(), factor in 0.01_f64..100.0) {
            let (ours, qemu) = unzipped(&pairs);
            let slower = |list: &[f64]| list.iter().map(|ms| ms * factor).collect::<Vec<_>>();
            let (one, other) = (compare(&ours, &qemu).unwrap(), compare(&slower(&ours), &slower(&qemu)).unwrap());
            prop_assert!(close(one.times, other.times) && close(one.low, other.low) && close(one.high, other.high));
        }

        #[test]
        fn where_all_pairs_agree_the_verdict_does(pairs in prop::collection::vec((1.0_f64..1e3, 1.01_f64..9.0), 3..30)) {
            let ours: Vec<f64> = pairs.iter().map(|(ms, _)| *ms).collect();
            let slower: Vec<f64> = pairs.iter().map(|(ms, times)| ms * times).collect();
            prop_assert_eq!(verdict(&ours, &slower), Verdict::Ahead);
            prop_assert_eq!(verdict(&slower, &ours), Verdict::Behind);
            prop_assert_eq!(verdict(&ours, &ours), Verdict::Even);
        }
    }
}
