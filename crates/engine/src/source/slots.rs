//! The slots of a channel: room for windows of memory that can't be lent, which the destination empties.
use std::io::{self, Read};

use transship_memory::WindowBuffer;

use crate::{
    Error, Rule,
    transport::{Connection, STALL_TIMEOUT},
};

/// Those of one channel.
#[derive(Default)]
pub(super) struct Slots {
    /// None: somebody fills it.
    rooms: Vec<Option<WindowBuffer>>,
    free: Vec<u8>,
}

impl Slots {
    /// At most 256.
    pub(super) fn new(rooms: Vec<WindowBuffer>) -> Self {
        let free = (0..=u8::MAX).take(rooms.len()).collect();
        Self { rooms: rooms.into_iter().map(Some).collect(), free }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rooms.is_empty()
    }

    /// One that is free; waits for the destination to empty one. It says so by its number, over the connection.
    pub(super) fn take(&mut self, connection: &mut Connection, peer: &str) -> Result<(u8, WindowBuffer), Error> {
        let number = match self.free.pop() {
            Some(number) => number,
            None => self.await_one(connection, peer)?,
        };
        let room = self.rooms[usize::from(number)].take();
        Ok((number, room.ok_or(Error::Bug("a slot was taken twice"))?))
    }

    /// It is filled, or not needed.
    pub(super) fn put(&mut self, number: u8, room: WindowBuffer) {
        self.rooms[usize::from(number)] = Some(room);
    }

    /// Nothing in it is needed any more.
    pub(super) fn release(&mut self, number: u8) {
        self.free.push(number);
    }

    /// All are full here.
    fn await_one(&self, connection: &mut Connection, peer: &str) -> Result<u8, Error> {
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::WouldBlock => {
                let what = format!("has emptied no slot for {} s", STALL_TIMEOUT.as_secs());
                Error::breach(peer, Rule::Answers, what)
            }
            io::ErrorKind::UnexpectedEof => Error::breach(peer, Rule::Stays, "has closed a data connection"),
            _ => Error::Io { what: format!("read from {peer} which slots are empty"), source },
        };
        let mut number = [0];
        connection.set_read_timeout(Some(STALL_TIMEOUT)).map_err(failed)?;
        connection.read_exact(&mut number).map_err(failed)?;
        match number {
            [number] if usize::from(number) < self.rooms.len() => Ok(number),
            [number] => {
                Err(Error::breach(peer, Rule::Bounds, format!("has emptied slot {number}, which there is not")))
            }
        }
    }
}
