//! Both relays on threads of this process, and the link between them.
use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use tempfile::TempDir;
use transship_engine::{Error, Listener, Progress, RelayOptions, Report, Uri, relay_from_qemu, relay_to_qemu};

use super::qemus::PATIENCE;
use crate::crowd::{Passage, Words};

/// A link that can be cut, and counts.
pub(super) struct Cable {
    pub(super) uri: Uri,
    ends: Arc<Mutex<Vec<TcpStream>>>,
    carried: Arc<AtomicU64>,
    cut: Arc<AtomicU64>,
}

impl Cable {
    /// `cut_after`: so many bytes in all.
    pub(super) fn new(to: &Uri, cut_after: u64) -> Self {
        let Uri::Tcp { port, .. } = *to else { panic!("{to}") };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let uri = format!("tcp:127.0.0.1:{}", listener.local_addr().unwrap().port()).parse().unwrap();
        let cable =
            Self { uri, ends: Arc::default(), carried: Arc::default(), cut: Arc::new(AtomicU64::new(cut_after)) };
        let (ends, carried, cut) = (Arc::clone(&cable.ends), Arc::clone(&cable.carried), Arc::clone(&cable.cut));
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(("127.0.0.1", port)) else { return };
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let (ends, carried, cut) = (Arc::clone(&ends), Arc::clone(&carried), Arc::clone(&cut));
                    ends.lock().unwrap().push(from.try_clone().unwrap());
                    thread::spawn(move || {
                        let mut room = vec![0; 16 << 10];
                        while let Ok(count @ 1..) = from.read(&mut room) {
                            if carried.fetch_add(count as u64, SeqCst) + count as u64 > cut.load(SeqCst) {
                                sever(&ends);
                                break;
                            }
                            if to.write_all(&room[..count]).is_err() {
                                break;
                            }
                        }
                        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                    });
                }
            }
        });
        cable
    }

    pub(super) fn cut_now(&self) {
        self.cut.store(0, SeqCst);
        sever(&self.ends);
    }
}

fn sever(ends: &Mutex<Vec<TcpStream>>) {
    ends.lock().unwrap().iter().for_each(|end| drop(end.shutdown(Shutdown::Both)));
}

pub(super) struct Ended {
    pub(super) result: Result<(), Error>,
    pub(super) report: Report,
}

/// Both relays, each on a thread, and the two addresses at which QEMUs are or come.
pub(super) struct Relays {
    _folder: TempDir,
    pub(super) near_uri: PathBuf,
    pub(super) qemu: UnixListener,
    pub(super) cable: Cable,
    pub(super) near: thread::JoinHandle<Ended>,
    pub(super) far: thread::JoinHandle<Ended>,
    pub(super) near_progress: Arc<Progress>,
}

pub(super) fn options(compress: &str) -> RelayOptions {
    RelayOptions {
        channels: 3,
        compress: compress.parse().unwrap(),
        encoders: 2,
        without_return_path: false,
        caller: None,
    }
}

impl Relays {
    pub(super) fn start(options: RelayOptions, cut_after: u64) -> Self {
        Self::start_with(options, |link| Cable::new(link, cut_after))
    }

    /// In front of each connection of the link a crowd of strangers comes.
    pub(super) fn start_among(options: RelayOptions, first_words: Vec<Words>) -> Self {
        Self::start_with(options, |link| Cable::new(&Passage::new(link, first_words).uri, u64::MAX))
    }

    fn start_with(options: RelayOptions, connected: impl FnOnce(&Uri) -> Cable) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (near_uri, qemu_uri) = (folder.path().join("near"), folder.path().join("qemu"));
        let qemu = UnixListener::bind(&qemu_uri).unwrap();
        let link = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
        let cable = connected(link.uri());
        let far = thread::spawn(move || {
            let mut report = Report::default();
            let result = relay_to_qemu(link, &Uri::Unix(qemu_uri), &Progress::new(), &mut report);
            Ended { result, report }
        });
        let listener = Listener::bind(&Uri::Unix(near_uri.clone())).unwrap();
        let (near_progress, to) = (Progress::new(), cable.uri.clone());
        let progress = Arc::clone(&near_progress);
        let near = thread::spawn(move || {
            let mut report = Report::default();
            let result = relay_from_qemu(&listener, &to, &options, &progress, &mut report);
            Ended { result, report }
        });
        Self { _folder: folder, near_uri, qemu, cable, near, far, near_progress }
    }

    pub(super) fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.near_uri).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// A connection that comes to the waiting QEMU, with its first bytes: it is silent for no longer than it takes to
    /// hear of it.
    pub(super) fn accept(&self) -> (UnixStream, Vec<u8>) {
        let (mut stream, _) = self.qemu.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut first = vec![0; 4];
        stream.read_exact(&mut first).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        (stream, first)
    }

    pub(super) fn end(self) -> (Ended, Ended) {
        (self.near.join().unwrap(), self.far.join().unwrap())
    }
}
