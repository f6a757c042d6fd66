//! A network card whose device is another process than QEMU: a stock back end of vhost-user, which writes what comes in
//! to guest memory through a mapping of its own.
use crate::back_end::listening;
use crate::place::Place;
use crate::versions::back_end;
use crate::{Process, Result, Scratch, failed};
use std::net::UdpSocket;
use std::path::PathBuf;
use std::process::Command;
use std::thread;

/// Programs that `scripts/back-ends.sh` unpacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// passt that goes on when its guest has gone.
    Passt,
    /// passt that ends then.
    PasstThatEnds,
    /// DPDK's testpmd, which sends back every frame.
    Testpmd,
}

/// Sends datagrams back to whoever has sent them. The guest's `workload.net` reaches it by passt.
#[derive(Debug)]
pub struct Echo {
    port: u16,
}

impl Echo {
    /// For as long as this process lives.
    ///
    /// # Errors
    /// There is no port.
    pub fn start() -> Result<Self> {
        let socket = UdpSocket::bind("127.0.0.1:0").map_err(failed("can't listen for datagrams"))?;
        let port = socket.local_addr().map_err(failed("can't listen for datagrams"))?.port();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            loop {
                // That nobody is there any more for an earlier one is no reason to end.
                if let Ok((count, sender)) = socket.recv_from(&mut bytes) {
                    let _ = socket.send_to(&bytes[..count], sender);
                }
            }
        });
        Ok(Self { port })
    }

    /// Arguments for the kernel of a guest that sends so many datagrams a second, and checks what comes back.
    pub fn words(&self, rate: u32) -> String {
        format!("workload.net={rate} workload.net_port={}", self.port)
    }
}

/// A running one. It is gone when this is dropped.
#[derive(Debug)]
pub struct NetBackEnd {
    process: Process,
    socket: PathBuf,
    _folder: Scratch,
}

impl Network {
    /// Where it is; nothing without the variable that names their folder.
    ///
    /// # Errors
    /// The variable is set, but the program is missing.
    pub fn program(self) -> Result<Option<PathBuf>> {
        let name = match self {
            Self::Passt => "passt",
            Self::PasstThatEnds => "passt-2025",
            Self::Testpmd => "testpmd",
        };
        back_end(name)
    }

    /// Starts it, and waits until it listens. Nothing if it is not to be had here.
    ///
    /// # Errors
    /// It does not.
    pub fn start(self) -> Result<Option<NetBackEnd>> {
        let Some(program) = self.program()? else { return Ok(None) };
        // passt makes itself an ordinary user's.
        let folder = Place { of_nobody: true, contained: false }.folder()?;
        let socket = folder.join("net");
        let path = socket.display();
        let words = match self {
            Self::Passt | Self::PasstThatEnds => {
                format!("--foreground --vhost-user --socket {path} --ipv4-only -a 10.0.2.15 -n 24 -g 10.0.2.2")
            }
            // Two of one prefix would be one program.
            Self::Testpmd => format!(
                "--no-huge -m 64 --no-pci --file-prefix={} --vdev net_vhost0,iface={path},queues=1 -l 0,1 -- \
                 --forward-mode=5tswap --total-num-mbufs=4096 --auto-start --no-lsc-interrupt",
                path.to_string().replace('/', "-")
            ),
        };
        let mut command = Command::new("sh");
        // testpmd ends when there is nothing more to read.
        command.args(["-c", "mkfifo \"$0\" && exec \"$@\" <>\"$0\""]).arg(folder.join("commands")).arg(program);
        command.args(words.split(' '));
        let mut process = Process::start(command)?;
        listening(&mut process, "the back end of a network", &socket)?;
        Ok(Some(NetBackEnd { process, socket, _folder: folder }))
    }
}

impl NetBackEnd {
    /// The arguments by which a QEMU has it as a network card. The guest's memory must be shared.
    pub fn args(&self) -> [String; 6] {
        let chardev = format!("socket,id=net,path={}", self.socket.display());
        let card = "virtio-net-pci,netdev=net,mac=52:54:00:12:34:56,romfile=";
        ["-chardev", &chardev, "-netdev", "vhost-user,id=net,chardev=net", "-device", card].map(str::to_owned)
    }

    /// Its process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }
}
