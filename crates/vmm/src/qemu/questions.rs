//! What QEMU is asked together, with [`Qmp::ask_ahead`]: each way to QEMU and back costs two switches from process to
//! process, and while the guest stands still every one of them is felt.
//!
//! [`Qmp::ask_ahead`]: super::qmp::Qmp::ask_ahead
use serde_json::json;

use super::{blocks, machine::CONTAINERS, qmp::Question};

fn plain(command: &'static str) -> Question {
    (command, json!({}))
}

fn list(path: &str) -> Question {
    ("qom-list", json!({ "path": path }))
}

fn monitor(line: &str) -> Question {
    ("human-monitor-command", json!({ "command-line": line }))
}

fn devices() -> impl Iterator<Item = Question> {
    CONTAINERS.into_iter().map(list)
}

/// Disks and networks: what is behind the devices.
fn backends_of_devices() -> [Question; 2] {
    [("query-named-block-nodes", json!({ "flat": true })), monitor("info network")]
}

/// Where the guest's memory is.
fn memory() -> [Question; 3] {
    [plain("query-memdev"), list("/objects"), blocks::question()]
}

/// What QEMU's migration is set to.
pub(super) fn settings() -> [Question; 2] {
    [plain("query-migrate-capabilities"), plain("query-migrate-parameters")]
}

/// For a QEMU that is to load a guest. Stopped, it does not let it run by itself.
pub(super) fn loading() -> Vec<Question> {
    let mut questions = vec![plain("stop")];
    questions.extend(settings());
    questions
}

/// For an attachment to any QEMU.
pub(super) fn attachment() -> Vec<Question> {
    let mut questions = vec![plain("query-status"), plain("query-migrate"), plain("query-migrate-capabilities")];
    questions.extend(memory());
    questions.extend([plain("query-memory-size-summary"), plain("query-memory-devices")]);
    questions.extend(devices());
    questions.push(("qom-get", json!({ "path": "/machine", "property": "type" })));
    questions
}

/// For an attachment to one whose guest is to leave it, or to be saved.
pub(super) fn source() -> Vec<Question> {
    let mut questions = attachment();
    questions.extend(backends_of_devices());
    questions
}

/// Of a guest that is about to be stopped: whether everything is as it was when it was attached. QEMU takes 4 to 8 µs
/// for each byte of this.
pub(super) fn stopping() -> Vec<Question> {
    let mut questions = Vec::from(backends_of_devices());
    questions.extend(devices());
    questions.extend([plain("query-memdev"), blocks::question()]);
    questions
}
