//! What goes over the connection of a probe, which measures the way to a receiver.
use crate::Error;
use crate::reader::{Header, Reader};

/// Size of an encoded [`Probe`] in bytes.
pub const PROBE_BYTES: usize = 16;
/// The most filling after one [`Probe::Filling`].
pub const MAX_FILLING_BYTES: u64 = 1 << 20;

const MAGIC: [u8; 4] = *b"TSPB";
const READY: u8 = 1;
const FILLING: u8 = 2;
const COUNT: u8 = 3;
const REFUSED: u8 = 4;

/// One record. `S` is the side that probes, `D` the receiver that waits.
///
/// | offset | bytes | field |
/// | ---: | ---: | --- |
/// | 0 | 4 | magic `TSPB` |
/// | 4 | 1 | kind |
/// | 5 | 3 | reserved, zero |
/// | 8 | 8 | value |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probe {
    /// 1, D to S, first: so many bytes of filling are taken at most.
    Ready(u64),
    /// 2, S to D: so many bytes follow, whose values mean nothing; 0: say how many have come.
    Filling(u64),
    /// 3, D to S: so many bytes of filling have come in all.
    Count(u64),
    /// 4, D to S, first and last: others probe this receiver just now, or have done so too often.
    Refused,
}

impl Probe {
    /// The bytes to send.
    pub fn encode(&self) -> [u8; PROBE_BYTES] {
        let (kind, value) = match *self {
            Self::Ready(bytes) => (READY, bytes),
            Self::Filling(bytes) => (FILLING, bytes),
            Self::Count(bytes) => (COUNT, bytes),
            Self::Refused => (REFUSED, 0),
        };
        let mut header = Header::new();
        header.put(MAGIC).put([kind, 0, 0, 0]).put(value.to_le_bytes());
        header.done()
    }

    /// # Errors
    /// Wrong magic, kind or value, or reserved bytes that are not zero.
    pub fn decode(bytes: &[u8; PROBE_BYTES]) -> Result<Self, Error> {
        let mut reader = Reader::new(bytes, 0);
        let magic = reader.u32("probe magic")?;
        if magic != u32::from_le_bytes(MAGIC) {
            return Err(reader.invalid("probe magic", magic.into(), "this is no record of a probe"));
        }
        let kind = reader.u8("probe kind")?;
        if !matches!(kind, READY | FILLING | COUNT | REFUSED) {
            return Err(reader.invalid("probe kind", kind.into(), "unknown record"));
        }
        reader.reserved::<3>("probe reserved")?;
        let value = reader.u64("probe value")?;
        if kind == FILLING && value > MAX_FILLING_BYTES {
            return Err(reader.invalid("probe value", value, "more filling at a time than 1048576 bytes"));
        }
        if kind == REFUSED && value != 0 {
            return Err(reader.invalid("probe value", value, "a refusal has none"));
        }
        reader.end("probe")?;
        Ok(match kind {
            READY => Self::Ready(value),
            FILLING => Self::Filling(value),
            COUNT => Self::Count(value),
            _ => Self::Refused,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_what_is_documented() {
        let all = [Probe::Ready(7), Probe::Filling(0), Probe::Filling(1 << 20), Probe::Count(u64::MAX), Probe::Refused];
        for probe in all {
            assert_eq!(Probe::decode(&probe.encode()), Ok(probe));
        }
        assert_eq!(&Probe::Filling(0x0102).encode(), b"TSPB\x02\0\0\0\x02\x01\0\0\0\0\0\0");
    }

    #[test]
    fn every_wrong_byte_is_refused() {
        for (place, value) in [(0, 0), (3, b'A'), (4, 0), (4, 5), (5, 1), (7, 1), (10, 0x10)] {
            let mut bytes = Probe::Filling(1).encode();
            bytes[place] = value;
            // The last one announces 1 MiB and a byte.
            assert!(Probe::decode(&bytes).is_err(), "{place}");
        }
        let mut bytes = Probe::Refused.encode();
        bytes[8] = 1;
        assert!(Probe::decode(&bytes).is_err());
    }
}
