//! What happened in a step: kept for the case that something is wrong with it.
use crate::host::Host;

/// One step's.
#[derive(Debug, Default)]
pub(crate) struct Story {
    text: String,
}

impl Story {
    pub(crate) fn say(&mut self, line: &str) {
        self.text.push_str(&format!("{line}\n"));
    }

    /// What a QEMU and its guest have said.
    pub(crate) fn listen(&mut self, name: &str, host: &Host) {
        let status = host.qemu.status().unwrap_or_else(|error| error.to_string());
        let (said, serial) = (host.qemu.stderr().tail(), host.qemu.serial().lines().tail());
        self.say(&format!("--- {name} ({:?}, {status})\n{said}--- its guest\n{serial}", host.version));
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }
}
