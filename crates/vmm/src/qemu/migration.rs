//! QEMU's own migration, which carries everything but the guest's memory: the device state of a stopped guest.
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use transship_guest::GuestError;

use super::{
    by_hand,
    qmp::{Command, Qmp, QmpError, Question},
};

/// The name of the descriptor that QEMU writes to or reads from. Always the same, so that a leftover is replaced. Only
/// we know it: each connection has names of its own.
pub(super) const STATE_FD: &str = "state";
/// The same as a migration URI.
pub(super) const STATE_URI: &str = "fd:state";
/// The capability that leaves shared memory out of the stream.
const IGNORE_SHARED: &str = "x-ignore-shared";
const MULTIFD: &str = "multifd";
/// How long QEMU may take to clean up behind a migration, and how often it is asked, as no event tells.
const CLEANUP_WAIT: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// How long to rely on an event before asking again.
const EVENT_WAIT: Duration = Duration::from_secs(1);

/// Whether the other end answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answers {
    /// QEMU is done, and gives its guest up, when it has written everything.
    No,
    /// QEMU has a return path, and is done when it is told so on it. Until then the guest is still its own.
    Yes,
}

/// What a stream says of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Shared files with a name are left out (`x-ignore-shared`).
    SharedLeftOut,
    /// It may have pages of all memory.
    Plain,
}

/// What a QEMU is set up for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// To write its state, without shared memory.
    Save(Answers),
    /// To load a state of this form.
    Load(Form),
}

impl Purpose {
    const ALL: [Self; 4] =
        [Self::Save(Answers::No), Self::Save(Answers::Yes), Self::Load(Form::SharedLeftOut), Self::Load(Form::Plain)];

    /// What a capability must be for our one plain stream; none: as the user has it.
    fn capability(self, name: &str) -> Option<bool> {
        match name {
            IGNORE_SHARED => Some(self != Self::Load(Form::Plain)),
            "events" => Some(true),
            "return-path" => Some(self == Self::Save(Answers::Yes)),
            // A destination that locked the disks when it has loaded would keep the source from taking its guest back.
            // At a source it means nothing.
            "late-block-activate" => Some(true),
            // A check of the user's own, which works with a plain stream.
            "validate-uuid" => None,
            _ => Some(false),
        }
    }

    /// What parameters must be.
    fn parameters(self) -> Vec<(&'static str, Value)> {
        let mut parameters = vec![("tls-creds", json!("")), ("mode", json!("normal"))];
        // Whoever loads takes what comes. What is not set need not be put back while the guest stands still.
        if matches!(self, Self::Save(_)) {
            parameters.push(("max-bandwidth", json!(0)));
        }
        parameters
    }
}

/// QEMU's migration settings as they were, to be put back.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Settings {
    capabilities: Vec<Value>,
    parameters: Map<String, Value>,
}

impl Settings {
    /// Sets what the device state needs, and nothing that is so already.
    pub(super) fn apply(qmp: &mut Qmp, purpose: Purpose) -> Result<Self, GuestError> {
        let (before, wanted) = Current::ask(qmp)?.planned(purpose);
        if let Err(e) = set(qmp, &wanted.capabilities, wanted.parameters, &[]) {
            // Half of it may be set.
            let _ = before.restore(qmp);
            return Err(e.into());
        }
        Ok(before)
    }

    /// The settings as they are, of all that `apply` might set.
    pub(super) fn now(qmp: &mut Qmp) -> Result<Self, GuestError> {
        let current = Current::ask(qmp)?;
        let mut before = Self::default();
        for purpose in Purpose::ALL {
            let (other, _) = current.planned(purpose);
            let new = other.capabilities.into_iter().filter(|one| !before.capabilities.contains(one));
            before.capabilities.extend(new.collect::<Vec<_>>());
            before.parameters.extend(other.parameters);
        }
        Ok(before)
    }

    /// Has QEMU read what it takes to put the capabilities back, but for its end. Whether it has, and [`Self::restore`]
    /// may follow as soon as QEMU has loaded.
    pub(super) fn prepare_restore(&self, qmp: &mut Qmp) -> Result<bool, GuestError> {
        if self.capabilities.is_empty() || self.has_multifd() {
            return Ok(false);
        }
        Ok(qmp.type_ahead(&set_capabilities(&self.capabilities))?)
    }

    /// It is to be on again.
    fn has_multifd(&self) -> bool {
        self.capabilities.contains(&json!({ "capability": MULTIFD, "state": true }))
    }

    /// Puts back what `apply` changed.
    ///
    /// # Errors
    /// Some of it was refused; all the rest is as it was.
    pub(super) fn restore(&self, qmp: &mut Qmp) -> Result<(), GuestError> {
        self.restore_and_ask(qmp, &[])
    }

    /// The same, with these asked ahead behind it.
    pub(super) fn restore_and_ask(&self, qmp: &mut Qmp, questions: &[Question]) -> Result<(), GuestError> {
        if self.has_multifd() {
            wait_cleaned_up(qmp)?;
        }
        // Together, as some need others; then one by one, so that one that is refused does not keep the others.
        let capabilities = set(qmp, &self.capabilities, Map::new(), questions).or_else(|error| {
            let one = |capability: &Value| set(qmp, std::slice::from_ref(capability), Map::new(), &[]);
            if_refused(error, self.capabilities.iter().map(one))
        });
        let parameters = set(qmp, &[], self.parameters.clone(), &[]).or_else(|error| {
            let alone = |(name, value): (&String, &Value)| Map::from_iter([(name.clone(), value.clone())]);
            let one = |parameter| set(qmp, &[], alone(parameter), &[]);
            if_refused(error, self.parameters.iter().map(one))
        });
        Ok(capabilities.and(parameters)?)
    }
}

/// What QEMU's migration is set to now.
struct Current {
    capabilities: Vec<(String, bool)>,
    parameters: Value,
}

impl Current {
    fn ask(qmp: &mut Qmp) -> Result<Self, QmpError> {
        let capabilities = capabilities_of(qmp)?;
        Ok(Self { capabilities, parameters: qmp.execute("query-migrate-parameters", json!({}))? })
    }

    /// What is to be set and is not so already: as it is, and as it is to be.
    fn planned(&self, purpose: Purpose) -> (Settings, Settings) {
        let (mut before, mut wanted) = (Settings::default(), Settings::default());
        for (name, state) in &self.capabilities {
            let Some(to_be) = purpose.capability(name).filter(|to_be| to_be != state) else { continue };
            wanted.capabilities.push(json!({ "capability": name, "state": to_be }));
            before.capabilities.push(json!({ "capability": name, "state": state }));
        }
        for (name, to_be) in purpose.parameters() {
            let Some(value) = self.parameters.get(name).filter(|value| **value != to_be) else { continue };
            before.parameters.insert(name.to_owned(), value.clone());
            wanted.parameters.insert(name.to_owned(), to_be);
        }
        (before, wanted)
    }
}

/// Tries all of these where QEMU has refused them together; one that does not answer is not asked again.
fn if_refused(error: QmpError, each: impl Iterator<Item = Result<(), QmpError>>) -> Result<(), QmpError> {
    match error {
        QmpError::Refused { .. } => each.fold(Ok(()), Result::and),
        error => Err(error),
    }
}

/// Waits until QEMU has cleaned up behind a migration. It calls a migration over before that, and what there is to
/// clean up it sees by its capabilities: if multifd is switched on again too early, it looks for channels that never
/// were, and dies. Until then the migration is among the things that can be yanked.
fn wait_cleaned_up(qmp: &mut Qmp) -> Result<(), GuestError> {
    let deadline = Instant::now() + CLEANUP_WAIT;
    loop {
        match qmp.execute("query-yank", json!({})) {
            Ok(instances) if instances.as_array().into_iter().flatten().any(|one| one["type"] == "migration") => {}
            // QEMU before 6.0 can't say.
            Ok(_) | Err(QmpError::Refused { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        let now = Instant::now();
        if now >= deadline {
            let seconds = CLEANUP_WAIT.as_secs();
            let what = format!("QEMU has not cleaned up behind its migration after {seconds} s; {MULTIFD} stays off");
            return Err(GuestError::vmm(what));
        }
        qmp.wait_event("MIGRATION", now + LOOK_EVERY)?;
    }
}

/// Puts QEMU's own defaults back where what we set would harm a later migration: the memory would be left out of it.
/// What was set before us is not known any more.
pub(super) fn forget_settings(qmp: &mut Qmp) -> Result<(), QmpError> {
    qmp.execute("migrate-set-capabilities", off(&[IGNORE_SHARED, "events"])).map(drop)
}

/// Arguments that switch capabilities off.
fn off(names: &[&str]) -> Value {
    let off = |name: &&str| json!({ "capability": name, "state": false });
    json!({ "capabilities": names.iter().map(off).collect::<Vec<_>>() })
}

fn set_capabilities(capabilities: &[Value]) -> Command {
    ("migrate-set-capabilities", json!({ "capabilities": capabilities }))
}

/// `questions`: asked ahead behind that.
fn set(
    qmp: &mut Qmp,
    capabilities: &[Value],
    parameters: Map<String, Value>,
    questions: &[Question],
) -> Result<(), QmpError> {
    let mut commands = Vec::new();
    if !capabilities.is_empty() {
        commands.push(set_capabilities(capabilities));
    }
    if !parameters.is_empty() {
        commands.push(("migrate-set-parameters", Value::Object(parameters)));
    }
    qmp.execute_all(&commands, questions)
}

fn capabilities_of(qmp: &mut Qmp) -> Result<Vec<(String, bool)>, QmpError> {
    let list = qmp.execute("query-migrate-capabilities", json!({}))?;
    let named = |entry: &Value| Some((entry["capability"].as_str()?.to_owned(), entry["state"].as_bool()?));
    Ok(list.as_array().into_iter().flatten().filter_map(named).collect())
}

/// Refuses a QEMU that would send all memory again, and tells of one that would leave it out also where it must not.
/// Whoever is killed while a QEMU loads a guest leaves that setting behind; as it may be the user's own, it is left as
/// it is.
pub(super) fn check_ignore_shared(qmp: &mut Qmp) -> Result<(), GuestError> {
    match capabilities_of(qmp)?.iter().find(|(name, _)| name == IGNORE_SHARED) {
        Some((_, false)) => return Ok(()),
        Some((_, true)) => {
            tracing::warn!(
                "QEMU's migration capability {IGNORE_SHARED} is on, which a transship that was killed may have left behind; with it a \
                 migration of QEMU's own leaves out the guest's memory: if it is not wanted, switch it off: {}",
                by_hand(
                    qmp.path(),
                    &json!({ "execute": "migrate-set-capabilities", "arguments": off(&[IGNORE_SHARED]) }).to_string()
                )
            );
            return Ok(());
        }
        None => {}
    }
    let (major, minor) = qmp.version();
    Err(GuestError::Unfit(format!(
        "QEMU {major}.{minor} can't leave shared memory out of its device state (no {IGNORE_SHARED}); use QEMU 4.0 or newer"
    )))
}

/// Takes the guest back from a migration that QEMU has written all of and waits to be told about: it is as it was
/// before.
pub(super) fn take_back(qmp: &mut Qmp, limit: Duration) -> Result<(), GuestError> {
    qmp.execute("migrate_cancel", json!({}))?;
    let (status, reason) = wait_settled(qmp, limit)?;
    // That it was cancelled, or that its channel is gone, whichever QEMU noticed first.
    if status == "completed" {
        return Err(GuestError::vmm(format!(
            "QEMU gave its guest up although it should have kept it ({})",
            reason.as_str().unwrap_or(&status)
        )));
    }
    Ok(())
}

/// Whether QEMU sends or loads at this moment. Unknown names count as such.
fn is_active(status: &str) -> bool {
    !["none", "completed", "failed", "cancelled"].contains(&status)
}

fn status(qmp: &mut Qmp) -> Result<(String, Value), QmpError> {
    let mut answer = qmp.execute("query-migrate", json!({}))?;
    let status = answer["status"].as_str().unwrap_or("none").to_owned();
    Ok((status, answer["error-desc"].take()))
}

/// Waits until QEMU calls the migration completed, which has begun since events were forgotten. Needs the capability
/// `events`, which [`Settings::apply`] sets: a question would come behind whatever else QEMU was asked meanwhile.
pub(super) fn wait_completed(qmp: &mut Qmp, limit: Duration) -> Result<(), GuestError> {
    let until = Instant::now() + limit.min(EVENT_WAIT);
    while let Some(event) = qmp.wait_event("MIGRATION", until)? {
        match event.data["status"].as_str() {
            Some("completed") => return Ok(()),
            Some(status) if is_active(status) => {}
            _ => break,
        }
    }
    let (status, reason) = wait_settled(qmp, limit)?;
    match status.as_str() {
        "completed" => Ok(()),
        other => Err(GuestError::vmm(format!(
            "QEMU's migration of the device state {other}: {}",
            reason.as_str().unwrap_or("it gives no reason; its own output may")
        ))),
    }
}

/// Waits until QEMU loads nothing any more, whether or not it had begun.
pub(super) fn wait_loaded(qmp: &mut Qmp, limit: Duration) -> Result<(), GuestError> {
    match is_active(&status(qmp)?.0) {
        true => wait_settled(qmp, limit).map(drop),
        false => Ok(()),
    }
}

fn wait_settled(qmp: &mut Qmp, limit: Duration) -> Result<(String, Value), GuestError> {
    let deadline = Instant::now() + limit;
    loop {
        let (status, reason) = status(qmp)?;
        if status != "none" && !is_active(&status) {
            return Ok((status, reason));
        }
        let now = Instant::now();
        if now >= deadline {
            return Err(GuestError::vmm(format!(
                "QEMU's migration of the device state is still {status:?} after {} s",
                limit.as_secs()
            )));
        }
        qmp.wait_event("MIGRATION", deadline.min(now + EVENT_WAIT))?;
    }
}

/// Ends a save that is under way, whatever it is at.
pub(super) fn cancel(qmp: &mut Qmp, limit: Duration) -> Result<(), GuestError> {
    if is_active(&status(qmp)?.0) {
        qmp.execute("migrate_cancel", json!({}))?;
        wait_settled(qmp, limit)?;
    }
    // Left over only if QEMU was not told to save to it, or refused; else it has consumed it, and says so.
    let _ = qmp.execute("closefd", json!({ "fdname": STATE_FD }));
    Ok(())
}
