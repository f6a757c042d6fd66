//! QEMU's stream, taken apart and put together again, wherever it comes from and goes to: a file, a connection, a VMM.
//!
//! - `whence`: where bytes come from, for what is said about them; `records`: they are read, `ahead` if that is
//!   quicker, and checked
//! - `feed`: records on their way into a `store`; `guest_store`: the one that is a waiting guest
//! - `fit`: whether what comes is the waiting guest's; `tail`: what follows its memory
//! - `regions`: the guest's memory as a stream names it; `state`: the part that is the VMM's, taken apart; `opaque`:
//!   that of a VMM that is no QEMU
//! - `recompose`: put together for the VMM that loads it, read in `pieces`; `standing`: so that it runs no guest by
//!   itself
pub(crate) mod ahead;
pub(crate) mod feed;
pub(crate) mod fit;
pub(crate) mod guest_store;
pub(crate) mod opaque;
pub(crate) mod pieces;
pub(crate) mod recompose;
pub(crate) mod records;
pub(crate) mod regions;
pub(crate) mod standing;
pub(crate) mod state;
pub(crate) mod store;
pub(crate) mod tail;
pub(crate) mod whence;

/// Has at least `bytes` of room in a buffer, of which the first `kept` stay. The allocator has zeroed memory at hand
/// that nobody needs to clear, which `Vec::resize` does not use.
fn make_room(buffer: &mut Vec<u8>, kept: usize, bytes: usize) {
    if buffer.len() < bytes {
        // At least twice as much: it may be asked for a little more again and again.
        let mut larger = vec![0; bytes.max(2 * buffer.len())];
        larger[..kept].copy_from_slice(&buffer[..kept]);
        *buffer = larger;
    }
}
