//! Strangers beside those who are waited for.
#![allow(unreachable_pub, clippy::unwrap_used)]
use std::{
    io::{self, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use transship_engine::Uri;

/// More than have their time one after the other while somebody waits for a connection that is due: 30 s, and 5 s for
/// each.
const AT_ONCE: usize = 8;

/// An address that leads to another one. Before each connection that is made through it a crowd of strangers comes
/// there, who stay.
pub struct Passage {
    pub uri: Uri,
    strangers: Arc<Mutex<Vec<TcpStream>>>,
}

impl Passage {
    /// `first_words`: what a stranger of each kind says. All bytes but the last, one after the other, if it dribbles.
    pub fn new(to: &Uri, first_words: Vec<Words>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let uri = format!("tcp:127.0.0.1:{}", listener.local_addr().unwrap().port()).parse().unwrap();
        let strangers = Arc::<Mutex<Vec<TcpStream>>>::default();
        let (crowd, to) = (Arc::clone(&strangers), to.clone());
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                for words in first_words.iter().cycle().take(AT_ONCE) {
                    let Ok(stranger) = dial(&to) else { return };
                    words.say(&stranger);
                    crowd.lock().unwrap().push(stranger);
                }
                let Ok(far) = dial(&to) else { return };
                carry(&near, &far);
                carry(&far, &near);
            }
        });
        Self { uri, strangers }
    }

    /// How many have come so far.
    pub fn strangers(&self) -> usize {
        self.strangers.lock().unwrap().len()
    }
}

/// What a stranger says, and how.
#[derive(Clone)]
pub enum Words {
    AtOnce(Vec<u8>),
    Dribbled(Vec<u8>),
}

impl Words {
    fn say(&self, mut to: &TcpStream) {
        match self {
            Self::AtOnce(bytes) => to.write_all(bytes).unwrap(),
            Self::Dribbled(bytes) => {
                let (mut to, bytes) = (to.try_clone().unwrap(), bytes.clone());
                thread::spawn(move || {
                    for byte in bytes {
                        if to.write_all(&[byte]).is_err() {
                            return;
                        }
                        thread::sleep(Duration::from_secs(1)); // its pace
                    }
                });
            }
        }
    }
}

fn dial(to: &Uri) -> io::Result<TcpStream> {
    let Uri::Tcp { port, .. } = *to else { panic!("{to}") };
    TcpStream::connect(("127.0.0.1", port))
}

fn carry(from: &TcpStream, to: &TcpStream) {
    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
    thread::spawn(move || {
        let _ = io::copy(&mut from, &mut to);
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    });
}
