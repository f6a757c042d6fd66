//! The multifd channels of a migration: how they come about, and what one sends of a window.
use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use transship_codec::{Encoder, Setting, ZLIB_STREAM_HEADER};
use transship_memory::{PAGE_BYTES, PageNumber, PageRange};
use transship_secure::Caller;
use transship_wire::qemu::{Greeting, Method, Name, PACKET_HEADER_BYTES, Pages};

use super::plan::Zeros;
use crate::{
    Error, Rule, Uri,
    channels::{self, Body, Channel, Encoded, Encoders, Sent, Settled, Shared, Window},
    transport::{Connection, sending_failed},
};

/// All multifd channels.
pub(crate) type Channels = channels::Channels<PacketSender>;

/// What all packets of a migration have in common.
pub(crate) struct Common {
    /// By region: the names of their blocks.
    pub(crate) names: Vec<Name>,
    pub(crate) zeros: Zeros,
    pub(crate) compress: Setting,
    /// Packets are numbered over all channels.
    numbers: AtomicU64,
}

impl Common {
    pub(crate) fn new(names: Vec<Name>, zeros: Zeros, compress: Setting) -> Self {
        Self { names, zeros, compress, numbers: AtomicU64::new(0) }
    }
}

/// Connects them one after the other, in the order of their numbers: a destination that has fewer has then closed its
/// door before it sees a number that it would not expect.
pub(crate) fn connect(
    (to, caller): (&Uri, Option<&Caller>),
    count: u8,
    uuid: [u8; 16],
    encoders: Option<Encoders>,
    shared: &Arc<Shared>,
    common: &Arc<Common>,
) -> Result<Channels, Error> {
    let mut channels = Channels::new(shared, encoders);
    for number in 0..count {
        let connection = Connection::call(to, caller).map_err(|error| refused(error, number, count))?;
        channels.add(connection, |connection| {
            PacketSender::greet(connection, number, uuid, Arc::clone(shared), Arc::clone(common))
        })?;
    }
    Ok(channels)
}

/// A QEMU with multifd off stops listening after its main connection.
fn refused(error: Error, number: u8, count: u8) -> Error {
    match error {
        Error::Connect { to, source, .. } if number > 0 || source.kind() == io::ErrorKind::ConnectionRefused => {
            Error::Connect {
                to: format!("{to} for channel {number} of {count}"),
                source,
                cure: "the destination must have the capability multifd, and as many multifd-channels",
            }
        }
        error => error,
    }
}

/// One channel.
pub(crate) struct PacketSender {
    connection: Connection,
    number: u8,
    shared: Arc<Shared>,
    common: Arc<Common>,
    method: Method,
    /// For pages that no encoder had at hand: a QEMU takes nothing but its method here. None: pages go as they are,
    /// straight from guest memory.
    storing: Option<Box<dyn Encoder>>,
    /// Put in front of the first payload.
    stream_header: &'static [u8],
    /// The pages of a window, stored.
    stored: Vec<u8>,
}

impl PacketSender {
    /// Greets at once: until it has the first bytes of a connection, a destination does nothing else at all.
    fn greet(
        connection: Connection,
        number: u8,
        uuid: [u8; 16],
        shared: Arc<Shared>,
        common: Arc<Common>,
    ) -> Result<Self, Error> {
        let codec = common.compress.method();
        let (method, stream_header): (_, &[u8]) = match codec {
            transship_codec::Method::None => (Method::None, &[]),
            transship_codec::Method::Zlib => (Method::Zlib, &ZLIB_STREAM_HEADER),
            transship_codec::Method::Zstd => (Method::Zstd, &[]),
            other => {
                return Err(Error::unfit(format!("{other} can't be sent to a QEMU; use none, zlib or zstd")));
            }
        };
        let mut sender = Self {
            connection,
            number,
            shared,
            common,
            method,
            storing: codec.storing_encoder(),
            stream_header,
            stored: Vec::new(),
        };
        sender.write(&Greeting { uuid, channel: number }.encode(), &mut Sent::default())?;
        Ok(sender)
    }

    /// Sends this channel's half of a barrier: the destination reads on here when it has come to the other halves.
    pub(crate) fn barrier(&mut self, sent: &mut Sent) -> Result<(), Error> {
        let number = self.common.numbers.fetch_add(1, Relaxed);
        self.write(&Pages::barrier().numbered(number).encode(), sent)
    }

    /// The destination says nothing on a channel, and keeps it open until it has everything. One that knows nothing of
    /// this channel lets it drop, and what was sent on it would be missing.
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        match self.connection.peek(&mut [0]) {
            Ok(0) if !self.connection.is_closed() => Ok(()),
            Ok(_) | Err(_) => Err(self.closed()),
        }
    }

    /// Numbers it, and sends its header.
    fn header(&self, window: &Window, pages: Settled, length: usize) -> Vec<u8> {
        let offsets = |pages| -> Vec<u64> { window.pages(pages).iter().map(PageNumber::offset).collect() };
        let (normal, zeros) = (offsets(pages.present), offsets(pages.zero));
        let name = self.common.names[window.region].clone();
        let length = length as u32; // hardly longer than 128 pages
        let number = self.common.numbers.fetch_add(1, Relaxed);
        Pages::new(name, &normal, &zeros, self.method, length).numbered(number).encode().to_vec()
    }

    /// Sends a packet that has no pages, and names those that became zero, if there are any.
    fn send_zeros(&mut self, window: &Window, zero: u128, sent: &mut Sent) -> Result<(), Error> {
        if zero == 0 {
            return Ok(());
        }
        let header = self.header(window, Settled { present: 0, zero }, 0);
        self.write(&header, sent)
    }

    /// Sends a packet of encoded pages.
    fn send_encoded(&mut self, window: &Window, pages: Settled, encoded: &[u8], sent: &mut Sent) -> Result<(), Error> {
        let stream_header = std::mem::take(&mut self.stream_header);
        let mut head = self.header(window, pages, stream_header.len() + encoded.len());
        head.extend(stream_header);
        self.write(&head, sent)?;
        self.write(encoded, sent)
    }

    fn write(&mut self, bytes: &[u8], sent: &mut Sent) -> Result<(), Error> {
        self.shared.book(bytes.len(), sent);
        self.connection.write_all(bytes).map_err(|source| self.failed(source))
    }

    /// All has arrived: a destination that speaks TLS is told that nothing more comes.
    pub(crate) fn say_goodbye(&mut self) {
        self.connection.say_goodbye();
    }

    fn closed(&self) -> Error {
        let what = format!(
            "has closed channel {}: it has ended or refuses the data, and its own output says why; are its \
             multifd-channels, multifd-compression and uuid the same?",
            self.number
        );
        Error::breach(&self.shared.peer, Rule::Stays, what)
    }

    fn failed(&self, source: io::Error) -> Error {
        match source.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => self.closed(),
            _ => sending_failed(&self.shared.peer, &format!("channel {}", self.number), source),
        }
    }
}

impl Channel for PacketSender {
    fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    fn send_window(&mut self, window: &Window, pages: Settled, body: Body<'_>, sent: &mut Sent) -> Result<(), Error> {
        let zero = match self.common.zeros {
            Zeros::InPackets => pages.zero,
            Zeros::OnMain => 0, // told there
        };
        let pages = Settled { zero, ..pages };
        if pages.present == 0 {
            return self.send_zeros(window, zero, sent);
        }
        let read = match body {
            Body::Encoded(Encoded { bytes, .. }) => return self.send_encoded(window, pages, bytes, sent),
            Body::Plain(read) => read,
            Body::Lent { .. } | Body::Slot(_) => return Err(Error::Bug("can't lend memory to a QEMU")),
        };
        let Some(storing) = &mut self.storing else {
            let header = self.header(window, pages, 0);
            self.shared.book(PACKET_HEADER_BYTES + pages.present.count_ones() as usize * PAGE_BYTES, sent);
            return self
                .connection
                .send_window(&read, &header, window.pages(pages.present), false)
                .map_err(|source| self.failed(source));
        };
        let mut stored = std::mem::take(&mut self.stored);
        let _ = storing.encode(read.into_bytes(), &mut stored); // never shorter
        let result = self.send_encoded(window, pages, &stored, sent);
        self.stored = stored;
        result
    }

    fn send_hole(&mut self, round: u32, region: usize, range: PageRange, sent: &mut Sent) -> Result<(), Error> {
        let shared = Arc::clone(&self.shared);
        for zero in shared.content[region].take(range) {
            if self.common.zeros == Zeros::InPackets {
                self.send_zeros(&Window::new(round, region, zero.with(0)), zero.mask, sent)?;
            }
        }
        Ok(())
    }

    fn end_round(&mut self, _round: u32, sent: &mut Sent) -> Result<(), Error> {
        self.barrier(sent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_channel_names_what_the_destination_must_have() {
        let absent = Uri::Unix("/no/such.sock".into());
        let error = refused(Connection::open(&absent).expect_err("nothing listens there"), 1, 4).to_string();
        assert!(error.starts_with("can't connect to unix:/no/such.sock for channel 1 of 4: "), "{error}");
        assert!(error.contains("multifd-channels") && !error.contains("transship receive"), "{error}");
    }
}
