//! A link that can be cut: copies bytes between unix sockets until it is told to stop.
use std::{
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// How long what a source says first may take to get through.
const FIRST_WAIT: Duration = Duration::from_secs(20);

/// Connections to one path go to another. Its threads end with their connections.
pub(crate) struct Proxy {
    streams: Arc<Mutex<Option<Vec<UnixStream>>>>,
    copying: Arc<Mutex<Vec<JoinHandle<()>>>>,
    /// Something has got through.
    in_use: Arc<AtomicBool>,
}

impl Proxy {
    /// Listens at `here`, and connects each connection to `there`.
    pub(crate) fn start(here: &Path, there: &Path) -> Self {
        let listener = UnixListener::bind(here).expect("a folder of the test's own");
        let streams = Arc::new(Mutex::new(Some(Vec::new())));
        let copying = Arc::new(Mutex::new(Vec::new()));
        let (kept, there) = (Arc::clone(&streams), there.to_owned());
        let (threads, in_use) = (Arc::clone(&copying), Arc::new(AtomicBool::new(false)));
        let used = Arc::clone(&in_use);
        thread::spawn(move || {
            for incoming in listener.incoming() {
                let Ok(near) = incoming else { return };
                // The destination may have gone: then the source sees its connection end.
                let Ok(far) = UnixStream::connect(&there) else { continue };
                let mut kept = kept.lock().expect("nobody panics with the lock held");
                let Some(kept) = kept.as_mut() else { return };
                for (from, to) in [(&near, &far), (&far, &near)] {
                    kept.push(clone(from));
                    threads.lock().expect("as above").push(copy(clone(from), clone(to), Arc::clone(&used)));
                }
            }
        });
        Self { streams, copying, in_use }
    }

    /// One side has died: returns when the other has been told so on all connections.
    pub(crate) fn wait_until_told(&self) {
        for thread in self.copying.lock().expect("nobody panics with the lock held").drain(..) {
            thread.join().expect("copying does not panic");
        }
    }

    /// Ends all connections, and takes no more. A destination that was connected to and has heard nothing would wait for another source: so first
    /// something must have got through.
    pub(crate) fn cut(&self) {
        let deadline = Instant::now() + FIRST_WAIT;
        while !self.in_use.load(SeqCst) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        for stream in self.streams.lock().expect("nobody panics with the lock held").take().into_iter().flatten() {
            // It may have ended already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn clone(stream: &UnixStream) -> UnixStream {
    stream.try_clone().expect("file descriptors are not short")
}

/// What one side sends reaches the other; the end too.
fn copy(mut from: UnixStream, mut to: UnixStream, used: Arc<AtomicBool>) -> JoinHandle<()> {
    thread::spawn(move || {
        let mut bytes = vec![0; 256 << 10];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
            used.store(true, SeqCst);
        }
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    })
}
