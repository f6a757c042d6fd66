//! A restartable sequence (rseq) that the visit interrupts. Runs in the child: what is said there holds here.
//!
//! A thread that is interrupted in one must begin it anew. The kernel sees to that when the thread goes on, but there
//! it would find our call, far from the sequence, and call it over. So we do what the kernel would have done.

/// As PTRACE_GET_RSEQ_CONFIGURATION fills it.
#[repr(C)]
#[derive(Default)]
struct Configuration {
    area: u64,
    area_bytes: u32,
    signature: u32,
    flags: u32,
    padding: u32,
}

const PTRACE_GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
/// Where a thread's area names its sequence.
const SEQUENCE_AT: u64 = 8;
/// Where a sequence has its start, its length, and where to begin anew.
const BOUNDS_AT: u64 = 8;

/// Where a stopped thread must go on instead, if it stands in a sequence.
pub(super) fn begins_anew_at(thread: libc::pid_t, registers: &libc::user_regs_struct) -> Option<u64> {
    let mut configuration = Configuration::default();
    let bytes = size_of::<Configuration>();
    // SAFETY: the request writes at most as many bytes as it is told, which is what there is.
    let got = unsafe { libc::ptrace(PTRACE_GET_RSEQ_CONFIGURATION, thread, bytes, &raw mut configuration) };
    if got < 0 || configuration.area == 0 {
        return None;
    }
    let [sequence] = words(thread, configuration.area + SEQUENCE_AT)?;
    if sequence == 0 {
        return None;
    }
    let [start, length, anew] = words(thread, sequence.checked_add(BOUNDS_AT)?)?;
    // One that the thread has left already may still be named; the kernel forgets it.
    (registers.rip.wrapping_sub(start) < length).then_some(anew)
}

/// What lies there in the thread's memory, unless that can't be read.
fn words<const N: usize>(thread: libc::pid_t, address: u64) -> Option<[u64; N]> {
    let mut words = [0u64; N];
    let bytes = size_of_val(&words);
    let ours = libc::iovec { iov_base: words.as_mut_ptr().cast(), iov_len: bytes };
    let theirs = libc::iovec { iov_base: std::ptr::without_provenance_mut(address as usize), iov_len: bytes };
    // SAFETY: writes to `words` alone, as many bytes as it has; the other address is the other process's.
    let read = unsafe { libc::process_vm_readv(thread, &ours, 1, &theirs, 1, 0) };
    (usize::try_from(read) == Ok(bytes)).then_some(words)
}
