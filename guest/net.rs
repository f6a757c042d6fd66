//! A network that sends back what it gets. Each datagram says its number, all through, and lies where the network put
//! it until it is read: seconds later. Whoever copied that memory before, and does not look again, has something else
//! there.
use crate::{pattern, say};
use std::fs;
use std::net::UdpSocket;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The host that sends back; guest/init knows the way.
const PEER: &str = "10.0.2.2";
/// Words of a datagram: it fills most of a page, and fits into one frame.
const LENGTH: usize = 176;
/// Numbers begin here: no page of memory looks like one.
const FIRST: usize = 1 << 41;
/// How long datagrams lie.
const REST: Duration = Duration::from_secs(2);

/// The network, or none.
#[derive(Default)]
pub struct Net {
    sent: AtomicU64,
    received: AtomicU64,
    errors: AtomicU64,
    /// Which have come back.
    back: Mutex<Vec<bool>>,
}

impl Net {
    /// Sends `rate` datagrams a second to this port from now on, and looks at what comes back, on threads of their own.
    pub fn start(rate: u64, port: u16) -> Arc<Self> {
        let net = Arc::new(Self::default());
        if rate == 0 {
            return net;
        }
        let socket = UdpSocket::bind("0.0.0.0:0").expect("the network is there");
        socket.connect((PEER, port)).expect("there is a way to it");
        socket.set_nonblocking(true).expect("any socket can do that");
        let socket = Arc::new(socket);
        let (sender, with) = (Arc::clone(&net), Arc::clone(&socket));
        std::thread::spawn(move || {
            loop {
                sender.send(&with);
                std::thread::sleep(Duration::from_micros(1_000_000 / rate));
            }
        });
        let receiver = Arc::clone(&net);
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(REST);
                receiver.receive(&socket);
            }
        });
        net
    }

    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed) + wrong_sums(self.sent.load(Ordering::Relaxed))
    }

    pub fn tell(&self) {
        let (sent, received) = (self.sent.load(Ordering::Relaxed), self.received.load(Ordering::Relaxed));
        if sent != 0 {
            say(format_args!("net sent={sent} received={received} errors={}", self.errors()));
        }
    }

    fn send(&self, socket: &UdpSocket) {
        let number = self.sent.load(Ordering::Relaxed) as usize;
        let words = pattern(FIRST + number, 1);
        let bytes: Vec<u8> = (0..LENGTH).flat_map(|index| words(index).to_le_bytes()).collect();
        self.back.lock().expect("nobody panics with it").push(false);
        self.sent.fetch_add(1, Ordering::Relaxed);
        // What is lost is no error; nor is it that nobody is there for a moment.
        let _ = socket.send(&bytes);
    }

    fn receive(&self, socket: &UdpSocket) {
        let mut bytes = [0; 2 * LENGTH * 8];
        // An error is one that the sender had, or that there are no more.
        while let Ok(count) = socket.recv(&mut bytes).or_else(|_| socket.recv(&mut bytes)) {
            self.look(&bytes[..count]);
            self.received.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn look(&self, bytes: &[u8]) {
        let words: Vec<u64> =
            bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("it has eight"))).collect();
        let number = (words.get(1).copied().unwrap_or(0) as usize).wrapping_sub(FIRST);
        let right = pattern(FIRST.wrapping_add(number), 1);
        let wrong = (0..LENGTH).filter(|&index| words.get(index) != Some(&right(index))).count();
        let mut back = self.back.lock().expect("nobody panics with it");
        // What lay in that memory before came back then.
        let is_new = back.get_mut(number).is_some_and(|is_back| !std::mem::replace(is_back, true));
        if (wrong > 0 || !is_new) && self.errors.fetch_add(1, Ordering::Relaxed) < 10 {
            say(format_args!("bad datagram: number={number} new={is_new} words={wrong}"));
        }
    }
}

/// Datagrams whose checksum was wrong: the kernel does not hand them out.
fn wrong_sums(sent: u64) -> u64 {
    if sent == 0 {
        return 0;
    }
    let text = fs::read_to_string("/proc/net/snmp").expect("/proc is mounted");
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let (names, values) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    let found = names.split(' ').zip(values.split(' ')).find(|(name, _)| *name == "InCsumErrors");
    found.and_then(|(_, value)| value.parse().ok()).expect("the kernel counts them")
}
