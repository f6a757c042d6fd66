//! A stock QEMU that waits for a guest, with nothing of ours on its side.
use std::{process::ExitStatus, time::Duration};

use serde_json::{Value, json};
use transship_lab::{Finished, LabError, PATIENCE, Qemu, Result, Transship, transship::TransshipBuilder};

/// How the waiting QEMU is set up, and what the command is told about it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Wires {
    /// Multifd channels; 0: multifd is off.
    pub(crate) channels: u8,
    pub(crate) compress: &'static str,
}

/// One connection.
pub(crate) const PLAIN: Wires = Wires { channels: 0, compress: "none" };

pub(crate) fn multifd(channels: u8, compress: &'static str) -> Wires {
    Wires { channels, compress }
}

impl Wires {
    /// Has it wait at a unix socket, whose address is returned.
    pub(crate) fn wait_for_a_guest(&self, qemu: &Qemu) -> Result<String> {
        let uri = format!("unix:{}", qemu.folder().join("incoming").display());
        self.wait_at(qemu, &uri)?;
        Ok(uri)
    }

    /// The same at a port that the system chooses.
    pub(crate) fn wait_at_a_port(&self, qemu: &Qemu) -> Result<String> {
        self.wait_at(qemu, "tcp:127.0.0.1:0")?;
        let answer = qemu.qmp("query-migrate", json!({}))?;
        let port = answer["socket-address"][0]["port"].as_str();
        port.map(|port| format!("tcp:127.0.0.1:{port}")).ok_or_else(|| LabError(format!("no port in {answer}")))
    }

    fn wait_at(&self, qemu: &Qemu, uri: &str) -> Result<()> {
        if self.channels > 0 {
            let on = json!([{ "capability": "multifd", "state": true }]);
            qemu.qmp("migrate-set-capabilities", json!({ "capabilities": on }))?;
            let parameters = json!({ "multifd-channels": self.channels, "multifd-compression": self.compress });
            qemu.qmp("migrate-set-parameters", parameters)?;
        }
        qemu.qmp("migrate-incoming", json!({ "uri": uri })).map(drop)
    }

    /// The command that moves a guest there.
    pub(crate) fn moving(&self, source: &Qemu, to: &str) -> TransshipBuilder {
        let channels = self.channels.to_string();
        Transship::moving(&source.vm(), to).args([
            "--peer",
            "qemu",
            "--channels",
            &channels,
            "--compress",
            self.compress,
        ])
    }

    /// Moves it to the end, which must be a good one, and returns the report.
    pub(crate) fn move_over(&self, source: &Qemu, destination: &Qemu) -> Result<Value> {
        let to = self.wait_for_a_guest(destination)?;
        let report = self.moving(source, &to).run()?.expect_code(0)?.report()?;
        assert_eq!(report["status"], "completed", "{report}");
        Ok(report)
    }
}

/// It runs there and no longer here, and every page is what was written last.
pub(crate) fn assert_moved(source: &Qemu, destination: &Qemu, left: u64) -> Result<()> {
    assert_eq!(destination.status()?, "running");
    assert!(source.has_given_away()?, "it must not run on both sides: {}", source.status()?);
    let count = destination.next_count()?;
    assert!(count.count > left && count.errors == 0, "{left} {count:?}");
    let sweep = destination.sweep()?;
    assert_eq!(sweep.errors, 0, "{sweep:?}");
    assert_nothing_of_ours(source)
}

pub(crate) fn assert_nothing_of_ours(qemu: &Qemu) -> Result<()> {
    let files = qemu.open_files()?;
    assert!(!files.iter().any(|file| file.contains("userfaultfd")), "{files:?}");
    assert!(!qemu.is_traced()?);
    Ok(())
}

/// It runs here as if nothing had been, and another move works.
pub(crate) fn assert_runs_on(source: &Qemu, failed: &Finished, story: &str) -> Result<()> {
    assert_eq!(failed.status.code(), Some(1), "{story}: {failed}");
    assert_eq!(source.status()?, "running", "{story}: {failed}");
    let count = source.next_count()?;
    assert_eq!(count.errors, 0, "{story}");
    assert_nothing_of_ours(source)
}

/// How long a QEMU whose load fails may take to end, on a machine that has much else to do.
const END_WAIT: Duration = Duration::from_secs(60);

/// The process has ended, and its guest never ran.
pub(crate) fn assert_never_ran(destination: &mut Qemu, story: &str) -> Result<()> {
    let status = destination.process().wait(PATIENCE).map_err(|error| LabError(format!("{story}: {error}")))?;
    assert_failed_load(destination, status, story);
    Ok(())
}

/// As `assert_never_ran`, of one with channels: QEMU waits for ever for a channel that has ended before a barrier that
/// the main stream speaks of, and then answers nobody.
pub(crate) fn assert_never_ran_or_hangs(destination: &mut Qemu, story: &str) {
    match destination.process().wait(END_WAIT) {
        Ok(status) => assert_failed_load(destination, status, story),
        Err(error) => {
            eprintln!("{story}: {error}");
            destination.process().kill9();
            assert_wrote_nothing(destination, story);
        }
    }
}

fn assert_failed_load(destination: &mut Qemu, status: ExitStatus, story: &str) {
    assert_eq!(status.code(), Some(1), "{story}: a QEMU whose load fails ends");
    assert_wrote_nothing(destination, story);
}

fn assert_wrote_nothing(destination: &mut Qemu, story: &str) {
    let ran = destination.serial().lines().all();
    assert!(!ran.iter().any(|line| line.contains("workload")), "{story}: it ran: {ran:?}");
}
