//! The rights of those who make a clone of an image.
use std::{fs, path::Path};

use transship_lab::{
    LabError, Qemu, QemuBuilder, Result, Scratch, Transship, process::of_ours, transship::TransshipBuilder,
};

use crate::restoring::assert_goes_on;
use crate::sandbox::assert_stopped;

fn guest() -> QemuBuilder {
    Qemu::multiboot().named_as_by_default()
}

/// The image of a guest that goes on.
fn image(folder: &Scratch) -> Result<String> {
    let guest = guest().booted()?;
    let image = folder.join("image").display().to_string();
    Transship::command(["save", "--vm", &*guest.vm(), "--to", &*image, "--format", "raw"]).run()?.expect_code(0)?;
    Ok(image)
}

fn cloning(vm: &str, image: &str) -> TransshipBuilder {
    Transship::command(["clone", "--vm", vm, "--from", image])
}

/// One that maps the image, and one with memory of its own.
#[test]
fn those_who_make_clones_can_do_nothing_else() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let image = image(&folder)?;
    for waiting in [guest().clone_of(&*image), guest().incoming()] {
        let waiting = waiting.start()?;
        assert_stopped("Fill", || cloning(&waiting.vm(), &image), &folder)?;
    }
    let lazy = guest().incoming().start()?;
    assert_stopped("StandIn", || cloning(&lazy.vm(), &image), &folder)
}

/// The user's command, which is run as the user when the clone is there, looks at the process that waits for it.
#[test]
fn a_clone_is_made_without_rights_and_its_command_runs_with_them() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let image = image(&folder)?;
    let said = folder.join("said");
    for waiting in [guest().clone_of(&*image), guest().incoming()] {
        let waiting = waiting.start()?;
        // The process that has started it was started by the one that it is for.
        let whose = "$(sed -n 's/^PPid:[[:space:]]*//p' /proc/$PPID/status)";
        let status = format!("grep -E '^(Uid|CapEff|NoNewPrivs|Seccomp):' /proc/{whose}/status");
        let command = format!("(id -u; echo $TRANSSHIP_SOCKET $TRANSSHIP_NUMBER; {status}) > {}", said.display());
        let flags = ["--after", &*command, "--number", "7"];
        cloning(&waiting.vm(), &image).args(flags).run()?.expect_code(0)?;
        let text = read(&said)?;
        let lines: Vec<_> = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        let socket = format!("{} 7", waiting.qmp_path().display());
        let expected =
            ["0", &*socket, "Uid: 65534 65534 65534 65534", "CapEff: 0000000000000000", "NoNewPrivs: 1", "Seccomp: 2"];
        assert_eq!(lines, expected);
        assert_goes_on(&waiting)?;
        assert_eq!(of_ours(&waiting.vm(), ""), [0; 0], "something of ours is left");
    }
    let waiting = guest().clone_of(&*image).start()?;
    let failed = cloning(&waiting.vm(), &image).args(["--after", "exit 3"]).run()?.expect_code(1)?;
    assert!(failed.stderr.contains("the command of --after failed: exit status: 3"), "{failed}");
    assert_goes_on(&waiting)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|error| LabError(format!("{}: {error}", path.display())))
}
