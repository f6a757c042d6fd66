//! Sizes, rates, times and shares as people write and read them.
//!
//! `K`, `M`, `G`, `T` are powers of 1024, as QEMU has them (`4G`, `512MiB`); `KB`, `MB`, … and all bits are powers of
//! 1000. A parser's error says what is wrong with the text and what would be right; the caller puts the flag before it.
use std::{fmt, time::Duration};

const SIZES: &str = "write a size such as 4G, 512M or 64KiB";
const RATES: &str = "write bytes a second such as 100M, or bits such as 1Gbit";
const TIMES: &str = "write a time such as 300ms, 2s or 1m";

/// Bytes: `4G`, `512M`, `64KiB`, `1.5G`, `4096`.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let (number, unit) = Number::split(text).ok_or(SIZES)?;
    let factor = bytes_factor(unit).ok_or_else(|| format!("{unit:?} is not a unit of size; {SIZES}"))?;
    number.times(factor)
}

/// Bytes a second: `100M`, `100MiB/s`, `1Gbit`, `2.5Gbit/s`.
pub(crate) fn rate(text: &str) -> Result<u64, String> {
    let (number, unit) = Number::split(text).ok_or(RATES)?;
    let unit = unit.strip_suffix("/s").unwrap_or(unit);
    if let Some(prefix) = unit.strip_suffix("bit").or_else(|| unit.strip_suffix("bps")) {
        let factor = power(prefix, 1000).ok_or_else(|| format!("{unit:?} is not a unit of bits; {RATES}"))?;
        return Ok(number.times(factor)? / 8);
    }
    let factor = bytes_factor(unit).ok_or_else(|| format!("{unit:?} is not a unit of rate; {RATES}"))?;
    number.times(factor)
}

/// A time: `300ms`, `2s`, `1m`, `1.5s`. A bare number is refused: it could be seconds or milliseconds.
pub(crate) fn time(text: &str) -> Result<Duration, String> {
    let (number, unit) = Number::split(text).ok_or(TIMES)?;
    let nanos = match unit {
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" | "min" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        "" => return Err(format!("it has no unit; {TIMES}")),
        _ => return Err(format!("{unit:?} is not a unit of time; {TIMES}")),
    };
    number.times(nanos).map(Duration::from_nanos)
}

/// A share of something, 0 to 1: `50%` or `0.5`.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    const SHARES: &str = "write a share such as 50% or 0.5";
    let (digits, whole) = text.strip_suffix('%').map_or((text, 1.0), |digits| (digits, 100.0));
    if !digits.starts_with(|c: char| c.is_ascii_digit()) {
        return Err(SHARES.into());
    }
    let share = digits.parse::<f64>().map_err(|_| SHARES)? / whole;
    if (0.0..=1.0).contains(&share) { Ok(share) } else { Err("a share is from 0% to 100% (0 to 1)".into()) }
}

/// A whole number, `100` or `1000000`.
pub(crate) fn count(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "write a whole number".to_string())
}

/// A decimal number as written, kept exact: `digits / 10^decimals`.
struct Number {
    digits: u128,
    decimals: u32,
}

impl Number {
    /// The number that `text` begins with, and the unit after it.
    fn split(text: &str) -> Option<(Self, &str)> {
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (whole, fraction) = text[..end].split_once('.').unwrap_or((&text[..end], ""));
        // 20 digits are beyond u64; the check also keeps 10^decimals in range.
        if whole.is_empty() || whole.len() > 20 || fraction.len() > 9 || text[..end].ends_with('.') {
            return None;
        }
        let digits = format!("{whole}{fraction}").parse().ok()?;
        Some((Self { digits, decimals: fraction.len() as u32 }, text[end..].trim_start()))
    }

    fn times(&self, factor: u64) -> Result<u64, String> {
        self.digits
            .checked_mul(u128::from(factor))
            .map(|product| product / 10u128.pow(self.decimals))
            .and_then(|value| u64::try_from(value).ok())
            .ok_or_else(|| "it is too large".to_string())
    }
}

fn bytes_factor(unit: &str) -> Option<u64> {
    if let Some(prefix) = unit.strip_suffix("iB") {
        return if prefix.is_empty() { None } else { power(prefix, 1024) };
    }
    match unit.strip_suffix('B') {
        Some(prefix) => power(prefix, 1000),
        None => power(unit, 1024),
    }
}

fn power(prefix: &str, base: u64) -> Option<u64> {
    let exponent = match prefix {
        "" => 0,
        "K" | "k" => 1,
        "M" => 2,
        "G" => 3,
        "T" => 4,
        _ => return None,
    };
    Some(base.pow(exponent))
}

/// Prints bytes: `512 B`, `1.5 MiB`, `120 GiB`.
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0 as f64;
        let mut unit = "B";
        for next in ["KiB", "MiB", "GiB", "TiB"] {
            // 1023.5 would be printed as 1024: it belongs to the next unit.
            if value < 1023.5 {
                break;
            }
            value /= 1024.0;
            unit = next;
        }
        let decimals = if unit == "B" || value >= 99.95 { 0 } else { 1 };
        f.pad(&format!("{value:.decimals$} {unit}"))
    }
}

/// Prints bytes a second.
pub(crate) struct Rate(pub(crate) f64);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}/s", Bytes(self.0.max(0.0) as u64)))
    }
}

/// Prints a time: `0.4 ms`, `41 ms`, `3.21 s`, `2 m 05 s`.
pub(crate) struct Time(pub(crate) Duration);

impl Time {
    /// From the milliseconds of a report.
    pub(crate) fn from_ms(ms: f64) -> Self {
        Self(Duration::try_from_secs_f64(ms / 1000.0).unwrap_or_default())
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs_f64();
        let text = match seconds {
            s if s < 0.00995 => format!("{:.1} ms", s * 1e3),
            s if s < 0.9995 => format!("{:.0} ms", s * 1e3),
            s if s < 9.995 => format!("{s:.2} s"),
            s if s < 59.95 => format!("{s:.1} s"),
            s => {
                let whole = s.round() as u64;
                format!("{} m {:02} s", whole / 60, whole % 60)
            }
        };
        f.pad(&text)
    }
}

/// Prints a number in groups of three digits: `1,234,567`.
pub(crate) struct Count(pub(crate) u64);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.to_string();
        let mut grouped = String::with_capacity(digits.len() * 4 / 3);
        for (i, digit) in digits.chars().enumerate() {
            if i > 0 && (digits.len() - i).is_multiple_of(3) {
                grouped.push(',');
            }
            grouped.push(digit);
        }
        f.pad(&grouped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        let good = [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("4G", 4 << 30),
            ("512M", 512 << 20),
            ("512MiB", 512 << 20),
            ("64KiB", 64 << 10),
            ("64k", 64 << 10),
            ("1.5G", 3 << 29),
            ("0.1K", 102),
            ("1MB", 1_000_000),
            ("2 GiB", 2 << 30),
            ("16777215T", 16_777_215 << 40),
        ];
        for (text, bytes) in good {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_an_example() {
        for text in
            ["", "G", "-1", ".5G", "1.G", "1..5G", "1.5.2G", "4X", "4iB", "4Gb", "4Gbit", "4 G B", "1,5G", "0x10"]
        {
            let error = size(text).expect_err(text);
            assert!(error.contains("4G"), "{text}: {error}");
        }
        for text in ["16777216T", "99999999999999999999"] {
            assert!(size(text).expect_err(text).contains("too large"), "{text}");
        }
        assert!(size("999999999999999999999").is_err());
        assert!(size("1.1234567890G").is_err());
    }

    #[test]
    fn rates_are_bytes_unless_they_say_bit() {
        let good = [
            ("100M", 100 << 20),
            ("100M/s", 100 << 20),
            ("100MiB/s", 100 << 20),
            ("100MB/s", 100_000_000),
            ("1Gbit", 125_000_000),
            ("2.5Gbit/s", 312_500_000),
            ("800Mbps", 100_000_000),
            ("8bit", 1),
        ];
        for (text, bytes) in good {
            assert_eq!(rate(text), Ok(bytes), "{text}");
        }
        for text in ["", "fast", "1Gb", "1Gibit", "1G/m"] {
            assert!(rate(text).expect_err(text).contains("1Gbit"), "{text}");
        }
    }

    #[test]
    fn times_need_a_unit() {
        let good =
            [("300ms", 300_000), ("2s", 2_000_000), ("1m", 60_000_000), ("1.5s", 1_500_000), ("50us", 50), ("0s", 0)];
        for (text, micros) in good {
            assert_eq!(time(text), Ok(Duration::from_micros(micros)), "{text}");
        }
        assert!(time("300").expect_err("300").contains("no unit"));
        for text in ["", "ms", "2 weeks", "-1s", "2S"] {
            assert!(time(text).expect_err(text).contains("300ms"), "{text}");
        }
        assert!(time("99999999999h").expect_err("long").contains("too large"));
    }

    #[test]
    fn shares_are_percents_or_fractions() {
        for (text, value) in [("50%", 0.5), ("0.5", 0.5), ("100%", 1.0), ("1", 1.0), ("0", 0.0), ("12.5%", 0.125)] {
            assert_eq!(share(text), Ok(value), "{text}");
        }
        for text in ["50", "101%", "2", "", "%", "half", "-1%", "nan", "inf", "0.5%%"] {
            assert!(share(text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_are_printed_with_their_unit() {
        let bytes = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (120 << 20, "120 MiB"),
            ((1 << 20) - 1, "1.0 MiB"),
            (u64::MAX, "16777216 TiB"),
        ];
        for (value, text) in bytes {
            assert_eq!(Bytes(value).to_string(), text);
        }
        assert_eq!(Rate(1.5 * 1024.0 * 1024.0).to_string(), "1.5 MiB/s");
        assert_eq!(Rate(f64::NAN).to_string(), "0 B/s");
        let times = [
            (0.0, "0.0 ms"),
            (0.44, "0.4 ms"),
            (41.2, "41 ms"),
            (999.6, "1.00 s"),
            (3210.0, "3.21 s"),
            (59_960.0, "1 m 00 s"),
            (125_000.0, "2 m 05 s"),
        ];
        for (ms, text) in times {
            assert_eq!(Time::from_ms(ms).to_string(), text, "{ms}");
        }
        assert_eq!(Time::from_ms(f64::NAN).to_string(), "0.0 ms");
        assert_eq!(Count(0).to_string(), "0");
        assert_eq!(Count(999).to_string(), "999");
        assert_eq!(Count(1_234_567).to_string(), "1,234,567");
        assert_eq!(format!("[{:>8}]", Count(1000)), "[   1,000]");
    }
}
