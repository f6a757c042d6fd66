//! A stock QEMU saves its guest by itself.
use std::{
    path::Path,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use transship_lab::{LabError, PATIENCE, Qemu, Result};

/// How QEMU is to write the file.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StockSave<'a> {
    /// Names of capabilities beside those that follow from the rest.
    pub(crate) capabilities: &'a [&'a str],
    /// A plain stream instead of mapped-ram.
    pub(crate) stream: bool,
    /// Threads that write; 0: none beside the main one.
    pub(crate) multifd: u8,
    pub(crate) direct_io: bool,
    pub(crate) offset: u64,
}

impl StockSave<'_> {
    /// Has QEMU save to `path`, and waits until it calls that completed.
    pub(crate) fn save(&self, qemu: &Qemu, path: &Path) -> Result<()> {
        let mut on = self.capabilities.to_vec();
        if !self.stream {
            on.push("mapped-ram");
        }
        if self.multifd > 0 {
            on.push("multifd");
            qemu.qmp("migrate-set-parameters", json!({ "multifd-channels": self.multifd }))?;
        }
        if self.direct_io {
            qemu.qmp("migrate-set-parameters", json!({ "direct-io": true }))?;
        }
        // As fast as it goes.
        qemu.qmp("migrate-set-parameters", json!({ "max-bandwidth": 0 }))?;
        let capabilities: Vec<Value> = on.iter().map(|name| json!({ "capability": name, "state": true })).collect();
        qemu.qmp("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
        let offset = if self.offset > 0 { format!(",offset={:#x}", self.offset) } else { String::new() };
        qemu.qmp("migrate", json!({ "uri": format!("file:{}{offset}", path.display()) }))?;
        wait_completed(qemu)
    }
}

/// Waits until QEMU's migration is over and well.
pub(crate) fn wait_completed(qemu: &Qemu) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let answer = qemu.qmp("query-migrate", json!({}))?;
        match answer["status"].as_str().unwrap_or("none") {
            "completed" => return Ok(()),
            "failed" | "cancelled" => return Err(LabError(format!("QEMU did not save: {answer}"))),
            _ if Instant::now() > deadline => return Err(LabError(format!("QEMU still saves: {answer}"))),
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// How a stock QEMU that waits is to read a file.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StockLoad {
    /// A plain stream instead of mapped-ram, as any version reads it.
    pub(crate) stream: bool,
    /// With threads.
    pub(crate) multifd: bool,
    pub(crate) direct_io: bool,
    pub(crate) offset: u64,
}

impl StockLoad {
    /// Has it load the file.
    pub(crate) fn load(&self, qemu: &Qemu, path: &Path) -> Result<()> {
        let path = path.display();
        let uri = match self.stream {
            true => format!("exec:cat '{path}'"),
            false => {
                let wanted = [("mapped-ram", true), ("multifd", self.multifd)];
                let wanted: Vec<Value> =
                    wanted.map(|(name, state)| json!({ "capability": name, "state": state })).into();
                qemu.qmp("migrate-set-capabilities", json!({ "capabilities": wanted }))?;
                qemu.qmp("migrate-set-parameters", json!({ "direct-io": self.direct_io }))?;
                format!("file:{path},offset={:#x}", self.offset)
            }
        };
        qemu.qmp("migrate-incoming", json!({ "uri": uri }))?;
        wait_completed(qemu)
    }
}
