//! Files that were converted are files like others: stock QEMU loads them, and the guest checks its memory.
use crate::stock::{StockLoad, StockSave};
use transship_lab::{Qemu, Result, Scratch, Transship};

fn assert_goes_on(guest: &Qemu, story: &str) -> Result<()> {
    assert_eq!(guest.status()?, "running", "{story}");
    let count = guest.next_count()?;
    let sweep = guest.sweep()?;
    assert_eq!((count.errors, sweep.errors), (0, 0), "{story}: {count:?} {sweep:?}");
    Ok(())
}

#[test]
fn stock_qemu_loads_what_was_converted() -> Result<()> {
    let folder = Scratch::on_disk()?;
    for stream in [true, false] {
        let [from, to, back] = ["from", "to", "back"].map(|name| folder.join(name));
        let source = Qemu::multiboot().booted()?;
        StockSave { stream, capabilities: if stream { &["xbzrle"] } else { &[] }, ..StockSave::default() }
            .save(&source, &from)?;
        drop(source);
        let convert = |from: &std::path::Path, to: &std::path::Path| {
            let (from, to) = (from.to_string_lossy(), to.to_string_lossy());
            Transship::command(["convert", &*from, &*to, "--json"]).run()?.expect_code(0)?.report()
        };
        let report = convert(&from, &to)?;
        assert_eq!(report["file"]["format"], if stream { "mapped-ram" } else { "stream" }, "{report}");
        convert(&to, &back)?;
        for (path, stream) in [(&to, !stream), (&back, stream)] {
            let text = path.to_string_lossy();
            Transship::command(["info", &*text, "--check"]).run()?.expect_code(0)?;
            let destination = Qemu::multiboot().incoming().start()?;
            StockLoad { stream, ..StockLoad::default() }.load(&destination, path)?;
            assert_goes_on(&destination, &format!("{text}, loaded by QEMU"))?;
        }
        if stream {
            let destination = Qemu::multiboot().incoming().start()?;
            let from = to.to_string_lossy();
            Transship::command(["restore", "--vm", &destination.vm(), "--from", &*from, "--lazy"])
                .run()?
                .expect_code(0)?;
            assert_goes_on(&destination, "restored lazily")?;
        }
    }
    Ok(())
}
