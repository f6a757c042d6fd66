//! Lazy restores into memory that is QEMU's own: it is given back by QEMU itself, and its pages come when they are
//! touched.
use std::{
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use crate::peer::assert_nothing_of_ours;
use crate::restoring::{
    assert_goes_on,
    lazy::{Stalled, stand_ins},
    place, restoring, saved_by_stock,
};
use crate::stock::StockSave;
use serde_json::json;
use transship_lab::{
    Backend, HugePool, LabError, Qemu, QemuBuilder, Result, Scratch, lacks, other_qemu, process::status_field,
    wait_until,
};

fn guest(backend: Backend) -> QemuBuilder {
    Qemu::multiboot().backend(backend).named_as_by_default()
}

/// KVM and the kernel wait for pages, too.
fn with_kvm(backend: Backend) -> QemuBuilder {
    Qemu::multiboot_with_kvm().backend(backend).named_as_by_default()
}

/// A guest in a file.
fn saved(guest: QemuBuilder) -> Result<(Scratch, PathBuf)> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("snapshot");
    saved_by_stock(guest, StockSave::default(), &path)?;
    Ok((folder, path))
}

/// Fills the memory of a waiting guest with what must not be seen afterwards.
pub(crate) fn make_dirty(guest: &Qemu) -> Result<()> {
    let (address, bytes) = place(guest)?;
    let memory = fs::OpenOptions::new().write(true).open(format!("/proc/{}/mem", guest.pid()))?;
    let junk = vec![0xa5; 1 << 20];
    Ok((0..bytes).step_by(junk.len()).try_for_each(|at| memory.write_all_at(&junk, address + at))?)
}

/// Restores lazily, held where the guest runs by what it waits for alone, and then to the end.
fn comes_page_by_page(destination: &Qemu, path: &Path) -> Result<()> {
    let stalled = Stalled::start(&destination.vm(), path)?;
    destination.next_count()?;
    let report = stalled.go_on()?.wait()?.expect_code(0)?.report()?;
    assert!(report["lazy"]["faults"].as_u64() > Some(0), "nobody ever waited: {report}");
    assert_goes_on(destination)?;
    assert_nothing_of_ours(destination)?;
    assert!(stand_ins(destination)?.is_empty());
    Ok(())
}

#[test]
fn a_lazy_guest_finds_all_its_memory_in_memory_of_any_kind() -> Result<()> {
    let (_folder, path) = saved(guest(Backend::Default))?;
    let kinds = [
        Backend::Default,
        Backend::Ram,
        Backend::SharedRam,
        Backend::Memfd,
        Backend::PrivateMemfd,
        Backend::PrivateFile,
        Backend::SharedFile,
    ];
    for kind in kinds {
        let destination = guest(kind).incoming().start()?;
        if kind != Backend::PrivateFile {
            make_dirty(&destination)?;
        }
        comes_page_by_page(&destination, &path).map_err(|e| LabError(format!("{kind:?}: {e}")))?;
    }
    Ok(())
}

/// A real kernel, in two parts of memory.
#[test]
#[ignore = "long: make test-long"]
fn a_lazy_linux_guest_finds_all_its_private_memory() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("snapshot");
    let linux = || Qemu::linux().backend(Backend::Ram).backends(2);
    saved_by_stock(linux(), StockSave::default(), &path)?;
    let destination = linux().incoming().start()?;
    comes_page_by_page(&destination, &path)
}

#[test]
fn a_lazy_guest_finds_all_its_memory_on_private_huge_pages() -> Result<()> {
    let (_folder, path) = saved(guest(Backend::Default))?;
    let pool = HugePool::with_mib(64)?;
    let free = pool.state()?.free;
    let destination = guest(Backend::PrivateMemfd).memory_options("hugetlb=on,hugetlbsize=2M").incoming().start()?;
    // Those that QEMU has had already are promised to it still: there are no others.
    make_dirty(&destination)?;
    assert_eq!(pool.state()?.to_be_had(), 0);
    comes_page_by_page(&destination, &path)?;
    drop(destination);
    assert_eq!(pool.state()?.free, free, "all of it is given back");
    Ok(())
}

/// One that does not say where its memory is.
#[test]
fn a_lazy_guest_finds_all_its_private_memory_in_an_old_qemu() -> Result<()> {
    let Some(old) = other_qemu("7.2")? else { return Ok(()) };
    let folder = Scratch::on_disk()?;
    let path = folder.join("snapshot");
    let of = || guest(Backend::Default).machine("pc-q35-7.2");
    saved_by_stock(of(), StockSave::default(), &path)?;
    let destination = of().binary(&old).incoming().start()?;
    comes_page_by_page(&destination, &path)
}

/// As under libvirt: QEMU is in its own sandbox, and may not make the userfaultfd that is needed.
#[test]
fn a_sandboxed_qemu_without_rights_is_no_obstacle_to_a_lazy_guest() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        lacks("root, to take rights away");
        return Ok(());
    }
    let (_folder, path) = saved(guest(Backend::Default))?;
    let setpriv = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"].map(str::to_owned);
    let sandbox = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
    let waiting = || guest(Backend::Default).prefix(&setpriv).args(["-sandbox", sandbox]).incoming().start();
    let destination = waiting()?;
    let rights = status_field(destination.pid(), "CapEff")?;
    assert!(rights.chars().all(|digit| digit == '0'), "it has rights: {rights}");
    comes_page_by_page(&destination, &path)
}

/// Whoever is killed, the guest gets its memory.
#[test]
fn a_lazy_guest_in_private_memory_survives_the_death_of_its_restore() -> Result<()> {
    let (_folder, path) = saved(with_kvm(Backend::Default))?;
    for kind in [Backend::Default, Backend::PrivateMemfd] {
        let destination = with_kvm(kind).incoming().start()?;
        make_dirty(&destination)?;
        let mut stalled = Stalled::start(&destination.vm(), &path)?;
        assert_eq!(stand_ins(&destination)?.len(), 1);
        stalled.restore.kill9();
        assert_goes_on(&destination)?;
        wait_until("the second process to end", || Ok(stand_ins(&destination)?.is_empty()))?;
        assert_goes_on(&destination)?;
        assert_nothing_of_ours(&destination)?;
    }
    Ok(())
}

/// At whatever step it dies, the QEMU waits still, with nothing of ours in it, and takes the guest from the next
/// restore; or it has loaded, and has all of it.
#[test]
fn a_lazy_restore_into_private_memory_may_be_killed_at_each_step() -> Result<()> {
    let (_folder, path) = saved(guest(Backend::Default))?;
    for step in ["restore.missing", "restore.loading", "restore.loaded"] {
        let destination = guest(Backend::Default).incoming().start()?;
        make_dirty(&destination)?;
        let kill = format!("{step}=kill");
        let ended = restoring(&destination.vm(), &path).args(["--lazy"]).env("TRANSSHIP_FAIL_POINT", kill).run()?;
        assert_eq!(ended.code(), None, "{step}: {ended}");
        wait_until("the second process to end", || Ok(stand_ins(&destination)?.is_empty()))?;
        assert_nothing_of_ours(&destination)?;
        match step {
            "restore.missing" => {
                assert_eq!(destination.status()?, "inmigrate");
                restoring(&destination.vm(), &path).args(["--lazy"]).run()?.expect_code(0)?;
            }
            // It has heard of a load that failed, and takes no other.
            "restore.loading" => {
                assert_eq!(destination.status()?, "inmigrate");
                continue;
            }
            _ => drop(destination.qmp("cont", json!({}))?),
        }
        assert_goes_on(&destination)?;
    }
    Ok(())
}

/// What can't be given back is left as it is: the guest comes with all its memory at once.
#[test]
fn private_memory_that_can_not_be_given_back_is_refused() -> Result<()> {
    let (folder, path) = saved(guest(Backend::Default))?;
    let file = folder.join("on-disk");
    let on_disk = format!("memory-backend-file,share=off,id=pc.ram,size=64M,mem-path={}", file.display());
    let on_disk = guest(Backend::Default).machine("q35,memory-backend=pc.ram").args(["-object", &on_disk]);
    let cases = [
        (guest(Backend::Ram).memory_options("prealloc=on"), "it was allocated beforehand"),
        (guest(Backend::Default).args(["-overcommit", "mem-lock=on"]), "memory that is locked"),
        (on_disk, "a file on a disk"),
    ];
    for (waiting, why) in cases {
        let destination = waiting.incoming().start()?;
        let refused = restoring(&destination.vm(), &path).args(["--lazy"]).run()?.expect_code(1)?.to_string();
        assert!(refused.contains(why), "{why:?} is not in {refused}");
        assert_nothing_of_ours(&destination)?;
        restoring(&destination.vm(), &path).run()?.expect_code(0)?;
        assert_goes_on(&destination)?;
    }
    Ok(())
}
