//! Whether memory is all zero, at the machine's width.
//!
//! The guest may write while we look. A page that changes under the scan may be called either way; it was written after
//! the scan of the dirty tracker that led here, so a later round asks again. What matters is that the compiler
//! may assume nothing about the memory: every access is a volatile load of a raw pointer.

use std::sync::OnceLock;

use crate::{PAGE_BYTES, WindowPages};

/// A way of scanning.
///
/// # Safety
/// `len` bytes from `start` are readable for the time of the call (they may be written meanwhile), and the processor
/// has the instructions that the way is made of.
type Scan = unsafe fn(start: *const u8, len: usize) -> bool;

/// Whether all `len` bytes from `start` are zero. Returns at the first block that is not.
///
/// # Safety
/// `len` bytes from `start` are readable for the time of the call. They may be written meanwhile.
pub(crate) unsafe fn is_zero(start: *const u8, len: usize) -> bool {
    // Data shows at its first, middle or last word mostly: a look at three places spares a call and a block.
    // SAFETY: the caller's promise.
    if unsafe { shows_data(start, len) } {
        return false;
    }
    // SAFETY: the caller's promise; best() chose by what the processor has.
    unsafe { best()(start, len) }
}

/// Whether all of it is zero.
pub(crate) fn all(bytes: &[u8]) -> bool {
    // SAFETY: a slice can be read.
    unsafe { is_zero(bytes.as_ptr(), bytes.len()) }
}

/// Of pages whose bytes these are, the mask of those that are all zero.
pub(crate) fn mask(pages: WindowPages, bytes: &[u8]) -> u128 {
    let (bytes, _) = bytes.as_chunks::<PAGE_BYTES>();
    let zero = pages.iter().zip(bytes).filter(|(_, page)| all(*page));
    zero.fold(0, |mask, (page, _)| mask | 1 << page.since(pages.first).get())
}

/// The widest way that this processor has. Found out once.
fn best() -> Scan {
    static BEST: OnceLock<Scan> = OnceLock::new();
    *BEST.get_or_init(|| ways().next().map_or(portable as Scan, |(_, scan)| scan))
}

/// All ways that this processor has, the widest first.
fn ways() -> impl Iterator<Item = (&'static str, Scan)> {
    #[cfg(target_arch = "x86_64")]
    let wide = [
        ("avx512", x86::avx512 as Scan, is_x86_feature_detected!("avx512f")),
        ("avx2", x86::avx2 as Scan, is_x86_feature_detected!("avx2")),
    ];
    #[cfg(not(target_arch = "x86_64"))]
    let wide: [(&str, Scan, bool); 0] = [];
    wide.into_iter().filter(|way| way.2).map(|way| (way.0, way.1)).chain([("portable", portable as Scan)])
}

/// Whether the first, middle or last aligned word has a one. Short or odd memory shows nothing.
///
/// # Safety
/// As [`is_zero`].
unsafe fn shows_data(start: *const u8, len: usize) -> bool {
    const WORD: usize = size_of::<u64>();
    if len < 2 * WORD || !start.addr().is_multiple_of(WORD) {
        return false;
    }
    let last = (len - WORD) / WORD;
    // SAFETY: 0 <= word <= last, so the word ends within len, which is readable; start was seen to be aligned.
    let word = |word: usize| unsafe { start.cast::<u64>().add(word).read_volatile() };
    word(0) | word(last / 2) | word(last) != 0
}

/// Bytes at both ends that are not whole blocks, by single loads; `blocks` gets the blocks between, aligned to their
/// size.
///
/// # Safety
/// As [`is_zero`]. `blocks` may believe that its pointer is aligned to `block` and its length is a multiple of it.
#[inline(always)]
unsafe fn split(start: *const u8, len: usize, block: usize, blocks: impl FnOnce(*const u8, usize) -> bool) -> bool {
    let head = start.addr().wrapping_neg() % block;
    let head = head.min(len);
    let body = (len - head) / block * block;
    // SAFETY: at < len, readable by the caller's promise.
    let byte = |at: usize| unsafe { start.add(at).read_volatile() == 0 };
    // SAFETY: head <= len, so this is in the memory or one past it.
    (0..head).all(byte) && blocks(unsafe { start.add(head) }, body) && (head + body..len).all(byte)
}

/// Eight bytes at a time.
///
/// # Safety
/// As [`is_zero`].
unsafe fn portable(start: *const u8, len: usize) -> bool {
    const BLOCK: usize = size_of::<[u64; 8]>();
    let blocks = |body: *const u8, len: usize| {
        (0..len).step_by(BLOCK).all(|at| {
            let mut any = 0;
            for word in 0..8 {
                // SAFETY: at + BLOCK <= len and word < 8, so the load is in the memory; split() aligned the block.
                any |= unsafe { body.add(at).cast::<u64>().add(word).read_volatile() };
            }
            any == 0
        })
    };
    // SAFETY: the caller's promise.
    unsafe { split(start, len, BLOCK, blocks) }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256i, __m512i, _mm256_or_si256, _mm256_testz_si256, _mm512_or_si512, _mm512_test_epi64_mask,
    };

    use super::split;

    /// Four registers of 64 bytes at a time.
    ///
    /// # Safety
    /// As [`super::is_zero`], and the processor has AVX-512F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512(start: *const u8, len: usize) -> bool {
        const BLOCK: usize = size_of::<[__m512i; 4]>();
        let blocks = |body: *const u8, len: usize| {
            let mut at = 0;
            while at < len {
                // SAFETY: at + BLOCK <= len as both are multiples of BLOCK, n < 4; split() aligned the block.
                let load = |n: usize| unsafe { body.add(at).cast::<__m512i>().add(n).read_volatile() };
                let any = _mm512_or_si512(_mm512_or_si512(load(0), load(1)), _mm512_or_si512(load(2), load(3)));
                if _mm512_test_epi64_mask(any, any) != 0 {
                    return false;
                }
                at += BLOCK;
            }
            true
        };
        // SAFETY: the caller's promise.
        unsafe { split(start, len, BLOCK, blocks) }
    }

    /// Eight registers of 32 bytes at a time.
    ///
    /// # Safety
    /// As [`super::is_zero`], and the processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2(start: *const u8, len: usize) -> bool {
        const BLOCK: usize = size_of::<[__m256i; 8]>();
        let blocks = |body: *const u8, len: usize| {
            let mut at = 0;
            while at < len {
                // SAFETY: at + BLOCK <= len as both are multiples of BLOCK, n < 8; split() aligned the block.
                let load = |n: usize| unsafe { body.add(at).cast::<__m256i>().add(n).read_volatile() };
                let pair = |n: usize| _mm256_or_si256(load(n), load(n + 1));
                let any = _mm256_or_si256(_mm256_or_si256(pair(0), pair(2)), _mm256_or_si256(pair(4), pair(6)));
                if _mm256_testz_si256(any, any) == 0 {
                    return false;
                }
                at += BLOCK;
            }
            true
        };
        // SAFETY: the caller's promise.
        unsafe { split(start, len, BLOCK, blocks) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All ways, the chosen one with its first look included.
    fn all_ways() -> Vec<(&'static str, Scan)> {
        ways().chain([("chosen", is_zero as Scan)]).collect()
    }

    fn scan(scan: Scan, bytes: &[u8]) -> bool {
        // SAFETY: a slice is readable for its length; ways() lists only what the processor has.
        unsafe { scan(bytes.as_ptr(), bytes.len()) }
    }

    fn plain(bytes: &[u8]) -> bool {
        bytes.iter().all(|&byte| byte == 0)
    }

    #[test]
    fn every_way_agrees_with_a_plain_loop_at_every_start_and_length() {
        // Ones all around: a way that looks past either end sees them.
        let mut memory = vec![0xff_u8; 4 * 256 + 64];
        for (name, way) in all_ways() {
            for start in 0..=64 {
                for len in (0..600).chain([768, 1023, 1024]) {
                    memory.fill(0xff);
                    memory[start..start + len].fill(0);
                    let slice = &memory[start..start + len];
                    assert_eq!(scan(way, slice), plain(slice), "{name}: {len} bytes from {start}");
                }
            }
        }
    }

    #[test]
    fn every_way_finds_a_nonzero_byte_wherever_it_is() {
        let mut memory = vec![0_u8; PAGE_BYTES + 256];
        for (name, way) in all_ways() {
            for (start, len) in [(0, PAGE_BYTES), (0, 256), (1, 255), (7, 700), (63, 1025), (64, 64), (200, 13)] {
                for at in 0..memory.len() {
                    for value in [1, 0x80] {
                        memory[at] = value;
                        let slice = &memory[start..start + len];
                        assert_eq!(scan(way, slice), plain(slice), "{name}: {len} from {start}, {value:#x} at {at}");
                        memory[at] = 0;
                    }
                }
            }
        }
    }
}
