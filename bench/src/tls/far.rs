//! A connection that takes its time: every byte arrives later, and none is slowed by those before it.
use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use rustix::net::Shutdown as End;

/// What is read at once.
const PIECE_BYTES: usize = 64 << 10;
/// Pieces under way in one direction of a connection.
const PIECES: usize = 256;

/// A port of this host that leads to another one. Its threads end with their connections, and with it.
pub(crate) struct Far {
    listener: TcpListener,
}

impl Far {
    /// What connects there comes to `to`, and each byte takes `delay` in either direction.
    pub(crate) fn new(to: u16, delay: Duration) -> Result<Self, String> {
        let failed = |error: io::Error| format!("can't make a slow connection: {error}");
        let listener = TcpListener::bind("127.0.0.1:0").map_err(failed)?;
        let taking = listener.try_clone().map_err(failed)?;
        thread::spawn(move || {
            for near in taking.incoming().map_while(Result::ok) {
                // Whoever is not there any more is missed by the one who called.
                let _ = TcpStream::connect(("127.0.0.1", to)).and_then(|far| carry(&near, &far, delay));
            }
        });
        Ok(Self { listener })
    }

    pub(crate) fn port(&self) -> Result<u16, String> {
        Ok(self.listener.local_addr().map_err(|error| error.to_string())?.port())
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        // It wakes the thread that accepts.
        let _ = rustix::net::shutdown(&self.listener, End::Both);
    }
}

/// Copies both ways from now on.
fn carry(near: &TcpStream, far: &TcpStream, delay: Duration) -> io::Result<()> {
    for (from, to) in [(near, far), (far, near)] {
        to.set_nodelay(true)?;
        let (mut from, mut to) = (from.try_clone()?, to.try_clone()?);
        let (send, receive) = mpsc::sync_channel::<(Instant, Vec<u8>)>(PIECES);
        thread::spawn(move || {
            let mut piece = vec![0; PIECE_BYTES];
            while let Ok(count @ 1..) = from.read(&mut piece) {
                if send.send((Instant::now() + delay, piece[..count].to_vec())).is_err() {
                    break;
                }
            }
        });
        thread::spawn(move || {
            for (due, piece) in receive {
                thread::sleep(due.saturating_duration_since(Instant::now()));
                if to.write_all(&piece).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Write);
        });
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn bytes_arrive_later_and_so_does_the_end() {
        let there = TcpListener::bind("127.0.0.1:0").unwrap();
        let delay = Duration::from_millis(40);
        let far = Far::new(there.local_addr().unwrap().port(), delay).unwrap();
        let mut near = TcpStream::connect(("127.0.0.1", far.port().unwrap())).unwrap();
        let (mut other, _) = there.accept().unwrap();
        let begin = Instant::now();
        near.write_all(b"there").unwrap();
        let mut word = [0; 5];
        other.read_exact(&mut word).unwrap();
        assert!(begin.elapsed() >= delay && word == *b"there", "{:?}", begin.elapsed());
        other.write_all(b"and back").unwrap();
        drop(other);
        let mut answer = String::new();
        near.read_to_string(&mut answer).unwrap();
        assert!(begin.elapsed() >= 2 * delay && answer == "and back", "{:?}", begin.elapsed());
    }
}
