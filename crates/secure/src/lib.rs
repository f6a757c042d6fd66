//! Encrypted connections between two ends that know each other.
//!
//! A [`Token`] names the key of one receiver and proves who calls it. [`Certificates`] name both ends, as an authority
//! says that both trust. Either becomes a [`Host`] at the receiver and a [`Caller`] at the other end. A [`Handshake`]
//! makes a [`Sealer`] and an [`Opener`] of a connection: its two directions, which different threads may use at once.
//!
//! The handshake is TLS 1.3 by rustls. What follows are TLS records that are made and taken apart here, because the two
//! directions of a rustls connection can't be used apart, and because nothing that failed to go out may go out later.
//!
//! Files are encrypted in the format of the program `age`: for [`Recipients`], who open them by their [`Identities`].
//!
//! This crate does no I/O of its own: it reads from and writes to what it is given.
#![forbid(unsafe_code)]

mod certificates;
mod cipher;
mod ends;
mod failure;
mod files;
mod handed;
mod handshake;
mod names;
mod opener;
mod sealer;
mod token;
mod verify;

pub use certificates::{Certificates, Pem, Piece, Unusable};
pub use ends::{Caller, Host, Lack};
pub use failure::{Doubt, SecureError};
pub use files::{ENCRYPTED_MAGIC, FileSealer, Identities, KeyTextError, NotOpened, Recipients, sealed_bytes};
pub use handshake::{Halves, Handshake, Progress};
pub use names::PeerName;
pub use opener::Opener;
pub use sealer::Sealer;
pub use token::{Token, TokenError};
pub use verify::Usage;

/// Most bytes of one record before it is sealed, as TLS has it.
pub const RECORD_BYTES: usize = 1 << 14;

#[cfg(test)]
mod tests;
