//! Somebody between the two ends of a move, who reads all that goes by and may harm some of it.
use std::{
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
};

use memchr::memmem;
use transship_lab::{LabError, Result};

/// What is done to a byte on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Harm {
    /// One bit of it is changed.
    Flip,
    /// It is the last one that gets through on this connection.
    Cut,
}

/// Which byte is harmed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target {
    /// In the order in which they are made: 0 is the control connection, unless others come to the same door.
    pub(crate) connection: usize,
    /// From the source to the destination, or back.
    pub(crate) to_destination: bool,
    /// Its number, from 0.
    pub(crate) byte: usize,
    pub(crate) harm: Harm,
}

/// What went to the destination on a connection.
type Heard = Arc<Mutex<Vec<u8>>>;

/// It carries connections until the test ends.
pub(crate) struct Middle {
    /// By connection.
    heard: Arc<Mutex<Vec<Heard>>>,
    /// The next word of the source on the control connection is lost, and the connection with it.
    loses: Arc<AtomicBool>,
}

impl Middle {
    /// Listens at `here`, and connects each connection to `there`.
    pub(crate) fn start(here: &Path, there: &Path, target: Option<Target>) -> Result<Self> {
        let failed = |e: std::io::Error| LabError(format!("{}: {e}", here.display()));
        let (listener, there) = (UnixListener::bind(here).map_err(failed)?, there.to_owned());
        let heard = Arc::new(Mutex::new(Vec::new()));
        let loses = Arc::<AtomicBool>::default();
        let (kept, lost) = (Arc::clone(&heard), Arc::clone(&loses));
        thread::spawn(move || {
            for (number, near) in listener.incoming().map_while(std::io::Result::ok).enumerate() {
                let Ok(far) = UnixStream::connect(&there) else { continue };
                let said = Arc::new(Mutex::new(Vec::new()));
                kept.lock().expect("nobody panics with it held").push(Arc::clone(&said));
                let target = |to_destination| {
                    target.filter(|target| target.connection == number && target.to_destination == to_destination)
                };
                let (Ok(near_again), Ok(far_again)) = (near.try_clone(), far.try_clone()) else { return };
                let (there, back) = (target(true), target(false));
                let lost = if number == 0 { Arc::clone(&lost) } else { Arc::default() };
                thread::spawn(move || copy(near, far, (there, &lost), Some(&said)));
                thread::spawn(move || copy(far_again, near_again, (back, &AtomicBool::new(false)), None));
            }
        });
        Ok(Self { heard, loses })
    }

    /// What the source says next on the control connection does not arrive, and that connection ends.
    pub(crate) fn lose_the_next_word(&self) {
        self.loses.store(true, SeqCst);
    }

    /// What went to the destination so far, by connection.
    pub(crate) fn heard(&self) -> Vec<Vec<u8>> {
        let heard = self.heard.lock().expect("nobody panics with it held");
        heard.iter().map(|said| said.lock().expect("nobody panics with it held").clone()).collect()
    }
}

/// Whether the word is among what went by. Four certain bytes are there by chance, too, once in 256 times 16 MiB that
/// are encrypted. In clear they are at the beginning, or in every packet.
pub(crate) fn has(said: &[u8], word: &[u8]) -> bool {
    let places = || memmem::find_iter(said, word).count();
    said.starts_with(word) || places() > if word.len() > 4 { 0 } else { 2 }
}

fn copy(
    mut from: UnixStream,
    mut to: UnixStream,
    (target, loses): (Option<Target>, &AtomicBool),
    kept: Option<&Mutex<Vec<u8>>>,
) {
    let (mut bytes, mut before) = (vec![0; 64 << 10], 0);
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let mut piece = &mut bytes[..count];
        if let Some(kept) = kept {
            kept.lock().expect("nobody panics with it held").extend_from_slice(piece);
        }
        let mut is_cut = false;
        if let Some(Target { byte, harm, .. }) = target.filter(|target| (before..before + count).contains(&target.byte))
        {
            match harm {
                Harm::Flip => piece[byte - before] ^= 4,
                Harm::Cut => (piece, is_cut) = (&mut piece[..=byte - before], true),
            }
        }
        if loses.load(SeqCst) {
            break;
        }
        if to.write_all(piece).is_err() {
            // What the other end has said before it left still goes back.
            let _ = from.shutdown(Shutdown::Read);
            return;
        }
        if is_cut {
            break;
        }
        before += count;
    }
    // They may have ended already.
    let _ = (to.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both));
}
