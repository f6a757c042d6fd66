//! How a user names a snapshot file: as QEMU does, and by descriptors that a manager has opened for us.
use std::{fmt, path::PathBuf, str::FromStr};

/// What names the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FilePlace {
    /// A file by its name.
    Path(PathBuf),
    /// A descriptor that this process was started with.
    Fd(i32),
    /// Two such descriptors of one file: one opened with O_DIRECT, for pages, and one without. In any order.
    FdSet(i32, i32),
}

/// A snapshot file, and where in it the snapshot begins: `PATH`, `file:PATH[,offset=N]`, `fd:N[,offset=N]`,
/// `fdset:N,M[,offset=N]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileUri {
    /// What names the file.
    pub place: FilePlace,
    /// Bytes before the snapshot that are somebody else's.
    pub offset: u64,
}

/// The largest offset: a file's size is a signed number, and a snapshot has to follow.
const OFFSET_MAX: u64 = 1 << 62;

impl FileUri {
    /// A file by its name, from its first byte on.
    pub fn path(path: impl Into<PathBuf>) -> Self {
        Self { place: FilePlace::Path(path.into()), offset: 0 }
    }
}

impl FromStr for FileUri {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| format!("{text:?} is not a snapshot file: {why}");
        let (scheme, rest) = match text.split_once(':') {
            Some((scheme @ ("file" | "fd" | "fdset"), rest)) => (scheme, rest),
            // `PATH` alone, with whatever colons and commas it has.
            _ if text.is_empty() => return Err(wrong("it has no name")),
            _ => return Ok(Self::path(text)),
        };
        let (name, offset) = match rest.rsplit_once(",offset=") {
            Some((name, offset)) => (name, size(offset).map_err(|why| wrong(&format!("offset={offset}: {why}")))?),
            None => (rest, 0),
        };
        if offset > OFFSET_MAX {
            return Err(wrong(&format!("offset={offset} is beyond the size of any file")));
        }
        let number = |text: &str| {
            let number = text.parse::<i32>().ok().filter(|number| *number >= 0);
            number.ok_or_else(|| wrong(&format!("{text:?} is not the number of a descriptor")))
        };
        let place = match scheme {
            "file" if name.is_empty() => return Err(wrong("it has no name")),
            "file" => FilePlace::Path(name.into()),
            "fd" => FilePlace::Fd(number(name)?),
            _ => match name.split_once(',') {
                Some((one, other)) if one != other => FilePlace::FdSet(number(one)?, number(other)?),
                _ => return Err(wrong("write the numbers of two descriptors, as in fdset:3,4")),
            },
        };
        Ok(Self { place, offset })
    }
}

impl fmt::Display for FileUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            FilePlace::Path(path) => write!(f, "file:{}", path.display())?,
            FilePlace::Fd(number) => write!(f, "fd:{number}")?,
            FilePlace::FdSet(one, other) => write!(f, "fdset:{one},{other}")?,
        }
        if self.offset > 0 { write!(f, ",offset={:#x}", self.offset) } else { Ok(()) }
    }
}

/// A number as QEMU reads it: decimal, 0x hex, or with a suffix (k, M, G, T, powers of 1024).
fn size(text: &str) -> Result<u64, String> {
    let wrong = || "write bytes, as in 4096, 0x1000 or 4k".to_owned();
    if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        let hex = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        return u64::from_str_radix(digits, 16).ok().filter(|_| hex).ok_or_else(wrong);
    }
    let (digits, shift) = match text.char_indices().next_back() {
        Some((at, suffix)) if suffix.is_ascii_alphabetic() => {
            let shift =
                ["B", "K", "M", "G", "T"].iter().position(|unit| suffix.to_ascii_uppercase().to_string() == *unit);
            (&text[..at], 10 * shift.ok_or_else(wrong)? as u32)
        }
        _ => (text, 0),
    };
    let number = digits.parse::<u64>().ok().filter(|_| digits.bytes().all(|digit| digit.is_ascii_digit()));
    number.and_then(|number| number.checked_mul(1 << shift)).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn read(text: &str) -> FileUri {
        text.parse().unwrap_or_else(|why| panic!("{why}"))
    }

    #[test]
    fn files_are_named_as_qemu_names_them() {
        let path = |path: &str, offset| FileUri { place: FilePlace::Path(path.into()), offset };
        assert_eq!(read("/vm/a.snap"), path("/vm/a.snap", 0));
        assert_eq!(read("a:b,offset=3"), path("a:b,offset=3", 0), "a bare path is taken as it is");
        assert_eq!(read("file:a"), path("a", 0));
        for (text, offset) in
            [("4660", 4660), ("0x1234", 0x1234), ("4k", 4096), ("4K", 4096), ("1G", 1 << 30), ("7B", 7)]
        {
            assert_eq!(read(&format!("file:/a,b,offset={text}")), path("/a,b", offset), "{text}");
        }
        assert_eq!(read("fd:7"), FileUri { place: FilePlace::Fd(7), offset: 0 });
        assert_eq!(read("fdset:3,4,offset=1M"), FileUri { place: FilePlace::FdSet(3, 4), offset: 1 << 20 });
    }

    #[test]
    fn what_is_shown_is_what_is_read() {
        for text in ["file:/vm/a", "file:/vm/a,offset=0x1000", "fd:3", "fd:3,offset=0x1", "fdset:3,4"] {
            assert_eq!(read(text).to_string(), text);
        }
    }

    #[test]
    fn mistakes_are_told() {
        for (text, part) in [
            ("", "no name"),
            ("file:", "no name"),
            ("file:,offset=3", "no name"),
            ("fd:x", "\"x\" is not the number"),
            ("fd:-1", "\"-1\" is not the number"),
            ("fdset:3", "fdset:3,4"),
            ("fdset:3,3", "fdset:3,4"),
            ("file:a,offset=", "4096, 0x1000 or 4k"),
            ("file:a,offset=4x", "4096, 0x1000 or 4k"),
            ("file:a,offset=-4", "4096, 0x1000 or 4k"),
            ("file:a,offset=0x+4", "4096, 0x1000 or 4k"),
            ("file:a,offset=99999999T", "4096, 0x1000 or 4k"),
            ("file:a,offset=8000000000000000000", "beyond the size of any file"),
        ] {
            let why = text.parse::<FileUri>().unwrap_err();
            assert!(why.contains(part), "{text}: {why}");
        }
    }
}
