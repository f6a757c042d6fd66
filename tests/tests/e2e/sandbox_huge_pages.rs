//! The rights of those who fill memory on huge pages of a pool, be it a file that they map or private to the VMM.
use transship_lab::{Backend, HugePool, Qemu, QemuBuilder, Result, Scratch, Transship, process::of_ours};

use crate::post_copy::receiving;
use crate::restore_lazy_private::make_dirty;
use crate::restoring::{assert_goes_on, restoring, saved_by_stock};
use crate::sandbox::{assert_confined, assert_stopped};
use crate::sandbox_filling::{lazily_restored, stand_in};
use crate::stock::StockSave;

/// For two guests of 64 MiB.
const POOL_MIB: u64 = 160;

/// Guests that wait: in files on a hugetlbfs, and in memory that QEMU shares with nobody.
fn waiting(pool: &HugePool) -> [QemuBuilder; 2] {
    let shared = Qemu::multiboot().memory_folder(pool.path());
    let private = Qemu::multiboot().backend(Backend::PrivateMemfd).memory_options("hugetlb=on,hugetlbsize=2M");
    [shared, private].map(|guest| guest.named_as_by_default().incoming())
}

#[test]
fn those_who_fill_huge_pages_can_do_nothing_else() -> Result<()> {
    let (pool, folder, tried) = (HugePool::with_mib(POOL_MIB)?, Scratch::on_disk()?, Scratch::new()?);
    let path = folder.join("snapshot");
    saved_by_stock(Qemu::multiboot().named_as_by_default(), StockSave::default(), &path)?;
    let listen = format!("unix:{}", tried.join("there").display());
    for guest in waiting(&pool) {
        let guest = guest.start()?;
        let restore = || restoring(&guest.vm(), &path);
        assert_stopped("Restore", restore, &tried)?;
        assert_stopped("Fill", || restore().args(["--lazy"]), &tried)?;
        assert_stopped("StandIn", || restore().args(["--lazy"]), &tried)?;
        assert_stopped("Receive", || Transship::receiving(&guest.vm(), &listen), &tried)?;
    }
    Ok(())
}

/// Every page of the guest is what it wrote last.
#[test]
fn huge_pages_are_filled_without_rights() -> Result<()> {
    let (pool, folder) = (HugePool::with_mib(POOL_MIB)?, Scratch::on_disk()?);
    let path = folder.join("snapshot");
    saved_by_stock(Qemu::multiboot().named_as_by_default(), StockSave::default(), &path)?;
    for number in 0..2 {
        let start = || -> Result<Qemu> {
            let [shared, private] = waiting(&pool);
            let guest = if number == 0 { shared } else { private }.start()?;
            make_dirty(&guest)?;
            Ok(guest)
        };
        let end = |guest: Qemu| -> Result<()> {
            assert_goes_on(&guest)?;
            assert_eq!(of_ours(&guest.vm(), ""), [0; 0], "something of ours is left");
            Ok(())
        };
        let guest = start()?;
        restoring(&guest.vm(), &path).run()?.expect_code(0)?;
        end(guest)?;
        let guest = start()?;
        lazily_restored(&guest, &path)?;
        end(guest)?;
        let guest = start()?;
        let source = Qemu::multiboot().named_as_by_default().booted()?;
        let receive = Transship::receiving(&guest.vm(), "tcp:127.0.0.1:0").start()?;
        let to = receive.listening()?;
        assert_confined(receive.pid(), "receive")?;
        let moved = Transship::moving(&source.vm(), &to).args(["--verify"]).run()?.expect_code(0)?;
        assert_eq!(moved.report()?["verified"], true);
        receive.wait()?.expect_code(0)?;
        end(guest)?;
        let guest = start()?;
        let source = Qemu::multiboot().named_as_by_default().booted()?;
        let receive = receiving(&guest.vm(), "tcp:127.0.0.1:0").start()?;
        let to = receive.listening()?;
        assert_confined(receive.pid(), "receive --postcopy")?;
        assert_confined(stand_in(&guest.vm())?, "its second process")?;
        // No guest runs on such memory before its pages are there.
        Transship::moving(&source.vm(), &to).run()?.expect_code(0)?;
        receive.wait()?.expect_code(0)?;
        end(guest)?;
    }
    Ok(())
}
