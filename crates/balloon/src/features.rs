//! What the device can do, and which of its queues is which.
use vhost::vhost_user::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use virtio_bindings::{
    virtio_config::VIRTIO_F_VERSION_1,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};

/// Queues that the device has, if the driver takes all features: QEMU is to be told this number too (`num_vqs=5`).
pub(crate) const QUEUES: usize = 5;
/// Entries that a queue may have: QEMU is to be told this number or a smaller one (`vq_size=128`).
pub(crate) const QUEUE_SIZE: usize = 1024;

/// The driver says how its memory is used.
const STATISTICS: u32 = 1;
const FREE_PAGE_HINT: u32 = 3;
/// The driver says what its free pages hold.
const PAGE_POISON: u32 = 4;
const REPORTING: u32 = 5;

/// What a queue is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Queue {
    /// Pages that the driver gives up.
    Inflate,
    /// Pages that it takes back.
    Deflate,
    /// How its memory is used.
    Statistics,
    /// Free pages that it names when asked.
    Hints,
    /// Free pages that it gives up without being asked, until it uses them again.
    Reports,
}

/// Features that the driver has taken.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Features(pub(crate) u64);

impl Features {
    /// What we offer.
    pub(crate) fn offered() -> Self {
        let bits = [
            VIRTIO_F_VERSION_1,
            VIRTIO_RING_F_EVENT_IDX,
            VIRTIO_RING_F_INDIRECT_DESC,
            STATISTICS,
            FREE_PAGE_HINT,
            PAGE_POISON,
            REPORTING,
        ];
        Self(bits.iter().fold(VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits(), |all, bit| all | 1 << bit))
    }

    /// What we need of the protocol with QEMU: it reads the configuration from us, and we tell it when that has
    /// changed.
    pub(crate) fn protocol() -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::BACKEND_REQ
    }

    pub(crate) fn hints(self) -> bool {
        self.has(FREE_PAGE_HINT)
    }

    pub(crate) fn poison(self) -> bool {
        self.has(PAGE_POISON)
    }

    fn has(self, bit: u32) -> bool {
        self.0 >> bit & 1 == 1
    }

    /// Queues are numbered without gaps: those of features that the driver has not taken do not exist. Where a driver
    /// takes statistics and hints, as Linux does, that is also the numbering of the specification, which has gaps.
    pub(crate) fn queue(self, index: u16) -> Option<Queue> {
        let all = [
            (true, Queue::Inflate),
            (true, Queue::Deflate),
            (self.has(STATISTICS), Queue::Statistics),
            (self.has(FREE_PAGE_HINT), Queue::Hints),
            (self.has(REPORTING), Queue::Reports),
        ];
        all.into_iter().filter(|(exists, _)| *exists).nth(usize::from(index)).map(|(_, queue)| queue)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn queues_have_no_gaps() {
        let names = |features: Features| (0..6).map(|n| features.queue(n)).collect::<Vec<_>>();
        use Queue::{Deflate, Hints, Inflate, Reports, Statistics};
        let all = [Some(Inflate), Some(Deflate), Some(Statistics), Some(Hints), Some(Reports), None];
        assert_eq!(names(Features::offered()), all);
        assert_eq!(names(Features(1 << 3)), [Some(Inflate), Some(Deflate), Some(Hints), None, None, None]);
        assert_eq!(names(Features(1 << 1 | 1 << 5))[2..], [Some(Statistics), Some(Reports), None, None]);
    }
}
