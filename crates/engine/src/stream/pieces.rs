//! A stream that is made piece by piece while the VMM reads it.
use std::io::{self, Read};

use crate::Error;

/// The side that makes the pieces.
pub(crate) trait Pieces {
    /// The next piece. An empty one is the end.
    ///
    /// # Errors
    /// The stream can't go on. It is not asked again.
    fn advance(&mut self) -> Result<Vec<u8>, Error>;
}

/// The pieces as they are read.
pub(crate) struct PieceReader<P> {
    pub(crate) pieces: P,
    piece: Vec<u8>,
    used: usize,
    failed: Option<Error>,
}

impl<P: Pieces> PieceReader<P> {
    pub(crate) fn new(pieces: P) -> Self {
        Self { pieces, piece: Vec::new(), used: 0, failed: None }
    }

    /// Why it could not go on, if so: the reader has only seen the text.
    pub(crate) fn failure(&mut self) -> Option<Error> {
        self.failed.take()
    }
}

impl<P: Pieces> Read for PieceReader<P> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.used == self.piece.len() {
            let next = self.pieces.advance();
            self.piece = next.map_err(|error| {
                let text = error.to_string();
                self.failed.get_or_insert(error);
                io::Error::other(text)
            })?;
            self.used = 0;
        }
        let length = out.len().min(self.piece.len() - self.used);
        out[..length].copy_from_slice(&self.piece[self.used..][..length]);
        self.used += length;
        Ok(length)
    }
}
