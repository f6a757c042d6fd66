//! libvirt's own client library, found when it is needed: a machine without libvirt needs none to run this program,
//! and none to build it.
//!
//! Only functions whose arguments are numbers, text and pointers that the library itself made are used, so that no
//! layout of its structures matters here.
use std::{
    ffi::{CStr, CString, c_char, c_int, c_longlong, c_uint, c_ulong, c_void},
    sync::OnceLock,
};

use libloading::Library;

/// libvirt's names of the libraries since they exist.
const CLIENT: &str = "libvirt.so.0";
const QEMU: &str = "libvirt-qemu.so.0";

/// Something of the library's that only it looks into.
pub(super) type Opaque = *mut c_void;
/// Called with an event of a domain's QEMU: connection, domain, name, seconds, microseconds, details, what was given
/// when it was registered.
pub(super) type OnEvent = extern "C" fn(Opaque, Opaque, *const c_char, c_longlong, c_uint, *const c_char, *mut c_void);
type OnFree = extern "C" fn(*mut c_void);
type OnError = extern "C" fn(*mut c_void, *mut c_void);

macro_rules! functions {
    ($($library:ident $name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions, each as libvirt's headers declare it.
        #[allow(non_snake_case, reason = "libvirt's own names")]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            _client: Library,
            _qemu: Library,
        }

        impl Functions {
            fn load() -> Result<Self, libloading::Error> {
                // SAFETY: libvirt's libraries do nothing when they are loaded that a program could notice.
                let (client, qemu) = unsafe { (Library::new(CLIENT)?, Library::new(QEMU)?) };
                Ok(Self {
                    // SAFETY: the types are those of libvirt's public headers, which never change (its soname is 0).
                    $($name: *unsafe { $library(&client, &qemu).get(concat!(stringify!($name), "\0").as_bytes())? },)*
                    _client: client,
                    _qemu: qemu,
                })
            }
        }
    };
}

fn main<'a>(client: &'a Library, _: &'a Library) -> &'a Library {
    client
}

fn qemu<'a>(_: &'a Library, qemu: &'a Library) -> &'a Library {
    qemu
}

functions! {
    main virInitialize: fn() -> c_int;
    main virSetErrorFunc: fn(*mut c_void, OnError);
    main virEventRegisterDefaultImpl: fn() -> c_int;
    main virEventRunDefaultImpl: fn() -> c_int;
    main virGetLastErrorMessage: fn() -> *const c_char;
    main virConnectOpen: fn(*const c_char) -> Opaque;
    main virConnectClose: fn(Opaque) -> c_int;
    main virConnectIsAlive: fn(Opaque) -> c_int;
    main virConnectGetURI: fn(Opaque) -> *mut c_char;
    main virConnectListAllDomains: fn(Opaque, *mut *mut Opaque, c_uint) -> c_int;
    main virDomainLookupByName: fn(Opaque, *const c_char) -> Opaque;
    main virDomainLookupByUUIDString: fn(Opaque, *const c_char) -> Opaque;
    main virDomainFree: fn(Opaque) -> c_int;
    main virDomainGetID: fn(Opaque) -> c_uint;
    main virDomainGetUUIDString: fn(Opaque, *mut c_char) -> c_int;
    main virDomainGetName: fn(Opaque) -> *const c_char;
    main virDomainGetMaxMemory: fn(Opaque) -> c_ulong;
    main virDomainGetXMLDesc: fn(Opaque, c_uint) -> *mut c_char;
    main virDomainGetState: fn(Opaque, *mut c_int, *mut c_int, c_uint) -> c_int;
    main virDomainSuspend: fn(Opaque) -> c_int;
    main virDomainResume: fn(Opaque) -> c_int;
    main virDomainSnapshotCreateXML: fn(Opaque, *const c_char, c_uint) -> Opaque;
    main virDomainSnapshotFree: fn(Opaque) -> c_int;
    main virDomainGetJobStats: fn(Opaque, *mut c_int, *mut *mut c_void, *mut c_int, c_uint) -> c_int;
    main virTypedParamsGetInt: fn(*mut c_void, c_int, *const c_char, *mut c_int) -> c_int;
    main virTypedParamsFree: fn(*mut c_void, c_int);
    qemu virDomainQemuMonitorCommandWithFiles:
        fn(Opaque, *const c_char, c_uint, *mut c_int, *mut c_uint, *mut *mut c_int, *mut *mut c_char, c_uint) -> c_int;
    qemu virConnectDomainQemuMonitorEventRegister:
        fn(Opaque, Opaque, *const c_char, OnEvent, *mut c_void, OnFree, c_uint) -> c_int;
    qemu virConnectDomainQemuMonitorEventDeregister: fn(Opaque, c_int) -> c_int;
}

/// The library, ready for use.
///
/// # Errors
/// It is not there, or too old: the text says what to do.
pub(super) fn library() -> Result<&'static Functions, String> {
    static LOADED: OnceLock<Result<Functions, String>> = OnceLock::new();
    LOADED.get_or_init(load).as_ref().map_err(Clone::clone)
}

fn load() -> Result<Functions, String> {
    let functions = Functions::load().map_err(|e| {
        format!("can't load libvirt's client library, 8.2 or newer: {e}; install it (Debian: libvirt0, Fedora: libvirt-libs)")
    })?;
    // SAFETY: no arguments to go wrong; the error function lives as long as the program.
    unsafe {
        if (functions.virInitialize)() < 0 || (functions.virEventRegisterDefaultImpl)() < 0 {
            return Err(format!("can't prepare libvirt's client library: {}", functions.last_error()));
        }
        (functions.virSetErrorFunc)(std::ptr::null_mut(), say_nothing);
    }
    let run = functions.virEventRunDefaultImpl;
    // It moves what comes to connections and their callbacks, for as long as this program runs.
    // SAFETY: the loop may run in any one thread once it is registered.
    let events = move || while unsafe { run() } >= 0 {};
    std::thread::Builder::new()
        .name("libvirt".into())
        .spawn(events)
        .map_err(|e| format!("can't start a thread: {e}"))?;
    Ok(functions)
}

/// Every error comes back from the call, too.
extern "C" fn say_nothing(_: *mut c_void, _: *mut c_void) {}

impl Functions {
    /// Why the last call of this thread failed.
    pub(super) fn last_error(&self) -> String {
        // SAFETY: the text is the library's, of this thread, and stays until its next call.
        let text = unsafe { (self.virGetLastErrorMessage)() };
        if text.is_null() {
            return "no reason given".to_owned();
        }
        // SAFETY: it is not null, and C's text.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// A text that libvirt made for its caller.
///
/// # Safety
/// `text` is null, or a text that the caller has to free.
pub(super) unsafe fn taken(text: *mut c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: as the caller promises.
    let copy = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    // SAFETY: libvirt allocates it by malloc, and nobody else has it.
    unsafe { libc::free(text.cast()) };
    Some(copy)
}

/// For libvirt's calls.
pub(super) fn c_text(text: &str) -> Result<CString, String> {
    CString::new(text).map_err(|_| format!("{text:?} has a zero byte, which libvirt can't take"))
}
