//! libvirts, and what is done with a domain of theirs.
use std::{
    fs::{File, OpenOptions},
    os::unix::fs::FileExt,
    path::Path,
    time::Instant,
};

use transship_lab::{Accel, Domain, Kind, LibvirtHost, Scratch, SlowLink, Transship, Workload};

use super::{By, Deed, Libvirt, results::Once};
use crate::{
    corpus::Corpus,
    ours::{number, relayed, relays as relays_between},
    output::say,
    pair::text,
    units::millis,
};

const NAME: &str = "bench";
/// The guest itself, and what it writes to, lie below.
const CONTENT_FROM: u64 = 48 << 20;
const PIECE_BYTES: usize = 1 << 20;
/// On both hosts, each of which has its own loopback.
const PORT: u16 = 4444;

/// One libvirt, or two with a link between them.
pub(super) struct Hosts {
    here: LibvirtHost,
    there: Option<(LibvirtHost, SlowLink)>,
}

impl Hosts {
    /// `link`: Mbit/s to a second one. None: libvirt can't run here, and it was said why.
    pub(super) fn start(link: Option<u32>) -> Result<Option<Self>, String> {
        if let Some(missing) = LibvirtHost::missing() {
            say(&format!("left out, for want of {missing}"));
            return Ok(None);
        }
        let Some(mbit) = link else {
            return Ok(LibvirtHost::start("here").map_err(text)?.map(|here| Self { here, there: None }));
        };
        let link = SlowLink::with_offload(mbit).map_err(text)?;
        let here = LibvirtHost::start_by("here", &link.source()).map_err(text)?;
        let there = LibvirtHost::start_by("there", &link.destination()).map_err(text)?;
        let Some((here, there)) = here.zip(there) else { return Ok(None) };
        // A libvirt asks a QEMU that it has not seen before what it can do: seconds, of the first domain.
        there.virsh(&["domcapabilities"]).map_err(text)?;
        Ok(Some(Self { here, there: Some((there, link)) }))
    }

    /// libvirt's, and QEMU's.
    pub(super) fn version(&self) -> Result<(String, String), String> {
        let said = self.here.virsh(&["version", "--daemon"]).map_err(text)?;
        let after = |start: &str| said.lines().find_map(|line| line.strip_prefix(start)).unwrap_or("?").trim();
        let qemu = after("Running hypervisor: ").trim_start_matches("QEMU ");
        Ok((after("Running against daemon: ").to_owned(), qemu.to_owned()))
    }

    pub(super) fn knows_sparse(&self) -> Result<bool, String> {
        Ok(self.here.version().map_err(text)? >= (11, 2))
    }

    /// Starts the domain, does it once, and ends the domain.
    pub(super) fn run(&self, what: Deed, by: By, table: &Libvirt, corpus: &Corpus) -> Result<Once, String> {
        let accel = Accel::best();
        let mib = (table.mem >> 20) as u32;
        let domain = Domain::new(NAME, &Kind::Multiboot(Workload::MULTIBOOT), mib, accel).map_err(text)?;
        let serial = domain.start(&self.here).map_err(text)?;
        fill(&self.here, table.mem, corpus)?;
        let done = match what {
            Deed::Save | Deed::SaveSparse => self.save(what, by, &table.dir),
            Deed::Migrate => self.migrate(by, &[]),
            Deed::MigrateParallel => self.migrate(by, &["--parallel"]),
        };
        drop(serial);
        let hosts = [Some(&self.here), self.there.as_ref().map(|(there, _)| there)];
        for host in hosts.into_iter().flatten() {
            // It is on one of them, or on none.
            let _ = host.virsh(&["destroy", NAME]);
        }
        done
    }

    fn save(&self, what: Deed, by: By, dir: &Path) -> Result<Once, String> {
        let folder = Scratch::within(dir).map_err(text)?;
        let image = folder.join("image");
        let path = image.to_string_lossy();
        let is_sparse = what == Deed::SaveSparse;
        let begin = Instant::now();
        let downtime_ms = match by {
            By::Transship => {
                let format = if is_sparse { "libvirt-sparse" } else { "libvirt" };
                let (vm, to) = (self.here.vm(NAME), format!("file:{path}"));
                let save = ["save", "--vm", &vm, "--to", &to, "--background", "--format", format, "--json"];
                let ended = Transship::command(save).run().and_then(|ended| ended.expect_code(0)).map_err(text)?;
                Some(number(&ended.report().map_err(text)?, "/downtime_ms")?)
            }
            By::Virsh => {
                let more: &[&str] = if is_sparse { &["--image-format", "sparse", "--bypass-cache"] } else { &[] };
                self.here.virsh(&[&["save", NAME, &*path], more].concat()).map_err(text)?;
                None
            }
        };
        // Ours is there by now; virsh leaves it to the kernel.
        let failed = |error: std::io::Error| format!("can't sync {}: {error}", image.display());
        let file = File::open(&image).map_err(failed)?;
        file.sync_all().map_err(failed)?;
        let ms = millis(begin.elapsed());
        let bytes = file.metadata().map_err(failed)?.len();
        // Whom virsh saves stands still from the beginning on, and does not run again.
        Ok(Once { ms, downtime_ms: downtime_ms.unwrap_or(ms), bytes: Some(bytes) })
    }

    fn migrate(&self, by: By, more: &[&str]) -> Result<Once, String> {
        let Some((there, link)) = &self.there else { return Err("there is no second host".into()) };
        // For one migration. They end when it has, or when they are dropped.
        let mut relays = None;
        let (uri, listen) = match by {
            By::Transship => {
                let at = format!("tcp:127.0.0.1:{PORT}");
                relays = Some(relays_between(link, &at, &at, &["--json"])?);
                (format!("tcp://127.0.0.1:{PORT}"), "127.0.0.1".to_owned())
            }
            By::Virsh => {
                let address = link.destination_uri(PORT).replace("tcp:", "tcp://");
                (address, "0.0.0.0".to_owned())
            }
        };
        let to = there.uri();
        let words = ["migrate", "--live", "--unsafe", NAME, &to, "--migrateuri", &uri, "--listen-address", &listen];
        let begin = Instant::now();
        self.here.virsh(&[&words, more].concat()).map_err(text)?;
        let ms = millis(begin.elapsed());
        let bytes = relays.map(relayed).transpose()?;
        let done = there.virsh(&["domjobinfo", NAME, "--completed", "--rawstats"]).map_err(text)?;
        let downtime = done.lines().find_map(|line| line.trim().strip_prefix("downtime"));
        let downtime = downtime.and_then(|text| text.trim_start_matches([':', ' ']).trim().parse().ok());
        Ok(Once { ms, downtime_ms: downtime.unwrap_or(f64::NAN), bytes })
    }
}

/// Writes the corpus into the domain's memory, again and again, behind what its guest uses.
fn fill(host: &LibvirtHost, guest_bytes: u64, corpus: &Corpus) -> Result<(), String> {
    let list = host.virsh(&["qemu-monitor-command", "--hmp", NAME, "info ramblock"]).map_err(text)?;
    let address = address(&list).ok_or_else(|| format!("QEMU does not say where its memory is: {list}"))?;
    let path = format!("/proc/{}/mem", host.pid(NAME).map_err(text)?);
    let failed = |error: std::io::Error| format!("can't fill the domain's memory: {error}");
    let memory = OpenOptions::new().write(true).open(path).map_err(failed)?;
    let mut at = CONTENT_FROM;
    for piece in corpus.packets(PIECE_BYTES).cycle() {
        if at + piece.len() as u64 > guest_bytes {
            break;
        }
        memory.write_all_at(piece, address + at).map_err(failed)?;
        at += piece.len() as u64;
    }
    Ok(())
}

/// Of `pc.ram`: the fourth of its long numbers.
fn address(list: &str) -> Option<u64> {
    let line = list.lines().find(|line| line.trim_start().starts_with("pc.ram"))?;
    let text = line.split_whitespace().filter_map(|word| word.strip_prefix("0x")).nth(3)?;
    u64::from_str_radix(text, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_where_qemu_says() {
        let list = "          Block Name    PSize              Offset               Used              Total                HVA  RO\n\
                    pc.ram    4 KiB  0x0000000000000000 0x0000000010000000 0x0000000010000000 0x00007f41d3e00000  rw\n\
                    /rom@etc/acpi/tables    4 KiB  0x1 0x2 0x3 0x4 ro\n";
        assert_eq!(address(list), Some(0x7f41_d3e0_0000));
        assert_eq!(address("no list"), None);
    }
}
