//! Guests that get their pages although nobody is left who was to bring them: a person starts the move again.
use std::path::PathBuf;

use rustix::process::{Pid, Signal, kill_process};
use transship_lab::{
    Backend, LabError, Qemu, QemuBuilder, Result, Scratch, Transship, lines::Mark, transship::TransshipBuilder,
    wait_until,
};

use crate::{
    ends::number,
    peer::assert_moved,
    post_copy::{assert_alone, busy, receiving, running, slowly},
    restoring::lazy::stand_ins,
};

/// The record of a guest that was handed over.
fn record(source: &Qemu) -> PathBuf {
    let base = match rustix::process::geteuid().is_root() {
        true => "/run".into(),
        false => std::env::var("XDG_RUNTIME_DIR").unwrap_or_default(),
    };
    PathBuf::from(base).join("transship/handed-over").join(source.pid().to_string())
}

fn kill_stand_ins(guest: &Qemu) -> Result<()> {
    for pid in stand_ins(guest)? {
        let pid = Pid::from_raw(pid as i32).ok_or_else(|| LabError("no process".into()))?;
        kill_process(pid, Signal::KILL).map_err(|error| LabError(format!("kill: {error}")))?;
    }
    wait_until("the end of the second process", || Ok(stand_ins(guest)?.is_empty()))
}

/// A guest at its destination that lacks pages, and nobody sends them.
struct Left {
    source: Qemu,
    destination: Qemu,
    receive: Transship,
    there: String,
    token: String,
    count: u64,
    _folder: Scratch,
}

impl Left {
    fn leave(guest: fn() -> QemuBuilder) -> Result<Self> {
        let (source, count) = running(guest())?;
        let (destination, folder) = (busy(16).incoming().start()?, Scratch::new()?);
        let there = format!("unix:{}", folder.join("there").display());
        let receive = receiving(&destination.vm(), &there).args(["--token-lifetime", "10m"]).start()?;
        receive.listening()?;
        let token = receive.token()?;
        let moving = Transship::moving(&source.vm(), &there).args(["--token", &token]);
        let mut moving = moving.args(slowly(&[])).start()?;
        destination.wait_status("running")?;
        moving.kill9();
        kill_stand_ins(&source)?;
        Ok(Self { source, destination, receive, there, token, count, _folder: folder })
    }

    fn recovering(&self) -> TransshipBuilder {
        Transship::moving(&self.source.vm(), &self.there).args(["--token", &self.token, "--recover"])
    }

    /// The guest is whole at its destination, and nothing is left of all this.
    fn assert_whole(self) -> Result<()> {
        let Self { source, destination, receive, count, .. } = self;
        let received = receive.wait()?.expect_code(0)?.report()?;
        assert!(number(&received, "/postcopy/reconnects") > 0.0, "{received}");
        assert_moved(&source, &destination, count)?;
        wait_until("the end of its record", || Ok(!record(&source).exists()))?;
        assert_alone(&destination)?;
        assert_alone(&source)
    }
}

#[test]
fn a_guest_gets_its_pages_though_nobody_of_its_move_is_left() -> Result<()> {
    let left = Left::leave(|| busy(16))?;
    let report = left.recovering().args(["--compress", "zstd"]).run()?.expect_code(0)?.report()?;
    assert_eq!(report["status"], "completed", "{report}");
    assert!(number(&report, "/postcopy/owed") > 0.0, "{report}");
    left.assert_whole()
}

/// Memory that only the VMM has no second process can send; and whoever recovers may be killed, too.
#[test]
fn private_memory_is_sent_by_whoever_is_not_killed() -> Result<()> {
    let left = Left::leave(|| busy(16).backend(Backend::Ram))?;
    for _ in 0..2 {
        let mut killed = left.recovering().args(["--bandwidth", "1MiB"]).start()?;
        killed.stderr().wait(Mark::START, "the line", |line| line.contains("is back").then_some(()))?;
        let second = left.recovering().run()?.expect_code(1)?;
        assert!(second.stderr.contains("another transship still serves"), "{second}");
        killed.kill9();
    }
    left.recovering().run()?.expect_code(0)?;
    left.assert_whole()
}

/// Whatever is named wrongly, no page goes that the guest does not wait for.
#[test]
fn only_what_was_handed_over_is_recovered() -> Result<()> {
    let refused = |recovering: TransshipBuilder, why: &str| -> Result<()> {
        let refused = recovering.run()?.expect_code(1)?;
        assert!(refused.stderr.contains(why), "{refused}");
        Ok(())
    };
    let left = Left::leave(|| busy(16))?;
    let (other, _) = running(busy(16))?;
    let other = Transship::moving(&other.vm(), &left.there).args(["--token", &left.token, "--recover"]);
    refused(other, "was not given away")?;
    left.recovering().run()?.expect_code(0)?;
    refused(left.recovering(), "there is no record")?;
    let flags = left.recovering().args(["--hold", "--verify"]).run()?.expect_code(2)?;
    assert!(flags.stderr.contains("--hold") && flags.stderr.contains("--verify"), "{flags}");
    left.assert_whole()
}
