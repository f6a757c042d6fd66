//! A link that can be cut or held: copies bytes between unix sockets until it is told to stop.
use crate::{Result, failed};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long what a source says first may take to get through.
const FIRST_WAIT: Duration = Duration::from_secs(20);

/// Connections to one path go to another. Its threads end with their connections, and with it.
#[derive(Debug)]
pub struct Proxy {
    shared: Arc<Shared>,
    /// The one that its thread waits at.
    listener: UnixListener,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    streams: Vec<UnixStream>,
    copying: Vec<JoinHandle<()>>,
    /// No connection is taken any more.
    cut: bool,
    /// Bytes wait here.
    held: bool,
    /// Something has got through.
    in_use: bool,
}

impl Proxy {
    /// Listens at `here`, and connects each connection to `there`.
    ///
    /// # Errors
    /// There is something at `here` already.
    pub fn start(here: &Path, there: &Path) -> Result<Self> {
        let listener = UnixListener::bind(here).map_err(failed(here.display()))?;
        let shared = Arc::new(Shared::default());
        let (kept, there) = (Arc::clone(&shared), there.to_owned());
        let waits = listener.try_clone().map_err(failed(here.display()))?;
        thread::spawn(move || {
            for near in waits.incoming().map_while(std::io::Result::ok) {
                // The destination may have gone: then the source sees its connection end.
                let Ok(far) = UnixStream::connect(&there) else { continue };
                if !kept.carry(&near, &far) {
                    return;
                }
            }
        });
        Ok(Self { shared, listener })
    }

    /// Whether anything has got through, either way.
    pub fn in_use(&self) -> bool {
        self.shared.lock().in_use
    }

    /// One side has died: returns when the other has been told so on all connections.
    pub fn wait_until_told(&self) {
        let copying = std::mem::take(&mut self.shared.lock().copying);
        for thread in copying {
            thread.join().expect("copying does not panic");
        }
    }

    /// Waits until something got through: a destination that was connected to and has heard nothing would wait for
    /// another source.
    pub fn wait_in_use(&self) {
        let deadline = Instant::now() + FIRST_WAIT;
        while !self.in_use() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends all connections, and takes no more.
    pub fn cut(&self) {
        self.shared.lock().cut = true;
        self.snap();
    }

    /// Ends all connections. Others may follow.
    pub fn snap(&self) {
        let mut state = self.shared.lock();
        state.held = false;
        for stream in state.streams.drain(..) {
            // It may have ended already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.shared.changed.notify_all();
    }

    /// From now on what is sent waits, and nobody is told.
    pub fn hold(&self) {
        self.shared.lock().held = true;
    }

    /// What was held goes on.
    pub fn let_go(&self) {
        self.shared.lock().held = false;
        self.shared.changed.notify_all();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut();
        // Its thread waits for a connection that may never come. A listener that has ended already is as good.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics with the lock held")
    }

    /// Copies both ways from now on, unless the link has been cut.
    fn carry(self: &Arc<Self>, near: &UnixStream, far: &UnixStream) -> bool {
        let mut state = self.lock();
        if state.cut {
            return false;
        }
        for (from, to) in [(near, far), (far, near)] {
            let (from, to, shared) = (clone(from), clone(to), Arc::clone(self));
            state.streams.push(clone(&from));
            state.copying.push(thread::spawn(move || shared.copy(from, to)));
        }
        true
    }

    /// What one side sends reaches the other; the end too.
    fn copy(&self, mut from: UnixStream, mut to: UnixStream) {
        let mut bytes = vec![0; 256 << 10];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            self.wait_while_held();
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
            self.lock().in_use = true;
        }
        self.wait_while_held();
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    }

    fn wait_while_held(&self) {
        let state = self.lock();
        drop(self.changed.wait_while(state, |state| state.held).expect("nobody panics with the lock held"));
    }
}

fn clone(stream: &UnixStream) -> UnixStream {
    stream.try_clone().expect("file descriptors are not short")
}
