//! The first bytes of every connection: the role, the version and the session.
use crate::Error;
use crate::reader::{Header, Reader};

/// The protocol version that this crate speaks.
pub const VERSION: u16 = 1;
/// The most data channels that a session may have. Their numbers are 0 to 254.
pub const MAX_CHANNELS: u16 = 255;
/// Size of an encoded [`Preamble`] in bytes.
pub const PREAMBLE_BYTES: usize = 32;

/// Which protocol a connection is to speak.
pub(crate) struct Protocol {
    pub(crate) magic: [u8; 4],
    pub(crate) version: u16,
    /// What is wrong with another magic.
    pub(crate) other: &'static str,
    /// Whether there are connections that probe.
    pub(crate) has_probes: bool,
}

const MOVE: Protocol =
    Protocol { magic: *b"TSHP", version: VERSION, other: "the other side is not a transship", has_probes: true };
const ROLE_CONTROL: u8 = 1;
const ROLE_DATA: u8 = 2;
const ROLE_SUPPLY: u8 = 3;
const ROLE_PUSH: u8 = 4;
/// Far from the others, which may become more.
const ROLE_PROBE: u8 = 16;

/// Chosen at random by the source; ties the data connections to their control connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub [u8; 16]);

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Messages, both ways.
    Control,
    /// Packets, from the source to the destination, on the channel of this number: 0 to 254.
    Data(u8),
    /// Records of a [`Probe`](crate::Probe), both ways; there is no session.
    Probe,
    /// Of post-copy, messages both ways: pages that are waited for. The supply line of this number, from 1: a line that
    /// breaks is followed by the next.
    Supply(u32),
    /// Of post-copy, packets of all other pages: on the channel of this number, of this supply line.
    Push {
        /// See `Supply`.
        line: u32,
        /// 0 to 254.
        channel: u8,
    },
}

/// Sent once by the connecting side, before anything else.
///
/// | offset | bytes | field |
/// | ---: | ---: | --- |
/// | 0 | 4 | magic `TSHP` |
/// | 4 | 2 | [`VERSION`] |
/// | 6 | 1 | role: 1 control, 2 data, 3 supply, 4 push, 16 probe |
/// | 7 | 1 | channel number; 0 for control, supply and probe |
/// | 8 | 16 | session |
/// | 24 | 4 | number of the supply line, from 1; 0 for control and data |
/// | 28 | 4 | reserved, zero |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preamble {
    /// The session that the connection belongs to.
    pub session: SessionId,
    /// What the connection is for.
    pub role: Role,
}

impl Preamble {
    /// The bytes to send.
    pub fn encode(&self) -> [u8; PREAMBLE_BYTES] {
        self.encode_for(&MOVE)
    }

    /// # Errors
    /// Wrong magic, version, role, channel, or reserved bytes that are not zero.
    pub fn decode(bytes: &[u8; PREAMBLE_BYTES]) -> Result<Self, Error> {
        Self::decode_for(bytes, &MOVE)
    }

    pub(crate) fn encode_for(&self, protocol: &Protocol) -> [u8; PREAMBLE_BYTES] {
        let (role, channel, line) = match self.role {
            Role::Control => (ROLE_CONTROL, 0, 0),
            Role::Data(channel) => (ROLE_DATA, channel, 0),
            Role::Supply(line) => (ROLE_SUPPLY, 0, line),
            Role::Push { line, channel } => (ROLE_PUSH, channel, line),
            Role::Probe => (ROLE_PROBE, 0, 0),
        };
        let mut header = Header::new();
        header
            .put(protocol.magic)
            .put(protocol.version.to_le_bytes())
            .put([role, channel])
            .put(self.session.0)
            .put(line.to_le_bytes())
            .put([0; 4]);
        header.done()
    }

    pub(crate) fn decode_for(bytes: &[u8; PREAMBLE_BYTES], protocol: &Protocol) -> Result<Self, Error> {
        let mut reader = Reader::new(bytes, 0);
        let magic = reader.u32("preamble magic")?;
        if magic != u32::from_le_bytes(protocol.magic) {
            return Err(reader.invalid("preamble magic", magic.into(), protocol.other));
        }
        let version = reader.u16("preamble version")?;
        if version != protocol.version {
            return Err(reader.invalid("preamble version", version.into(), "use the same transship on both sides"));
        }
        let (role, channel) = decode_role(&mut reader, protocol)?;
        let session = SessionId(reader.array("preamble session")?);
        let line = reader.u32("preamble line")?;
        if (line == 0) == matches!(role, ROLE_SUPPLY | ROLE_PUSH) {
            return Err(reader.invalid("preamble line", line.into(), "supply lines are numbered from 1, no others"));
        }
        let role = match role {
            ROLE_CONTROL => Role::Control,
            ROLE_PROBE => Role::Probe,
            ROLE_SUPPLY => Role::Supply(line),
            ROLE_PUSH => Role::Push { line, channel },
            _ => Role::Data(channel),
        };
        reader.reserved::<4>("preamble reserved")?;
        reader.end("preamble")?;
        Ok(Preamble { session, role })
    }
}

/// The number of the role, a known one, and the channel.
fn decode_role(reader: &mut Reader<'_>, protocol: &Protocol) -> Result<(u8, u8), Error> {
    let role = reader.u8("preamble role")?;
    let is_probe = role == ROLE_PROBE && protocol.has_probes;
    if !matches!(role, ROLE_CONTROL | ROLE_DATA | ROLE_SUPPLY | ROLE_PUSH) && !is_probe {
        return Err(reader.invalid(
            "preamble role",
            role.into(),
            "none of control (1), data (2), supply (3), push (4)",
        ));
    }
    let channel = reader.u8("preamble channel")?;
    match role {
        ROLE_CONTROL | ROLE_SUPPLY | ROLE_PROBE if channel != 0 => {
            Err(reader.invalid("preamble channel", channel.into(), "this connection has no channel number"))
        }
        ROLE_DATA | ROLE_PUSH if u16::from(channel) >= MAX_CHANNELS => {
            Err(reader.invalid("preamble channel", channel.into(), "channel numbers end at 254"))
        }
        _ => Ok((role, channel)),
    }
}
