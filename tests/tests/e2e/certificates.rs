//! Moves with certificates: who is let in, and what both ends say when somebody is not. Whatever fails, the guest runs
//! on at the source.
use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use crate::ends::{assert_whole, in_the_middle, synthetic_pair};
use crate::hosts::Hosts;
use crate::middle::{self, Harm, Middle, Target};
use transship_lab::{
    Authority, Finished, Holder, LabError, Result, Scratch, Synthetic, Transship,
    lines::Mark,
    synthetic::{SyntheticBuilder, SyntheticState},
    wait_until,
};

fn guest() -> SyntheticBuilder {
    Synthetic::builder().memory("32M").touched("60%").content("mixed").write_rate("10M").hot_set("2M")
}

fn failed(doing: &str) -> impl FnOnce(std::io::Error) -> LabError {
    let doing = doing.to_owned();
    move |error| LabError(format!("{doing}: {error}"))
}

fn unix(path: &Path) -> String {
    format!("unix:{}", path.display())
}

fn assert_runs_on(source: &Synthetic) -> Result<()> {
    assert_eq!(source.state()?, SyntheticState::Running);
    assert_eq!(source.check()?.wrong, 0);
    Ok(())
}

/// It failed in one line, with these words.
#[track_caller]
fn assert_says(ended: &Finished, code: i32, words: &str) {
    let lines: Vec<_> = ended.stderr.lines().filter(|line| line.starts_with("transship: ")).collect();
    let reason = lines.last().copied().unwrap_or_default();
    assert!(ended.code() == Some(code) && reason.contains(words), "{words:?} is not in: {ended}");
    let said = lines.iter().filter(|line| !words.is_empty() && line.contains(words)).count();
    assert!(said <= 1, "it is said in one line: {ended}");
}

/// The receiver has turned somebody away for this reason, in one line.
fn turned_away(receive: &Transship, why: &str) -> Result<()> {
    let said = |line: &str| (line.contains("turned ") && line.contains(why)).then_some(());
    receive.stderr().wait(Mark::START, why, said).map(drop)
}

#[test]
fn a_guest_moves_with_certificates() -> Result<()> {
    let hosts = Hosts::new()?;
    hosts.authority.revoke(&hosts.folder("there"), &[7])?;
    let cases: [(&str, &[&str], &[&str]); 4] = [
        ("tcp:127.0.0.1:0", &["--channels", "1"], &[]),
        ("tcp:localhost:0", &["--channels", "8", "--compress", "zstd"], &["--peer-name", "ship1.example.org"]),
        ("tcp:0.0.0.0:0", &["--channels", "3", "--peer-name", "ship2.*.org"], &["--peer-name", "*.example.org"]),
        ("unix", &["--peer-name", "ship9", "--peer-name", "SHIP2.example.org"], &[]),
    ];
    for (listen, flags, theirs) in cases {
        let (source, destination) = synthetic_pair(guest())?;
        let socket = Scratch::new()?;
        let listen = if listen == "unix" { unix(&socket.join("s")) } else { listen.to_owned() };
        let listening = ["receive", "--vm", &destination.vm(), "--listen", &listen, "--json"];
        let receive = Transship::command(listening).args(hosts.tls("there")).args(theirs.iter().copied()).start()?;
        let to = receive.listening()?.replace("0.0.0.0", "127.0.0.1");
        let moving = Transship::command(["move", "--vm", &source.vm(), "--to", &to, "--json", "--verify"]);
        let moving = moving.args(hosts.tls("here")).args(flags.iter().copied());
        let moved = moving.run()?.expect_code(0)?;
        assert_eq!(moved.report()?["verified"], true, "{flags:?}");
        assert_eq!(receive.wait()?.expect_code(0)?.report()?["status"], "completed");
        assert_whole(&destination)?;
        assert_eq!(source.state()?, SyntheticState::Stopped, "it must not run on both sides");
    }
    Ok(())
}

/// Neither the words of a move nor its pages are found in what goes by.
#[test]
fn nothing_goes_in_clear() -> Result<()> {
    let hosts = Hosts::new()?;
    let (source, destination) = synthetic_pair(guest())?;
    let (near, far) = (hosts.folder("near"), hosts.folder("far"));
    let receive = hosts.receiving(&destination, &unix(&far)).start()?;
    receive.listening()?;
    let middle = Middle::start(&near, &far, None)?;
    hosts.moving(&source, &unix(&near)).args(["--peer-name", "ship2.example.org"]).run()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert_whole(&destination)?;
    let heard = middle.heard();
    assert_eq!(heard.len(), 3);
    for said in heard {
        for word in [&b"TSHP"[..], b"TSPK", b"synthetic", b"ship1.example.org"] {
            assert!(!middle::has(&said, word), "{}", String::from_utf8_lossy(word));
        }
        assert!(said.len() > 300);
    }
    Ok(())
}

/// Who comes with a certificate that does not count, or comes to one, learns nothing and disturbs nobody: both ends say
/// why, the guest runs on, and the receiver waits on for the right one.
#[test]
fn each_end_knows_the_other_by_its_certificate() -> Result<()> {
    let hosts = Hosts::new()?;
    let others = Authority::new()?;
    others.furnish(&hosts.folder("stranger"), &Holder::named(["ship1.example.org"]))?;
    hosts.host("revoked", &Holder::named(["ship1.example.org"]).serial(7))?;
    hosts.host("aware", &Holder::named(["ship1.example.org"]).serial(3))?;
    hosts.authority.revoke(&hosts.folder("there"), &[7])?;
    hosts.authority.revoke(&hosts.folder("aware"), &[2])?;
    let (source, destination) = synthetic_pair(guest())?;
    let receive =
        hosts.receiving(&destination, "tcp:127.0.0.1:0").args(["--peer-name", "ship1.example.org"]).start()?;
    let to = receive.listening()?;
    let cases: [(&str, &[&str], &str, &str); 6] = [
        ("stranger", &[], "is signed by none of the authorities", "is signed by no authority that is trusted there"),
        ("revoked", &[], "(ship1.example.org) was revoked", "was revoked (ca-crl.pem)"),
        ("aware", &[], "(ship2.example.org, localhost, 127.0.0.1) was revoked", "was revoked; make a new one"),
        (
            "here",
            &["--peer-name", "ship3.example.org"],
            "--peer-name allows here: ship3",
            "allowed there (--peer-name)",
        ),
        ("there", &[], "allowed there (--peer-name)", "--peer-name allows here: ship1.example.org"),
        ("", &[], "a certificate is needed here; use --tls DIR", "it speaks in clear, without a certificate"),
    ];
    for (folder, flags, here, there) in cases {
        let tls = if folder.is_empty() { Vec::new() } else { hosts.tls(folder).to_vec() };
        let moved = Transship::moving(&source.vm(), &to).args(tls).args(flags.iter().copied()).run()?;
        assert_says(&moved, 1, here);
        turned_away(&receive, there)?;
        assert_runs_on(&source)?;
    }
    hosts.moving(&source, &to).run()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert_whole(&destination)
}

#[test]
fn a_receiver_with_another_name_gets_nothing() -> Result<()> {
    let hosts = Hosts::new()?;
    hosts.host("elsewhere", &Holder::named(["ship3.example.org"]))?;
    let (source, destination) = synthetic_pair(guest())?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").args(hosts.tls("elsewhere")).start()?;
    let to = receive.listening()?;
    assert_says(
        &hosts.moving(&source, &to).run()?,
        1,
        "(ship3.example.org) is not for 127.0.0.1, by which it was called",
    );
    turned_away(&receive, "(ship3.example.org) is not for the name by which this host was called")?;
    assert_runs_on(&source)?;
    drop(receive);
    assert_eq!(destination.state()?, SyntheticState::Waiting);
    Ok(())
}

/// One end with a token or in clear, the other one with certificates.
#[test]
fn both_ends_have_to_speak_of_the_same() -> Result<()> {
    let hosts = Hosts::new()?;
    let (source, destination) = synthetic_pair(guest())?;
    let other = guest().incoming().start()?;
    let receive = hosts.receiving(&destination, "tcp:127.0.0.1:0").start()?;
    let by_token = Transship::receiving(&other.vm(), "tcp:127.0.0.1:0").args(["--token-lifetime", "10m"]).start()?;
    let (to, token) = (receive.listening()?, by_token.token()?);
    assert_says(
        &Transship::moving(&source.vm(), &to).args(["--token", &token]).run()?,
        1,
        "use --token or --tls on both",
    );
    turned_away(&receive, "use --token or --tls on both")?;
    assert_says(&hosts.moving(&source, &by_token.listening()?).run()?, 1, "it needs certificates as here (--tls)");
    turned_away(&by_token, "use --token or --tls on both")?;
    let clear = guest().incoming().start()?;
    let open = Transship::receiving(&clear.vm(), "tcp:127.0.0.1:0").start()?;
    assert_says(&hosts.moving(&source, &open.listening()?).run()?, 1, "no encrypted connection with tcp:127.0.0.1");
    assert_runs_on(&source)
}

/// What is wrong with this end's own files is said before anything is touched.
#[test]
fn files_are_checked_first() -> Result<()> {
    let hosts = Hosts::new()?;
    hosts.host("expired", &Holder::named(["ship1"]).expired())?;
    hosts.host("alone", &Holder::named(["ship1"]).signs_itself())?;
    hosts.host("open", &Holder::named(["ship1"]))?;
    let key = hosts.folder("open").join("client-key.pem");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).map_err(failed("chmod"))?;
    hosts.host("mixed", &Holder::named(["ship1"]))?;
    fs::copy(hosts.folder("here").join("client-key.pem"), hosts.folder("mixed").join("client-key.pem"))
        .map_err(failed("copy"))?;
    let to = "tcp:127.0.0.1:1";
    let cases: [(&str, &[&str], &str); 9] = [
        (
            "expired",
            &[],
            "client-cert.pem is of no use: it is for ship1, and expired on 2001-01-01T00:00:00Z; make a new",
        ),
        ("alone", &[], "client-cert.pem is of no use: it is for ship1, and is signed by itself"),
        ("open", &[], "client-key.pem: every user of this host may use it; take it from them (chmod o-rwx)"),
        ("mixed", &[], "client-key.pem is not the key of the certificate beside it"),
        ("nowhere", &[], "can't read"),
        ("here", &["--insecure"], "--tls, --insecure: both say"),
        ("here", &["--token", "ts1-"], "--tls, --token: both say"),
        ("here", &["--peer-name", ""], "a name is missing"),
        ("", &["--peer-name", "ship2"], "--peer-name: it is a name in a certificate; add --tls DIR"),
    ];
    for (folder, flags, words) in cases {
        let tls = if folder.is_empty() { Vec::new() } else { hosts.tls(folder).to_vec() };
        let moving = Transship::moving("handoff:/nowhere", to).args(tls).args(flags.iter().copied());
        assert_says(&moving.run()?, 2, words);
    }
    let to_unix = Transship::moving("handoff:/nowhere", "unix:/nowhere/s").args(hosts.tls("here"));
    assert_says(&to_unix.run()?, 2, "name the receiver with --peer-name");
    Ok(())
}

/// A stranger with a certificate of the authority, who comes to the port before the data channels do, and one who comes
/// while pages go over them.
#[test]
fn strangers_at_the_port_get_nowhere() -> Result<()> {
    let hosts = Hosts::new()?;
    let (source, destination) = synthetic_pair(guest())?;
    let (another, folder) = (guest().start()?, Scratch::new()?);
    let receive = hosts.receiving(&destination, "tcp:127.0.0.1:0").start()?;
    let to = receive.listening()?;
    let gate = folder.join("gate");
    let first = hosts
        .moving(&source, &to)
        .env("TRANSSHIP_FAIL_POINT", "source.welcome=stall")
        .env("TRANSSHIP_FAIL_FILE", &gate)
        .start()?;
    wait_until("the first word", || Ok(gate.exists()))?;
    assert_says(&hosts.moving(&another, &to).run()?, 1, "another move has begun here");
    let _silent = TcpStream::connect(to.trim_start_matches("tcp:")).map_err(failed("a stranger"))?;
    fs::remove_file(&gate).map_err(failed("the gate"))?;
    first.wait()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert_whole(&destination)?;

    let back = guest().incoming().start()?;
    let receive = hosts.receiving(&back, "tcp:127.0.0.1:0").start()?;
    let to = receive.listening()?;
    let second = in_the_middle(hosts.moving(&destination, &to), &folder)?;
    assert_says(&hosts.moving(&another, &to).run()?, 1, "nothing listens there");
    fs::remove_file(folder.join("gate")).map_err(failed("the gate"))?;
    second.wait()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert_whole(&back)?;
    assert_runs_on(&another)
}

/// Somebody in the middle who changes a byte or cuts a record in two, in the handshake, of a message and of pages.
#[test]
fn whoever_is_in_the_middle_can_only_break_the_move() -> Result<()> {
    let target = |connection, to_destination, byte, harm| Target { connection, to_destination, byte, harm };
    let hosts = Hosts::new()?;
    let cases = [
        (target(0, true, 400, Harm::Flip), "no encrypted connection with", "changed on its way"),
        (target(0, false, 600, Harm::Flip), "changed on its way", "changed on its way"),
        (target(2, true, 1_000_003, Harm::Flip), "changed on its way", "changed on its way"),
        (target(1, true, 1_000_003, Harm::Cut), "", "data channel"),
        (target(0, true, 700, Harm::Cut), "no encrypted connection with", "closed the connection"),
    ];
    for (number, (target, here, there)) in cases.into_iter().enumerate() {
        let (source, destination) = synthetic_pair(guest())?;
        let (near, far) = (hosts.folder(&format!("near{number}")), hosts.folder(&format!("far{number}")));
        let mut receive = hosts.receiving(&destination, &unix(&far)).start()?;
        receive.listening()?;
        let _middle = Middle::start(&near, &far, Some(target))?;
        let moved = hosts.moving(&source, &unix(&near)).args(["--peer-name", "ship2.example.org"]).run()?;
        println!("{target:?}: {}", moved.stderr.lines().last().unwrap_or_default());
        assert_says(&moved, 1, here);
        assert_runs_on(&source)?;
        if target.connection == 0 && receive.process().ended()?.is_none() {
            turned_away(&receive, there)?;
            continue;
        }
        let received = receive.wait()?;
        println!("    {}", received.stderr.lines().last().unwrap_or_default());
        assert_says(&received, 1, there);
        assert_eq!(destination.state()?, SyntheticState::Waiting, "{target:?}");
    }
    Ok(())
}

/// A program of others, as one end of a handshake.
struct Foreign(Child);

impl Foreign {
    fn start(program: &str, words: &[&str]) -> Result<Self> {
        let child = Command::new(program)
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        child.map(Self).map_err(failed(program))
    }

    /// All that it has said, once it has ended.
    fn said(mut self) -> Result<String> {
        let mut said = String::new();
        for pipe in
            [self.0.stdout.take().map(|p| Box::new(p) as Box<dyn Read>), self.0.stderr.take().map(|p| Box::new(p) as _)]
        {
            let mut bytes = Vec::new();
            pipe.into_iter().try_for_each(|mut pipe| pipe.read_to_end(&mut bytes).map(drop)).map_err(failed("read"))?;
            said.push_str(&String::from_utf8_lossy(&bytes));
        }
        Ok(said)
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Files of a role in a folder.
fn files(folder: &Path, role: &str) -> [String; 3] {
    ["ca-cert.pem".into(), format!("{role}-cert.pem"), format!("{role}-key.pem")]
        .map(|name| folder.join(name).display().to_string())
}

/// OpenSSL's and GnuTLS's programs as callers: each is told by an alert, and the receiver says why it has turned it
/// away.
#[test]
fn foreign_callers_are_told_why() -> Result<()> {
    let hosts = Hosts::new()?;
    hosts.host("expired", &Holder::named(["ship1.example.org"]).expired())?;
    hosts.host("alone", &Holder::named(["ship1.example.org"]).signs_itself())?;
    let destination = guest().incoming().start()?;
    let receive = hosts.receiving(&destination, "tcp:127.0.0.1:0").start()?;
    let address = receive.listening()?.trim_start_matches("tcp:").to_owned();
    let port = address.rsplit(':').next().unwrap_or_default().to_owned();
    let cases: [(&str, &[&str], &str, &str); 5] = [
        ("expired", &[], "expired", "(ship1.example.org) expired on 2001-01-01T00:00:00Z"),
        ("alone", &[], "unknown", "(ship1.example.org) is signed by itself"),
        ("", &[], "certificate required", "it shows no certificate; put client-cert.pem"),
        ("here", &["-tls1_2"], "alert protocol version", "it speaks no TLS 1.3"),
        ("there-as-server", &[], "unsupported certificate", "is not for a TLS client"),
    ];
    for (folder, flags, alert, why) in cases {
        let (folder, role) = folder.strip_suffix("-as-server").map_or((folder, "client"), |name| (name, "server"));
        let [ca, certificate, key] = files(&hosts.folder(folder), role);
        let mut words = vec!["s_client", "-connect", &address, "-ign_eof"];
        if !folder.is_empty() {
            words.extend(["-CAfile", &ca, "-cert", &certificate, "-key", &key]);
        }
        words.extend(flags);
        let said = Foreign::start("openssl", &words)?.said()?;
        assert!(said.contains(alert), "{alert:?} is not in: {said}");
        turned_away(&receive, why)?;
    }
    let [ca, ..] = files(&hosts.folder("here"), "client");
    let (ca, port) = (format!("--x509cafile={ca}"), format!("--port={port}"));
    let said =
        Foreign::start("gnutls-cli", &["--priority=NORMAL:-VERS-ALL:+VERS-TLS1.2", &ca, &port, "127.0.0.1"])?.said()?;
    assert!(said.contains("protocol version"), "{said}");
    let (source, to) = (guest().start()?, format!("tcp:{address}"));
    hosts.moving(&source, &to).run()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert_whole(&destination)
}

/// The same as receivers: the guest runs on, whatever they show.
#[test]
fn foreign_receivers_get_nothing() -> Result<()> {
    let hosts = Hosts::new()?;
    hosts.host("expired", &Holder::named(["localhost"]).expired())?;
    hosts.host("alone", &Holder::named(["localhost"]).signs_itself())?;
    let source = guest().start()?;
    let cases: [(&str, &[&str], &str); 4] = [
        ("expired", &[], "its certificate (localhost) expired on 2001-01-01T00:00:00Z; make a new one"),
        ("alone", &[], "its certificate (localhost) is signed by itself"),
        ("there", &["-tls1_2"], "it speaks no TLS 1.3"),
        ("there", &[], "it does not speak as a transship does"),
    ];
    for (folder, flags, why) in cases {
        let [ca, certificate, key] = files(&hosts.folder(folder), "server");
        let mut words = vec!["s_server", "-accept", "127.0.0.1:0", "-CAfile", &ca, "-cert", &certificate, "-key", &key];
        words.extend(["-Verify", "1"]);
        words.extend(flags);
        let mut server = Foreign::start("openssl", &words)?;
        // It says this to whoever it trusts.
        let input = server.0.stdin.as_mut().ok_or_else(|| LabError("no input".into()))?;
        input.write_all(b"hello\n").map_err(failed("openssl"))?;
        let to = format!("tcp:localhost:{}", port_of(&mut server)?);
        assert_says(&hosts.moving(&source, &to).run()?, 1, why);
        assert_runs_on(&source)?;
    }
    Ok(())
}

/// The port that the system has chosen for `openssl s_server`, which says so: `ACCEPT 127.0.0.1:PORT`.
fn port_of(server: &mut Foreign) -> Result<String> {
    let out = server.0.stdout.as_mut().ok_or_else(|| LabError("no output".into()))?;
    let (mut said, mut byte) = (String::new(), [0]);
    while out.read(&mut byte).map_err(failed("read"))? > 0 {
        said.push(byte[0].into());
        if let Some(line) = said.strip_suffix('\n')
            && let Some((_, port)) = line.lines().last().unwrap_or_default().rsplit_once(':')
            && line.contains("ACCEPT")
        {
            return Ok(port.trim().to_owned());
        }
    }
    Err(LabError(format!("openssl s_server ended: {said}")))
}
