//! What of QEMU a process may ask for that has given up its rights: the commands that a save or a watch needs. With
//! others it could have QEMU start a program or open a file.
use serde_json::{Value, json};

use super::{
    OverlayFolder, Purpose,
    calls::Call,
    carrier::{FD_NOTE, FD_SET},
};

/// Lines of QEMU's monitor for people.
const LINES: [&str; 4] = ["info ramblock", "info network", "info mtree -f", "info registers"];

/// Whether who has this purpose may ask for it. `has_fd`: a descriptor goes with it.
pub(super) fn permits(purpose: &Purpose, call: &Call, has_fd: bool) -> bool {
    let (overlays, definition) = match purpose {
        Purpose::Settle => return false,
        Purpose::Anything => (None, true),
        Purpose::Watch => (Some(&OverlayFolder::Nowhere), false),
        Purpose::Save { overlays, definition } => (Some(overlays), *definition),
    };
    match call {
        Call::Settle { .. } => false,
        Call::Uuid | Call::CheckIdle | Call::TakeEvents { .. } | Call::Keep => true,
        Call::Command { name, arguments } => permits_command(purpose, name, arguments, has_fd),
        Call::Suspend | Call::Resume => *purpose != Purpose::Watch,
        Call::Lasting | Call::Live => definition,
        Call::MakeOverlays | Call::UseOverlays => overlays != Some(&OverlayFolder::Nowhere),
        Call::PlanDisks { folder } => match (overlays, folder) {
            (None, _) | (Some(OverlayFolder::BesideDisks), None) => true,
            (Some(OverlayFolder::In(known)), Some(folder)) => known == folder,
            _ => false,
        },
    }
}

/// Whether it is one of QEMU's that are permitted, and with such arguments.
fn permits_command(purpose: &Purpose, name: &str, arguments: &Value, has_fd: bool) -> bool {
    let is = |key: &str, value: Value| arguments.get(key) == Some(&value);
    match name {
        "add-fd" => has_fd && is("fdset-id", json!(FD_SET)) && is("opaque", json!(FD_NOTE)),
        _ if has_fd => false,
        "remove-fd" => is("fdset-id", json!(FD_SET)),
        "xen-save-devices-state" => {
            matches!(purpose, Purpose::Save { .. } | Purpose::Anything)
                && is("filename", json!(format!("/dev/fdset/{FD_SET}")))
        }
        // Waits for the disks, and does nothing.
        "transaction" => *arguments == json!({ "actions": [] }),
        "human-monitor-command" => match arguments.as_object().map(serde_json::Map::len) {
            Some(1) => arguments["command-line"].as_str().is_some_and(is_permitted_line),
            _ => false,
        },
        "qom-get" | "qom-list" => true,
        "x-query-virtio-queue-status" | "x-query-virtio-vhost-queue-status" => true,
        _ => name.starts_with("query-"),
    }
}

fn is_permitted_line(line: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    LINES.contains(&line) || line.strip_prefix("gpa2hva 0x").is_some_and(is_number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn save() -> Purpose {
        Purpose::Save { overlays: OverlayFolder::Nowhere, definition: false }
    }

    #[test]
    fn what_a_save_needs_is_permitted() {
        let none = json!({});
        for name in ["query-status", "query-cpus-fast", "qom-list", "qom-get"] {
            assert!(permits_command(&Purpose::Watch, name, &none, false), "{name}");
        }
        for line in ["info ramblock", "gpa2hva 0x1000"] {
            assert!(
                permits_command(&save(), "human-monitor-command", &json!({ "command-line": line }), false),
                "{line}"
            );
        }
        let set = json!({ "fdset-id": FD_SET, "opaque": FD_NOTE });
        assert!(permits_command(&Purpose::Watch, "add-fd", &set, true));
        assert!(permits_command(&save(), "remove-fd", &json!({ "fdset-id": FD_SET, "fd": 3 }), false));
        let state = json!({ "filename": format!("/dev/fdset/{FD_SET}"), "live": false });
        assert!(permits_command(&save(), "xen-save-devices-state", &state, false));
        assert!(!permits_command(&Purpose::Watch, "xen-save-devices-state", &state, false));
    }

    #[test]
    fn what_would_reach_beyond_the_guest_is_not() {
        for (name, arguments, has_fd) in [
            ("human-monitor-command", json!({ "command-line": "migrate \"exec:id\"" }), false),
            ("human-monitor-command", json!({ "command-line": "info ramblock", "cpu-index": 0 }), false),
            ("human-monitor-command", json!({ "command-line": "gpa2hva 0x1; quit" }), false),
            ("human-monitor-command", json!({ "command-line": "info ramblock\nquit" }), false),
            ("xen-save-devices-state", json!({ "filename": "/etc/passwd" }), false),
            ("transaction", json!({ "actions": [{ "type": "blockdev-snapshot-sync" }] }), false),
            ("migrate", json!({ "uri": "exec:id" }), false),
            ("getfd", json!({ "fdname": "x" }), true),
            ("query-status", json!({}), true),
            ("add-fd", json!({ "fdset-id": 1 }), true),
            ("add-fd", json!({ "fdset-id": FD_SET, "opaque": FD_NOTE }), false),
            ("remove-fd", json!({ "fdset-id": 1 }), false),
            ("qom-set", json!({}), false),
            ("blockdev-add", json!({}), false),
            ("quit", json!({}), false),
        ] {
            assert!(!permits_command(&save(), name, &arguments, has_fd), "{name} {arguments}");
        }
    }

    #[test]
    fn only_what_the_command_line_names_is_done() {
        let beside = || Call::PlanDisks { folder: None };
        let folder = |path: &str| Call::PlanDisks { folder: Some(path.into()) };
        let with = |overlays| Purpose::Save { overlays, definition: true };
        for (purpose, call, is_permitted) in [
            (save(), Call::Suspend, true),
            (Purpose::Watch, Call::Suspend, false),
            (Purpose::Watch, Call::Resume, false),
            (save(), Call::Lasting, false),
            (with(OverlayFolder::Nowhere), Call::Lasting, true),
            (save(), beside(), false),
            (save(), Call::MakeOverlays, false),
            (with(OverlayFolder::BesideDisks), beside(), true),
            (with(OverlayFolder::BesideDisks), folder("/a"), false),
            (with(OverlayFolder::In("/a".into())), folder("/a"), true),
            (with(OverlayFolder::In("/a".into())), folder("/b"), false),
            (with(OverlayFolder::In("/a".into())), beside(), false),
            (Purpose::Anything, folder("/b"), true),
            (Purpose::Anything, Call::Settle { will: String::new(), run: true }, false),
            (Purpose::Settle, Call::Uuid, false),
        ] {
            assert_eq!(permits(&purpose, &call, false), is_permitted, "{purpose:?} {call:?}");
        }
    }
}
