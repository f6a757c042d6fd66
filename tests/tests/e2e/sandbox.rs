//! The rights that a process keeps: what the kernel says of a running one, and what one gets that tries for more.
use std::{
    fs,
    os::unix::net::UnixListener,
    sync::{Mutex, PoisonError},
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use transship_lab::{
    Balloon, LabError, PATIENCE, Qemu, Result, Scratch, Synthetic, Transship,
    process::{of_ours, status_field},
    transship::TransshipBuilder,
    wait_until,
};

use crate::ends::{assert_whole, in_the_middle};
use crate::peer::PLAIN;
use crate::stock::wait_completed;

/// The answers of a system that does not let it be: no permission of two kinds, no such path.
const DENIED: [&str; 3] = ["1", "13", "2"];
/// What a process in the place of each role tries.
const ATTEMPTS: [&str; 15] = [
    "open",
    "open proc",
    "create",
    "list",
    "connect unix",
    "connect tcp",
    "listen tcp",
    "ptrace",
    "read memory",
    "signal",
    "datagrams",
    "fork",
    "root",
    "capability",
    "exec",
];

/// Fields of the status of each thread of a process.
pub(crate) fn threads(pid: u32, field: &str) -> Result<Vec<String>> {
    let failed = |error: std::io::Error| LabError(format!("threads of {pid}: {error}"));
    let mut found = Vec::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task")).map_err(failed)? {
        let status = fs::read_to_string(thread.map_err(failed)?.path().join("status")).map_err(failed)?;
        let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        found.push(line.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" "));
    }
    Ok(found)
}

/// The processes that a process has started and that have not ended.
fn children(pid: u32) -> Result<Vec<Pid>> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let text = fs::read_to_string(&path).map_err(|error| LabError(format!("{path}: {error}")))?;
    let numbers: Vec<_> = text.split_whitespace().filter_map(|number| Pid::from_raw(number.parse().ok()?)).collect();
    assert!(!numbers.is_empty(), "{pid} has no steward");
    Ok(numbers)
}

/// Every thread is nobody's, has no capability, can get none, and is filtered.
pub(crate) fn assert_confined(pid: u32, role: &str) -> Result<()> {
    assert_confined_but_for(pid, role, "0000000000000000")
}

/// The same with these capabilities.
fn assert_confined_but_for(pid: u32, role: &str, capabilities: &str) -> Result<()> {
    for (field, value) in [
        ("Uid", "65534 65534 65534 65534"),
        ("Gid", "65534 65534 65534 65534"),
        ("Groups", ""),
        ("CapInh", "0000000000000000"),
        ("CapPrm", capabilities),
        ("CapEff", capabilities),
        ("CapAmb", "0000000000000000"),
        ("NoNewPrivs", "1"),
        ("Seccomp", "2"),
    ] {
        let found = threads(pid, field)?;
        assert!(!found.is_empty() && found.iter().all(|thread| thread == value), "{role}: {field}: {found:?}");
    }
    assert_eq!(fs::read_dir(format!("/proc/{pid}/root")).map(Iterator::count).ok(), Some(0), "{role}: it has paths");
    Ok(())
}

/// What came of each attempt of a process in the place of this role. A command that starts it ends as it may.
fn attempts(command: TransshipBuilder, role: &str, folder: &Scratch) -> Result<Vec<(String, String)>> {
    let path = folder.join("anybody");
    let _ = fs::remove_file(&path);
    let _socket = UnixListener::bind(&path).map_err(|error| LabError(format!("listen: {error}")))?;
    let finished = command.env("TRANSSHIP_TRY", &path).env("TRANSSHIP_TRY_AS", role).start()?.wait()?;
    let lines = finished.stderr.lines().filter_map(|line| line.split_once("trial: ")?.1.rsplit_once(": "));
    Ok(lines.map(|(name, result)| (name.to_owned(), result.to_owned())).collect())
}

/// Held by whoever lets another process trace this one.
static TRACING_US: Mutex<()> = Mutex::new(());

/// `role` as the program calls it. Without the sandbox all of it can be done, else the sandbox would not be what stops
/// it.
pub(crate) fn assert_stopped(role: &str, command: impl Fn() -> TransshipBuilder, folder: &Scratch) -> Result<()> {
    let confined = attempts(command(), role, folder)?;
    assert_eq!(confined.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ATTEMPTS, "{role}");
    for (name, result) in &confined {
        assert!(DENIED.contains(&&**result), "{role}: {name}: {result}");
    }
    // One of the attempts is to trace the parent, which is this program: only one can at a time.
    let alone = TRACING_US.lock().unwrap_or_else(PoisonError::into_inner);
    let free = attempts(command().args(["--no-sandbox"]), role, folder)?;
    drop(alone);
    // One that becomes another program says nothing more.
    assert_eq!(
        free.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
        ATTEMPTS[..ATTEMPTS.len() - 1],
        "{role}"
    );
    for (name, result) in &free {
        assert!(!DENIED.contains(&&**result), "{role} without a sandbox: {name}: {result}");
    }
    Ok(())
}

#[test]
fn relays_can_do_nothing_but_relay() -> Result<()> {
    let folder = Scratch::new()?;
    let (near, to) = (folder.join("near"), format!("unix:{}", folder.join("anybody").display()));
    let listen = format!("unix:{}", near.display());
    for (listen, to) in [(listen.clone(), format!("relay:{to}")), ("relay:tcp:127.0.0.1:0".to_owned(), to.clone())] {
        assert_stopped("Relay", || Transship::command(["relay", "--listen", &*listen, "--to", &*to]), &folder)?;
    }
    Ok(())
}

#[test]
fn relays_that_carry_a_guest_have_no_rights() -> Result<()> {
    let source = Qemu::multiboot().start()?;
    source.ready()?;
    let destination = Qemu::multiboot().incoming().start()?;
    let socket = destination.folder().join("relay");
    let (to, listen) = (PLAIN.wait_for_a_guest(&destination)?, format!("unix:{}", socket.display()));
    let far = Transship::command(["relay", "--listen", "relay:tcp:127.0.0.1:0", "--to", &*to]).start()?;
    let near = Transship::command(["relay", "--listen", &*listen, "--to", &*far.listening()?]).start()?;
    near.listening()?;

    let on: Vec<_> =
        ["return-path", "events"].iter().map(|name| json!({ "capability": name, "state": true })).collect();
    source.qmp("migrate-set-capabilities", json!({ "capabilities": on }))?;
    source.qmp("migrate-set-parameters", json!({ "max-bandwidth": 1 << 20 }))?;
    source.qmp("migrate", json!({ "uri": listen }))?;
    let sent = |source: &Qemu| Ok(source.qmp("query-migrate", json!({}))?["ram"]["transferred"].as_u64() > Some(4096));
    wait_until("pages on their way", || sent(&source))?;
    for (relay, role) in [(&near, "near"), (&far, "far")] {
        assert_confined(relay.pid(), role)?;
    }
    // As by a service that is ended, all of it: the guest is on its way, and its stewards stay.
    for relay in [&near, &far] {
        for steward in children(relay.pid())? {
            kill_process(steward, Signal::TERM).map_err(|error| LabError(format!("signal: {error}")))?;
        }
    }
    source.qmp("migrate-set-parameters", json!({ "max-bandwidth": 1_u64 << 40 }))?;
    wait_completed(&source)?;
    near.wait()?.expect_code(0)?;
    far.wait()?.expect_code(0)?;
    destination.wait_status("running")?;
    assert!(!socket.exists(), "the socket is left behind");
    assert_eq!(destination.sweep()?.errors, 0);
    Ok(())
}

/// Also if it has no time to. The one near the destination waits for the other; that one would end at once, as nothing
/// listens where it connects to.
#[test]
fn what_a_relay_leaves_behind_is_removed() -> Result<()> {
    let folder = Scratch::new()?;
    let socket = folder.join("relay");
    let (listen, to) = (format!("relay:unix:{}", socket.display()), format!("unix:{}", folder.join("qemu").display()));
    for signal in [Signal::INT, Signal::KILL] {
        let relay = Transship::command(["relay", "--listen", &*listen, "--to", &*to]).start()?;
        relay.listening()?;
        assert!(socket.exists());
        relay.signal(signal)?;
        relay.wait()?;
        match signal {
            Signal::KILL => wait_until("the end of its socket", || Ok(!socket.exists()))?,
            _ => assert!(!socket.exists()),
        }
    }
    Ok(())
}

#[test]
fn users_choose_who_a_process_becomes() -> Result<()> {
    let (folder, listen) = (Scratch::new()?, "relay:tcp:127.0.0.1:0");
    let to = format!("unix:{}", folder.join("qemu").display());
    let relay = |flags: &[&str]| -> Result<Vec<String>> {
        let relay =
            Transship::command(["relay", "--listen", listen, "--to", &*to]).args(flags.iter().copied()).start()?;
        relay.listening()?;
        let found = ["Uid", "NoNewPrivs", "Seccomp"].map(|field| status_field(relay.pid(), field));
        relay.signal(Signal::INT)?;
        relay.wait_for(PATIENCE)?;
        found.into_iter().map(|value| Ok(value?.split_whitespace().collect::<Vec<_>>().join(" "))).collect()
    };
    assert_eq!(relay(&["--user", "4711"])?, ["4711 4711 4711 4711", "1", "2"]);
    assert_eq!(relay(&["--no-sandbox"])?, ["0 0 0 0", "0", "0"]);
    let refused = Transship::command(["relay", "--listen", listen, "--to", &*to, "--user", "no-such-user"]).run()?;
    assert!(refused.code() == Some(2) && refused.stderr.contains("--user"), "{refused}");
    Ok(())
}

#[test]
fn receivers_can_do_nothing_but_receive() -> Result<()> {
    let folder = Scratch::new()?;
    let guest = Synthetic::builder().memory("16M").incoming().start()?;
    let qemu = Qemu::multiboot().incoming().start()?;
    let listen = format!("unix:{}", folder.join("move").display());
    for (vm, peer) in [(guest.vm(), "transship"), (qemu.vm(), "transship"), (qemu.vm(), "qemu")] {
        let receive = ["receive", "--vm", &*vm, "--listen", &*listen, "--peer", peer];
        assert_stopped("Receive", || Transship::command(receive), &folder)?;
    }
    Ok(())
}

/// Its memory is written through a mapping, or, where it is private, through a file of its process.
#[test]
fn receivers_in_the_middle_of_a_move_have_no_rights() -> Result<()> {
    let private = || Qemu::multiboot().backend(transship_lab::Backend::Ram);
    for (source, destination) in [(Qemu::multiboot(), Qemu::multiboot()), (private(), private())] {
        let folder = Scratch::new()?;
        let (source, destination) = (source.start()?, destination.incoming().start()?);
        source.ready()?;
        let socket = folder.join("move");
        let receive = Transship::receiving(&destination.vm(), &format!("unix:{}", socket.display())).start()?;
        let to = receive.listening()?;
        assert_confined(receive.pid(), "waiting")?;
        let moving = in_the_middle(Transship::moving(&source.vm(), &to).args(["--verify"]), &folder)?;
        assert_confined(receive.pid(), "in the middle")?;
        fs::remove_file(folder.join("gate")).map_err(|error| LabError(format!("gate: {error}")))?;
        assert_eq!(moving.wait()?.expect_code(0)?.report()?["verified"], true);
        receive.wait()?.expect_code(0)?;
        assert!(!socket.exists(), "the socket is left behind");
        assert_eq!(destination.status()?, "running");
        assert_eq!(destination.sweep()?.errors, 0);
    }
    Ok(())
}

#[test]
fn balloons_can_do_nothing_but_serve() -> Result<()> {
    let folder = Scratch::new()?;
    let socket = folder.join("balloon");
    let command = || Transship::command(["balloon", "--socket", &*socket.display().to_string()]);
    assert_stopped("Balloon", command, &folder)?;

    let mut balloon = Balloon::start()?;
    for (field, value) in [("CapEff", "0000000000000000"), ("NoNewPrivs", "1"), ("Seccomp", "2")] {
        assert!(threads(balloon.command().pid(), field)?.iter().all(|thread| thread == value), "{field}");
    }
    assert!(threads(balloon.command().pid(), "Uid")?.iter().all(|thread| thread.starts_with("65534 65534")));
    let path = balloon.path().to_owned();
    assert!(path.exists());
    balloon.command().signal(Signal::INT)?;
    balloon.command().process().wait(PATIENCE)?;
    assert!(!path.exists(), "the socket is left behind");
    Ok(())
}

#[test]
fn readers_of_files_can_do_nothing_but_read() -> Result<()> {
    let folder = Scratch::new()?;
    let guest = Synthetic::builder().memory("16M").start()?;
    let file = folder.join("file").display().to_string();
    Transship::command(["save", "--vm", &*guest.vm(), "--to", &*file]).run()?.expect_code(0)?;
    assert_stopped("Info", || Transship::command(["info", &*file]), &folder)?;
    let waiting = Synthetic::builder().memory("16M").incoming().start()?;
    let restore = ["restore", "--vm", &*waiting.vm(), "--from", &*file];
    assert_stopped("Restore", || Transship::command(restore), &folder)?;
    // It is whole, and so is the guest.
    Transship::command(["info", &*file, "--check"]).run()?.expect_code(0)?;
    Transship::command(restore).run()?.expect_code(0)?;
    assert_whole(&waiting)
}

/// It renames the file in the end, as the user that it was; nothing else is left to it.
#[test]
fn receivers_of_files_can_do_nothing_but_complete_theirs() -> Result<()> {
    let folder = Scratch::new()?;
    let file = folder.join("file").display().to_string();
    let receive = ["receive", "--peer", "qemu", "--to", &*file, "--listen", "tcp:127.0.0.1:0"];
    assert_stopped("ReceiveFile", || Transship::command(receive), &folder)?;

    let source = Qemu::multiboot().start()?;
    source.ready()?;
    let receive = Transship::command(receive).start()?;
    let uri = receive.listening()?;
    for (field, value) in [("CapEff", "000000000000000f"), ("NoNewPrivs", "1"), ("Seccomp", "2")] {
        let found = threads(receive.pid(), field)?;
        assert!(found.iter().all(|thread| thread == value), "{field}: {found:?}");
    }
    let on = json!([{ "capability": "return-path", "state": true }]);
    source.qmp("migrate-set-capabilities", json!({ "capabilities": on }))?;
    source.qmp("migrate", json!({ "uri": uri }))?;
    receive.wait()?.expect_code(0)?;
    Transship::command(["info", &*file, "--check"]).run()?.expect_code(0)?;
    Ok(())
}

/// And their guards, which wait beside them.
#[test]
fn movers_can_do_nothing_but_move() -> Result<()> {
    let folder = Scratch::new()?;
    let guest = Synthetic::builder().memory("16M").start()?;
    let qemu = Qemu::multiboot().booted()?;
    let private = Qemu::multiboot().backend(transship_lab::Backend::Ram).booted()?;
    let to = format!("unix:{}", folder.join("nobody").display());
    for (vm, peer) in
        [(guest.vm(), "transship"), (qemu.vm(), "transship"), (qemu.vm(), "qemu"), (private.vm(), "transship")]
    {
        let moving = ["move", "--vm", &*vm, "--to", &*to, "--peer", peer];
        for role in ["Move", "Guard"] {
            assert_stopped(role, || Transship::command(moving), &folder)?;
        }
    }
    assert_runs(&qemu)
}

#[test]
fn savers_can_do_nothing_but_complete_their_files() -> Result<()> {
    let folder = Scratch::new()?;
    let qemu = Qemu::multiboot().booted()?;
    let file = folder.join("file").display().to_string();
    for way in ["--live", "--background", "--paused"] {
        let save = ["save", "--vm", &*qemu.vm(), "--to", &*file, way];
        for role in ["Save", "Guard"] {
            assert_stopped(role, || Transship::command(save), &folder)?;
        }
    }
    assert_runs(&qemu)
}

/// Those that look at a guest, and those that make one file of another.
#[test]
fn watchers_planners_and_converters_can_do_nothing_else() -> Result<()> {
    let folder = Scratch::new()?;
    let qemu = Qemu::multiboot().booted()?;
    let (file, other) = (folder.join("file").display().to_string(), folder.join("other").display().to_string());
    let vm = qemu.vm();
    Transship::command(["save", "--vm", &*vm, "--to", &*file]).run()?.expect_code(0)?;
    let (watch, plan) = (["watch", "--vm", &*vm, "--count", "1"], ["plan", "--vm", &*vm, "--time", "1s"]);
    assert_stopped("Watch", || Transship::command(watch), &folder)?;
    assert_stopped("Plan", || Transship::command(plan), &folder)?;
    assert_stopped("Convert", || Transship::command(["convert", &*file, &*other]), &folder)?;
    Transship::command(watch).run()?.expect_code(0)?;
    Transship::command(plan).run()?.expect_code(0)?;
    Transship::command(["convert", &*file, &*other]).run()?.expect_code(0)?;
    assert_runs(&qemu)
}

fn assert_runs(qemu: &Qemu) -> Result<()> {
    assert_eq!(qemu.status()?, "running");
    qemu.next_count()?;
    Ok(())
}

/// Its memory is read through a mapping, or, where it is private, by the number of its process.
#[test]
fn movers_in_the_middle_of_a_move_have_no_rights_but_to_read() -> Result<()> {
    const CAP_SYS_PTRACE: &str = "0000000000080000";
    let private = || Qemu::multiboot().backend(transship_lab::Backend::Ram);
    for (source, destination, capabilities) in
        [(Qemu::multiboot(), Qemu::multiboot(), "0000000000000000"), (private(), private(), CAP_SYS_PTRACE)]
    {
        let (source, destination) = (source.booted()?, destination.incoming().start()?);
        let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
        let moving = Transship::moving(&source.vm(), &receive.listening()?).args(["--verify", "--hold"]).start()?;
        wait_until("that it is held", || Ok(steered("status", &source.vm(), &["--json"])?.contains("\"ready\"")))?;
        assert_confined_but_for(moving.pid(), "move", capabilities)?;
        let read = bytes_read(moving.pid())?;
        assert!(read < 2 << 20, "it has read {read} bytes, by descriptors: the guest's memory among them");
        let guards = of_ours(&source.vm(), "guard");
        assert_eq!(guards.len(), 1, "{guards:?}");
        assert_confined(guards[0], "guard")?;
        steered("go", &source.vm(), &[])?;
        assert_eq!(moving.wait()?.expect_code(0)?.report()?["verified"], true);
        receive.wait()?.expect_code(0)?;
        assert_eq!(destination.status()?, "running");
        assert_eq!(destination.sweep()?.errors, 0);
        assert_eq!(of_ours(&source.vm(), ""), [0; 0], "something of ours is left");
    }
    Ok(())
}

/// What a process has read by descriptors, in bytes.
fn bytes_read(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/io");
    let failed = |why: String| LabError(format!("{path}: {why}"));
    let text = fs::read_to_string(&path).map_err(|error| failed(error.to_string()))?;
    let count = text.lines().find_map(|line| line.strip_prefix("rchar: ")?.parse().ok());
    count.ok_or_else(|| failed("no rchar".into()))
}

/// What was said to a move or save that runs.
pub(crate) fn steered(command: &str, vm: &str, flags: &[&str]) -> Result<String> {
    let steering = Transship::command([command, vm]).args(flags.iter().copied()).run()?;
    Ok(steering.stdout)
}

/// It renames the file in the end, as the user that it was; nothing else is left to it.
#[test]
fn savers_in_the_middle_of_a_save_have_no_rights_but_over_their_folder() -> Result<()> {
    let (qemu, folder) = (Qemu::multiboot().booted()?, Scratch::new()?);
    let file = folder.join("file").display().to_string();
    let save = ["save", "--vm", &*qemu.vm(), "--to", &*file, "--live", "--hold"];
    let saving = Transship::command(save).start()?;
    wait_until("that it is held", || Ok(steered("status", &qemu.vm(), &["--json"])?.contains("\"ready\"")))?;
    for (field, value) in
        [("CapPrm", "000000000000000f"), ("CapEff", "000000000000000f"), ("NoNewPrivs", "1"), ("Seccomp", "2")]
    {
        let found = threads(saving.pid(), field)?;
        assert!(found.iter().all(|thread| thread == value), "{field}: {found:?}");
    }
    steered("go", &qemu.vm(), &[])?;
    saving.wait()?.expect_code(0)?;
    Transship::command(["info", &*file, "--check"]).run()?.expect_code(0)?;
    assert_runs(&qemu)
}

/// Whoever has no rights has them run by somebody who has.
#[test]
fn commands_of_the_user_run_as_the_user() -> Result<()> {
    let (source, folder) = (Qemu::multiboot().booted()?, Scratch::new()?);
    let destination = Qemu::multiboot().incoming().start()?;
    let said = folder.join("said");
    let command = format!("echo $TRANSSHIP_PHASE $(id -u) >> {}", said.display());
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let flags = ["--hold-until", &*command, "--at-stop", &*command];
    Transship::moving(&source.vm(), &receive.listening()?).args(flags).run()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    let said = fs::read_to_string(&said)?;
    assert_eq!(said, "held 0\nstopped 0\n");
    Ok(())
}

/// Also if it has no time to.
#[test]
fn what_a_move_leaves_behind_is_removed() -> Result<()> {
    let (guest, folder) = (Synthetic::builder().memory("16M").start()?, Scratch::new()?);
    let (control, waiting) = (folder.join("control"), folder.join("waiting"));
    let _listener = UnixListener::bind(&waiting).map_err(|error| LabError(format!("listen: {error}")))?;
    let to = format!("unix:{}", waiting.display());
    for signal in [Signal::INT, Signal::KILL] {
        let flags = ["--control", &*control.display().to_string()].map(str::to_owned);
        let moving = Transship::moving(&guest.vm(), &to).args(flags).start()?;
        wait_until("its socket, and that it answers", || {
            Ok(steered("status", &control.display().to_string(), &[])?.contains("move"))
        })?;
        moving.signal(signal)?;
        moving.wait()?;
        match signal {
            Signal::KILL => wait_until("the end of its socket", || Ok(!control.exists()))?,
            _ => assert!(!control.exists()),
        }
    }
    Ok(())
}
