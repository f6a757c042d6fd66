//! Intel's QATzip library, loaded at run time, for machines with a QAT device.
//!
//! Nothing here is linked. Without the library or without a device the software makes the same format, and one line
//! says so.
use libc::{c_int, c_long, c_uchar, c_uint, c_ulong, c_void};
use std::path::Path;
use std::sync::{Once, OnceLock};

/// The library with the interface below; its number changes when the structures do.
const LIBRARY: &str = "libqatzip.so.3";
/// What the drivers of a device make: of the kernel's QAT generations (vfio) and of Intel's own.
const DEVICES: [&str; 2] = ["/dev/vfio", "/dev/qat_adf_ctl"];

const QZ_OK: c_int = 0;
/// The process has it already; no failure.
const QZ_DUPLICATE: c_int = 1;
const QZ_DIR_COMPRESS: c_uint = 0;

/// What makes QATzip's format on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backend {
    /// A QAT device, by Intel's library.
    Device,
    /// This program.
    Software {
        /// Why not a device, in a line.
        reason: String,
    },
}

/// Looks for the library and a device, once; the answer stays.
pub fn backend() -> &'static Backend {
    static BACKEND: OnceLock<Backend> = OnceLock::new();
    BACKEND.get_or_init(|| match library() {
        Ok(_) => Backend::Device,
        Err(reason) => Backend::Software { reason: reason.clone() },
    })
}

/// A session of the device at `level`, if there is one; else the software does it, and a line has said so.
pub(crate) fn session(level: i32) -> Option<QatSession> {
    let (Backend::Device, Ok(library)) = (backend(), library()) else { return None };
    match QatSession::open(library, level, 0, QZ_DIR_COMPRESS) {
        Ok(session) => Some(session),
        Err(code) => {
            say_once_that_it_failed(code);
            None
        }
    }
}

/// One line for all encoders.
pub(crate) fn say_once_that_it_failed(code: c_int) {
    static SAID: Once = Once::new();
    SAID.call_once(|| tracing::warn!("the QAT device failed (QATzip's code {code}); going on in software"));
}

fn library() -> &'static Result<Library, String> {
    static FOUND: OnceLock<Result<Library, String>> = OnceLock::new();
    FOUND.get_or_init(|| {
        if !DEVICES.iter().any(|device| Path::new(device).exists()) {
            return Err(format!("no QAT device (neither {} nor {} exists)", DEVICES[0], DEVICES[1]));
        }
        let library = Library::load(Path::new(LIBRARY))?;
        // Tried once with no software behind it, so that a device that can't be used is known before the first packet.
        match QatSession::open(&library, 1, 0, QZ_DIR_COMPRESS) {
            Ok(session) => drop(session),
            Err(code) => return Err(format!("{LIBRARY} found no usable QAT device (its code is {code})")),
        }
        Ok(library)
    })
}

/// `QzSession_T`, and room for what a later version may add to it.
#[repr(C)]
struct QzSession {
    hw_session_stat: c_long,
    thd_sess_stat: c_int,
    internal: *mut c_void,
    total_in: c_ulong,
    total_out: c_ulong,
    _later: [u64; 32],
}

/// The beginning of `QzSessionParams_T`, the same since the format field came in, and room for the rest of it.
#[repr(C)]
struct QzParams {
    huffman_header: c_uint,
    direction: c_uint,
    data_format: c_uint,
    level: c_uint,
    algorithm: c_uchar,
    max_forks: c_uint,
    software_backup: c_uchar,
    hardware_buffer: c_uint,
    _rest: [u64; 32],
}

type SessionCall = unsafe extern "C" fn(*mut QzSession) -> c_int;
type Init = unsafe extern "C" fn(*mut QzSession, c_uchar) -> c_int;
type Defaults = unsafe extern "C" fn(*mut QzParams) -> c_int;
type Setup = unsafe extern "C" fn(*mut QzSession, *mut QzParams) -> c_int;
type Compress =
    unsafe extern "C" fn(*mut QzSession, *const c_uchar, *mut c_uint, *mut c_uchar, *mut c_uint, c_uint) -> c_int;

/// The functions that are used; they live as long as the library, which is never unloaded.
#[derive(Clone, Copy)]
struct Library {
    init: Init,
    defaults: Defaults,
    setup: Setup,
    compress: Compress,
    teardown: SessionCall,
    close: SessionCall,
}

impl Library {
    fn load(path: &Path) -> Result<Self, String> {
        // SAFETY: loading runs the library's initialisers; it is the system's own library, found as every program
        // finds its.
        let library = unsafe { libloading::Library::new(path) }
            .map_err(|error| format!("can't load {}: {error}", path.display()))?;
        // Its own threads may outlive any session.
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the type is that of qatzip.h for this number of the library, which is never unloaded.
                *unsafe { library.get($name) }
                    .map_err(|error| format!("{} lacks a function: {error}", path.display()))?
            };
        }
        Ok(Self {
            init: function!(b"qzInit\0"),
            defaults: function!(b"qzGetDefaults\0"),
            setup: function!(b"qzSetupSession\0"),
            compress: function!(b"qzCompress\0"),
            teardown: function!(b"qzTeardownSession\0"),
            close: function!(b"qzClose\0"),
        })
    }
}

/// One encoder's session.
pub(crate) struct QatSession {
    library: Library,
    /// Boxed: the library may keep its address.
    session: Box<QzSession>,
}

// SAFETY: the library allows a session to be used by any thread, one at a time; &mut sees to that.
unsafe impl Send for QatSession {}

impl QatSession {
    /// `software` 0: fail without a device; 1: the library's own software.
    fn open(library: &Library, level: i32, software: c_uchar, direction: c_uint) -> Result<Self, c_int> {
        let zero = QzSession {
            hw_session_stat: 0,
            thd_sess_stat: 0,
            internal: std::ptr::null_mut(),
            total_in: 0,
            total_out: 0,
            _later: [0; 32],
        };
        let mut this = Self { library: *library, session: Box::new(zero) };
        // SAFETY: the session is zeroed as qatzip.h asks, at least as long as QzSession_T, and stays where it is.
        let code = unsafe { (library.init)(&raw mut *this.session, software) };
        // Software counts as success (codes of "using SW" are positive) only where it was asked for.
        if !(code == QZ_OK || code == QZ_DUPLICATE || software == 1 && code > 0) {
            return Err(code);
        }
        let mut params = QzParams {
            huffman_header: 0,
            direction: 0,
            data_format: 0,
            level: 0,
            algorithm: 0,
            max_forks: 0,
            software_backup: 0,
            hardware_buffer: 0,
            _rest: [0; 32],
        };
        // SAFETY: longer than QzSessionParams_T of every version with this number.
        let code = unsafe { (library.defaults)(&raw mut params) };
        if code != QZ_OK {
            return Err(code);
        }
        params.direction = direction;
        params.level = level.unsigned_abs();
        params.software_backup = software;
        // SAFETY: both as above; the library copies the parameters.
        let code = unsafe { (library.setup)(&raw mut *this.session, &raw mut params) };
        if code == QZ_OK || software == 1 && code > 0 { Ok(this) } else { Err(code) }
    }

    /// Replaces `out` by `pages` in gzip members.
    pub(crate) fn compress(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<(), c_int> {
        const TOO_LONG: c_int = -3;
        out.clear();
        out.reserve(pages.len() * 2 + 4096);
        let mut taken = c_uint::try_from(pages.len()).map_err(|_| TOO_LONG)?;
        let mut written = c_uint::try_from(out.capacity()).map_err(|_| TOO_LONG)?;
        // SAFETY: `taken` bytes are readable at `pages`, `written` are writable at `out` (its capacity); last = 1
        // ends the members.
        let code = unsafe {
            (self.library.compress)(
                &raw mut *self.session,
                pages.as_ptr(),
                &raw mut taken,
                out.as_mut_ptr(),
                &raw mut written,
                1,
            )
        };
        if code != QZ_OK || taken as usize != pages.len() || written as usize > out.capacity() {
            return Err(if code == QZ_OK { TOO_LONG } else { code });
        }
        // SAFETY: the library wrote `written` bytes, no more than the capacity that it was given.
        unsafe { out.set_len(written as usize) };
        Ok(())
    }
}

impl Drop for QatSession {
    fn drop(&mut self) {
        // SAFETY: the session was given to qzInit; both functions accept one that was only half set up. They are
        // called once.
        unsafe {
            (self.library.teardown)(&raw mut *self.session);
            (self.library.close)(&raw mut *self.session);
        }
    }
}

#[cfg(test)]
mod tests;
