//! `METHOD[:LEVEL]`.
use crate::SettingError;
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// How packets are encoded. The numbers are those on the wire between our own peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Method {
    /// Pages as they are.
    None = 0,
    /// Deflate, as a stock QEMU's `multifd-compression=zlib` reads it.
    Zlib = 1,
    /// Zstandard, as a stock QEMU's `multifd-compression=zstd` reads it.
    Zstd = 2,
    /// The gzip members of Intel's QATzip.
    Qatzip = 3,
    /// LZ4 blocks, between our own peers only.
    Lz4 = 4,
}

impl Method {
    /// Every method, in the order of their numbers.
    pub const ALL: [Self; 5] = [Self::None, Self::Zlib, Self::Zstd, Self::Qatzip, Self::Lz4];

    /// The name that users write.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
            Self::Qatzip => "qatzip",
            Self::Lz4 => "lz4",
        }
    }

    /// Its number on the wire.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// The method with this number on the wire.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|method| method.number() == number)
    }

    /// The levels it has, none if it has none; higher is smaller and slower.
    #[must_use]
    pub const fn levels(self) -> Option<RangeInclusive<i32>> {
        match self {
            Self::None => None,
            Self::Zlib => Some(0..=9),
            Self::Zstd => Some(-7..=20),
            Self::Qatzip => Some(1..=9),
            Self::Lz4 => Some(1..=12),
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A method and its level, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Setting {
    method: Method,
    level: i32,
}

impl Setting {
    /// Pages as they are.
    pub const NONE: Self = Self { method: Method::None, level: 0 };

    /// `method` at `level`, or at its fastest common level, 1.
    ///
    /// # Errors
    /// A level that the method does not have.
    pub fn new(method: Method, level: Option<i32>) -> Result<Self, SettingError> {
        let Some(levels) = method.levels() else {
            return match level {
                Some(level) => Err(SettingError::NoLevels { method, given: level.to_string() }),
                None => Ok(Self { method, level: 0 }),
            };
        };
        let level = level.unwrap_or(1);
        if levels.contains(&level) {
            return Ok(Self { method, level });
        }
        Err(SettingError::Level { method, given: level.to_string(), min: *levels.start(), max: *levels.end() })
    }

    /// The method.
    #[must_use]
    pub const fn method(&self) -> Method {
        self.method
    }

    /// The level; 0 for a method without levels.
    #[must_use]
    pub const fn level(&self) -> i32 {
        self.level
    }
}

impl FromStr for Setting {
    type Err = SettingError;

    fn from_str(text: &str) -> Result<Self, SettingError> {
        let (name, level) = text.split_once(':').map_or((text, None), |(name, level)| (name, Some(level)));
        let method = Method::ALL
            .into_iter()
            .find(|method| method.name() == name)
            .ok_or_else(|| SettingError::Method { given: name.to_owned() })?;
        let Some(given) = level else { return Self::new(method, None) };
        let Some(levels) = method.levels() else {
            return Err(SettingError::NoLevels { method, given: given.to_owned() });
        };
        let number = given.parse().map_err(|_| SettingError::Level {
            method,
            given: given.to_owned(),
            min: *levels.start(),
            max: *levels.end(),
        })?;
        Self::new(method, Some(number))
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.method.levels() {
            None => write!(f, "{}", self.method),
            Some(_) => write!(f, "{}:{}", self.method, self.level),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_is_printed_is_parsed() {
        for method in Method::ALL {
            assert_eq!(Method::from_number(method.number()), Some(method));
            for level in method.levels().unwrap_or(0..=0) {
                let setting = Setting { method, level };
                assert_eq!(setting.to_string().parse(), Ok(setting));
            }
        }
        assert_eq!(Method::from_number(5), None);
        assert_eq!("zstd".parse::<Setting>().unwrap().level(), 1);
        assert_eq!("zstd:-5".parse::<Setting>().unwrap().level(), -5);
    }

    #[test]
    fn a_refusal_names_the_bounds() {
        let refusal = |text: &str| text.parse::<Setting>().unwrap_err().to_string();
        assert_eq!(refusal("zlib:10"), r#"zlib level "10" is not a number from 0 to 9"#);
        assert_eq!(refusal("zstd:-8"), r#"zstd level "-8" is not a number from -7 to 20"#);
        assert_eq!(refusal("lz4:"), r#"lz4 level "" is not a number from 1 to 12"#);
        assert_eq!(refusal("qatzip:0"), r#"qatzip level "0" is not a number from 1 to 9"#);
        assert_eq!(refusal("none:1"), r#"method none has no level, but "1" was given"#);
        assert_eq!(refusal("gzip"), r#"unknown method "gzip"; use one of none, zlib, zstd, qatzip, lz4"#);
        assert_eq!(refusal("ZLIB"), r#"unknown method "ZLIB"; use one of none, zlib, zstd, qatzip, lz4"#);
    }
}
