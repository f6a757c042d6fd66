//! What a plan says of a move, and what the move is then.
use serde_json::Value;
use transship_lab::{
    Accel, Finished, LabError, Proxy, Qemu, QemuBuilder, Result, Scratch, Synthetic, Transship, Workload,
};

use crate::ends::{assert_whole, number, synthetic_pair};
use crate::peer::{assert_moved, assert_nothing_of_ours};

/// A link of this speed, and what may be waited for on it.
const LINK: [&str; 4] = ["--bandwidth", "32MiB", "--downtime", "300ms"];

fn plan(vm: &str, flags: &[&str]) -> Result<Value> {
    let ended = Transship::command([&["plan", "--vm", vm, "--json", "--time", "2s"], flags].concat()).run()?;
    ended.expect_code(0)?.report()
}

/// The line with these flags.
fn way<'a>(plan: &'a Value, flags: &str) -> &'a Value {
    let ways = plan["ways"].as_array().into_iter().flatten();
    ways.into_iter().find(|way| way["flags"] == flags).unwrap_or_else(|| panic!("no {flags:?} in {plan}"))
}

fn assert_near(what: &str, foretold: f64, came: f64, factor: f64) {
    let is_near = foretold <= came * factor && came <= foretold * factor;
    assert!(is_near, "{what}: {foretold} was foretold, and {came} came");
}

/// A receiver that was probed is as good as before.
fn move_to(source: &str, receive: Transship, to: &str) -> Result<Finished> {
    let ended = Transship::moving(source, to).args(LINK).run()?;
    receive.wait()?;
    Ok(ended)
}

/// Idle ones, and one that writes a little all the time.
#[test]
fn a_guest_that_converges_does_so_with_about_as_many_bytes_as_were_planned() -> Result<()> {
    for rate in [None, Some("4M")] {
        let guest = Synthetic::builder().memory("96M").touched("80%").content("mixed").hot_set("8M");
        let guest = rate.map_or(guest.clone(), |rate| guest.write_rate(rate));
        let (source, destination) = synthetic_pair(guest)?;
        let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
        let to = receive.listening()?;
        let plan = plan(&source.vm(), &[&LINK[..], &["--to", &to]].concat())?;
        assert_eq!(plan["link"]["known"], "given", "{plan}");
        assert!(number(&plan, "/link/round_trip_ms") > 0.0, "it was probed: {plan}");
        let outlook = way(&plan, "");
        assert_eq!(outlook["converges"], true, "{plan}");
        let report = move_to(&source.vm(), receive, &to)?.expect_code(0)?.report()?;
        assert_near("bytes", number(outlook, "/bytes"), number(&report, "/bytes/wire"), 1.5);
        // What was thought after the first round is in the report.
        assert_eq!(report["forecast"]["converges"], true, "{report}");
        assert_near("bytes after round 1", number(&report, "/forecast/bytes"), number(&report, "/bytes/wire"), 1.5);
        assert_whole(&destination)?;
    }
    Ok(())
}

/// It writes all its pages again and again, faster than the link carries them.
fn hopeless() -> QemuBuilder {
    let workload = Workload { mib: 5, rate: 0, sweep_ms: 2000, ..Workload::MULTIBOOT };
    Qemu::multiboot_under(Accel::Tcg).workload(workload)
}

#[test]
fn a_guest_that_never_converges_is_known_beforehand_and_what_ends_it_does() -> Result<()> {
    let source = hopeless().start()?;
    source.ready()?;
    let left = source.next_count()?.count;
    let slow = ["--bandwidth", "4MiB", "--downtime", "250ms"];
    let plan = plan(&source.vm(), &slow)?;
    assert_nothing_of_ours(&source)?;
    assert_eq!(way(&plan, "")["converges"], false, "{plan}");
    assert_eq!(way(&plan, "--converge pace")["converges"], true, "{plan}");
    let followed = way(&plan, "--converge postcopy");
    assert!(number(followed, "/follows_bytes") > 1e6 && followed["work_share"].is_null(), "{plan}");
    let longer = plan["ways"].as_array().and_then(|ways| ways.last()).and_then(|way| way["flags"].as_str());
    let longer = longer.unwrap_or_default().to_owned();
    assert!(longer.starts_with("--downtime ") && way(&plan, &longer)["converges"] == true, "{plan}");

    let destination = hopeless().incoming().start()?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let ended = Transship::moving(&source.vm(), &receive.listening()?).args(slow).run()?.expect_code(1)?;
    let report = ended.report()?;
    assert_eq!((&report["status"], &report["forecast"]["converges"]), (&"not-converging".into(), &false.into()));
    receive.wait()?;

    // The last flag counts.
    let destination = hopeless().incoming().start()?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let (flag, value) = longer.split_once(' ').ok_or_else(|| LabError(longer.clone()))?;
    let flags = ["--bandwidth", "4MiB", flag, value];
    Transship::moving(&source.vm(), &receive.listening()?).args(flags).run()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert_moved(&source, &destination, left)
}

/// The token is not used up by a probe, and nobody without it is answered.
#[test]
fn a_receiver_with_a_token_is_probed_with_it_and_waits_on() -> Result<()> {
    let (source, destination) = synthetic_pair(Synthetic::builder().memory("16M"))?;
    let receive =
        Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").args(["--token-lifetime", "10m"]).start()?;
    let (to, token) = (receive.listening()?, receive.token()?);
    let refused = Transship::command(["plan", "--vm", &source.vm(), "--to", &to]).run()?.expect_code(1)?;
    assert!(refused.stderr.contains("--token"), "{refused}");
    for _ in 0..2 {
        let plan = plan(&source.vm(), &["--to", &to, "--token", &token])?;
        assert_eq!(plan["link"]["known"], "measured", "{plan}");
        assert!(number(&plan, "/link/bytes_per_s") > 1e6, "{plan}");
    }
    Transship::moving(&source.vm(), &to).args(["--token", &token]).run()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert_whole(&destination)
}

/// A link that breaks in a probe is an error here, and nothing there.
#[test]
fn a_probe_that_breaks_does_no_harm() -> Result<()> {
    let (source, destination) = synthetic_pair(Synthetic::builder().memory("16M"))?;
    let folder = Scratch::new()?;
    let there = format!("unix:{}", folder.join("there").display());
    let receive = Transship::receiving(&destination.vm(), &there).start()?;
    receive.listening()?;
    let proxy = Proxy::start(&folder.join("here"), &folder.join("there"))?;
    let here = format!("unix:{}", folder.join("here").display());
    let planning = Transship::command(["plan", "--vm", &source.vm(), "--to", &here]).start()?;
    proxy.wait_in_use();
    proxy.cut();
    let ended = planning.wait()?;
    assert!(matches!(ended.code(), Some(0 | 1)), "{ended}");
    Transship::moving(&source.vm(), &there).run()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert_whole(&destination)
}

/// People get a table, with bars only on a terminal.
#[test]
fn a_plan_is_a_table_of_ways() -> Result<()> {
    let source = Synthetic::builder().memory("32M").write_rate("1M").hot_set("1M").start()?;
    let ended = Transship::command(["plan", "--vm", &source.vm(), "--time", "1s"]).run()?.expect_code(0)?;
    for part in ["guest  32.0 MiB", "assumed: name a receiver", "as it is", "--compress zstd", "--converge pace"] {
        assert!(ended.stdout.contains(part), "{part}: {ended}");
    }
    assert!(!ended.stdout.contains('█'), "{ended}");
    Ok(())
}
