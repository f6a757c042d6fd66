//! `transship balloon`.

use clap::Args;

const BALLOON_EXAMPLES: &str = "\
Examples:
  The device, and a QEMU that gives it to its guest (11.1 or newer; Linux has the driver):
    transship balloon --socket /run/vm.balloon &
    qemu-system-x86_64 ... -chardev socket,id=balloon,path=/run/vm.balloon \\
      -device pcie-root-port,id=port0 -device vhost-user-test-device-pci,id=balloon,bus=port0,chardev=balloon,\\
        virtio-id=5,num_vqs=5,config_size=16,vq_size=1024

The balloon inflates and deflates, and gives back memory that the guest reports as free. With --balloon, `move` and \
`save` ask it which memory they can leave out. Guest memory must be a shared file, as always with transship.

After Ctrl-C the balloon ends as soon as QEMU has disconnected (device_del, then chardev-remove). If it ended earlier, \
QEMU 11.1 could crash, and the guest with it.";

#[derive(Debug, Args)]
#[command(after_long_help = BALLOON_EXAMPLES)]
pub(crate) struct BalloonArgs {
    /// Socket for QEMU, and for `move` and `save`
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: std::path::PathBuf,
    /// User that QEMU runs as: owns the socket, and may connect as well as root [default: yourself]
    #[arg(long, value_name = "NAME")]
    pub(crate) user: Option<String>,
    /// Keep all rights, to find out whether they were what was missing
    ///
    /// Without this flag, root becomes `nobody` once the socket listens, without capabilities, can open no file, and
    /// can make only a few system calls.
    #[arg(long, hide_short_help = true)]
    pub(crate) no_sandbox: bool,
}
