//! Encrypted files, in the format of the program `age`: for whom they are, who opens them, and the bytes between.
//!
//! Only X25519 keys are known, as `age-keygen` writes them.
use std::{
    fmt,
    io::{self, BufRead, BufReader, Read, Write},
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use age::{DecryptError, Decryptor, EncryptError, Encryptor, stream::StreamWriter, x25519};
use thiserror::Error;

/// With which such a file begins.
pub const ENCRYPTED_MAGIC: &[u8] = b"age-encryption.org/";
/// More than the head of any file has: a few lines for each of its recipients.
const HEAD_MAX: u64 = 1 << 20;
/// Read at once: some of the pieces that are encrypted one by one.
const CHUNK: usize = 1 << 20;
/// A piece, and how much longer it is encrypted.
const PIECE: u64 = 64 << 10;
const TAG: u64 = 16;
/// With which secret keys begin.
const SECRET: &str = "AGE-SECRET-KEY-";

/// Why a text has no keys. It never holds what it is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum KeyTextError {
    /// A line of it is none.
    #[error("line {0} is no X25519 key of age, as `age-keygen` writes them; other kinds are not known")]
    Line(usize),
    /// It has public keys, where a secret one is needed.
    #[error("line {0} is a public key of age, which opens nothing; name the file that `age-keygen` has written")]
    Public(usize),
    /// It is empty.
    #[error("it has no key of age")]
    Empty,
}

/// Why a file could not be opened.
#[derive(Debug, Error)]
pub enum NotOpened {
    /// It is for others.
    #[error("it is encrypted for another key than {0}")]
    OtherKey(String),
    /// It is for those who know a passphrase.
    #[error("it is encrypted by a passphrase, which transship does not ask for; decrypt it with age")]
    Passphrase,
    /// Its head can't be. One with a byte changed may look like one of a version that is to come.
    #[error("the head of its encryption is damaged, or of a newer version of age than is known here")]
    Damaged,
    /// The system's.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Those who can open a file.
#[derive(Clone)]
pub struct Recipients(Vec<x25519::Recipient>);

impl Recipients {
    /// All of both.
    pub fn and(mut self, others: Self) -> Self {
        self.0.extend(others.0);
        self
    }

    /// Begins a file for them.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn seal<W: Write>(&self, out: W) -> io::Result<FileSealer<W>> {
        let recipients = self.0.iter().map(|recipient| recipient as &dyn age::Recipient);
        let encryptor = Encryptor::with_recipients(recipients).map_err(|error| match error {
            EncryptError::Io(source) => source,
            // Any of them can be beside any other, and there is one.
            _ => io::Error::other("these recipients can't be used together"),
        })?;
        encryptor.wrap_output(out).map(FileSealer)
    }
}

impl fmt::Debug for Recipients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(ToString::to_string)).finish()
    }
}

/// Of a file with one key a line: public ones, or secret ones, which stand for their public halves. Lines that begin
/// with `#` are passed over, as `age` does.
impl FromStr for Recipients {
    type Err = KeyTextError;

    fn from_str(text: &str) -> Result<Self, KeyTextError> {
        keys(text, |line| match line.starts_with(SECRET) {
            true => line.parse().ok().map(|identity: x25519::Identity| identity.to_public()),
            false => line.parse().ok(),
        })
        .map(Self)
    }
}

/// The keys that open files.
#[derive(Clone)]
pub struct Identities(Vec<x25519::Identity>);

impl Identities {
    /// Opens what begins at the first byte of `from`, which has [`ENCRYPTED_MAGIC`]. What is read from the result has
    /// been checked; its end is only where the writer has put it.
    ///
    /// # Errors
    /// See [`NotOpened`]. Reading fails with [`io::ErrorKind::InvalidData`] or [`io::ErrorKind::UnexpectedEof`] where
    /// the file was changed or cut short.
    pub fn open<R: Read + Send + 'static>(&self, from: R) -> Result<Box<dyn Read + Send>, NotOpened> {
        let left = Arc::new(AtomicU64::new(HEAD_MAX));
        let bounded = Bounded { from: BufReader::with_capacity(CHUNK, from), left: Arc::clone(&left) };
        let decryptor = Decryptor::new_buffered(bounded).map_err(|error| self.why(error))?;
        left.store(u64::MAX, Relaxed);
        if decryptor.is_scrypt() {
            return Err(NotOpened::Passphrase);
        }
        let identities = self.0.iter().map(|identity| identity as &dyn age::Identity);
        let opened = decryptor.decrypt(identities).map_err(|error| self.why(error))?;
        Ok(Box::new(opened))
    }

    fn why(&self, error: DecryptError) -> NotOpened {
        match error {
            DecryptError::NoMatchingKeys | DecryptError::DecryptionFailed => {
                let keys: Vec<_> = self.0.iter().map(|identity| identity.to_public().to_string()).collect();
                NotOpened::OtherKey(keys.join(", "))
            }
            DecryptError::Io(source) if source.raw_os_error().is_some() => NotOpened::Io(source),
            _ => NotOpened::Damaged,
        }
    }
}

impl fmt::Debug for Identities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identities(…)")
    }
}

/// Of a file as `age-keygen` writes it, with one key or several.
impl FromStr for Identities {
    type Err = KeyTextError;

    fn from_str(text: &str) -> Result<Self, KeyTextError> {
        // The library reads the texts of its errors when it needs the first of them, in some builds from files, which a
        // process that has given up its rights could not open.
        let _ = DecryptError::NoMatchingKeys.to_string();
        if let Some(line) = text.lines().position(|line| line.parse::<x25519::Recipient>().is_ok()) {
            return Err(KeyTextError::Public(line + 1));
        }
        keys(text, |line| line.parse().ok()).map(Self)
    }
}

fn keys<T>(text: &str, read: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, KeyTextError> {
    let lines = text.lines().map(str::trim).enumerate();
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<T> =
        lines.map(|(number, line)| read(line).ok_or(KeyTextError::Line(number + 1))).collect::<Result<_, _>>()?;
    if keys.is_empty() { Err(KeyTextError::Empty) } else { Ok(keys) }
}

/// Encrypts what is written to it.
pub struct FileSealer<W: Write>(StreamWriter<W>);

impl<W: Write> FileSealer<W> {
    /// All of it was written: without this the file counts as cut short.
    ///
    /// # Errors
    /// Those of what is below.
    pub fn finish(self) -> io::Result<W> {
        self.0.finish()
    }
}

impl<W: Write> Write for FileSealer<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// About what so many bytes take when they are encrypted.
pub fn sealed_bytes(bytes: u64) -> u64 {
    bytes + (bytes / PIECE + 1) * TAG + 1024
}

/// So that a head without an end is not read for ever.
struct Bounded<R> {
    from: R,
    left: Arc<AtomicU64>,
}

impl<R> Bounded<R> {
    fn note(&self, count: usize) {
        let _ = self.left.fetch_update(Relaxed, Relaxed, |left| match left {
            u64::MAX => None,
            left => Some(left.saturating_sub(count as u64)),
        });
    }
}

impl<R: BufRead> Read for Bounded<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left.load(Relaxed)).unwrap_or(usize::MAX).min(into.len());
        self.from.read(&mut into[..most]).inspect(|&count| self.note(count))
    }
}

impl<R: BufRead> BufRead for Bounded<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        let most = usize::try_from(self.left.load(Relaxed)).unwrap_or(usize::MAX);
        self.from.fill_buf().map(|bytes| &bytes[..bytes.len().min(most)])
    }

    fn consume(&mut self, count: usize) {
        self.from.consume(count);
        self.note(count);
    }
}
