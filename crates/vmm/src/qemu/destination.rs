//! A QEMU that waits for a guest (`-incoming defer`).
use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::{Duration, Instant},
};

use serde_json::json;
use transship_guest::{DestinationGuest, DiskFile, GuestError, StateFormat, StateMade};
use transship_memory::{Area, GuestMemory, Missing, PageSet, Region};
use transship_wire::{
    GuestDescription,
    qemu::{Step, StreamReader},
};

use super::{
    abandoned, device_state, disk_files, emptying, faults, machine,
    memory::{self, Backend},
    migration::{self, Form, Purpose, STATE_FD, STATE_URI, Settings},
    qmp::{Command, Qmp, QmpError, Question},
    questions, state_channel,
    survey::{DestinationSeen, lazy},
};
use crate::freeze::Freezer;

/// How long QEMU may take to load what it has been given.
const LOAD_WAIT: Duration = Duration::from_secs(60);
/// How long it may take to stop a guest that lacks pages: it answers at once or hangs on one of them.
const PAUSE_WAIT: Duration = Duration::from_secs(10);
const PIECE_BYTES: usize = 256 << 10;
/// What is read at once to see of which form a stream is.
const FORM_BYTES: usize = 4096;
/// What a state ends with that has no trailer.
const END_OF_SECTIONS: u8 = 0;
/// A trailer that describes nothing: its type, its length, its text.
const EMPTY_TRAILER: &[u8] = b"\x06\0\0\0\x02{}";
/// The name of an export that is there for a moment.
const EXPORT: &str = "transship-open";
/// Another process that may have the guest's disks, in words.
pub(super) const SOURCE: &str = "the source's QEMU, unless its guest runs,";

/// A stock QEMU as the destination of a move. Nothing runs in it before [`DestinationGuest::start`].
pub struct QemuDestination {
    qmp: Qmp,
    description: GuestDescription,
    state_format: StateFormat,
    backends: Vec<Backend>,
    memory: GuestMemory,
    /// What an adapter makes. Which one comes the source decides, by its own QEMU, which is as ours as a rule.
    form_of_adapter: Form,
    /// What missing pages take, if it was had beforehand.
    prepared: Option<Result<Prepared, GuestError>>,
    /// Once pages may be missing.
    freezer: Option<Freezer>,
    /// All settings that loading may change, as they were.
    before: Option<Settings>,
    /// Our end of the socket that the state goes through, if QEMU has the other one already.
    channel: Option<UnixStream>,
    /// Settings to be put back, and what was set in their place: for a state of which form.
    settings: Option<(Settings, Form)>,
    ran_since: Option<Instant>,
}

/// What takes rights of all that has threads wait for missing pages.
struct Prepared {
    uffd: OwnedFd,
    areas: Vec<Area>,
    freezer: Freezer,
}

impl QemuDestination {
    /// Attaches to the QEMU whose QMP socket this is. Changes nothing in it.
    ///
    /// # Errors
    /// It does not wait for a guest, or its memory can't be written from here; each with its cure.
    pub fn attach(socket: &Path) -> Result<Self, GuestError> {
        let mut qmp = Qmp::connect(socket)?;
        qmp.ask_ahead(&questions::attachment())?;
        let _mappings = qmp.process().hold_mappings();
        let seen = DestinationSeen::look(&mut qmp, &mut Err)?;
        let DestinationSeen { backends, memory, description, state_format } = seen;
        let left_out = memory::can_be_left_out(&backends) && !device_state::is_quicker(&mut qmp)?;
        qmp.forget_answers();
        Ok(Self {
            qmp,
            description,
            state_format,
            backends,
            memory,
            form_of_adapter: if left_out { Form::SharedLeftOut } else { Form::Plain },
            prepared: None,
            freezer: None,
            before: None,
            channel: None,
            settings: None,
            ran_since: None,
        })
    }

    fn prepare(&mut self) -> Result<Prepared, GuestError> {
        lazy(&mut self.qmp, &self.memory, &mut Err)?;
        let areas = memory::areas(&mut self.qmp, &self.backends)?;
        let freezer = Freezer::of(self.qmp.pid())?;
        Ok(Prepared { uffd: faults::for_all(&mut self.qmp)?, areas, freezer })
    }

    /// Sets QEMU up for a state of this form. Whatever the state says, the guest does not run when it is loaded, and
    /// the disks are left to whoever has them.
    fn ready_for(&mut self, form: Form) -> Result<(), GuestError> {
        if self.settings.as_ref().is_some_and(|(_, set_for)| *set_for == form) {
            return Ok(());
        }
        self.restore_settings();
        self.qmp.ask_ahead(&questions::loading())?;
        let ready = self.set_for(form);
        self.qmp.forget_answers();
        self.settings = Some((ready?, form));
        Ok(())
    }

    /// By answers that were asked ahead. Returns what was set before.
    fn set_for(&mut self, form: Form) -> Result<Settings, GuestError> {
        self.qmp.stop(PAUSE_WAIT)?;
        if self.before.is_none() {
            self.before = Some(Settings::now(&mut self.qmp)?);
        }
        Settings::apply(&mut self.qmp, Purpose::Load(form))
    }

    /// Hands QEMU the other end of a socket. One that is left over, by whoever was killed, is replaced.
    fn offer(&mut self) -> Result<UnixStream, GuestError> {
        let (ours, qemus) = UnixStream::pair().map_err(state_channel::failed)?;
        ours.set_write_timeout(Some(LOAD_WAIT)).map_err(state_channel::failed)?;
        self.qmp.send_fd(STATE_FD, qemus.as_fd())?;
        Ok(ours)
    }

    /// Has QEMU load from the other end of that socket.
    fn incoming(&self) -> Command {
        let mut arguments = json!({ "uri": STATE_URI });
        if self.qmp.version() >= (9, 1) {
            // So that QEMU lives to tell us what it did not like.
            arguments["exit-on-error"] = json!(false);
        }
        ("migrate-incoming", arguments)
    }

    /// Tells QEMU to load from the other end of the returned socket.
    fn listen(&mut self) -> Result<UnixStream, GuestError> {
        let ours = match self.channel.take() {
            Some(channel) => channel,
            None => self.offer()?,
        };
        self.qmp.forget_events();
        let (command, arguments) = self.incoming();
        self.qmp.execute(command, arguments)?;
        Ok(ours)
    }

    /// Has QEMU load the state, and returns when it is done with it, be it by failing.
    fn load(&mut self, state: &mut dyn Read) -> Result<(), GuestError> {
        let to = self.listen()?;
        let soon = match &self.settings {
            Some((settings, _)) => settings.prepare_restore(&mut self.qmp)?,
            None => false,
        };
        let pumped = pump(state, to);
        let completed = migration::wait_completed(&mut self.qmp, LOAD_WAIT);
        if soon {
            self.restore_settings_and_ask(&[machine::state_question()]);
        }
        let loaded = match pumped {
            Ok(()) | Err(Pump::Write) => completed
                .map_err(|e| GuestError::vmm(format!("the destination did not load the device state: {e}")))
                .and_then(|()| self.check_loaded_and_stopped()),
            Err(Pump::Read(e)) => Err(broken_off(e)),
        };
        self.qmp.forget_answers();
        loaded
    }

    /// Has QEMU open the disks of a guest that stays as it is. QEMU 10 can move and save a guest whose disks nobody has
    /// opened since it came; older ones end by an assertion then.
    fn open_disks(&mut self) -> Result<(), GuestError> {
        if self.qmp.version() >= (10, 0) {
            return Ok(());
        }
        let nodes = self.qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
        for node in nodes.as_array().into_iter().flatten() {
            // An export opens the disk that it is of, also if it is refused then because nothing is there to export it.
            let export = json!({ "type": "nbd", "id": EXPORT, "node-name": node["node-name"], "writable": false });
            if self.qmp.execute("block-export-add", export).is_ok() {
                self.qmp.execute("block-export-del", json!({ "id": EXPORT }))?;
            }
        }
        Ok(())
    }

    /// Puts the settings back, if that was not done.
    fn restore_settings(&mut self) {
        self.restore_settings_and_ask(&[]);
    }

    /// The same, with these asked ahead behind it.
    fn restore_settings_and_ask(&mut self, questions: &[Question]) {
        let Some((settings, _)) = self.settings.take() else { return };
        match settings.restore_and_ask(&mut self.qmp, questions) {
            Err(why) if !self.is_gone() => {
                tracing::warn!("can't restore the destination QEMU's migration settings: {why}");
            }
            _ => {}
        }
    }

    /// Asked by its own connection, too: this process may not have the right to make another one any more.
    fn is_gone(&mut self) -> bool {
        let closed = |error: QmpError| matches!(error, QmpError::Closed { .. });
        crate::is_gone(self.qmp.path()) || self.qmp.execute("query-version", json!({})).is_err_and(closed)
    }

    /// What must hold before the source may give the guest up.
    fn check_loaded_and_stopped(&mut self) -> Result<(), GuestError> {
        match machine::run_state(&mut self.qmp)?.as_str() {
            "inmigrate" => {
                Err(GuestError::vmm("QEMU reports the device state as loaded, but still waits for a guest".to_owned()))
            }
            "running" => {
                self.qmp.stop(PAUSE_WAIT)?;
                Err(GuestError::vmm(
                    "QEMU started the guest too early; it was stopped again; start a new QEMU".to_owned(),
                ))
            }
            _ => Ok(()),
        }
    }
}

impl DestinationGuest for QemuDestination {
    fn description(&self) -> GuestDescription {
        self.description.clone()
    }

    fn memory(&self) -> GuestMemory {
        self.memory.clone()
    }

    fn answered(&self) -> Option<Instant> {
        self.qmp.answered()
    }

    fn ran_since(&self) -> Option<Instant> {
        self.ran_since
    }

    fn state_format(&self) -> StateFormat {
        self.state_format.clone()
    }

    fn process(&self) -> Option<i32> {
        Some(self.qmp.pid())
    }

    fn prepare_to_miss(&mut self) {
        self.prepared = Some(self.prepare());
    }

    fn own_memory(&self) -> Option<String> {
        match &self.prepared {
            Some(Ok(Prepared { areas, .. })) => emptying::all(&self.qmp, &self.memory, areas),
            _ => None,
        }
    }

    fn may_miss(&mut self) -> Result<(), GuestError> {
        match self.prepared.take() {
            None => lazy(&mut self.qmp, &self.memory, &mut Err),
            Some(Err(why)) => Err(why),
            prepared => {
                self.prepared = prepared;
                Ok(())
            }
        }
    }

    fn missing(&mut self, lacks: &[PageSet]) -> Result<Missing, GuestError> {
        let Prepared { uffd, areas, freezer } = self.prepared.take().unwrap_or_else(|| self.prepare())?;
        self.freezer = Some(freezer);
        let pages: Vec<_> = self.memory.regions().iter().map(Region::pages).collect();
        let missing = Missing::new(uffd, areas, &pages)?;
        emptying::give_back(&self.qmp, &self.memory, &missing.areas(), lacks)?;
        // Asked only now that nobody can fill a hole past us any more.
        crate::check_holes(&self.memory, lacks)?;
        Ok(missing)
    }

    fn stop(&mut self) -> Result<String, GuestError> {
        let asked = pause(&mut self.qmp);
        match &self.freezer {
            Some(freezer) => freezer.unless_stopped(asked),
            None => Freezer::of(self.qmp.pid())?.unless_stopped(asked),
        }
    }

    fn last_will(&mut self) -> Result<String, GuestError> {
        match &self.before {
            Some(before) => abandoned::loading(before),
            None => abandoned::loading(&Settings::now(&mut self.qmp)?),
        }
    }

    fn writable_disks(&mut self) -> Result<Vec<DiskFile>, GuestError> {
        disk_files::list(&mut self.qmp, disk_files::Which::Writable)
    }

    fn written_elsewhere(&mut self, disks: &[DiskFile]) -> Option<(DiskFile, String)> {
        disk_files::written_elsewhere(self.qmp.pid(), disks)
    }

    fn expect_state(&mut self, made: StateMade) -> Result<(), GuestError> {
        self.ready_for(match made {
            StateMade::ByAdapter => self.form_of_adapter,
            StateMade::ByVmm => Form::SharedLeftOut,
        })?;
        self.channel = Some(self.offer()?);
        let incoming = self.incoming();
        self.qmp.type_ahead(&incoming)?;
        Ok(())
    }

    fn load_state(&mut self, state: &mut dyn Read) -> Result<(), GuestError> {
        let (form, begin) = form_of(state)?;
        self.ready_for(form)?;
        // What is loaded is waited for: settings that take long are put back later.
        self.load(&mut begin.as_slice().chain(state)).inspect_err(|_| self.restore_settings())
    }

    fn check_alive(&mut self) -> Result<(), GuestError> {
        Ok(self.qmp.check_alive()?)
    }

    fn tidy(&mut self) {
        self.restore_settings();
        // What it is told next, as a rule. If QEMU is gone that says so.
        let _ = self.qmp.type_cont_ahead();
    }

    fn start(&mut self, run: bool) -> Result<(), GuestError> {
        if !run {
            self.restore_settings();
            self.check_loaded_and_stopped()?;
            return self.open_disks();
        }
        let runs = machine::let_run(&mut self.qmp, SOURCE);
        self.ran_since = runs.is_ok().then(Instant::now);
        self.restore_settings();
        runs
    }

    fn start_hint(&self) -> String {
        self.qmp.cont_by_hand()
    }
}

impl Drop for QemuDestination {
    fn drop(&mut self) {
        self.restore_settings();
        if self.channel.take().is_some() {
            // If this fails the next one replaces it.
            let _ = self.qmp.execute("closefd", json!({ "fdname": STATE_FD }));
        }
    }
}

/// Reads the stream up to where it says of which form it is. The bytes that were read. What is none is for QEMU to
/// judge.
fn form_of(state: &mut dyn Read) -> Result<(Form, Vec<u8>), GuestError> {
    let (mut reader, mut bytes, mut used) = (StreamReader::new(), Vec::new(), 0);
    loop {
        match reader.next(&bytes[used..]) {
            Err(_) => return Ok((Form::SharedLeftOut, bytes)),
            Ok(Step::Done { used: more, .. }) => used += more,
            Ok(Step::More { .. }) => {
                let have = bytes.len();
                bytes.resize(have + FORM_BYTES, 0);
                let read = loop {
                    match state.read(&mut bytes[have..]) {
                        Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                        read => break read.map_err(broken_off)?,
                    }
                };
                bytes.truncate(have + read);
                if read == 0 {
                    return Ok((Form::SharedLeftOut, bytes));
                }
            }
        }
        if let Some(configuration) = reader.configuration() {
            let form = if configuration.ignore_shared { Form::SharedLeftOut } else { Form::Plain };
            return Ok((form, bytes));
        }
    }
}

fn broken_off(source: io::Error) -> GuestError {
    let cure = "start a new destination QEMU";
    GuestError::System { what: "read the device state to its end".to_owned(), source, cure }
}

/// Has QEMU stop its guest, if it can.
pub(super) fn pause(qmp: &mut Qmp) -> Result<(), GuestError> {
    qmp.stop(PAUSE_WAIT)?;
    match machine::run_state(qmp)?.as_str() {
        "running" => Err(GuestError::vmm("QEMU runs its guest again right after it was stopped".to_owned())),
        _ => Ok(()),
    }
}

/// Which end failed.
enum Pump {
    Read(io::Error),
    /// QEMU knows better why.
    Write,
}

/// Carries all of the state over, and closes. QEMU complains of a state without a trailer, and takes no notice of what
/// is in it.
fn pump(state: &mut dyn Read, mut to: UnixStream) -> Result<(), Pump> {
    let mut piece = vec![0; PIECE_BYTES];
    let mut last = None;
    loop {
        match state.read(&mut piece) {
            Ok(0) => {
                if last == Some(END_OF_SECTIONS) {
                    // If it does not listen any more it does not miss anything.
                    let _ = to.write_all(EMPTY_TRAILER);
                }
                return Ok(());
            }
            Ok(count) => {
                to.write_all(&piece[..count]).map_err(|_| Pump::Write)?;
                last = piece[..count].last().copied();
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(Pump::Read(e)),
        }
    }
}
