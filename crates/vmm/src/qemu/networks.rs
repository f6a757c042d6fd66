//! Networks of a QEMU whose packets another process, or a device, writes to guest memory by itself.
use serde_json::json;
use transship_guest::GuestError;

use super::qmp::Qmp;

/// One, or one queue of it.
pub(super) struct Network {
    name: String,
    /// In QEMU's words.
    about: String,
}

/// They are no objects: the only list of them is the monitor's text.
pub(super) fn shared(qmp: &mut Qmp) -> Result<Vec<Network>, GuestError> {
    let text = qmp.execute("human-monitor-command", json!({ "command-line": "info network" }))?;
    Ok(text.as_str().unwrap_or("").lines().filter_map(Network::read).collect())
}

impl Network {
    /// `n0: index=0,type=vhost-user,…`; passt's says it in the next field: `n0: index=0,type=passt,vhost-user,…`.
    fn read(line: &str) -> Option<Self> {
        let (name, about) = line.trim().trim_start_matches("\\ ").split_once(": ")?;
        let is_it = |field: &str| matches!(field.trim_start_matches("type="), "vhost-user" | "vhost-vdpa");
        about.split(',').any(is_it).then(|| Self { name: name.to_owned(), about: about.to_owned() })
    }

    /// Its id.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Whether QEMU has started the process by itself: `type=passt,vhost-user,connected to pid 3879`.
    pub(super) fn is_started_by_qemu(&self) -> bool {
        self.about.split(',').any(|field| field == "type=passt")
    }

    /// At whose other end the process is: `vhost-user0 to chardev`. None: it is no process, or nobody is there.
    pub(super) fn chardev(&self) -> Option<&str> {
        let (_, last) = self.about.split_once("type=vhost-user,")?;
        // Its queues are numbered.
        let (queue, chardev) = last.split_once(" to ")?;
        queue.strip_prefix("vhost-user")?.parse::<u32>().ok().map(|_| chardev)
    }
}

impl std::fmt::Display for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "network {}: {}", self.name, self.about)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Lines of QEMU 11.1.
    #[test]
    fn networks_that_share_memory_are_known_and_who_is_behind_them() {
        for (line, name, chardev) in [
            ("n1: index=0,type=vhost-user,vhost-user0 to c1\r", "n1", Some("c1")),
            (" \\ n1: index=1,type=vhost-user,vhost-user1 to c,1\r", "n1", Some("c,1")),
            (" \\ n0: index=0,type=passt,vhost-user,connected to pid 3879\r", "n0", None),
            (" \\ n0: index=0,type=vhost-vdpa,fd=5", "n0", None),
            ("n1: index=0,type=vhost-user,\r", "n1", None),
        ] {
            let network = Network::read(line).unwrap();
            assert_eq!((network.name(), network.chardev()), (name, chardev), "{line}");
            assert_eq!(network.is_started_by_qemu(), line.contains("passt"), "{line}");
        }
        for line in [
            "n3: index=0,type=passt,stream,connected to pid 3883\r",
            "vhost-user: index=0,type=user,net=10.0.2.0,restrict=off\r",
            "virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:56\r",
            "",
        ] {
            assert!(Network::read(line).is_none(), "{line}");
        }
    }
}
