//! Reads the values of the command line and collects every mistake, so that one attempt shows them all.
use std::fmt::Display;

use crate::failure::Failure;

/// The mistakes so far. Each names its flag, what was given and what would be right.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    mistakes: Vec<String>,
}

impl Checks {
    /// Reads `text`, the value of `flag`. None if it is wrong, which is then noted.
    pub(crate) fn read<T, E: Display>(
        &mut self,
        flag: &str,
        text: &str,
        read: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        match read(text) {
            Ok(value) => Some(value),
            Err(why) => {
                let (why, given) = (why.to_string(), format!("{text:?}"));
                // Addresses begin with what was given themselves.
                self.mistakes.push(match why.starts_with(&given) {
                    true => format!("{flag} {why}"),
                    false => format!("{flag} {given}: {why}"),
                });
                None
            }
        }
    }

    /// As [`Self::read`], and the value must lie within `least..=most`, which are shown as `bounds`.
    pub(crate) fn within<T: PartialOrd>(
        &mut self,
        flag: &str,
        text: &str,
        read: impl FnOnce(&str) -> Result<T, String>,
        (least, most): (T, T),
        bounds: &str,
    ) -> Option<T> {
        self.read(flag, text, |text| {
            let value = read(text)?;
            if value < least || value > most { Err(format!("it must be {bounds}")) } else { Ok(value) }
        })
    }

    /// Notes a mistake that is not in one value alone.
    pub(crate) fn mistake(&mut self, what: String) {
        self.mistakes.push(what);
    }

    /// `value` if there was no mistake. It's None only if one was noted.
    pub(crate) fn finish<T>(self, value: Option<T>) -> Result<T, Failure> {
        match value {
            Some(value) if self.mistakes.is_empty() => Ok(value),
            _ => Err(Failure::Usage(self.mistakes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units;

    #[test]
    fn every_mistake_is_reported_with_its_flag() {
        let mut checks = Checks::default();
        let channels = checks.within("--channels", "0", units::count, (1, 255), "1 to 255");
        let bandwidth = checks.read("--bandwidth", "fast", units::rate);
        let rounds = checks.within("--max-rounds", "255", units::count, (1, 255), "1 to 255");
        assert_eq!((channels, bandwidth, rounds), (None, None, Some(255)));
        let Err(Failure::Usage(mistakes)) = checks.finish(Some(())) else { panic!("mistakes were let through") };
        assert_eq!(mistakes.len(), 2, "{mistakes:?}");
        assert_eq!(mistakes[0], r#"--channels "0": it must be 1 to 255"#);
        assert!(mistakes[1].starts_with(r#"--bandwidth "fast": "#), "{mistakes:?}");
    }

    #[test]
    fn without_mistakes_the_value_comes_through() {
        assert!(matches!(Checks::default().finish(Some(7)), Ok(7)));
    }
}
