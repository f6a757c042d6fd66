//! Every method moves a guest whole, with as many encoders as there may be; and nothing of them hangs when a move ends
//! early.
use crate::ends::{assert_whole, move_between, number, synthetic_pair};
use rustix::process::Signal;
use transship_lab::{
    LabError, Qemu, Result, Scratch, SlowLink, Synthetic, Transship, Workload,
    lines::Mark,
    synthetic::{SyntheticBuilder, SyntheticState},
};

/// A folder with text that shrinks as text does. Not the same everywhere: a packet in another's place would show.
fn corpus() -> Result<Scratch> {
    const WORDS: [&str; 24] = [
        "ship", "harbour", "the", "a", "of", "cargo", "carries", "and", "sails", "page", "window", "channel", "from",
        "to", "with", "fog", "light", "captain", "writes", "letter", "again", "never", "in", "tide",
    ];
    let folder = Scratch::new()?;
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for file in 0..4 {
        let mut text = String::new();
        while text.len() < 400_000 {
            // xorshift: the same text in every run
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            text.push_str(WORDS[(state >> 33) as usize % WORDS.len()]);
            match state % 13 {
                0 => text.push_str(&format!(" {}.\n", state % 10_000)),
                _ => text.push(' '),
            }
        }
        std::fs::write(folder.join(&format!("{file}.txt")), text).map_err(|e| LabError(format!("corpus: {e}")))?;
    }
    Ok(folder)
}

/// A guest full of text that writes.
fn of_text(corpus: &Scratch, memory: &str) -> SyntheticBuilder {
    let folder = corpus.path().to_string_lossy();
    Synthetic::builder().memory(memory).touched("80%").set("--corpus", &folder).write_rate("20M").hot_set("4M")
}

/// A machine that has much else to do still moves a guest that writes all the time.
const PATIENT: [&str; 2] = ["--downtime", "5s"];

#[test]
fn every_method_moves_a_writing_guest_whole() -> Result<()> {
    let corpus = corpus()?;
    let methods = [
        ("none", "channels"),
        ("zlib", "channels"),
        ("zlib:6", "main"),
        ("zstd", "channels"),
        ("zstd:-5", "off"),
        ("qatzip", "channels"),
        ("lz4", "main"),
        ("lz4:9", "channels"),
    ];
    for (method, zero_pages) in methods {
        let (source, destination) = synthetic_pair(of_text(&corpus, "48M"))?;
        let flags = [
            "--verify",
            "--channels",
            "2",
            "--encoders",
            "3",
            "--zero-pages",
            zero_pages,
            "--compress",
            method,
            PATIENT[0],
            PATIENT[1],
        ];
        let moved = move_between(&source.vm(), &destination.vm(), &flags)?;
        let report = moved.source.report()?;
        assert_eq!((&report["status"], &report["verified"]), (&"completed".into(), &true.into()), "{method}: {report}");
        assert_eq!(moved.destination.report()?["status"], "completed");
        assert_whole(&destination)?;
        assert_eq!(source.state()?, SyntheticState::Stopped, "it must not run on both sides");

        let (given, made) = (number(&report, "/bytes/encoder_in"), number(&report, "/bytes/encoder_out"));
        let pages = 4096.0 * number(&report, "/pages/normal");
        let text = number(&report, "/rounds/0/bytes");
        if method == "none" {
            assert_eq!((given, made), (0.0, 0.0), "{report}");
            assert!(text > pages / 2.0, "the first round has most pages: {report}");
        } else {
            // Every page was encoded, since nobody goes past busy encoders unasked. What the guest writes does not
            // shrink.
            assert_eq!(given, pages, "{method}: {report}");
            assert!(text < 0.6 * f64::from(48 << 20), "{method} did not make text smaller: {report}");
            assert!(number(&report, "/cpu/encoders") > 0.0, "{method}: {report}");
        }
        assert_eq!(number(&report, "/pages/raw_busy"), 0.0, "{method}: {report}");
    }
    Ok(())
}

/// Far more threads than cores, and than channels; and one for many channels.
#[test]
fn encoders_and_channels_come_in_any_number() -> Result<()> {
    let corpus = corpus()?;
    for (encoders, channels) in [("16", "4"), ("255", "1"), ("1", "64")] {
        let (source, destination) = synthetic_pair(of_text(&corpus, "48M"))?;
        let flags =
            ["--verify", "--compress", "zstd", "--encoders", encoders, "--channels", channels, PATIENT[0], PATIENT[1]];
        move_between(&source.vm(), &destination.vm(), &flags)?;
        assert_whole(&destination)?;
    }
    Ok(())
}

/// A limit on bytes is a slow link: text has to be encoded, after a first look at the link with pages as they are. So
/// packets of several methods and raw ones mix on each channel.
#[test]
fn auto_encodes_for_a_slow_link_and_the_guest_arrives_whole() -> Result<()> {
    let corpus = corpus()?;
    let (source, destination) = synthetic_pair(of_text(&corpus, "192M"))?;
    let flags = ["--verify", "--compress", "auto", "--encoders", "3", "--channels", "2", "--bandwidth", "60M"];
    let report = move_between(&source.vm(), &destination.vm(), &flags)?.source.report()?;
    assert_eq!(report["verified"], true);
    assert_whole(&destination)?;
    let (given, made) = (number(&report, "/bytes/encoder_in"), number(&report, "/bytes/encoder_out"));
    let pages = 4096.0 * number(&report, "/pages/normal");
    assert!(0.0 < made && made < given, "nothing was encoded: {report}");
    assert!(number(&report, "/bytes/wire") < pages, "{report}");
    Ok(())
}

/// There is nothing to be gained by any method, and it knows.
#[test]
fn auto_leaves_alone_what_does_not_shrink() -> Result<()> {
    let (source, destination) = synthetic_pair(Synthetic::builder().memory("64M").touched("100%").content("random"))?;
    let flags = ["--verify", "--channels", "2", "--compress", "auto", "--bandwidth", "100M"];
    let report = move_between(&source.vm(), &destination.vm(), &flags)?.source.report()?;
    assert_whole(&destination)?;
    let pages = 4096.0 * number(&report, "/pages/normal");
    let (given, wire) = (number(&report, "/bytes/encoder_in"), number(&report, "/bytes/wire"));
    assert!(given < 0.5 * pages && wire < 1.1 * pages, "{report}");
    Ok(())
}

/// One encoder at a level that takes it a long time: pages go past it if that is asked for, and only then.
#[test]
fn pages_go_past_busy_encoders_only_when_asked() -> Result<()> {
    let corpus = corpus()?;
    for when_busy in ["raw", "wait"] {
        let (source, destination) = synthetic_pair(of_text(&corpus, "16M"))?;
        let flags = ["--verify", "--compress", "zstd:15", "--encoders", "1", "--when-busy", when_busy];
        // On a busy machine one encoder may be slower than the guest writes.
        let flags = flags.into_iter().chain(["--downtime", "60s"]).collect::<Vec<_>>();
        let report = move_between(&source.vm(), &destination.vm(), &flags)?.source.report()?;
        assert_whole(&destination)?;
        assert!(number(&report, "/busy_ratio") > 0.0, "{report}");
        let (raw, normal) = (number(&report, "/pages/raw_busy"), number(&report, "/pages/normal"));
        assert_eq!(raw > 0.0, when_busy == "raw", "{report}");
        assert_eq!(number(&report, "/bytes/encoder_in"), 4096.0 * (normal - raw), "each page goes one way: {report}");
    }
    Ok(())
}

/// What does not shrink goes as it is, and costs no more than without encoders.
#[test]
fn random_pages_go_raw_by_themselves() -> Result<()> {
    for method in ["zlib", "zstd", "qatzip", "lz4"] {
        let guest = Synthetic::builder().memory("16M").touched("100%").content("random");
        let (source, destination) = synthetic_pair(guest)?;
        let flags = ["--verify", "--channels", "2", "--compress", method];
        let report = move_between(&source.vm(), &destination.vm(), &flags)?.source.report()?;
        assert_whole(&destination)?;
        let pages = 4096.0 * number(&report, "/pages/normal");
        assert!(pages >= f64::from(16 << 20), "{report}");
        assert_eq!(number(&report, "/bytes/encoder_out"), pages, "{method}: {report}");
        let rounds = report["rounds"].as_array().ok_or_else(|| LabError(format!("no rounds in {report}")))?;
        let wire: f64 = rounds.iter().map(|round| number(round, "/bytes")).sum();
        assert!(wire <= 1.01 * pages, "{method} made them longer: {report}");
    }
    Ok(())
}

/// Over a link that is slower than the encoders, or as fast: encoded and raw packets mix, and pages change while they
/// travel.
#[test]
#[ignore = "long: make test-long"]
fn a_linux_guest_moves_compressed_over_a_slow_link() -> Result<()> {
    let link = SlowLink::new(400)?;
    let workload = Workload { rate: 1500, hot_mib: Some(8), ..Workload::LINUX };
    let source = Qemu::linux().workload(workload).booted()?;
    let destination = Qemu::linux().workload(workload).incoming().start()?;
    let before = source.next_count()?;
    let receive =
        Transship::receiving(&destination.vm(), &link.destination_uri(0)).prefix(&link.destination()).start()?;
    let to = receive.listening()?;
    let flags = [
        "--verify",
        "--channels",
        "3",
        "--downtime",
        "2s",
        "--compress",
        "zstd",
        "--encoders",
        "2",
        "--when-busy",
        "raw",
    ];
    let moved = Transship::moving(&source.vm(), &to).prefix(&link.source()).args(flags).run()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    let report = moved.report()?;
    assert_eq!(report["verified"], true);
    let (given, made) = (number(&report, "/bytes/encoder_in"), number(&report, "/bytes/encoder_out"));
    assert!(0.0 < made && made < given, "{report}");
    let after = destination.next_count()?;
    assert!(after.count > before.count, "{before:?} {after:?}");
    let sweep = destination.sweep()?;
    assert_eq!((sweep.errors, after.errors), (0, 0), "{sweep:?}");
    Ok(())
}

/// A destination that hangs takes nothing, so all rings are full and main waits for room. The user is heard all the
/// same, and not only when the link is taken for dead: then the move would have failed instead.
#[test]
#[ignore = "long: make test-long"]
fn a_move_to_a_destination_that_hangs_can_be_cancelled() -> Result<()> {
    let corpus = corpus()?;
    let waiting = ["--compress", "zstd", "--bandwidth", "20M"];
    let raw = ["--compress", "zstd:9", "--bandwidth", "20M", "--when-busy", "raw"];
    let auto = ["--compress", "auto", "--bandwidth", "20M"];
    for flags in [&waiting[..], &raw, &auto] {
        let (source, destination) = synthetic_pair(of_text(&corpus, "192M"))?;
        let folder = Scratch::new()?;
        let uri = format!("unix:{}", folder.join("s").display());
        let mut receive = Transship::receiving(&destination.vm(), &uri).start()?;
        let moving = Transship::moving(&source.vm(), &receive.listening()?).args(flags.iter().copied()).start()?;
        let (_, begun) = moving.stderr().wait(Mark::START, "bytes that travel", |line| {
            (line.contains("round 1") && !line.contains(", 0 B/s")).then_some(())
        })?;
        receive.process().signal(Signal::STOP)?;
        moving.stderr().wait(begun, "the standstill", |line| line.contains(", 0 B/s").then_some(()))?;
        moving.signal(Signal::INT)?;
        let moved = moving.wait()?.expect_code(1)?;
        assert_eq!(moved.report()?["status"], "cancelled", "{flags:?}: {moved}");
        receive.process().signal(Signal::CONT)?;
        receive.wait()?.expect_code(1)?;
        assert_whole(&source)?;
    }
    Ok(())
}

/// How a move is made to end while its encoders have work.
#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    /// Ctrl-C at the source.
    Cancel,
    KillSource,
    KillDestination,
}

/// Whatever stands between the threads at that moment (full rings before encoders that are slow, or behind them before
/// channels that may not send), both commands end, the guest runs on, and the next attempt works.
#[test]
#[ignore = "long: make test-long"]
fn nothing_hangs_when_a_move_ends_early() -> Result<()> {
    let corpus = corpus()?;
    let stuck_encoders = ["--compress", "zstd:20", "--encoders", "16", "--channels", "2"];
    let stuck_channels = ["--compress", "lz4", "--encoders", "16", "--channels", "2", "--bandwidth", "1M"];
    let raw = ["--compress", "zlib:9", "--encoders", "2", "--when-busy", "raw", "--bandwidth", "1M"];
    let auto = ["--compress", "auto", "--encoders", "4", "--bandwidth", "1M"];
    for flags in [&stuck_encoders[..], &stuck_channels, &raw, &auto] {
        for end in [End::Cancel, End::KillSource, End::KillDestination] {
            ends_early(&corpus, flags, end).map_err(|e| LabError(format!("{end:?} with {flags:?}: {e}")))?;
        }
    }
    Ok(())
}

fn ends_early(corpus: &Scratch, flags: &[&str], end: End) -> Result<()> {
    let (source, destination) = synthetic_pair(of_text(corpus, "48M"))?;
    let folder = Scratch::new()?;
    let uri = format!("unix:{}", folder.join("s").display());
    let mut receive = Transship::receiving(&destination.vm(), &uri).start()?;
    let mut moving = Transship::moving(&source.vm(), &receive.listening()?).args(flags.iter().copied()).start()?;
    moving.stderr().wait(Mark::START, "the first round", |line| line.contains("round 1").then_some(()))?;
    match end {
        End::Cancel => moving.signal(Signal::INT)?,
        End::KillSource => moving.kill9(),
        End::KillDestination => receive.kill9(),
    }
    let (moved, received) = (moving.wait()?, receive.wait()?);
    if end != End::KillSource {
        let report = moved.clone().expect_code(1)?.report()?;
        assert_eq!(report["status"], if end == End::Cancel { "cancelled" } else { "failed" }, "{moved}");
    }
    if end != End::KillDestination {
        received.expect_code(1)?;
    }
    assert_whole(&source)?;

    let destination = of_text(corpus, "48M").incoming().start()?;
    move_between(&source.vm(), &destination.vm(), &["--verify", "--compress", "zstd", "--encoders", "4"])?;
    assert_whole(&destination)
}
