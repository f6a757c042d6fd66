//! Both ways to find written pages, on the present kernel: the one that older kernels have too is chosen by a flag. The
//! guests' own checks say whether a write was missed.
use crate::ends::number;
use crate::peer::{PLAIN, assert_moved, assert_nothing_of_ours};
use crate::restoring::{assert_goes_on, restoring};
use transship_lab::{Accel, Backend, LabError, Qemu, QemuBuilder, Result, Scratch, Synthetic, Transship, Workload};

use crate::ends::{assert_whole, move_between, synthetic_pair};

const SYNC: [&str; 2] = ["--tracker", "sync"];

fn guest(backend: Backend) -> QemuBuilder {
    let accel = Accel::best();
    let workload = Workload { rate: 2000, ..Workload::MULTIBOOT };
    Qemu::multiboot_under(accel).workload(workload).backend(backend).named_as_by_default()
}

/// Over a link so slow that pages change while they travel.
#[test]
fn guests_whose_writers_wait_arrive_whole() -> Result<()> {
    for (from, to) in [(Backend::Default, Backend::SharedFile), (Backend::SharedFile, Backend::Default)] {
        let source = guest(from).booted()?;
        let destination = guest(to).incoming().start()?;
        let flags = [&SYNC[..], &["--verify", "--bandwidth", "8MiB", "--downtime", "200ms"]].concat();
        let moved = move_between(&source.vm(), &destination.vm(), &flags)
            .map_err(|e| LabError(format!("{from:?} to {to:?}: {e}")))?;
        let report = moved.source.report()?;
        assert_eq!(report["tracker"]["name"], "sync", "{report}");
        assert!(number(&report, "/tracker/waits") > 0.0 && number(&report, "/pages/resent") > 0.0, "{report}");
        assert_eq!(number(&report, "/tracker/held"), 0.0, "nobody asked for a pace: {report}");
        assert_goes_on(&destination)?;
        assert_nothing_of_ours(&source)?;
    }
    Ok(())
}

#[test]
fn a_synthetic_guest_whose_writers_wait_arrives_whole() -> Result<()> {
    let (source, destination) =
        synthetic_pair(Synthetic::builder().memory("64M").write_rate("20M").hot_set("8M").set("--threads", "3"))?;
    let flags = [&SYNC[..], &["--verify", "--bandwidth", "64MiB"]].concat();
    let report = move_between(&source.vm(), &destination.vm(), &flags)?.source.report()?;
    assert!(number(&report, "/tracker/waits") > 0.0, "{report}");
    assert_whole(&destination)
}

#[test]
fn a_stock_qemu_receives_a_guest_whose_writers_wait() -> Result<()> {
    let (source, destination) = (guest(Backend::Default).booted()?, guest(Backend::Default).incoming().start()?);
    let left = source.next_count()?.count;
    let to = PLAIN.wait_for_a_guest(&destination)?;
    let report = PLAIN.moving(&source, &to).args(SYNC).run()?.expect_code(0)?.report()?;
    assert_eq!(report["tracker"]["name"], "sync", "{report}");
    assert_moved(&source, &destination, left)
}

#[test]
#[ignore = "long: make test-long"]
fn guests_whose_writers_wait_are_saved_and_watched() -> Result<()> {
    let folder = Scratch::on_disk()?;
    for backend in [Backend::Default, Backend::SharedFile] {
        let (path, source) = (folder.join("guest"), guest(backend).booted()?);
        let to = path.to_string_lossy();
        let save = Transship::command(["save", "--live", "--vm", &source.vm(), "--to", &*to, "--json"]).args(SYNC);
        let report = save.run()?.expect_code(0)?.report()?;
        assert_eq!(report["tracker"]["name"], "sync", "{report}");
        let watch = ["watch", "--vm", &source.vm(), "--count", "3", "--interval", "200ms", "--json"];
        let watched = Transship::command(watch).args(SYNC).run()?.expect_code(0)?;
        let busy =
            |line: &str| serde_json::from_str(line).is_ok_and(|look: serde_json::Value| look["dirty_pages"] != 0);
        assert!(watched.stdout.lines().all(busy), "{watched}");
        assert_goes_on(&source)?;
        assert_nothing_of_ours(&source)?;
        let destination = guest(backend).incoming().start()?;
        restoring(&destination.vm(), &path).run()?.expect_code(0)?;
        assert_goes_on(&destination)?;
    }
    Ok(())
}

/// Nobody is left to let writers go, and they go on all the same.
#[test]
fn writers_go_on_when_the_one_they_wait_for_is_killed() -> Result<()> {
    for point in ["source.round=kill", "source.stopped=kill"] {
        let (source, destination) = (guest(Backend::Default).booted()?, guest(Backend::Default).incoming().start()?);
        let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
        let moving = Transship::moving(&source.vm(), &receive.listening()?).args(SYNC);
        assert_eq!(moving.env("TRANSSHIP_FAIL_POINT", point).run()?.code(), None, "{point}");
        source.wait_status("running")?;
        assert_goes_on(&source)?;
        assert_nothing_of_ours(&source)?;
    }
    Ok(())
}
