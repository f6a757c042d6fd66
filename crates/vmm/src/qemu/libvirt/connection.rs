//! A connection to libvirt, and a domain of it, as safe Rust.
use std::{
    collections::VecDeque,
    ffi::{CStr, c_char, c_int, c_longlong, c_uint, c_void},
    os::fd::{AsRawFd, OwnedFd},
    ptr::{null, null_mut},
    sync::{Arc, Mutex, PoisonError},
};

use serde_json::Value;

use super::{
    Address,
    library::{Functions, Opaque, c_text, library, taken},
};
use crate::qemu::qmp::Event;

/// Events that are kept until somebody asks for them; beyond, the oldest goes.
const EVENTS_MAX: usize = 256;
/// `VIR_UUID_STRING_BUFLEN`
const UUID_BYTES: usize = 37;
/// Domain states.
const RUNNING: c_int = 1;
const PAUSED: c_int = 3;
/// `VIR_CONNECT_LIST_DOMAINS_ACTIVE`
const ACTIVE: c_uint = 1;
/// Of a snapshot: no record of it, disks alone, files that are there already, all or none.
const DISKS_OF_THE_MOMENT: c_uint = 4 | 16 | 32 | 128;

/// Why a call of libvirt's has no result.
#[derive(Debug)]
pub(super) struct LibvirtFailure {
    /// In libvirt's words.
    pub(super) why: String,
    /// The connection is gone; what was asked for may have been done or not.
    pub(super) is_lost: bool,
}

/// What a domain's QEMU said by itself, kept by libvirt's own thread.
#[derive(Default)]
pub(super) struct Events(Mutex<VecDeque<Event>>);

impl Events {
    fn add(&self, event: Event) {
        let mut events = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() == EVENTS_MAX {
            events.pop_front();
        }
        events.push_back(event);
    }

    /// Takes those of this name.
    pub(super) fn take(&self, name: &str) -> Vec<Event> {
        let mut events = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (taken, left): (Vec<_>, Vec<_>) = events.drain(..).partition(|event| event.name == name);
        *events = left.into();
        taken
    }
}

/// A connection; closed when dropped.
pub(super) struct Connection {
    library: &'static Functions,
    handle: Opaque,
}

// SAFETY: libvirt's objects may be used by any thread.
unsafe impl Send for Connection {}

impl Connection {
    /// To this URI, or to the one that libvirt chooses by itself.
    pub(super) fn open(uri: Option<&str>) -> Result<Self, String> {
        let library = library()?;
        let text = uri.map(c_text).transpose()?;
        // SAFETY: null, or C's text, which outlives the call.
        let handle = unsafe { (library.virConnectOpen)(text.as_ref().map_or(null(), |text| text.as_ptr())) };
        match handle.is_null() {
            true => Err(library.last_error()),
            false => Ok(Self { library, handle }),
        }
    }

    /// Its URI, whoever chose it.
    pub(super) fn uri(&self) -> String {
        // SAFETY: the handle is a connection; the text is ours to free.
        unsafe { taken((self.library.virConnectGetURI)(self.handle)) }.unwrap_or_default()
    }

    /// By name or UUID.
    pub(super) fn domain(self: &Arc<Self>, name: &str) -> Result<Domain, String> {
        let text = c_text(name)?;
        for look_up in [self.library.virDomainLookupByName, self.library.virDomainLookupByUUIDString] {
            // SAFETY: a connection, and C's text, which outlives the call.
            let handle = unsafe { look_up(self.handle, text.as_ptr()) };
            if !handle.is_null() {
                return Ok(Domain { connection: Arc::clone(self), handle });
            }
        }
        Err(self.library.last_error())
    }

    /// All domains that run or are paused.
    pub(super) fn active(self: &Arc<Self>) -> Result<Vec<Domain>, LibvirtFailure> {
        let mut list: *mut Opaque = null_mut();
        // SAFETY: a connection, and a place for the list that libvirt makes.
        let count = unsafe { (self.library.virConnectListAllDomains)(self.handle, &raw mut list, ACTIVE) };
        self.check(count)?;
        let domain = |number: usize| {
            // SAFETY: the list has `count` domains, which are ours.
            let handle = unsafe { *list.add(number) };
            Domain { connection: Arc::clone(self), handle }
        };
        let domains = (0..count as usize).map(domain).collect();
        // SAFETY: libvirt allocates it by malloc, and nobody else has it.
        unsafe { libc::free(list.cast()) };
        Ok(domains)
    }

    fn is_alive(&self) -> bool {
        // SAFETY: the handle is a connection.
        unsafe { (self.library.virConnectIsAlive)(self.handle) == 1 }
    }

    fn failure(&self) -> LibvirtFailure {
        let why = self.library.last_error();
        LibvirtFailure { why, is_lost: !self.is_alive() }
    }

    fn check(&self, result: c_int) -> Result<(), LibvirtFailure> {
        if result < 0 { Err(self.failure()) } else { Ok(()) }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: the handle is ours, and not used after this.
        unsafe { (self.library.virConnectClose)(self.handle) };
    }
}

/// A domain.
pub(super) struct Domain {
    connection: Arc<Connection>,
    handle: Opaque,
}

// SAFETY: libvirt's objects may be used by any thread.
unsafe impl Send for Domain {}
// SAFETY: as above, and several at once.
unsafe impl Sync for Connection {}

impl Domain {
    fn library(&self) -> &'static Functions {
        self.connection.library
    }

    pub(super) fn name(&self) -> String {
        // SAFETY: the handle is a domain; the text is libvirt's, for as long as the domain exists.
        let text = unsafe { (self.library().virDomainGetName)(self.handle) };
        match text.is_null() {
            true => String::new(),
            // SAFETY: C's text.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        }
    }

    /// The most memory that it may have, in bytes; 0: libvirt does not say.
    pub(super) fn memory_bytes(&self) -> u64 {
        // SAFETY: the handle is a domain.
        unsafe { (self.library().virDomainGetMaxMemory)(self.handle) }.saturating_mul(1024)
    }

    /// The number of this run of it.
    pub(super) fn id(&self) -> u32 {
        // SAFETY: the handle is a domain.
        unsafe { (self.library().virDomainGetID)(self.handle) }
    }

    pub(super) fn uuid(&self) -> Result<String, LibvirtFailure> {
        let mut text = [0; UUID_BYTES];
        // SAFETY: as large as libvirt says that it must be.
        let result = unsafe { (self.library().virDomainGetUUIDString)(self.handle, text.as_mut_ptr()) };
        self.connection.check(result)?;
        // SAFETY: libvirt has ended it with a zero.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Whether libvirt takes it for one that is paused; an error if it is neither that nor runs.
    pub(super) fn is_paused(&self) -> Result<bool, LibvirtFailure> {
        let (mut state, mut reason) = (0, 0);
        // SAFETY: a domain, and places for two numbers.
        let result = unsafe { (self.library().virDomainGetState)(self.handle, &raw mut state, &raw mut reason, 0) };
        self.connection.check(result)?;
        match state {
            RUNNING => Ok(false),
            PAUSED => Ok(true),
            other => Err(LibvirtFailure { why: format!("the domain is in libvirt's state {other}"), is_lost: false }),
        }
    }

    /// Its definition as it runs. `flags`: which parts of it, as libvirt numbers them.
    pub(super) fn xml(&self, flags: u32) -> Result<String, LibvirtFailure> {
        // SAFETY: the handle is a domain; the text is ours to free.
        let text = unsafe { taken((self.library().virDomainGetXMLDesc)(self.handle, flags)) };
        text.ok_or_else(|| self.connection.failure())
    }

    pub(super) fn suspend(&self) -> Result<(), LibvirtFailure> {
        // SAFETY: the handle is a domain.
        self.connection.check(unsafe { (self.library().virDomainSuspend)(self.handle) })
    }

    pub(super) fn resume(&self) -> Result<(), LibvirtFailure> {
        // SAFETY: the handle is a domain.
        self.connection.check(unsafe { (self.library().virDomainResume)(self.handle) })
    }

    /// Has it write to other files from now on, which are there: all those that `xml` names, or none. libvirt keeps no
    /// record of it.
    pub(super) fn snapshot_disks(&self, xml: &str) -> Result<(), LibvirtFailure> {
        let text = c_text(xml).map_err(|why| LibvirtFailure { why, is_lost: false })?;
        // SAFETY: a domain, and C's text, which outlives the call.
        let snapshot =
            unsafe { (self.library().virDomainSnapshotCreateXML)(self.handle, text.as_ptr(), DISKS_OF_THE_MOMENT) };
        if snapshot.is_null() {
            return Err(self.connection.failure());
        }
        // SAFETY: it is ours, and not used after this.
        unsafe { (self.library().virDomainSnapshotFree)(snapshot) };
        Ok(())
    }

    /// libvirt's number for the operation that it has under way for the domain, if it has one.
    pub(super) fn job(&self) -> Result<Option<i32>, LibvirtFailure> {
        let (mut kind, mut count, mut values) = (0, 0, null_mut());
        let library = self.library();
        // SAFETY: a domain, and places for what comes.
        let result =
            unsafe { (library.virDomainGetJobStats)(self.handle, &raw mut kind, &raw mut values, &raw mut count, 0) };
        self.connection.check(result)?;
        let mut operation = 0;
        // SAFETY: the list that libvirt made, C's text, and a place for the number.
        unsafe {
            (library.virTypedParamsGetInt)(values, count, c"operation".as_ptr(), &raw mut operation);
            (library.virTypedParamsFree)(values, count);
        }
        Ok((kind != 0).then_some(operation))
    }

    /// Has QEMU execute a line of QMP, with a descriptor if there is one, and gives the line that it answers.
    pub(super) fn command(&self, line: &str, fd: Option<&OwnedFd>) -> Result<String, LibvirtFailure> {
        let text = c_text(line).map_err(|why| LibvirtFailure { why, is_lost: false })?;
        let mut files: Vec<c_int> = fd.into_iter().map(AsRawFd::as_raw_fd).collect();
        let mut answer: *mut c_char = null_mut();
        // SAFETY: all pointers are to what outlives the call; nothing comes back but the answer, which is ours.
        let result = unsafe {
            (self.library().virDomainQemuMonitorCommandWithFiles)(
                self.handle,
                text.as_ptr(),
                files.len() as c_uint,
                files.as_mut_ptr(),
                null_mut(),
                null_mut(),
                &raw mut answer,
                0,
            )
        };
        // SAFETY: null, or ours to free.
        let answer = unsafe { taken(answer) };
        self.connection.check(result)?;
        answer.ok_or_else(|| self.connection.failure())
    }

    /// Keeps events of this name from now on, until the guard is dropped.
    pub(super) fn listen(&self, name: &str, events: &Arc<Events>) -> Result<Listening, LibvirtFailure> {
        let text = c_text(name).map_err(|why| LibvirtFailure { why, is_lost: false })?;
        let opaque = Arc::into_raw(Arc::clone(events)).cast_mut().cast::<c_void>();
        let register = self.library().virConnectDomainQemuMonitorEventRegister;
        // SAFETY: `opaque` is an Arc's, which `forget` takes back when libvirt needs it no more.
        let number =
            unsafe { register(self.connection.handle, self.handle, text.as_ptr(), on_event, opaque, forget, 0) };
        if number < 0 {
            let failure = self.connection.failure();
            forget(opaque);
            return Err(failure);
        }
        Ok(Listening { connection: Arc::clone(&self.connection), number })
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: the handle is ours, and not used after this.
        unsafe { (self.library().virDomainFree)(self.handle) };
    }
}

/// Events are kept while this exists.
pub(super) struct Listening {
    connection: Arc<Connection>,
    number: c_int,
}

impl Drop for Listening {
    fn drop(&mut self) {
        let deregister = self.connection.library.virConnectDomainQemuMonitorEventDeregister;
        // SAFETY: the number is one that this connection gave.
        unsafe { deregister(self.connection.handle, self.number) };
    }
}

extern "C" fn on_event(
    _: Opaque,
    _: Opaque,
    name: *const c_char,
    _: c_longlong,
    _: c_uint,
    details: *const c_char,
    opaque: *mut c_void,
) {
    // SAFETY: libvirt gives what `listen` gave it, which `forget` has not taken back yet.
    let events = unsafe { &*opaque.cast_const().cast::<Events>() };
    let text = |text: *const c_char| match text.is_null() {
        true => String::new(),
        // SAFETY: C's text, for the time of this call.
        false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
    };
    events.add(Event { name: text(name), data: serde_json::from_str(&text(details)).unwrap_or(Value::Null) });
}

extern "C" fn forget(opaque: *mut c_void) {
    // SAFETY: made by `listen`, and taken back once.
    drop(unsafe { Arc::from_raw(opaque.cast_const().cast::<Events>()) });
}

/// Opens a connection and finds the domain.
pub(super) fn find(address: &Address) -> Result<(Arc<Connection>, Domain), String> {
    let connection = Arc::new(Connection::open(address.uri.as_deref()).map_err(|why| {
        let uri = address.uri.as_deref().unwrap_or("its default URI");
        format!("can't reach libvirt at {uri}: {why}; is libvirtd (or virtqemud) running, and may you use it?")
    })?);
    let domain = connection.domain(&address.domain).map_err(|why| {
        format!(
            "can't find domain {:?} at {}: {why}; virsh list shows those that run",
            address.domain,
            connection.uri()
        )
    })?;
    Ok((connection, domain))
}
