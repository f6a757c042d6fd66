//! Which way a guest's writes are tracked.
use transship_guest::GuestError;
use transship_memory::{GuestMemory, PAGE, Region, SyncTracker, UffdTracker};

/// What a user may choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tracking {
    /// Asynchronous where the kernel can do that, else synchronous.
    #[default]
    Auto,
    /// The kernel takes note of writes, and nobody waits: Linux 6.7.
    Async,
    /// The first write to a page since a scan waits until we let it through: Linux 5.14, for shared memory 5.19. The
    /// only way in which writers can be held.
    Sync,
}

impl Tracking {
    /// The way to be taken here, never `Auto`.
    ///
    /// # Errors
    /// The kernel can't.
    pub fn here(self) -> Result<Self, GuestError> {
        Self::choose(self, UffdTracker::is_possible, SyncTracker::is_possible)
    }

    /// The same for this memory.
    ///
    /// # Errors
    /// The kernel can't, or not for such memory.
    pub fn of(self, memory: &GuestMemory) -> Result<Self, GuestError> {
        let tracking = self.here()?;
        let is_huge = |region: &&Region| region.backing_page_bytes() > PAGE;
        match memory.regions().iter().find(is_huge) {
            Some(region) if tracking == Self::Sync => Err(GuestError::Unfit(format!(
                "guest memory {:?} is on huge pages, whose writes can't all be found by having them wait; boot Linux \
                 6.7 or newer, and leave out --tracker sync and --converge pace",
                region.name()
            ))),
            _ => Ok(tracking),
        }
    }

    fn choose(
        self,
        async_is_possible: impl Fn() -> bool,
        sync_is_possible: impl Fn() -> bool,
    ) -> Result<Self, GuestError> {
        let cant =
            |cure: &str| Err(GuestError::Unfit(format!("this kernel can't track a running guest's writes {cure}")));
        match self {
            Self::Auto | Self::Async if async_is_possible() => Ok(Self::Async),
            Self::Async => cant("without having them wait; boot Linux 6.7 or newer, or leave out --tracker async"),
            Self::Auto | Self::Sync if sync_is_possible() => Ok(Self::Sync),
            Self::Auto | Self::Sync => cant("from outside; boot Linux 5.14 or newer (best 6.7)"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::Tracking::{Async, Auto, Sync};

    #[test]
    fn the_kernel_decides_where_the_user_has_not() {
        let (yes, no) = (|| true, || false);
        assert_eq!(Auto.choose(yes, yes).unwrap(), Async);
        assert_eq!(Auto.choose(no, yes).unwrap(), Sync);
        assert_eq!(Sync.choose(yes, yes).unwrap(), Sync);
        let refused = |tracking: super::Tracking| tracking.choose(no, no).unwrap_err().to_string();
        assert!(refused(Auto).contains("boot Linux 5.14 or newer") && refused(Sync).contains("5.14"));
        assert!(Async.choose(no, yes).unwrap_err().to_string().contains("leave out --tracker async"));
    }
}
