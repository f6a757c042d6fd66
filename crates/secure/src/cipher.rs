//! The keys of a connection, and what one of them does to one record.
use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use ring::aead::{AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use rustls::{
    ConnectionTrafficSecrets, client::ClientConnectionData, kernel::KernelConnection, server::ServerConnectionData,
};

use crate::SecureError;

/// Bytes before what a record holds: its kind, a version that means nothing any more, its length.
pub(crate) const HEADER_BYTES: usize = 5;
/// Bytes behind it: what it proves itself by.
pub(crate) const TAG_BYTES: usize = 16;
/// The kind that all sealed records show.
const SHOWN_KIND: u8 = 23;

/// What a record holds; it is sealed with it.
pub(crate) mod kind {
    pub(crate) const ALERT: u8 = 21;
    pub(crate) const HANDSHAKE: u8 = 22;
    pub(crate) const DATA: u8 = 23;
}

/// One direction's key. Each record has a number of its own under it: a number that was used is never used again.
pub(crate) struct Cipher {
    key: LessSafeKey,
    iv: [u8; 12],
    next: u64,
}

impl Cipher {
    pub(crate) fn new((next, secrets): (u64, ConnectionTrafficSecrets)) -> Result<Self, SecureError> {
        let (algorithm, key, iv) = match &secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return Err(SecureError::Unsuited("the two sides agreed on a cipher that is not known here".into())),
        };
        let key = UnboundKey::new(algorithm, key.as_ref()).expect("rustls makes keys as long as their cipher's");
        let iv = iv.as_ref().try_into().expect("these ciphers have 12 bytes of it");
        Ok(Self { key: LessSafeKey::new(key), iv, next })
    }

    /// Records that have gone through it.
    pub(crate) fn used(&self) -> u64 {
        self.next
    }

    /// Seals what is in `record` behind its header in place, and appends the tag. The header is written here.
    pub(crate) fn seal(&mut self, record: &mut Vec<u8>, start: usize) {
        let sealed = record.len() - start - HEADER_BYTES + TAG_BYTES;
        let header = header(sealed);
        record[start..start + HEADER_BYTES].copy_from_slice(&header);
        let nonce = self.nonce();
        let tag = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(header), &mut record[start + HEADER_BYTES..])
            .expect("a record is far shorter than these ciphers allow");
        record.extend_from_slice(tag.as_ref());
    }

    /// Opens a whole record in place: how many bytes it holds, behind the header. None: nobody who has the key made it
    /// as it is, or it is another record than the next one.
    pub(crate) fn open(&mut self, record: &mut [u8]) -> Option<usize> {
        let (header, sealed) = record.split_at_mut(HEADER_BYTES);
        let header: [u8; HEADER_BYTES] = header.try_into().expect("it was split there");
        let nonce = self.nonce();
        self.key.open_in_place(nonce, Aad::from(header), sealed).ok().map(|opened| opened.len())
    }

    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        nonce.iter_mut().skip(4).zip(self.next.to_be_bytes()).for_each(|(byte, number)| *byte ^= number);
        // Keys are changed long before.
        self.next = self.next.checked_add(1).expect("a key is used for fewer than 2^64 records");
        Nonce::assume_unique_for_key(nonce)
    }
}

fn header(sealed: usize) -> [u8; HEADER_BYTES] {
    let [high, low] = u16::try_from(sealed).expect("a record has at most 16 KiB and its tag").to_be_bytes();
    [SHOWN_KIND, 3, 3, high, low]
}

/// How many bytes follow the header of a sealed record. None: no sealed record has such a header.
pub(crate) fn sealed_bytes(header: [u8; HEADER_BYTES], most: usize) -> Option<usize> {
    let [SHOWN_KIND, 3, 3, high, low] = header else { return None };
    let sealed = usize::from(u16::from_be_bytes([high, low]));
    // At least the byte that says what it holds.
    (TAG_BYTES + 1..=most).contains(&sealed).then_some(sealed)
}

/// What both directions need to change their keys.
pub(crate) struct Keys {
    kernel: Mutex<Kernel>,
    /// The other side wants ours to be changed. Relaxed: it says nothing about other memory.
    wanted: AtomicBool,
}

pub(crate) enum Kernel {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

impl Keys {
    pub(crate) fn new(kernel: Kernel) -> Self {
        Self { kernel: Mutex::new(kernel), wanted: AtomicBool::new(false) }
    }

    /// The next key for what is sent.
    pub(crate) fn next_to_seal(&self) -> Result<Cipher, SecureError> {
        let secrets = match &mut *self.kernel.lock().unwrap_or_else(PoisonError::into_inner) {
            Kernel::Client(kernel) => kernel.update_tx_secret(),
            Kernel::Server(kernel) => kernel.update_tx_secret(),
        };
        Cipher::new(secrets.map_err(|error| SecureError::Unsuited(error.to_string()))?)
    }

    /// The next key for what is received.
    pub(crate) fn next_to_open(&self) -> Result<Cipher, SecureError> {
        let secrets = match &mut *self.kernel.lock().unwrap_or_else(PoisonError::into_inner) {
            Kernel::Client(kernel) => kernel.update_rx_secret(),
            Kernel::Server(kernel) => kernel.update_rx_secret(),
        };
        Cipher::new(secrets.map_err(|error| SecureError::Unsuited(error.to_string()))?)
    }

    /// The other side wants a new key for what is sent to it.
    pub(crate) fn want(&self) {
        self.wanted.store(true, Relaxed);
    }

    /// Whether it does; it is done with that.
    pub(crate) fn take_wanted(&self) -> bool {
        self.wanted.load(Relaxed) && self.wanted.swap(false, Relaxed)
    }
}
