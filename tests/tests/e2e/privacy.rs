//! What others on the same host get of a move: a core dump of ours, and a unix socket that they can reach.
use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::ExitStatusExt},
    process::{Command, Stdio},
};

use rustix::process::Signal;
use transship_lab::{
    LabError, PATIENCE, Process, Result, Scratch, Synthetic, Transship, lacks, lines::Mark, wait_until,
};

use crate::ends::{assert_whole, in_the_middle, synthetic_pair};

/// As large as it likes to be.
const ANY_CORE: [&str; 2] = ["prlimit", "--core=unlimited"];

/// A process that is not ours, in a folder where its core dump may lie.
fn other(folder: &Scratch) -> Result<Process> {
    let mut command = Command::new(ANY_CORE[0]);
    let words = format!("cd {} && exec sleep 3600", folder.path().display());
    command.args([ANY_CORE[1], "sh", "-c", &words]);
    let other = Process::start(command)?;
    let name = format!("/proc/{}/comm", other.pid());
    wait_until("the other process", || Ok(fs::read_to_string(&name).is_ok_and(|name| name.trim() == "sleep")))?;
    Ok(other)
}

/// Whether a process that the kernel ends so leaves a core dump here.
fn is_dumped(mut process: Process) -> Result<bool> {
    process.signal(Signal::ABORT)?;
    let status = process.wait(PATIENCE)?;
    assert_eq!(status.signal(), Some(Signal::ABORT.as_raw()), "it ended otherwise: {status:?}");
    Ok(status.core_dumped())
}

/// Guest memory is in what both ends have mapped and in their buffers. None of it is in a core dump, because there is
/// none; and were there one, the mapped memory would not be in it.
#[test]
fn no_guest_memory_is_in_a_core_dump() -> Result<()> {
    let folder = Scratch::new()?;
    if !is_dumped(other(&folder)?)? {
        lacks(format_args!("this system makes no core dumps"));
    }
    let guest = Synthetic::builder().memory("64M").touched("60%").content("mixed").write_rate("10M").hot_set("2M");
    let (source, destination) = synthetic_pair(guest)?;
    let socket = folder.join("s");
    let prefix = ANY_CORE.map(str::to_owned);
    let mut receive =
        Transship::receiving(&destination.vm(), &format!("unix:{}", socket.display())).prefix(&prefix).start()?;
    let to = receive.listening()?;
    let mut moving = in_the_middle(Transship::moving(&source.vm(), &to).prefix(&prefix), &folder)?;
    for pid in [moving.pid(), receive.pid()] {
        let mapped = shared_mappings(pid)?;
        assert!(!mapped.is_empty(), "it has mapped no guest");
        for (mapping, flags) in mapped {
            assert!(flags.split(' ').any(|flag| flag == "dd"), "{mapping}: {flags}");
        }
    }
    // The one that waits at its step notices nothing of the other's end.
    for process in [receive.process(), moving.process()] {
        process.signal(Signal::ABORT)?;
        let status = process.wait(PATIENCE)?;
        assert!(status.signal() == Some(Signal::ABORT.as_raw()) && !status.core_dumped(), "{status:?}");
    }
    assert_eq!(source.check()?.wrong, 0);
    Ok(())
}

/// The large shared mappings of a process, which are guests, with their flags.
fn shared_mappings(pid: u32) -> Result<Vec<(String, String)>> {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let (mut found, mut mapping) = (Vec::new(), None);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let (range, access) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        if let (Some((start, end)), true) = (range.split_once('-'), access.len() == 4) {
            let [start, end] = [start, end].map(|at| u64::from_str_radix(at, 16).unwrap_or_default());
            mapping = (access.ends_with('s') && end - start >= 1 << 20).then(|| line.to_owned());
        } else if let Some(flags) = line.strip_prefix("VmFlags: ") {
            found.extend(mapping.take().map(|mapping| (mapping, flags.trim().to_owned())));
        }
    }
    Ok(found)
}

/// Somebody with another user's rights, who can reach the socket: what he is told.
fn visit(socket: &std::path::Path, words: &str) -> Result<String> {
    let failed = |e: std::io::Error| LabError(format!("a visitor: {e}"));
    let target = format!("UNIX-CONNECT:{}", socket.display());
    let mut visitor = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "socat", "-t5", "-", &target])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    if let Some(mut input) = visitor.stdin.take() {
        std::io::Write::write_all(&mut input, words.as_bytes()).map_err(failed)?;
    }
    let said = visitor.wait_with_output().map_err(failed)?;
    Ok(String::from_utf8_lossy(&said.stdout).into_owned())
}

/// A socket that every user can reach serves root and the user who made it, and those who are named.
#[test]
fn other_users_are_not_heard_at_a_unix_socket() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        lacks(format_args!("only root can be somebody else"));
        return Ok(());
    }
    for (flags, is_heard) in [(&[][..], false), (&["--allow-user", "1"], false), (&["--allow-user", "65534"], true)] {
        let guest = Synthetic::builder().memory("16M").touched("60%").content("mixed");
        let (source, destination) = synthetic_pair(guest)?;
        // Where others may go: the usual place may be in a folder of this user alone.
        let folder = Scratch::on_disk()?;
        let open = |path: &std::path::Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode));
        open(folder.path(), 0o755)?;
        let socket = folder.join("s");
        let listen = format!("unix:{}", socket.display());
        let receive = Transship::receiving(&destination.vm(), &listen).args(flags.iter().copied()).start()?;
        let to = receive.listening()?;
        open(&socket, 0o777)?;
        let heard = visit(&socket, "hello")?;
        let told = "user 65534 may not connect here; allow it with --allow-user 65534";
        assert_eq!(heard.contains(told), !is_heard, "{flags:?}: {heard:?}");
        let why = if is_heard { "turned " } else { told };
        receive.stderr().wait(Mark::START, why, |line| line.contains(why).then_some(()))?;
        Transship::moving(&source.vm(), &to).run()?.expect_code(0)?;
        let received = receive.wait()?.expect_code(0)?;
        assert_eq!(received.stderr.contains(told), !is_heard, "{received}");
        assert_whole(&destination)?;
    }
    let tcp = Transship::receiving("handoff:/nowhere", "tcp:127.0.0.1:0").args(["--allow-user", "0"]).run()?;
    assert!(tcp.expect_code(2)?.stderr.contains("--allow-user: only a unix socket knows its users"));
    Ok(())
}
