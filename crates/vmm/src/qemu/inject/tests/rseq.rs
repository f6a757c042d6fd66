//! Restartable sequences: code that the kernel begins anew wherever it was interrupted.
use std::{
    arch::asm,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use super::{Work, read_byte};

/// What the kernel knows of a sequence.
#[repr(C, align(32))]
struct Sequence {
    version: u32,
    flags: u32,
    start: u64,
    length: u64,
    abort: u64,
}

/// Until there is input, in a sequence that sees whether it was gone on with where it should have begun anew: the
/// kernel takes it out of the thread's `rseq_cs` in both cases, but only one of them leads to its abort.
pub(super) fn wait_in_a_sequence() {
    static END: AtomicU32 = AtomicU32::new(0);
    let Some(rseq) = registered() else {
        println!("no rseq");
        return;
    };
    std::thread::spawn(|| {
        read_byte();
        END.store(1, Ordering::SeqCst);
    });
    println!("ready");
    let mut sequence = Sequence { version: 0, flags: 0, start: 0, length: 0, abort: 0 };
    let (mut aborts, mut interrupted) = (0u64, 0u64);
    // SAFETY: `rseq` is this thread's, and the C library leaves its field `rseq_cs` (at 8) to the program. The sequence
    // is valid as long as it is named there, and writes its own registers only. The word before `abort` is the
    // signature that the C library has registered.
    unsafe {
        asm!(
            "lea {tmp}, [rip + 2f]",
            "mov [{seq} + 8], {tmp}",
            "lea {abort}, [rip + 5f]",
            "mov [{seq} + 24], {abort}",
            "lea {abort}, [rip + 4f]",
            "sub {abort}, {tmp}",
            "mov [{seq} + 16], {abort}",
            "jmp 3f",
            ".long 0x53053053",
            "5:",
            "inc {aborts}",
            "3:",
            "mov [{rseq} + 8], {seq}",
            "2:",
            "cmp qword ptr [{rseq} + 8], 0",
            "je 6f",
            "cmp dword ptr [{end}], 0",
            "je 2b",
            "4:",
            "jmp 7f",
            "6:",
            "inc {interrupted}",
            "7:",
            "mov qword ptr [{rseq} + 8], 0",
            rseq = in(reg) rseq,
            seq = in(reg) &raw mut sequence,
            end = in(reg) END.as_ptr(),
            tmp = out(reg) _,
            abort = out(reg) _,
            aborts = inout(reg) aborts,
            interrupted = inout(reg) interrupted,
        );
    }
    assert_eq!(interrupted, 0, "interrupted, and not begun anew");
    println!("begun anew {aborts} times");
}

/// Where the C library has registered this thread's, if it has.
fn registered() -> Option<*mut u8> {
    // SAFETY: names end with 0; the symbols, where they exist (glibc 2.35), are constants of these types.
    unsafe {
        let offset = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()).cast::<isize>();
        let size = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_size".as_ptr()).cast::<u32>();
        if offset.is_null() || size.is_null() || *size == 0 {
            return None;
        }
        let thread: *mut u8;
        asm!("mov {}, fs:0", out(reg) thread);
        Some(thread.offset(*offset))
    }
}

/// Of the thread, in nanoseconds.
fn time_on_a_core(work: &Work) -> u64 {
    let text = work.proc("schedstat");
    text.split(' ').next().and_then(|number| number.parse().ok()).expect("a number first")
}

#[test]
fn a_restartable_sequence_begins_anew() {
    const TIMES: usize = 20;
    let mut work = Work::start("rseq");
    if work.expect("") == "no rseq" {
        transship_lab::lacks("a C library that registers rseq");
        return;
    }
    for _ in 0..TIMES {
        work.inject(1);
        // Interrupted again before it was in the sequence again, it would not begin that anew.
        let ran = time_on_a_core(&work);
        while time_on_a_core(&work) < ran + 1_000_000 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    use std::io::Write;
    work.input.write_all(b"end\n").unwrap();
    let anew: usize = work.expect("begun anew ").trim_end_matches(" times").parse().unwrap();
    assert!(anew >= TIMES, "{anew}");
    work.expect("done");
}
