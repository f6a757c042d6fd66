//! How long the link takes there and back when nothing else is on it.
use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::net::UnixStream,
    thread,
    time::Instant,
};

use transship_lab::SlowLink;

use crate::{results::Spread, units::millis};

const TIMES: usize = 200;

/// The median of some round trips of one byte, between two threads.
pub(super) fn median_ms(link: Option<&SlowLink>) -> Result<f64, String> {
    let failed = |error: io::Error| format!("can't take the time of the link: {error}");
    let times = match link {
        None => UnixStream::pair().and_then(|(near, far)| measured(near, move || Ok(far))).map_err(failed)?,
        Some(link) => {
            let listener = link.within_destination(|| TcpListener::bind("0.0.0.0:0")).map_err(|e| e.to_string())?;
            let listener = listener.map_err(failed)?;
            let to = link.destination_address(listener.local_addr().map_err(failed)?.port());
            let near = link.within_source(|| TcpStream::connect(to)).map_err(|e| e.to_string())?.map_err(failed)?;
            near.set_nodelay(true).map_err(failed)?;
            let far = move || {
                let far = listener.accept()?.0;
                far.set_nodelay(true)?;
                Ok(far)
            };
            measured(near, far).map_err(failed)?
        }
    };
    Ok(Spread::of(times).median)
}

fn measured<S: Read + Write + Send + 'static>(
    mut near: impl Read + Write,
    far: impl FnOnce() -> io::Result<S> + Send + 'static,
) -> io::Result<Vec<f64>> {
    let echo = thread::spawn(move || -> io::Result<()> {
        let (mut far, mut byte) = (far()?, [0]);
        for _ in 0..TIMES {
            far.read_exact(&mut byte)?;
            far.write_all(&byte)?;
        }
        Ok(())
    });
    let mut times = Vec::with_capacity(TIMES);
    for _ in 0..TIMES {
        let (begin, mut byte) = (Instant::now(), [0]);
        near.write_all(&[1])?;
        near.read_exact(&mut byte)?;
        times.push(millis(begin.elapsed()));
    }
    echo.join().map_err(|_| io::Error::other("the other end panicked"))??;
    Ok(times)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_needs_some_time_there_and_back() {
        assert!(median_ms(None).unwrap() > 0.0);
    }
}
