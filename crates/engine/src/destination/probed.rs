//! A receiver that waits lets others measure the way to it: what they send is counted and thrown away. Nothing of the
//! guest is touched or told.
use std::{
    io::{Read, Write},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use transship_wire::{PROBE_BYTES, Probe};

use crate::{
    door::{Line, turn_away},
    transport::Connection,
};

/// What one connection may send.
const MOST_BYTES: u64 = 256 << 20;
/// How long it may take, all in all.
const MOST_TIME: Duration = Duration::from_secs(10);
/// How many may probe at a time.
const AT_A_TIME: u32 = 8;
/// And as long as the receiver waits. Whoever probes for ever would cost this host its processors and its network.
const IN_ALL: u32 = 256;

const BUFFER_BYTES: usize = 64 << 10;

/// Those who probe.
#[derive(Default)]
pub(super) struct Probed {
    so_far: u32,
    /// Relaxed: it protects nothing else.
    now: Arc<AtomicU32>,
}

impl Probed {
    /// Answers on a thread of its own, or refuses.
    pub(super) fn answer(&mut self, (mut connection, peer): Line) {
        if self.so_far >= IN_ALL || self.now.load(Relaxed) >= AT_A_TIME {
            let _ = connection.write_all(&Probe::Refused.encode()); // it may be gone
            return turn_away(&peer, "it is probed by others, or was too often");
        }
        self.so_far += 1;
        let here = Here::new(&self.now);
        let answering = thread::Builder::new().name("probe".into()).spawn(move || {
            if let Err(why) = answer(&mut connection) {
                turn_away(&peer, &why);
            }
            drop(here);
        });
        // Without a thread the connection ends, and the other side says so.
        drop(answering);
    }
}

/// One of those who probe now.
struct Here(Arc<AtomicU32>);

impl Here {
    fn new(count: &Arc<AtomicU32>) -> Self {
        count.fetch_add(1, Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// Counts until the other side has enough, which is no error.
fn answer(connection: &mut Connection) -> Result<(), String> {
    let deadline = Instant::now() + MOST_TIME;
    let text = |error: std::io::Error| error.to_string();
    connection.write_all(&Probe::Ready(MOST_BYTES).encode()).map_err(text)?;
    let (mut count, mut buffer) = (0, vec![0; BUFFER_BYTES]);
    loop {
        let mut record = [0; PROBE_BYTES];
        if !fill(connection, &mut record, deadline)? {
            return Ok(());
        }
        match Probe::decode(&record).map_err(|error| error.to_string())? {
            Probe::Filling(0) => connection.write_all(&Probe::Count(count).encode()).map_err(text)?,
            Probe::Filling(bytes) if count + bytes <= MOST_BYTES => {
                let mut left = bytes as usize; // bounded by decode
                while left > 0 {
                    let piece = left.min(BUFFER_BYTES);
                    if !fill(connection, &mut buffer[..piece], deadline)? {
                        return Ok(());
                    }
                    left -= piece;
                }
                count += bytes;
            }
            Probe::Filling(_) => return Err(format!("its probe sends more than {MOST_BYTES} bytes")),
            Probe::Ready(_) | Probe::Count(_) | Probe::Refused => {
                return Err("its probe sends what only a receiver says".into());
            }
        }
    }
}

/// False: the other side has hung up.
fn fill(connection: &mut Connection, mut bytes: &mut [u8], deadline: Instant) -> Result<bool, String> {
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(format!("its probe takes longer than {} s", MOST_TIME.as_secs()));
        }
        connection.set_read_timeout(Some(left)).map_err(|error| error.to_string())?;
        match connection.read(bytes) {
            Ok(0) => return Ok(false),
            Ok(read) => bytes = &mut bytes[read..],
            Err(error) => match error.kind() {
                std::io::ErrorKind::Interrupted | std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {}
                std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::ConnectionReset => return Ok(false),
                _ => return Err(error.to_string()),
            },
        }
    }
    Ok(true)
}
