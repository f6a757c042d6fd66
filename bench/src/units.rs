//! Sizes, times, and numbers with few digits.
use std::time::Duration;

/// Memory of a guest: `4G`, `512M`, `64MiB`. Powers of 1024, as QEMU has them.
pub(crate) fn memory(text: &str) -> Result<u64, String> {
    const EXAMPLES: &str = "write a size such as 4G or 512M";
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..end].parse().map_err(|_| EXAMPLES)?;
    let shift = match &text[end..] {
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        "T" | "TiB" => 40,
        _ => return Err(EXAMPLES.into()),
    };
    let bytes = number.checked_mul(1 << shift).filter(|&bytes| bytes <= MEMORY_MAX).ok_or("it is more than 1T")?;
    if bytes < MEMORY_MIN {
        return Err("it must be at least 64M: in less there is nothing to measure".into());
    }
    if !bytes.is_multiple_of(2 << 20) {
        return Err("it must be a multiple of 2M, the size of a huge page".into());
    }
    Ok(bytes)
}

const MEMORY_MIN: u64 = 64 << 20;
const MEMORY_MAX: u64 = 1 << 40;

/// Milliseconds.
pub(crate) fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// `4 GiB`, `96.5 MiB`, `812 B`.
pub(crate) fn bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        // 1023.5 would be printed as 1024: it belongs to the next unit.
        if value < 1023.5 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    format!("{} {unit}", short(value))
}

/// Three digits that count, without useless zeros: `0.0123`, `1.5`, `31.6`, `2840`.
pub(crate) fn short(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return if value == 0.0 { "0".into() } else { "-".into() };
    }
    let magnitude = value.abs().log10().floor() as i32;
    let decimals = (2 - magnitude).clamp(0, 6) as usize;
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        for (text, wanted) in [("64M", 64 << 20), ("4G", 4 << 30), ("512MiB", 512 << 20), ("1T", 1 << 40)] {
            assert_eq!(memory(text), Ok(wanted), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_the_reason() {
        for (text, reason) in [
            ("", "such as 4G"),
            ("G", "such as 4G"),
            ("4", "such as 4G"),
            ("4X", "such as 4G"),
            ("-4G", "such as 4G"),
            ("62M", "at least 64M"),
            ("0G", "at least 64M"),
            ("65M", "multiple of 2M"),
            ("2T", "more than 1T"),
            ("18446744073709551615G", "more than 1T"),
        ] {
            let error = memory(text).expect_err(text);
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn numbers_have_three_digits() {
        for (value, text) in [
            (0.0, "0"),
            (0.01234, "0.0123"),
            (1.5, "1.5"),
            (31.649, "31.6"),
            (999.6, "1000"),
            (2840.4, "2840"),
            (f64::NAN, "-"),
        ] {
            assert_eq!(short(value), text);
        }
        assert_eq!(bytes(4 << 30), "4 GiB");
        assert_eq!(bytes((1 << 20) - 1), "1 MiB");
        assert_eq!(bytes(812), "812 B");
    }
}
