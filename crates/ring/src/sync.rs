//! What differs between the real machine and loom's model of it: atomics, cells, and the futex.

#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicUsize},
    },
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicUsize},
};

pub(crate) use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// `std`'s cell with loom's interface, which sees each access begin and end.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// Keeps what one side writes off the cache lines that the other side writes; 128 because x86 fetches lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Padded<T>(pub(crate) T);

/// A number on which threads sleep: `wait` sleeps only if the number is still the expected one.
#[derive(Debug)]
pub(crate) struct Futex {
    pub(crate) value: AtomicU32,
    #[cfg(loom)]
    sleepers: (loom::sync::Mutex<()>, loom::sync::Condvar),
}

impl Futex {
    pub(crate) fn new(value: u32) -> Self {
        Self {
            value: AtomicU32::new(value),
            #[cfg(loom)]
            sleepers: (loom::sync::Mutex::new(()), loom::sync::Condvar::new()),
        }
    }
}

#[cfg(not(loom))]
impl Futex {
    /// Sleeps while the number is `expected`, at most `timeout`; may also return for no reason.
    pub(crate) fn wait(&self, expected: u32, timeout: Option<std::time::Duration>) {
        use rustix::thread::futex::{Flags, Timespec, wait};
        let timeout = timeout
            .map(|t| Timespec { tv_sec: t.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: t.subsec_nanos().into() });
        // Every error means "look again": the number changed (EAGAIN), a signal came (EINTR), time is up (ETIMEDOUT).
        let _ = wait(&self.value, Flags::PRIVATE, expected, timeout.as_ref());
    }
    /// Wakes at most `count` sleepers.
    pub(crate) fn wake(&self, count: u32) {
        // FUTEX_WAKE on an address of ours can't fail.
        let _ = rustix::thread::futex::wake(&self.value, rustix::thread::futex::Flags::PRIVATE, count);
    }
}

#[cfg(loom)]
impl Futex {
    pub(crate) fn wait(&self, expected: u32, _timeout: Option<std::time::Duration>) {
        // As in the kernel: comparing and falling asleep are one step for those who wake.
        let held = self.sleepers.0.lock().expect("no model panics with it held");
        if self.value.load(Relaxed) == expected {
            drop(self.sleepers.1.wait(held));
        }
    }
    pub(crate) fn wake(&self, count: u32) {
        let _held = self.sleepers.0.lock().expect("no model panics with it held");
        if count == 1 { self.sleepers.1.notify_one() } else { self.sleepers.1.notify_all() }
    }
}
