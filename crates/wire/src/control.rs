//! What the two sides say to each other on the control connection.
use std::borrow::Cow;

use crate::Error;
use crate::frame::{FRAME_BYTES, Frame};
use crate::guest::{GuestDescription, MAX_REGIONS};
use crate::kind::{Kind, MAX_REASON_BYTES, MAX_STATE_BYTES};
use crate::owed::{self, OwedWindow, Pages};
use crate::reader::{Reader, Writer};

const FLAG: u8 = 1;
/// In a Hello.
const POST_COPY: u8 = 2;
/// The same.
const LENDS: u8 = 4;
/// In a Lent, in the place of an offset.
const NOT_LENT: u64 = u64::MAX;

/// Why a side ends the session. The text is shown to the user as the other side's words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// One line of at most [`MAX_REASON_BYTES`]. What is longer is cut when it is encoded; control characters (a
    /// terminal would obey them) become spaces.
    pub reason: String,
}

/// A message. The number of each kind is its tag on the wire. `S` is the source, `D` the destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// 1, S to D, first: what is to come.
    Hello {
        /// How many data connections follow; not 0.
        channels: u8,
        /// Whether the source will compare digests of the memory.
        verify: bool,
        /// Whether pages may follow after the guest: not together with `verify`.
        post_copy: bool,
        /// Whether the source would lend its memory: not together with `post_copy`.
        lends: bool,
        /// The guest to be moved.
        guest: GuestDescription,
    },
    /// 2, D to S: the guest fits and the memory reads as zero everywhere.
    Welcome,
    /// 3, D to S: every channel has brought its `RoundEnd` and all of it is in place.
    RoundDone {
        /// The round that is complete.
        round: u32,
        /// Pages of this round that came as contents.
        pages: u64,
        /// Pages of this round that came as zero bits or holes.
        zero: u64,
    },
    /// 4, S to D: digest of all guest memory, taken while the guest stands still.
    Digest {
        /// See docs/protocol.md for what is hashed.
        digest: [u8; 32],
    },
    /// 5, D to S: the same at the destination. Equal or the session ends.
    DigestIs {
        /// The destination's own, never a copy of the source's.
        digest: [u8; 32],
    },
    /// 6, S to D: a piece of the device state, in order.
    State {
        /// 1 to [`MAX_STATE_BYTES`].
        bytes: Vec<u8>,
    },
    /// 7, S to D: the device state is complete.
    StateEnd {
        /// The length of all pieces together.
        bytes: u64,
        /// Their blake3 hash.
        digest: [u8; 32],
    },
    /// 8, D to S: memory and device state are loaded; the guest could run. It does not run before `Go`.
    Loaded,
    /// 9, S to D: the source has given the guest up for good; it's the destination's. On a supply line: it was given up
    /// before, and the word may have been lost.
    Go {
        /// The guest was running, so start it.
        run: bool,
    },
    /// 10, D to S: the guest runs here (or stands here, if it stood). On a supply line: it was started before.
    Running,
    /// 11, both: I end the session, because. Valid at any time before `Go`, and after it from D only (it could not
    /// start the guest).
    Abort(Refusal),
    /// 12, S to D: the guest stands still and all rounds are done: digest its memory. The source does the same
    /// meanwhile.
    DigestWanted,
    /// 13: some pages of a region that are owed; ascending windows, the regions ascend as well. S to D on the control
    /// connection: those that the guest goes without, or will. D to S on a supply line: those that it still lacks.
    Owed {
        /// Index of the region in the Hello.
        region: u16,
        /// 1 to [`MAX_OWED_WINDOWS`](crate::MAX_OWED_WINDOWS).
        windows: Vec<OwedWindow>,
    },
    /// 14: all that are owed have been named.
    OwedEnd {
        /// How many they are.
        pages: u64,
    },
    /// 15, D to S on a supply line: somebody waits for this page.
    Want {
        /// Index of the region in the Hello.
        region: u16,
        /// Its number.
        page: u64,
    },
    /// 16, S to D on a supply line: a page that is waited for, or some about it.
    Page(Pages),
    /// 17, on a supply line: D has all pages. S answers with the same.
    Complete,
    /// 18, S to D: the guest runs, and what is named next has changed: it is not sent any more, and D is to drop it.
    Stale,
    /// 19, D to S, in the place of `Welcome` where the source lends: the same, and D will read pages by itself.
    Lend,
    /// 20, S to D, the answer to `Lend`: which regions are lent. Their descriptors come with the first byte on data
    /// connection 0.
    Lent {
        /// By region, 1 to [`MAX_REGIONS`]: byte of the file at which it begins, which is not 2^64 - 1; none: it is not
        /// lent.
        offsets: Vec<Option<u64>>,
        /// Slots of each channel for pages of other regions; 0: these are sent.
        slots: u8,
    },
    /// 21, D to S, when data connection 0 has brought that byte: what became of it.
    Borrowed {
        /// The descriptors have come, and what was lent can be read. If not, everything is to be sent: somebody between
        /// the two sides passes bytes on and no descriptors.
        is_readable: bool,
    },
}

impl Message {
    /// The name of the message, for errors: "Hello", "RoundDone", ….
    pub fn name(&self) -> &'static str {
        self.kind().name()
    }

    /// Frame and payload, ready to be written. A field that is out of its bounds is never bent into another meaning:
    /// the other side refuses it. Only the text of a refusal is made to fit.
    pub fn encode(&self, id: u64) -> Vec<u8> {
        // The payload's length is known only after it is written, so the frame is put over the room left for it.
        let mut writer = Writer(vec![0; FRAME_BYTES]);
        self.write_payload(&mut writer);
        let mut bytes = writer.0;
        let payload = u32::try_from(bytes.len() - FRAME_BYTES).unwrap_or(u32::MAX);
        let frame = Frame { kind: self.kind() as u16, payload, id };
        bytes[..FRAME_BYTES].copy_from_slice(&frame.encode());
        bytes
    }

    /// # Errors
    /// Any field that breaks a rule above; a payload that is not as long as the frame says; bytes left over.
    pub fn decode(frame: &Frame, payload: &[u8]) -> Result<Self, Error> {
        let mut frame_reader = Reader::new(payload, FRAME_BYTES);
        let payload = frame_reader.bytes("message payload", frame.payload as usize)?;
        frame_reader.end("message payload")?;
        let Some(kind) = Kind::of_number(frame.kind) else {
            return Err(Error::Invalid {
                field: "frame kind",
                offset: 0,
                value: frame.kind.into(),
                why: "unknown message",
            });
        };
        let mut reader = Reader::new(payload, FRAME_BYTES);
        let message = read_payload(kind, payload, &mut reader)?;
        reader.end(kind.name())?;
        Ok(message)
    }

    fn kind(&self) -> Kind {
        match self {
            Message::Hello { .. } => Kind::Hello,
            Message::Welcome => Kind::Welcome,
            Message::RoundDone { .. } => Kind::RoundDone,
            Message::Digest { .. } => Kind::Digest,
            Message::DigestIs { .. } => Kind::DigestIs,
            Message::State { .. } => Kind::State,
            Message::StateEnd { .. } => Kind::StateEnd,
            Message::Loaded => Kind::Loaded,
            Message::Go { .. } => Kind::Go,
            Message::Running => Kind::Running,
            Message::Abort(_) => Kind::Abort,
            Message::DigestWanted => Kind::DigestWanted,
            Message::Owed { .. } => Kind::Owed,
            Message::OwedEnd { .. } => Kind::OwedEnd,
            Message::Want { .. } => Kind::Want,
            Message::Page(_) => Kind::Page,
            Message::Complete => Kind::Complete,
            Message::Stale => Kind::Stale,
            Message::Lend => Kind::Lend,
            Message::Lent { .. } => Kind::Lent,
            Message::Borrowed { .. } => Kind::Borrowed,
        }
    }

    fn write_payload(&self, writer: &mut Writer) {
        match self {
            Message::Hello { channels, verify, post_copy, lends, guest } => {
                let flag = |is_set: bool, flag| if is_set { flag } else { 0 };
                let flags = flag(*verify, FLAG) | flag(*post_copy, POST_COPY) | flag(*lends, LENDS);
                writer.put([*channels, flags]);
                guest.write(writer);
            }
            Message::RoundDone { round, pages, zero } => {
                writer.put(round.to_le_bytes()).put(pages.to_le_bytes()).put(zero.to_le_bytes());
            }
            Message::Digest { digest } | Message::DigestIs { digest } => {
                writer.put(*digest);
            }
            Message::State { bytes } => writer.0.extend_from_slice(bytes),
            Message::StateEnd { bytes, digest } => {
                writer.put(bytes.to_le_bytes()).put(*digest);
            }
            Message::Go { run: flag } | Message::Borrowed { is_readable: flag } => {
                writer.put([u8::from(*flag)]);
            }
            Message::Abort(refusal) => {
                writer.text(&fitting(&refusal.reason));
            }
            Message::Owed { region, windows } => owed::write_owed(writer, *region, windows),
            Message::OwedEnd { pages } => {
                writer.put(pages.to_le_bytes());
            }
            Message::Want { region, page } => owed::write_place(writer, *region, *page),
            Message::Page(pages) => owed::write_pages(writer, pages),
            Message::Lent { offsets, slots } => {
                writer.put([*slots]);
                // Too many become so many as no reader takes.
                writer.put(u16::try_from(offsets.len()).unwrap_or(u16::MAX).to_le_bytes());
                offsets.iter().for_each(|offset| {
                    writer.put(offset.unwrap_or(NOT_LENT).to_le_bytes());
                });
            }
            Message::Welcome
            | Message::Loaded
            | Message::Running
            | Message::DigestWanted
            | Message::Complete
            | Message::Stale
            | Message::Lend => {}
        }
    }
}

fn read_payload(kind: Kind, payload: &[u8], reader: &mut Reader<'_>) -> Result<Message, Error> {
    Ok(match kind {
        Kind::Hello => read_hello(reader)?,
        Kind::Welcome => Message::Welcome,
        Kind::RoundDone => Message::RoundDone {
            round: reader.u32("RoundDone round")?,
            pages: reader.u64("RoundDone pages")?,
            zero: reader.u64("RoundDone zero")?,
        },
        Kind::Digest => Message::Digest { digest: reader.array("Digest digest")? },
        Kind::DigestIs => Message::DigestIs { digest: reader.array("DigestIs digest")? },
        Kind::State => read_state(payload.len(), reader)?,
        Kind::StateEnd => {
            Message::StateEnd { bytes: reader.u64("StateEnd bytes")?, digest: reader.array("StateEnd digest")? }
        }
        Kind::Loaded => Message::Loaded,
        Kind::DigestWanted => Message::DigestWanted,
        Kind::Complete => Message::Complete,
        Kind::Stale => Message::Stale,
        Kind::Lend => Message::Lend,
        Kind::Lent => read_lent(reader)?,
        Kind::Borrowed => Message::Borrowed { is_readable: read_flag(reader, "Borrowed is readable")? },
        Kind::Owed => {
            let (region, windows) = owed::read_owed(reader)?;
            Message::Owed { region, windows }
        }
        Kind::OwedEnd => Message::OwedEnd { pages: reader.u64("OwedEnd pages")? },
        Kind::Want => {
            let (region, page) = owed::read_want(reader)?;
            Message::Want { region, page }
        }
        Kind::Page => Message::Page(owed::read_pages(reader)?),
        Kind::Go => Message::Go { run: read_flag(reader, "Go run")? },
        Kind::Running => Message::Running,
        Kind::Abort => {
            Message::Abort(Refusal { reason: reader.text("Abort reason", 0..=MAX_REASON_BYTES)?.to_owned() })
        }
    })
}

fn read_hello(reader: &mut Reader<'_>) -> Result<Message, Error> {
    let channels = reader.u8("Hello channels")?;
    if channels == 0 {
        return Err(reader.invalid("Hello channels", 0, "a move needs at least one channel"));
    }
    let flags = reader.u8("Hello flags")?;
    let (verify, post_copy, lends) = (flags & FLAG != 0, flags & POST_COPY != 0, flags & LENDS != 0);
    if flags & !(FLAG | POST_COPY | LENDS) != 0 {
        return Err(reader.invalid("Hello flags", flags.into(), "reserved bits must be zero"));
    }
    if verify && post_copy {
        return Err(reader.invalid("Hello flags", flags.into(), "memory that follows later can't be compared before"));
    }
    if lends && post_copy {
        return Err(reader.invalid("Hello flags", flags.into(), "memory that follows later is not lent"));
    }
    let guest = GuestDescription::read(reader)?;
    Ok(Message::Hello { channels, verify, post_copy, lends, guest })
}

fn read_lent(reader: &mut Reader<'_>) -> Result<Message, Error> {
    let slots = reader.u8("Lent slots")?;
    let count = reader.u16("Lent regions")?;
    if !(1..=MAX_REGIONS).contains(&usize::from(count)) {
        return Err(reader.invalid("Lent regions", count.into(), "a guest has 1 to 1024"));
    }
    let offset = |_| Ok(Some(reader.u64("Lent offset")?).filter(|&offset| offset != NOT_LENT));
    Ok(Message::Lent { offsets: (0..count).map(offset).collect::<Result<_, Error>>()?, slots })
}

fn read_state(count: usize, reader: &mut Reader<'_>) -> Result<Message, Error> {
    let bytes = reader.bytes("State bytes", count)?;
    if !(1..=MAX_STATE_BYTES).contains(&count) {
        return Err(reader.invalid("State bytes", count as u64, "a piece has 1 to 262144 bytes"));
    }
    Ok(Message::State { bytes: bytes.to_vec() })
}

/// Bit 0; the other seven are reserved.
fn read_flag(reader: &mut Reader<'_>, field: &'static str) -> Result<bool, Error> {
    match reader.u8(field)? {
        0 => Ok(false),
        FLAG => Ok(true),
        flags => Err(reader.invalid(field, flags.into(), "reserved bits must be zero")),
    }
}

/// The text as it may travel: one line, at most [`MAX_REASON_BYTES`], cut between two characters.
pub(crate) fn fitting(reason: &str) -> Cow<'_, str> {
    let mut end = reason.len().min(MAX_REASON_BYTES);
    while !reason.is_char_boundary(end) {
        end -= 1; // ends at 0 at the latest, which is a boundary
    }
    let clipped = &reason[..end];
    if clipped.contains(char::is_control) {
        // A control character of two bytes becomes a space of one: the text never grows.
        Cow::Owned(clipped.replace(char::is_control, " "))
    } else {
        Cow::Borrowed(clipped)
    }
}
