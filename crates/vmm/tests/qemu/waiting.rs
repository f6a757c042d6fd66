//! QEMUs whose guests wait for pages: to write them, or for them to come.
use std::{
    fs,
    io::Read,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use serde_json::json;
use transship_guest::{DestinationGuest, SourceGuest, StateFormat};
use transship_memory::{Freeing, GuestMemory, Missing, PageRange, PageSet, Region, WindowPages};

use super::lab::{Qemu, clear, pair};

const TICK: Duration = Duration::from_millis(10);

/// By region: every page.
fn all(memory: &GuestMemory) -> Vec<PageSet> {
    memory.regions().iter().map(|region| PageSet::full(region.pages())).collect()
}

/// Brings pages that somebody touches, from where they are, until it is over.
fn bring(missing: &Missing, from: &Region, over: &AtomicBool) {
    while !over.load(Ordering::Relaxed) {
        let Some(fault) = missing.next_fault(TICK).unwrap() else { continue };
        let window = fault.page.window();
        let mut page = Vec::new();
        from.copy_out(window.masked(1 << (fault.page - window).get()), &mut page).unwrap();
        missing.fill(fault.region, fault.page, &page).unwrap();
    }
}

/// Sets a flag when it is dropped, also by a panic: who waits for it in a scope must not wait for ever.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn saved(source: &mut dyn SourceGuest) -> Vec<u8> {
    let mut state = Vec::new();
    source.stop().unwrap();
    source.save_state().unwrap().read_to_end(&mut state).unwrap();
    source.state_saved().unwrap();
    state
}

#[test]
fn a_guest_runs_before_its_memory_is_there() {
    let (from, to) = pair();
    let (mut source, mut destination) = (from.source(), to.destination());
    let descriptors = to.descriptors();
    let state = saved(&mut source);
    clear(&destination.memory());
    let everything = all(&destination.memory());
    let missing = destination.missing(&everything).unwrap();
    assert_eq!(to.descriptors(), descriptors, "nothing of ours is in QEMU");
    let (memory, over) = (source.memory(), AtomicBool::new(false));
    thread::scope(|scope| {
        let _over = Over(&over);
        scope.spawn(|| bring(&missing, &memory.regions()[0], &over));
        destination.load_state(&mut state.as_slice()).unwrap();
        destination.start(true).unwrap();
        // Its counter seems to count on when its page comes: it does once it goes on from there.
        to.wait_counting();
        to.wait_counting();
        assert!(to.count() > from.count(), "it counts on from {}, not from {}", from.count(), to.count());
        // Only what was touched has come.
        let came = destination.memory().regions()[0].data().unwrap().count().get();
        assert!((10..memory.regions()[0].data().unwrap().count().get()).contains(&came), "{came} pages");
        to.qmp("stop", json!({}));
    });
}

/// Nothing feeds it zeros, whoever hangs on the page that does not come: QEMU itself hangs here, as its processor does.
#[test]
fn a_guest_whose_pages_do_not_come_is_stopped() {
    let (from, to) = pair();
    let (mut source, mut destination) = (from.source(), to.destination());
    let state = saved(&mut source);
    clear(&destination.memory());
    let everything = all(&destination.memory());
    let missing = destination.missing(&everything).unwrap();
    let (memory, over) = (source.memory(), AtomicBool::new(false));
    thread::scope(|scope| {
        let _over = Over(&over);
        scope.spawn(|| bring(&missing, &memory.regions()[0], &over));
        destination.load_state(&mut state.as_slice()).unwrap();
    });
    destination.start(true).unwrap();
    // Its code, or its counter: in any case it needs a page at once.
    assert!(missing.next_fault(Duration::from_secs(120)).unwrap().is_some());
    let found = destination.stop().unwrap();
    drop(missing);
    let (count, state) = (to.count(), process_state(&to));
    assert!(found.contains(&format!("kill -9 {}", to.pid())) && state == 'T', "{found} ({state})");
    thread::sleep(Duration::from_millis(200));
    assert_eq!((to.count(), process_state(&to)), (count, 'T'));
}

fn process_state(of: &Qemu) -> char {
    let stat = fs::read_to_string(format!("/proc/{}/stat", of.pid())).unwrap();
    stat.rsplit_once(") ").unwrap().1.chars().next().unwrap()
}

#[test]
fn memory_that_holds_something_is_not_waited_for() {
    let to = Qemu::start(&["-incoming", "defer"]);
    let mut destination = to.destination();
    let memory = destination.memory();
    clear(&memory);
    memory.regions()[0].write_pages(WindowPages::new(128, 1 << 5), &[1; 4096]).unwrap();
    let error = destination.missing(&all(&memory)).err().unwrap().to_string();
    assert!(error.contains("\"mem0\" is not empty: pages 133..134 are there"), "{error}");
    memory.regions()[0].clear(PageRange::new(133, 1)).unwrap();
    // The first one is closed by then: its areas are free again.
    drop(destination.missing(&all(&memory)).unwrap());
}

#[test]
fn protecting_leaves_nothing_in_qemu_and_is_over_when_dropped() {
    let qemu = Qemu::start(&[]);
    qemu.wait_booted();
    let descriptors = qemu.descriptors();
    let mut source = qemu.source();
    let StateFormat::Qemu { blocks, .. } = source.state_format() else { panic!("not QEMU's") };
    assert_eq!(blocks, ["mem0"]);
    let protection = source.protect().unwrap();
    assert_eq!(qemu.descriptors(), descriptors);
    protection.protect(0, PageRange::new(0, 256)).unwrap();
    assert!(protection.next_fault(Duration::from_secs(120)).unwrap().is_some());
    let count = qemu.count();
    thread::sleep(Duration::from_millis(100));
    assert_eq!(qemu.count(), count, "it waits");
    drop(protection);
    qemu.wait_counting();
}

/// So that what a source sends for a device is not more than QEMU has for it here.
#[test]
fn the_memory_of_devices_is_known_by_name_and_length() {
    let qemu = Qemu::start(&["-S"]);
    let source = qemu.source();
    let StateFormat::Qemu { others, .. } = source.state_format() else { panic!("not QEMU's") };
    let most = |name: &str| others.iter().find(|other| other.name == name).map(|other| other.max_bytes);
    assert!(most("pc.bios").is_some_and(|bytes| (0x1_0000..=0x100_0000).contains(&bytes)), "{others:?}");
    // It begins with 128 KiB, and can grow.
    assert_eq!(most("/rom@etc/acpi/tables"), Some(0x20_0000), "{others:?}");
    assert_eq!(most("mem0"), None);
}

#[test]
fn memory_that_can_be_given_back_at_any_time_is_not_protected() {
    let reporting = Qemu::start(&["-S", "-device", "virtio-balloon-pci,id=b0,free-page-reporting=on"]);
    let error = reporting.source().protect().err().unwrap().to_string();
    assert!(error.contains("device b0 (virtio-balloon-pci) gives memory back") && error.contains("--live"), "{error}");
    drop(reporting);
    let pluggable = Qemu::start_with(
        &["-object", "memory-backend-file,id=mem0,size=64M,mem-path=DIR/ram,share=on"],
        &[
            "-S",
            "-object",
            "memory-backend-file,id=more,size=64M,mem-path=DIR/more,share=on",
            "-device",
            "virtio-mem-pci,id=vm0,memdev=more",
        ],
        &["-machine", "memory-backend=mem0", "-m", "64M,maxmem=1G"],
    );
    let error = pluggable.source().protect().err().unwrap().to_string();
    assert!(error.contains("device vm0 (virtio-mem-pci) gives memory back"), "{error}");
    drop(pluggable);
    // One that does not report is watched, and stays as it is.
    for (more, comes) in [(["-device", "virtio-balloon-pci"], false), (["-device", "pcie-root-port,id=slot0"], true)] {
        let qemu = Qemu::start(&[&["-S"], &more[..]].concat());
        let mut source = qemu.source();
        let _protection = source.protect().unwrap();
        source.stop().unwrap();
        source.check_protected().unwrap();
        if comes {
            let late =
                json!({"driver": "virtio-balloon-pci", "bus": "slot0", "free-page-reporting": true, "id": "late"});
            qemu.qmp("device_add", late);
            let error = source.check_protected().unwrap_err().to_string();
            assert!(error.contains("balloon"), "{error}");
        }
    }
}

#[test]
fn whether_a_guest_says_what_it_gives_back() {
    let balloon = "virtio-balloon-pci,bus=slot0,id=b0";
    let more: [(&[&str], _); 4] = [
        (&[], Freeing::Never),
        (&["-device", balloon], Freeing::Announced),
        (&["-device", "virtio-balloon-pci,bus=slot0,free-page-hint=on,iothread=t0"], Freeing::Announced),
        (&["-device", "virtio-balloon-pci,bus=slot0,free-page-reporting=on"], Freeing::Possible),
    ];
    for (more, freeing) in more {
        let port = ["-S", "-object", "iothread,id=t0", "-device", "pcie-root-port,id=slot0"];
        let qemu = Qemu::start(&[&port[..], more].concat());
        let mut source = qemu.source();
        assert_eq!(source.freeing(), freeing, "{more:?}");
        let _tracker = source.track().unwrap();
        if freeing == Freeing::Announced {
            assert!(!source.gave_back().unwrap(), "{more:?}");
        }
        if freeing == Freeing::Never {
            let late = json!({"driver": "virtio-balloon-pci", "bus": "slot0", "id": "late"});
            qemu.qmp("device_add", late);
            let error = source.stop().unwrap_err().to_string();
            assert!(error.contains("balloon"), "{error}");
        }
    }
}
