//! Unix sockets by which processes on one host speak to each other in lines of text, with file descriptors beside them,
//! and what the libraries lack for sockets of TCP.
//!
//! - [`GuestSocket`]: a socket that one user may connect to
//! - [`receive_with_fds`], [`send_with_fds`]: bytes, and the descriptors that travel with them
//! - [`LineSocket`]: a connection; lines have a limit, and so have the descriptors that come with one
//! - [`wait_for_any`], [`Shutdown`]: waiting for several of them, and being told to end
//! - [`TcpState`], [`limit_tcp_pace`]: how long bytes take on a TCP connection, and how fast they may go
#![deny(unsafe_code)]

mod descriptors;
mod line;
mod socket;
#[allow(unsafe_code)] // two system calls that have no safe wrapper
mod tcp;
mod wait;

pub use descriptors::{MAX_FDS, Received, receive_with_fds, send_with_fds};
pub use line::{Line, LineError, LineSocket, MAX_LINE_BYTES};
/// A user of the system, by number.
pub use rustix::process::Uid;
pub use socket::{GuestSocket, SocketError};
pub use tcp::{TcpState, limit_tcp_pace};
pub use wait::{Shutdown, wait_for, wait_for_any};
