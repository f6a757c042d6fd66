//! A client behind the door: the control protocol of docs/free-pages.md.
use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use serde_json::{Value, json};
use transship_lines::{LineError, LineSocket, Shutdown, wait_for_any};

use crate::{
    device::Device,
    message::{Call, Line, Request, Started},
};

/// A client that takes nothing for so long is dropped.
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves a client until it hangs up. Whatever ends it, the guest gets its pages back.
pub(crate) fn run(stream: UnixStream, device: &Device, shutdown: &Shutdown) -> io::Result<()> {
    let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let mut session = DeviceSession { socket: LineSocket::new(stream), device, wake };
    match device.attach(Arc::clone(&session.wake)) {
        Ok(()) => {}
        Err(why) => {
            // A connection that is closed with something unread in it loses what was sent, too.
            let _ = session.socket.receive(Instant::now() + PATIENCE);
            let _ = session.send(&Line::Error { id: 0, error: why });
            return Ok(());
        }
    }
    let _attached = Attached(device);
    match session.serve(shutdown) {
        Ok(()) | Err(LineError::Closed) => Ok(()),
        Err(error) => Err(io::Error::other(error.to_string())),
    }
}

struct Attached<'a>(&'a Device);

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        self.0.detach();
    }
}

struct DeviceSession<'a> {
    socket: LineSocket,
    device: &'a Device,
    wake: Arc<OwnedFd>,
}

impl DeviceSession<'_> {
    fn serve(&mut self, shutdown: &Shutdown) -> Result<(), LineError> {
        loop {
            let mut ready = [
                PollFd::from_borrowed_fd(shutdown.event(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.socket.stream().as_fd(), PollFlags::IN),
            ];
            wait_for_any(&mut ready, None)?;
            let [end, woken, talks] = ready.map(|fd| !fd.revents().is_empty());
            if end {
                return self.send(&Line::Lost { lost: "the balloon was asked to end".into() });
            }
            if woken {
                // It counts; what it counts is taken all at once.
                let _ = rustix::io::read(&*self.wake, &mut [0_u8; 8]);
                if !self.send_waiting()? {
                    return Ok(());
                }
            }
            if talks {
                self.socket.read_some()?;
                while let Some(line) = self.socket.take_line()? {
                    self.answer(&line.text)?;
                }
            }
        }
    }

    /// Sends what the device has for the client. False: that was the last.
    fn send_waiting(&self) -> Result<bool, LineError> {
        for line in self.device.take_lines() {
            self.send(&line)?;
            if matches!(line, Line::Lost { .. }) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn answer(&self, text: &[u8]) -> Result<(), LineError> {
        let request: Request = match serde_json::from_slice(text) {
            Ok(request) => request,
            Err(error) => {
                self.send(&Line::Error { id: 0, error: format!("that is not a request: {error}") })?;
                return Err(LineError::Closed);
            }
        };
        let id = request.id;
        let result = self.call(request.call);
        // What was heard before the answer goes before it: after `stop` there is nothing left.
        if !self.send_waiting()? {
            return Err(LineError::Closed);
        }
        self.send(&match result {
            Ok(ok) => Line::Ok { id, ok },
            Err(error) => Line::Error { id, error },
        })
    }

    fn call(&self, call: Call) -> Result<Value, String> {
        let nothing = || Ok(json!({}));
        match call {
            Call::Describe => Ok(json!(self.device.describe())),
            Call::Start => Ok(json!(Started { command: self.device.start()? })),
            Call::Stop => {
                self.device.stop();
                nothing()
            }
            Call::Done => {
                self.device.done();
                nothing()
            }
            Call::Keep => {
                self.device.keep();
                nothing()
            }
            Call::Target { bytes } => {
                self.device.set_target(bytes)?;
                nothing()
            }
            Call::Statistics => Ok(json!(self.device.statistics())),
        }
    }

    fn send(&self, line: &Line) -> Result<(), LineError> {
        let text = serde_json::to_vec(line).map_err(io::Error::from)?;
        self.socket.send(&text, &[], Instant::now() + PATIENCE)
    }
}
