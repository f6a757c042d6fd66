//! Sockets of this host alone: bytes from one thread to another, which looks at none of them.
use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    thread,
    time::Instant,
};

use crate::units::millis;

const PIECE_BYTES: usize = 512 << 10;

/// Milliseconds that so many connections take for all bytes together.
pub(crate) fn once(bytes: u64, connections: usize) -> Result<f64, String> {
    let each = bytes / connections as u64;
    let begin = Instant::now();
    thread::scope(|scope| {
        let mut all = Vec::new();
        for _ in 0..connections {
            let (from, to) = UnixStream::pair()?;
            all.push(scope.spawn(move || send(from, each)));
            all.push(scope.spawn(move || receive(to, each)));
        }
        all.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|_| Err(io::Error::other("panicked"))))
    })
    .map_err(|error| format!("sockets of this host: {error}"))?;
    Ok(millis(begin.elapsed()))
}

fn send(mut to: UnixStream, bytes: u64) -> io::Result<()> {
    let piece = vec![1; PIECE_BYTES];
    let mut left = bytes;
    while left > 0 {
        let length = left.min(PIECE_BYTES as u64) as usize;
        to.write_all(&piece[..length])?;
        left -= length as u64;
    }
    Ok(())
}

fn receive(mut from: UnixStream, bytes: u64) -> io::Result<()> {
    let mut piece = vec![0; PIECE_BYTES];
    let mut left = bytes;
    while left > 0 {
        let length = left.min(PIECE_BYTES as u64) as usize;
        match from.read(&mut piece[..length])? as u64 {
            0 => return Err(io::Error::other("the other end has closed")),
            read => left -= read,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_arrive() {
        assert!(once(3 << 20, 2).is_ok_and(|ms| ms > 0.0));
    }
}
