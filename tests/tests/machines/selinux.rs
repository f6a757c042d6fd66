//! Under an SELinux that confines QEMU, with Debian's own policy: what `relay` gives its socket, and who may connect.
use std::path::Path;

use transship_lab::{Initrd, Result, binary, image, lacks, root};

use crate::{Said, are_lacking, folder, run};

const POLICY: &str = ".guest/selinux/policy";

/// What guest/selinux/init has said of a relay.
impl Said {
    /// That what was asked for was refused, and by the kernel's own words why.
    fn is_refused(&self, case: &str, why: &str) -> Result<()> {
        assert!(self.of(&format!("{case} migration"))?.starts_with("failed"), "{case}:\n{self}");
        assert!(self.all(&format!("{case} denied")).any(|line| line.contains(why)), "{case}: {why}:\n{self}");
        Ok(())
    }

    /// That a relay ended without having listened.
    fn is_an_error(&self, case: &str, why: &str) -> Result<()> {
        assert_eq!(self.of(&format!("{case} exit"))?, "1", "{case}:\n{self}");
        let said = self.of(&format!("{case} said"))?;
        assert!(said.contains(why), "{case}: {said}");
        assert_eq!(self.of(&format!("{case} left"))?, "nothing", "{case}:\n{self}");
        Ok(())
    }

    /// The labels of a relay's socket and its file, but for their levels.
    fn has_labels(&self, case: &str, socket: &str, file: &str) -> Result<()> {
        for (what, label) in [("socket", socket), ("file", file)] {
            let has = self.of(&format!("{case} {what}"))?;
            assert!(has.contains(label), "{case} {what}: {has}");
        }
        assert_eq!(self.of(&format!("{case} next"))?, "0", "a thread would give its label to more:\n{self}");
        Ok(())
    }
}

/// That host's programs and files.
fn files(folder: &Path, perl: &Path, qemu: &Path) -> Result<Initrd> {
    let files = Initrd::new(folder)?;
    files.program(&binary()?, "bin/transship")?;
    files.program(perl, "bin/perl")?;
    files.file(perl, "bin/perl-as-libvirtd")?;
    files.emulator(qemu)?;
    files.file(&image("linux/busybox")?, "bin/busybox")?;
    files.file(&root().join(POLICY), "policy")?;
    files.file(&root().join("guest/selinux/ask.pl"), "ask.pl")?;
    files.init(include_str!("../../../guest/selinux/init"))?;
    Ok(files)
}

#[test]
#[ignore = "a minute: boots a kernel under emulation, with QEMUs in it"]
fn a_qemu_that_selinux_confines_connects_to_a_relay_with_the_right_labels() -> Result<()> {
    let (perl, qemu) = (Path::new("/usr/bin/perl"), Path::new("/usr/bin/qemu-system-x86_64"));
    if are_lacking(&[&root().join(POLICY), perl, qemu], "scripts/selinux-policy.sh makes Debian's policy") {
        return Ok(());
    }
    let folder = folder()?;
    let files = files(folder.path(), perl, qemu)?;
    let said = run(&files, &image("linux/vmlinuz")?, "security=selinux selinux=1 enforcing=0", "selinux")?;
    if said.of("end:")? == "this kernel has no SELinux" {
        lacks("a kernel with SELinux as .guest/linux/vmlinuz, such as Debian's");
        return Ok(());
    }
    assert_eq!((said.of("end:")?, said.of("enforcing")?), ("all", "1"), "{said}");
    assert!(said.all("qemu").all(|label| label.contains(":svirt_t:s0:c")), "{said}");

    let (admin, libvirts) = (":unconfined_t:", "system_u:system_r:virtd_t:s0");
    said.has_labels("default", admin, ":var_run_t:")?;
    said.is_refused("default", "tclass=sock_file")?;
    said.has_labels("socket-only", libvirts, ":var_run_t:")?;
    said.is_refused("socket-only", "tclass=sock_file")?;
    said.has_labels("file-only", admin, "system_u:object_r:svirt_image_t:s0")?;
    said.is_refused("file-only", "{ connectto }")?;
    assert_ne!(said.of("file-only libvirtd")?, "0", "{said}");

    said.is_an_error("unknown-socket", "--socket-label: the policy of this host's SELinux has no label")?;
    said.is_an_error("unknown-file", "--socket-file-label: the policy of this host's SELinux has no label")?;
    said.is_an_error("lax", "--socket-file-label: the policy of this host's SELinux has no label")?;
    said.is_an_error("no-file", "SELinux may have refused it because of --socket-file-label")?;

    said.has_labels("both", libvirts, "system_u:object_r:svirt_image_t:s0")?;
    said.has_labels("folder", libvirts, "system_u:object_r:svirt_runtime_t:s0")?;
    for case in ["both", "folder"] {
        assert_eq!(said.of(&format!("{case} libvirtd"))?, "0", "{case}:\n{said}");
        assert_eq!(said.of(&format!("{case} migration"))?, "completed", "{case}:\n{said}");
        assert_eq!(said.of(&format!("{case} arrived"))?, "VM status: paused (prelaunch)", "{case}:\n{said}");
        assert_eq!(said.of(&format!("{case} left"))?, "nothing", "{case}:\n{said}");
        assert!(!said.all(&format!("{case} denied")).any(|line| line.contains("\"transship\"")), "{case}:\n{said}");
    }
    // What the docs warn of: the relay of a shell at the destination.
    said.is_refused("far-level", "{ read }")?;
    Ok(())
}
