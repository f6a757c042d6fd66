//! Packets come in: one thread for each data connection of the link. It never waits for a QEMU, so no connection holds
//! up another.
use std::{
    collections::{HashMap, hash_map::Entry},
    io::{self, Read},
    sync::{Arc, atomic::Ordering::Relaxed},
};

use transship_codec::{Decoder, Method};
use transship_wire::relay::{Content, PACKET_BYTES, Packet};

use super::{buffers::Buffer, session::RelaySession, stream::Item};
use crate::{Error, Rule, cpu::Laps, transport::Connection};

/// One data connection of the link.
pub(super) struct Inlet {
    pub(super) connection: Connection,
    pub(super) number: usize,
    session: Arc<RelaySession>,
    /// Made when the first packet of their method comes.
    decoders: HashMap<Method, Box<dyn Decoder>>,
    payload: Vec<u8>,
}

impl Inlet {
    pub(super) fn new(connection: Connection, number: usize, session: &Arc<RelaySession>) -> Self {
        Self { connection, number, session: Arc::clone(session), decoders: HashMap::new(), payload: Vec::new() }
    }

    /// Takes packets until the link ends.
    pub(super) fn run(mut self) -> Result<(), Error> {
        let mut laps = Laps::begin();
        let mut header = [0; PACKET_BYTES];
        while self.fill_header(&mut header)? {
            let packet = Packet::decode(&header)
                .map_err(|source| Error::Wire { peer: self.session.fate.peer.clone(), source })?;
            let item = self.read(&packet)?;
            self.session.stream(packet.connection)?.arrive(&packet, item)?;
            let length = (PACKET_BYTES + packet.payload_bytes()) as u64;
            self.session.counts.link_in.fetch_add(length, Relaxed);
            self.session.progress.wire_bytes.fetch_add(length, Relaxed);
            self.session.progress.cpu.decoders.add(laps.next());
        }
        Ok(())
    }

    fn read(&mut self, packet: &Packet) -> Result<Item, Error> {
        Ok(match packet.content {
            Content::End => Item::End,
            Content::Raw { bytes, gives_end } => {
                let mut room = self.session.buffers.of(bytes as usize); // at most MAX_BYTES
                self.fill(&mut room)?;
                Item::Bytes { bytes: room, gives_end }
            }
            Content::Encoded { bytes, gives_end, method, payload } => {
                let mut encoded = std::mem::take(&mut self.payload);
                encoded.resize(payload as usize, 0); // fewer than MAX_BYTES
                self.fill(&mut encoded)?;
                let bytes = self.decode(packet, method, &encoded, bytes as usize)?;
                self.payload = encoded;
                Item::Bytes { bytes, gives_end }
            }
        })
    }

    fn decode(&mut self, packet: &Packet, method: u8, encoded: &[u8], bytes: usize) -> Result<Buffer, Error> {
        let Packet { connection, sequence, .. } = packet;
        let broke = |session: &RelaySession, why: String| {
            let what = format!("sent packet {sequence} of connection {connection}, which can't be decoded: {why}");
            session.fate.broke(Rule::Encoding, what)
        };
        let Some(method) = Method::from_number(method) else {
            return Err(broke(
                &self.session,
                format!("method {method} is not known here; use the same transship on both sides"),
            ));
        };
        let decoder = match self.decoders.entry(method) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(method.decoder()),
        };
        let mut decoded = self.session.buffers.of(bytes);
        decoder.decode(encoded, &mut decoded).map_err(|error| broke(&self.session, error.to_string()))?;
        Ok(decoded)
    }

    /// False: the link has ended, as it should.
    fn fill_header(&mut self, header: &mut [u8; PACKET_BYTES]) -> Result<bool, Error> {
        match self.connection.read_exact(header) {
            Ok(()) => Ok(true),
            Err(_) if self.session.fate.is_over() => Ok(false),
            Err(error) => Err(self.lost(error)),
        }
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Error> {
        self.connection.read_exact(bytes).map_err(|error| self.lost(error))
    }

    fn lost(&self, source: io::Error) -> Error {
        self.session.link_failed(source, |source| Error::Io {
            what: format!("read from the relay at {} on data connection {}", self.session.fate.peer, self.number),
            source,
        })
    }
}
