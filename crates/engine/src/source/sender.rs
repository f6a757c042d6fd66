//! One data connection of a source: what it sends of a window.
use std::{
    io::{self, Write},
    sync::{Arc, atomic::Ordering::Relaxed},
};

use transship_memory::{PageRange, WindowBuffer};
use transship_wire::{PACKET_BYTES, Packet};

use super::slots::Slots;
use crate::{
    Error,
    channels::{Body, Channel, Encoded, Sent, Settled, Shared, Window},
    transport::{Connection, sending_failed},
};

/// One data connection.
pub(crate) struct PageSender {
    connection: Connection,
    number: u8,
    shared: Arc<Shared>,
    /// Sent in this round.
    packets: u64,
    /// Where private memory goes; none: it is sent.
    slots: Slots,
}

impl PageSender {
    pub(crate) fn new(connection: Connection, number: u8, shared: Arc<Shared>) -> Self {
        Self { connection, number, shared, packets: 0, slots: Slots::default() }
    }

    /// From now on private memory goes through these.
    pub(super) fn use_slots(&mut self, rooms: Vec<WindowBuffer>) {
        self.slots = Slots::new(rooms);
    }

    /// The present pages of a window are in a slot.
    fn send_slot(&mut self, window: &Window, pages: Settled, slot: u8, sent: &mut Sent) -> Result<(), Error> {
        let Settled { present, zero } = pages;
        let Window { round, .. } = *window;
        let (region, first) = (window.region as u16, window.first.get());
        let packet = match (present, zero) {
            (0, 0) => None,
            (0, _) => Some(Packet::Pages { round, region, first, present, zero }),
            _ => Some(Packet::Slot { round, region, first, present, zero, slot }),
        };
        if present == 0 {
            self.slots.release(slot);
        }
        let Some(packet) = packet else { return Ok(()) };
        self.packets += 1;
        let handed = window.pages(present);
        sent.handed += handed.count();
        self.shared.progress.wire_bytes.fetch_add(handed.bytes(), Relaxed);
        self.write(&packet.encode(), sent)
    }

    fn write(&mut self, bytes: &[u8], sent: &mut Sent) -> Result<(), Error> {
        self.shared.book(bytes.len(), sent);
        self.connection.write_all(bytes).map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> Error {
        sending_failed(&self.shared.peer, &format!("data channel {}", self.number), source)
    }
}

impl Channel for PageSender {
    fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    fn fill_slot(
        &mut self,
        window: &mut Window,
        fill: &mut dyn FnMut(&mut Window, &mut WindowBuffer) -> Result<(), Error>,
    ) -> Result<Option<u8>, Error> {
        if self.slots.is_empty() || !self.shared.memory.regions()[window.region].is_private() {
            return Ok(None);
        }
        let (slot, mut room) = self.slots.take(&mut self.connection, &self.shared.peer)?;
        fill(window, &mut room)?;
        self.slots.put(slot, room);
        Ok(Some(slot))
    }

    fn send_window(&mut self, window: &Window, pages: Settled, body: Body<'_>, sent: &mut Sent) -> Result<(), Error> {
        let Settled { present, zero } = pages;
        let Window { round, .. } = *window;
        let (region, first) = (window.region as u16, window.first.get());
        let read = match body {
            Body::Slot(slot) => return self.send_slot(window, pages, slot, sent),
            _ if present | zero == 0 => return Ok(()),
            Body::Plain(read) => read,
            Body::Encoded(Encoded { method, bytes }) => {
                self.packets += 1;
                let length = bytes.len() as u32; // shorter than the pages of a window
                let packet = Packet::Encoded { round, region, first, present, zero, method: *method, bytes: length };
                self.write(&packet.encode(), sent)?;
                return self.write(bytes, sent);
            }
            Body::Lent { look } => {
                self.packets += 1;
                let lent = window.pages(present);
                sent.lent += lent.count();
                // As far as is known; it is told at the end of the round what they were.
                self.shared.progress.wire_bytes.fetch_add(lent.bytes(), Relaxed);
                return self.write(&Packet::Lent { round, region, first, wanted: present, zero, look }.encode(), sent);
            }
        };
        let shared = Arc::clone(&self.shared);
        let mut zero = zero;
        // Where there are zeros only, they go in a packet as well.
        let none = (present == 0).then(|| window.pages(0));
        for part in shared.at_once.parts(window.pages(present)).chain(none) {
            self.packets += 1;
            let packet = Packet::Pages { round, region, first, present: part.mask, zero: std::mem::take(&mut zero) };
            shared.book(PACKET_BYTES + packet.payload_bytes(), sent);
            let apart = shared.at_once.is_limited();
            let written = self.connection.send_window(&read, &packet.encode(), part, apart);
            written.map_err(|source| self.failed(source))?;
        }
        Ok(())
    }

    fn send_hole(&mut self, round: u32, region: usize, range: PageRange, sent: &mut Sent) -> Result<(), Error> {
        self.shared.content[region].take(range).for_each(drop);
        let packet = Packet::Hole { round, region: region as u16, first: range.first.get(), count: range.count.get() };
        sent.zero_sent += range.count;
        self.packets += 1;
        self.write(&packet.encode(), sent)
    }

    fn end_round(&mut self, round: u32, sent: &mut Sent) -> Result<(), Error> {
        let packets = std::mem::take(&mut self.packets);
        self.write(&Packet::RoundEnd { round, packets }.encode(), sent)
    }
}
