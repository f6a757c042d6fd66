//! What the kernel knows of a TCP connection, and how fast it lets one go: for both, the libraries have no call.
use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    time::Duration,
};

/// A TCP connection as its sending side sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpState {
    /// From a byte's way out to its acknowledgement, smoothed.
    pub round_trip: Duration,
    /// The shortest that was seen in the last minutes.
    pub least_round_trip: Duration,
    /// Bytes that were acknowledged so far.
    pub acknowledged: u64,
}

/// `struct tcp_info` of linux/tcp.h up to `tcpi_min_rtt`, which Linux has had since 4.6.
const INFO_BYTES: usize = 152;
const ROUND_TRIP: usize = 68;
const ACKNOWLEDGED: usize = 120;
const LEAST_ROUND_TRIP: usize = 148;

impl TcpState {
    /// Of a connected socket.
    ///
    /// # Errors
    /// It is not TCP, or the kernel is older than Linux 4.6.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let mut info = [0u8; INFO_BYTES];
        let mut length = INFO_BYTES as libc::socklen_t;
        let fd = socket.as_fd().as_raw_fd();
        // SAFETY: the kernel writes at most `length` bytes into `info`, and the new length into `length`; both live
        // beyond the call, and any bytes are valid for them.
        let result = unsafe {
            libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut length)
        };
        done(result)?;
        if (length as usize) < INFO_BYTES {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let micros = |at: usize| u32::from_ne_bytes(info[at..at + 4].try_into().unwrap_or_default());
        let acknowledged = info[ACKNOWLEDGED..ACKNOWLEDGED + 8].try_into().map(u64::from_ne_bytes).unwrap_or_default();
        Ok(Self {
            round_trip: Duration::from_micros(micros(ROUND_TRIP).into()),
            least_round_trip: Duration::from_micros(micros(LEAST_ROUND_TRIP).into()),
            acknowledged,
        })
    }
}

/// Bounds how many bytes a second the kernel sends on a TCP connection, in small steps. None: there is no bound.
///
/// # Errors
/// The socket is none of TCP.
pub fn limit_tcp_pace(socket: impl AsFd, bytes_per_s: Option<u64>) -> io::Result<()> {
    let rate = bytes_per_s.unwrap_or(u64::MAX).to_ne_bytes();
    let fd: BorrowedFd<'_> = socket.as_fd();
    // SAFETY: the kernel reads so many bytes of `rate`, which lives beyond the call.
    let result = unsafe {
        let length = rate.len() as libc::socklen_t;
        libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, rate.as_ptr().cast(), length)
    };
    done(result)
}

fn done(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{
        io::{Read, Write},
        net::{TcpListener, TcpStream},
        os::unix::net::UnixStream,
        thread,
        time::Instant,
    };

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (ours, listener.accept().unwrap().0)
    }

    /// Sends so many bytes, and waits until the other side has them.
    fn send(ours: &mut TcpStream, mut theirs: TcpStream, bytes: usize) -> Duration {
        let begin = Instant::now();
        let reader = thread::spawn(move || theirs.read_exact(&mut vec![0; bytes]).unwrap());
        ours.write_all(&vec![1; bytes]).unwrap();
        reader.join().unwrap();
        begin.elapsed()
    }

    #[test]
    fn what_has_arrived_is_counted_and_timed() {
        let (mut ours, theirs) = pair();
        let before = TcpState::of(&ours).unwrap();
        send(&mut ours, theirs, 1 << 20);
        // What the other side has read was acknowledged, or is within a moment.
        let deadline = Instant::now() + Duration::from_secs(10);
        while TcpState::of(&ours).unwrap().acknowledged < before.acknowledged + (1 << 20) {
            assert!(Instant::now() < deadline, "{:?}", TcpState::of(&ours));
            thread::yield_now();
        }
        let state = TcpState::of(&ours).unwrap();
        assert!(state.round_trip > Duration::ZERO && state.round_trip < Duration::from_secs(10), "{state:?}");
        assert!(state.least_round_trip <= state.round_trip, "{state:?}");
    }

    #[test]
    fn a_pace_is_kept() {
        let (mut ours, theirs) = pair();
        limit_tcp_pace(&ours, Some(10_000_000)).unwrap();
        let took = send(&mut ours, theirs, 5_000_000);
        // The first bytes go at once.
        assert!(took > Duration::from_millis(200), "{took:?}");
    }

    #[test]
    fn a_socket_of_another_kind_is_refused() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        TcpState::of(&ours).unwrap_err();
    }
}
