//! A kernel that takes no note of writes by itself (Debian 12's 6.1), booted in a virtual machine: there transship runs
//! as it is, and writers wait for it.
use std::{fs, path::Path};

use serde_json::Value;
use transship_lab::{Initrd, Result, binary, image, lacks, root};

use crate::{folder, run};

/// All that runs in it. Each line that begins with `old: ` is for us.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs devtmpfs /dev
/bin/busybox mkdir -p /tmp /dev/shm
/bin/busybox mount -t tmpfs tmpfs /tmp
/bin/busybox mount -t tmpfs tmpfs /dev/shm
exec </dev/ttyS0 >/dev/ttyS0 2>&1
export HOME=/ TMPDIR=/tmp XDG_RUNTIME_DIR=/tmp
there() { for _ in $(/bin/busybox seq 600); do [ -S "$1" ] && return; /bin/busybox sleep 0.2; done; }
echo "old: kernel $(/bin/busybox uname -r)"
/transship guest --listen /tmp/a --mem 48M --write-rate 2M --hot-set 4M --threads 2 &
a=$!
/transship guest --listen /tmp/b --mem 48M --incoming &
b=$!
there /tmp/a
there /tmp/b
/transship receive --vm handoff:/tmp/b --listen unix:/tmp/move &
receive=$!
there /tmp/move
/transship move --vm handoff:/tmp/a --to unix:/tmp/move --verify --bandwidth 8MiB --json >/tmp/report
echo "old: move $?"
echo "old: report $(/bin/busybox cat /tmp/report)"
wait $receive
echo "old: receive $?"
/transship save --vm handoff:/tmp/b --to /tmp/live --live
echo "old: save --live $?"
/transship save --vm handoff:/tmp/b --to /tmp/background --background 2>/tmp/refused
echo "old: save --background $?"
echo "old: refused $(/bin/busybox tail -n 1 /tmp/refused)"
/bin/busybox kill $b
wait $b
echo "old: guest $?"
/transship guest --listen /tmp/c --mem 48M --incoming &
c=$!
there /tmp/c
/transship restore --vm handoff:/tmp/c --from /tmp/live --lazy
echo "old: restore --lazy $?"
/bin/busybox kill $c
wait $c
echo "old: restored $?"
echo "old: end: all"
/bin/busybox poweroff -f
"#;

/// The release of a kernel, such as (6, 1), as its image says it.
fn version(kernel: &Path) -> Result<(u32, u32)> {
    // Where its header has the offset of its release, which begins 512 bytes behind that.
    const OFFSET_AT: usize = 0x20e;
    let bytes = fs::read(kernel)?;
    let at = bytes.get(OFFSET_AT..OFFSET_AT + 2).map_or(0, |two| usize::from(u16::from_le_bytes([two[0], two[1]])));
    let text = String::from_utf8_lossy(bytes.get(at + 0x200..at + 0x220).unwrap_or_default()).into_owned();
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse().ok());
    Ok((numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)))
}

#[test]
#[ignore = "minutes: boots a kernel under emulation, and moves and saves guests in it"]
fn guests_are_moved_saved_and_restored_under_a_kernel_before_6_7() -> Result<()> {
    let kernel = image("linux/vmlinuz")?;
    let found = version(&kernel)?;
    if !((5, 19)..(6, 7)).contains(&found) {
        lacks(format_args!("Debian 12's kernel as .guest/linux/vmlinuz in {} (it is {found:?})", root().display()));
        return Ok(());
    }
    let folder = folder()?;
    let files = Initrd::new(folder.path())?;
    files.program(&binary()?, "transship")?;
    files.file(&image("linux/busybox")?, "bin/busybox")?;
    files.init(INIT)?;
    let said = run(&files, &kernel, "", "old")?;
    assert_eq!(said.of("end:")?, "all", "{said}");
    assert!(said.of("kernel")?.starts_with(&format!("{}.{}", found.0, found.1)));
    for step in ["move", "receive", "save --live", "guest", "restore --lazy", "restored"] {
        assert_eq!(said.of(step)?, "0", "{step}:\n{said}");
    }
    // Pages that are not there yet can't be protected before that.
    assert_eq!(said.of("save --background")?, "1");
    assert!(said.of("refused")?.contains("Linux 6.4 or newer is needed"), "{said}");
    let report: Value = serde_json::from_str(said.of("report")?)?;
    assert_eq!(report["tracker"]["name"], "sync", "{report}");
    assert_eq!(report["verified"], true, "{report}");
    assert!(report["tracker"]["waits"].as_u64() > Some(0), "{report}");
    Ok(())
}
