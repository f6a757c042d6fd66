//! The device's configuration space, as virtio lays it out: four little-endian numbers of 32 bits.

/// Size in bytes: QEMU is to be told this number too (`config_size=16`).
pub(crate) const CONFIG_BYTES: usize = 16;
/// Bytes that the balloon counts by, whatever the guest's page size.
pub(crate) const BALLOON_PAGE_BYTES: u64 = 4096;

/// What the driver gives up is a page of ours, neither a part of one nor several.
const _: () = assert!(BALLOON_PAGE_BYTES == transship_memory::PAGE);

/// What both sides show each other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Config {
    /// Pages that the driver is to give up; ours.
    pub(crate) target_pages: u32,
    /// Pages that it has given up; the driver's.
    pub(crate) given_pages: u32,
    /// What each 4 bytes of a free page hold, if that is not 0; the driver's.
    pub(crate) poison: u32,
}

impl Config {
    /// All of it, with the command id of the hints.
    pub(crate) fn bytes(&self, command: u32) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        let fields = [self.target_pages, self.given_pages, command, self.poison];
        for (to, field) in bytes.chunks_exact_mut(4).zip(fields) {
            to.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    /// The driver wrote `data` at `offset`: its fields are taken, ours are not. QEMU writes all of them whatever the
    /// driver wrote.
    pub(crate) fn write(&mut self, offset: u32, data: &[u8], command: u32) {
        let mut bytes = self.bytes(command);
        let place = usize::try_from(offset).ok().and_then(|from| bytes.get_mut(from..from.checked_add(data.len())?));
        let Some(place) = place else {
            tracing::info!(offset, bytes = data.len(), "ignored a write past the end of the configuration");
            return;
        };
        place.copy_from_slice(data);
        let field = |n: usize| u32::from_le_bytes([bytes[4 * n], bytes[4 * n + 1], bytes[4 * n + 2], bytes[4 * n + 3]]);
        self.given_pages = field(1);
        self.poison = field(3);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_the_drivers_fields_are_written() {
        let mut config = Config { target_pages: 7, given_pages: 1, poison: 0 };
        config.write(0, &[0xff; 16], 9);
        assert_eq!(config, Config { target_pages: 7, given_pages: u32::MAX, poison: u32::MAX });
        config.write(4, &5_u32.to_le_bytes(), 9);
        config.write(13, &[0, 0], 9);
        assert_eq!(config, Config { target_pages: 7, given_pages: 5, poison: 0xff00_00ff });
        assert_eq!(config.bytes(9), [7, 0, 0, 0, 5, 0, 0, 0, 9, 0, 0, 0, 0xff, 0, 0, 0xff]);
    }

    #[test]
    fn a_write_past_the_end_changes_nothing() {
        let mut config = Config::default();
        for (offset, bytes) in [(16, 1), (15, 2), (0, 17), (u32::MAX, 1)] {
            config.write(offset, &vec![1; bytes], 0);
            assert_eq!(config, Config::default(), "{bytes} bytes at {offset}");
        }
    }
}
