//! Moves with a token: nothing goes in clear, nobody else gets in, and whoever is in the middle can do no more than
//! break the connection. Whatever is tried, the guest runs on at the source, and both ends say why in one line.
use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    path::Path,
};

use crate::ends::{assert_whole, in_the_middle, synthetic_pair};
use crate::middle::{self, Harm, Middle, Target};
use transship_lab::{
    Finished, LabError, Result, Scratch, Synthetic, Transship,
    synthetic::{SyntheticBuilder, SyntheticState},
    transship::TransshipBuilder,
    wait_until,
};

const LIFETIME: [&str; 2] = ["--token-lifetime", "10m"];

fn guest() -> SyntheticBuilder {
    Synthetic::builder().memory("32M").touched("60%").content("mixed").write_rate("10M").hot_set("2M")
}

fn receiving(destination: &Synthetic, listen: &str) -> Result<Transship> {
    Transship::receiving(&destination.vm(), listen).args(LIFETIME).start()
}

fn unix(path: &Path) -> String {
    format!("unix:{}", path.display())
}

fn moving(source: &Synthetic, to: &str, token: &str) -> TransshipBuilder {
    Transship::moving(&source.vm(), to).args(["--token", token, "--channels", "2"])
}

fn assert_runs_on(source: &Synthetic) -> Result<()> {
    assert_eq!(source.state()?, SyntheticState::Running);
    assert_eq!(source.check()?.wrong, 0);
    Ok(())
}

/// The one line that says why it ended; there may be warnings before it.
fn reason(ended: &Finished) -> &str {
    ended.stderr.lines().rfind(|line| !line.contains(" WARN ")).unwrap_or_default()
}

/// It failed, in one line with these words.
fn assert_says(ended: Finished, words: &str) -> Result<()> {
    let ended = ended.expect_code(1)?;
    assert!(reason(&ended).contains(words), "{words:?} is not in: {ended}");
    let report = ended.report()?;
    assert_eq!(format!("transship: {}", report["error"].as_str().unwrap_or_default()), reason(&ended), "{ended}");
    Ok(())
}

#[test]
fn a_guest_moves_with_a_token() -> Result<()> {
    for (compress, listen) in [("none", "tcp:127.0.0.1:0"), ("zstd", "tcp:[::1]:0"), ("auto", "tcp:localhost:0")] {
        let (source, destination) = synthetic_pair(guest())?;
        let receive = receiving(&destination, listen)?;
        let (to, token) = (receive.listening()?, receive.token()?);
        let flags = ["--channels", "4", "--compress", compress, "--verify", "--token", &token];
        let moved = Transship::moving(&source.vm(), &to).args(flags).run()?.expect_code(0)?;
        assert_eq!(moved.report()?["verified"], true, "{compress}");
        assert_eq!(receive.wait()?.expect_code(0)?.report()?["status"], "completed");
        assert_whole(&destination)?;
        assert_eq!(source.state()?, SyntheticState::Stopped, "it must not run on both sides");
    }
    Ok(())
}

/// The words and the pages of a move are found in what goes by without a token, and not with one.
#[test]
fn nothing_goes_in_clear() -> Result<()> {
    for with_token in [false, true] {
        let (source, destination) = synthetic_pair(guest())?;
        let folder = Scratch::new()?;
        let (here, there) = (folder.join("here"), folder.join("there"));
        let mut receive = Transship::receiving(&destination.vm(), &unix(&there));
        if with_token {
            receive = receive.args(LIFETIME);
        }
        let receive = receive.start()?;
        receive.listening()?;
        let middle = Middle::start(&here, &there, None)?;
        let mut moving = Transship::moving(&source.vm(), &unix(&here)).args(["--channels", "3"]);
        if with_token {
            fs::write(folder.join("token"), receive.token()?)?;
            moving = moving.args(["--token", &format!("@{}", folder.join("token").display())]);
        }
        moving.run()?.expect_code(0)?;
        receive.wait()?.expect_code(0)?;
        assert_whole(&destination)?;
        let heard = middle.heard();
        assert_eq!(heard.len(), 4);
        for (number, said) in heard.iter().enumerate() {
            // Preambles, packets, and the announcement of the guest.
            let words: &[&[u8]] = if number == 0 { &[b"TSHP", b"synthetic"] } else { &[b"TSHP", b"TSPK"] };
            for word in words {
                assert_eq!(
                    middle::has(said, word),
                    !with_token,
                    "connection {number}: {}",
                    String::from_utf8_lossy(word)
                );
            }
            assert!(said.len() > 300, "connection {number}");
        }
    }
    Ok(())
}

/// Whoever comes without the right token is told why, learns nothing and disturbs nobody: the receiver waits on for the
/// one with the token.
#[test]
fn only_the_right_token_opens_the_door() -> Result<()> {
    let (source, destination) = synthetic_pair(guest())?;
    let other = guest().incoming().start()?;
    let (receive, elsewhere) = (receiving(&destination, "tcp:127.0.0.1:0")?, receiving(&other, "tcp:127.0.0.1:0")?);
    let (to, token) = (receive.listening()?, receive.token()?);
    let wrong = elsewhere.token()?;
    assert_says(moving(&source, &to, &wrong).run()?, "another receiver than the one that made this token")?;
    turned_away(&receive, "its token is another receiver's")?;
    assert_says(Transship::moving(&source.vm(), &to).run()?, "a token is needed here")?;
    turned_away(&receive, "it speaks in clear, without a token")?;
    let cut = moving(&source, &to, &token[..60]).run()?.expect_code(2)?;
    assert!(cut.stderr.contains("--token: it is too short") && !cut.stderr.contains(&token[8..60]), "{cut}");
    // The other way round: one who has a token, and a receiver that wants none.
    let clear = guest().incoming().start()?;
    let open = Transship::receiving(&clear.vm(), "tcp:127.0.0.1:0").start()?;
    assert_says(moving(&source, &open.listening()?, &token).run()?, "no encrypted connection with tcp:127.0.0.1")?;
    assert_runs_on(&source)?;

    moving(&source, &to, &token).run()?.expect_code(0)?;
    let received = receive.wait()?.expect_code(0)?;
    assert!(!received.stderr.contains(&token[4..]), "a token is not for the log");
    assert_whole(&destination)
}

fn turned_away(receive: &Transship, why: &str) -> Result<()> {
    let said = |line: &str| (line.contains("turned tcp:127.0.0.1:") && line.contains(why)).then_some(());
    receive.stderr().wait(transship_lab::lines::Mark::START, why, said).map(drop)
}

/// A second time, while the first move is under way, and when it is over.
#[test]
fn a_token_is_good_for_one_move() -> Result<()> {
    let (source, destination) = synthetic_pair(guest())?;
    let (another, folder) = (guest().start()?, Scratch::new()?);
    let receive = receiving(&destination, "tcp:127.0.0.1:0")?;
    let (to, token) = (receive.listening()?, receive.token()?);
    // Its control connection is there, its data connections are not.
    let gate = folder.join("gate");
    let first = moving(&source, &to, &token)
        .env("TRANSSHIP_FAIL_POINT", "source.welcome=stall")
        .env("TRANSSHIP_FAIL_FILE", &gate)
        .start()?;
    wait_until("the first word", || Ok(gate.exists()))?;
    assert_says(moving(&another, &to, &token).run()?, "another move has begun here")?;
    turned_away(&receive, "another move has begun here")?;
    fs::remove_file(&gate)?;
    first.wait()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert_whole(&destination)?;
    assert_says(moving(&another, &to, &token).run()?, "nothing listens there")?;
    assert_runs_on(&another)
}

#[test]
fn a_move_that_is_under_way_is_deaf_to_its_token() -> Result<()> {
    let (source, destination) = synthetic_pair(guest())?;
    let (another, folder) = (guest().start()?, Scratch::new()?);
    let receive = receiving(&destination, "tcp:127.0.0.1:0")?;
    let (to, token) = (receive.listening()?, receive.token()?);
    let first = in_the_middle(moving(&source, &to, &token), &folder)?;
    assert_says(moving(&another, &to, &token).run()?, "nothing listens there")?;
    assert_runs_on(&another)?;
    fs::remove_file(folder.join("gate"))?;
    first.wait()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert_whole(&destination)
}

#[test]
fn a_token_expires() -> Result<()> {
    let (source, destination) = synthetic_pair(guest())?;
    let receive =
        Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").args(["--token-lifetime", "1s"]).start()?;
    let (to, token) = (receive.listening()?, receive.token()?);
    assert_says(receive.wait()?, "the token has expired")?;
    assert_says(moving(&source, &to, &token).run()?, "no longer than its token is good")?;
    assert_runs_on(&source)?;
    assert_eq!(destination.state()?, SyntheticState::Waiting);
    Ok(())
}

/// Strangers at the port before a move and while its data connections come; and one who has heard all of another move,
/// and says it again: the control connection, or a channel full of pages.
#[test]
fn strangers_and_echoes_get_nowhere() -> Result<()> {
    let (source, destination) = synthetic_pair(guest())?;
    let folder = Scratch::new()?;
    let (here, there) = (folder.join("here"), folder.join("there"));
    let receive = receiving(&destination, &unix(&there))?;
    let token = receive.token()?;
    receive.listening()?;
    let middle = Middle::start(&here, &there, None)?;
    moving(&source, &unix(&here), &token).run()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    let heard = middle.heard();

    let back = guest().incoming().start()?;
    let (there, gate) = (folder.join("second"), folder.join("gate"));
    let receive = receiving(&back, &unix(&there))?;
    let token = receive.token()?;
    let to = receive.listening()?;
    let mut crowd = strangers(&there, &heard)?;
    let second = moving(&destination, &to, &token)
        .env("TRANSSHIP_FAIL_POINT", "source.welcome=stall")
        .env("TRANSSHIP_FAIL_FILE", &gate)
        .start()?;
    wait_until("the first word", || Ok(gate.exists()))?;
    crowd.extend(strangers(&there, &heard)?);
    fs::remove_file(&gate)?;
    second.wait()?.expect_code(0)?;
    let received = receive.wait()?.expect_code(0)?;
    assert_whole(&back)?;
    for why in ["changed on its way", "speaks in clear"] {
        let times = received.stderr.lines().filter(|line| line.contains("turned") && line.contains(why)).count();
        assert!(times >= 2, "{times} times {why:?}: {received}");
    }
    Ok(())
}

/// They stay until they are dropped, and hear nothing that they could use.
fn strangers(door: &Path, heard: &[Vec<u8>]) -> Result<Vec<UnixStream>> {
    let failed = |e: std::io::Error| LabError(format!("a stranger: {e}"));
    let words = heard.iter().map(|said| &said[..said.len().min(100_000)]);
    let words = words.chain([&b"TSHP"[..], b"", b"\x16", b"\x16\x03\x01\x00\x05hello", &[0; 200]]);
    let come = |words: &[u8]| {
        let mut stranger = UnixStream::connect(door).map_err(failed)?;
        stranger.set_nonblocking(true).map_err(failed)?;
        let _ = stranger.write(words); // it may be turned away meanwhile
        Ok(stranger)
    };
    words.map(come).collect()
}

/// Somebody in the middle who changes one byte, or lets no more through: of the handshake, of a message, of pages, on
/// either connection, in either direction.
#[test]
fn whoever_is_in_the_middle_can_only_break_the_move() -> Result<()> {
    let target = |connection, to_destination, byte, harm| Target { connection, to_destination, byte, harm };
    // What both ends say: the cause at the end that noticed it, or that the other one has.
    let cases = [
        (target(0, true, 100, Harm::Flip), ["", ""]),
        (target(0, true, 560, Harm::Flip), ["changed on its way", "changed on its way"]),
        (target(0, false, 300, Harm::Flip), ["", ""]),
        (target(2, true, 1_000_003, Harm::Flip), ["changed on its way", "changed on its way"]),
        // The source ends the other channel as soon as it notices, which may be noticed first there.
        (target(1, true, 1_000_003, Harm::Cut), ["", "data channel"]),
        (target(0, true, 560, Harm::Cut), ["", ""]),
        (target(2, true, 200, Harm::Cut), ["", ""]),
    ];
    for (target, [here, there]) in cases {
        let (source, destination) = synthetic_pair(guest())?;
        let folder = Scratch::new()?;
        let (near, far) = (folder.join("near"), folder.join("far"));
        let receive = receiving(&destination, &unix(&far))?;
        receive.listening()?;
        let _middle = Middle::start(&near, &far, Some(target))?;
        let moved = moving(&source, &unix(&near), &receive.token()?).run()?;
        println!("{target:?}: {}", reason(&moved));
        assert_says(moved, here).map_err(|e| LabError(format!("{target:?}: {e}")))?;
        assert_runs_on(&source)?;
        let mut receive = receive;
        if receive.process().ended()?.is_none() && target.connection == 0 && target.byte < 400 {
            // It has turned away whoever that was, and waits on.
            let said = |line: &str| line.contains("turned").then(|| line.to_owned());
            let (line, _) =
                receive.stderr().wait(transship_lab::lines::Mark::START, "that somebody is turned away", said)?;
            println!("    {line}");
            continue;
        }
        let received = receive.wait()?;
        println!("    {}", reason(&received));
        if there.contains("changed") {
            assert_eq!(received.report()?["error_by"], "peer", "{received}");
        }
        assert_eq!(destination.state()?, SyntheticState::Waiting, "{target:?}");
        assert_says(received, there).map_err(|e| LabError(format!("{target:?}: {e}")))?;
    }
    Ok(())
}

/// In text, the command for the other side is the one line on standard output, and works as it is.
#[test]
fn the_command_that_is_printed_works() -> Result<()> {
    let (source, destination) = synthetic_pair(guest())?;
    let listen = ["receive", "--vm", &destination.vm(), "--listen", "tcp:0.0.0.0:0"];
    let mut receive = Transship::command(listen).start()?;
    receive.listening()?;
    let is_command = |line: &str| line.strip_prefix("transship ").map(str::to_owned);
    let (command, _) = receive.process().stdout().wait(transship_lab::lines::Mark::START, "the command", is_command)?;
    let host = fs::read_to_string("/proc/sys/kernel/hostname")?;
    assert!(command.contains(&format!("--to tcp:{}:", host.trim())), "{command}");
    // Its own name may not be known to this host.
    let command = command.replace(&format!("tcp:{}:", host.trim()), "tcp:127.0.0.1:");
    let words = command.split(' ').map(|word| if word == "VM" { source.vm() } else { word.to_owned() });
    Transship::command(words).run()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert_whole(&destination)
}

/// What would cross a network in clear is refused before anything is touched, with the line that cures it.
#[test]
fn other_hosts_are_reached_in_clear_only_if_somebody_says_so() -> Result<()> {
    let to = ["--to", "tcp:192.0.2.1:4444"];
    let vm = ["--vm", "handoff:/nowhere"];
    let cases: [(&[&str], &str); 5] = [
        (&["move"], "--token"),
        (&["move", "--peer", "qemu"], "--insecure"),
        (&["receive", "--peer", "qemu"], "--insecure"),
        (&["relay", "--listen", "unix:/nowhere/s"], "--token"),
        (&["relay", "--listen", "relay:unix:/nowhere/s"], "--insecure"),
    ];
    for (words, cure) in cases {
        let mut words = words.to_vec();
        match words[0] {
            "move" => words.extend(vm.iter().chain(&to)),
            "receive" => words.extend(vm.iter().chain(&["--listen", "tcp:0.0.0.0:0"])),
            _ if words[2].starts_with("relay:") => words.extend(to),
            _ => words.extend(["--to", "relay:tcp:192.0.2.1:4444"]),
        }
        let ended = Transship::command(words.iter().copied()).run()?.expect_code(2)?;
        assert!(ended.stderr.lines().count() == 1 && ended.stderr.contains(cure), "{words:?}: {ended}");
    }
    Ok(())
}

/// A stranger that shakes no hands and says nothing holds nobody up, over TCP too.
#[test]
fn a_silent_stranger_delays_nobody() -> Result<()> {
    let (source, destination) = synthetic_pair(guest())?;
    let receive = receiving(&destination, "tcp:127.0.0.1:0")?;
    let (to, token) = (receive.listening()?, receive.token()?);
    let failed = |e: std::io::Error| LabError(format!("a stranger: {e}"));
    let mut silent = TcpStream::connect(to.trim_start_matches("tcp:")).map_err(failed)?;
    moving(&source, &to, &token).run()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert!(matches!(silent.read(&mut [0; 8]), Ok(0) | Err(_)), "it was told something");
    assert_whole(&destination)
}
