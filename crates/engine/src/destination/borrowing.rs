//! Memory that a source on the same host lends: its pages are read here, from its files.
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use transship_memory::{GuestMemory, Lent, LentFile, LentSlots};
use transship_wire::Message;

use crate::{Error, Progress, Rule, control::Control, transport::Connection};

/// How long a source may take to say what it lends, and to pass it on.
const TIMEOUT: Duration = Duration::from_secs(30);

/// What a source has said that it lends.
#[derive(Debug)]
pub(super) struct Offered {
    /// By region: where in its file it begins; none: it is not lent.
    offsets: Vec<Option<u64>>,
    /// Of each channel.
    slots: u8,
}

/// What it lends.
#[derive(Debug)]
pub(super) struct Borrowed {
    pub(super) memory: Lent,
    /// Those of all channels, one channel's behind the other's, and how many each has; none: there are none.
    pub(super) slots: Option<(LentSlots, u8)>,
}

impl Offered {
    /// Has the source lend its memory, of so many regions.
    pub(super) fn ask(control: &mut Control, regions: usize, progress: &Progress) -> Result<Self, Error> {
        control.send_or_hear(&Message::Lend)?;
        let (offsets, slots) = match control.receive("its Lent", TIMEOUT, progress)? {
            Message::Lent { offsets, slots } => (offsets, slots),
            other => return Err(control.unexpected(&other, "where Lent was due")),
        };
        if offsets.len() != regions {
            let what = format!("lends {} regions, but there are {regions}", offsets.len());
            return Err(Error::breach(&control.peer, Rule::Count, what));
        }
        Ok(Self { offsets, slots })
    }

    /// Takes the files for the regions of `memory`, which come over the first data connection. None: somebody between
    /// passes bytes on and no files, such as ssh does with a socket of another host.
    pub(super) fn take(
        self,
        connections: &[(Connection, String)],
        memory: &GuestMemory,
    ) -> Result<Option<Borrowed>, Error> {
        let Self { offsets, slots } = self;
        let (first, peer) = &connections[0];
        let broke = |rule, what: String| Error::breach(peer, rule, what);
        let files = first.receive_files(TIMEOUT).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => broke(Rule::Stays, "has closed data channel 0".into()),
            io::ErrorKind::WouldBlock => {
                broke(Rule::Answers, format!("has not passed what it lends within {} s", TIMEOUT.as_secs()))
            }
            _ => Error::Io { what: format!("receive what {peer} lends"), source },
        })?;
        let (passed, said) = (files.len(), offsets.iter().flatten().count() + usize::from(slots > 0));
        if passed == 0 {
            tracing::info!("no memory was lent: there is somebody between the two sides");
            return Ok(None);
        }
        if passed != said {
            return Err(broke(Rule::Count, format!("lends {said} files, but passed {passed}")));
        }
        let unfit = |error| broke(Rule::Bounds, format!("lends what can't be read as its memory: {error}"));
        let mut files = files.into_iter();
        let file = |offset: Option<u64>| Some(LentFile { offset: offset?, file: files.next()? });
        let memory = Lent::of(offsets.into_iter().map(file).collect(), memory).map_err(unfit)?;
        let all = |file: OwnedFd| LentSlots::of(file.as_fd(), usize::from(slots) * connections.len());
        let slots = files.next().map(|file| Ok((all(file)?, slots))).transpose().map_err(unfit)?;
        Ok(Some(Borrowed { memory, slots }))
    }
}
