//! Memory that a source on the same host lends: its pages are read here, from its files.
use std::{io, time::Duration};

use transship_memory::{GuestMemory, Lent, LentFile};
use transship_wire::Message;

use crate::{Error, Progress, Rule, control::Control, transport::Connection};

/// How long a source may take to say what it lends, and to pass it on.
const TIMEOUT: Duration = Duration::from_secs(30);

/// What a source has said that it lends. By region: where in its file it begins; none: it is not lent.
#[derive(Debug)]
pub(super) struct Offered(Vec<Option<u64>>);

impl Offered {
    /// Has the source lend its memory, of so many regions.
    pub(super) fn ask(control: &mut Control, regions: usize, progress: &Progress) -> Result<Self, Error> {
        control.send_or_hear(&Message::Lend)?;
        let offsets = match control.receive("its Lent", TIMEOUT, progress)? {
            Message::Lent { offsets } => offsets,
            other => return Err(control.unexpected(&other, "where Lent was due")),
        };
        if offsets.len() != regions {
            let what = format!("lends {} regions, but there are {regions}", offsets.len());
            return Err(Error::breach(&control.peer, Rule::Count, what));
        }
        Ok(Self(offsets))
    }

    /// Takes the files for the regions of `memory`, which come over the first data connection.
    pub(super) fn take(self, (first, peer): &(Connection, String), memory: &GuestMemory) -> Result<Lent, Error> {
        let broke = |rule, what: String| Error::breach(peer, rule, what);
        let files = first.receive_files(TIMEOUT).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => broke(Rule::Stays, "has closed data channel 0".into()),
            io::ErrorKind::WouldBlock => {
                broke(Rule::Answers, format!("has not passed what it lends within {} s", TIMEOUT.as_secs()))
            }
            _ => Error::Io { what: format!("receive what {peer} lends"), source },
        })?;
        let (passed, said) = (files.len(), self.0.iter().flatten().count());
        if passed != said {
            return Err(broke(Rule::Count, format!("lends {said} regions, but passed {passed} files")));
        }
        let mut files = files.into_iter();
        let file = |offset: Option<u64>| Some(LentFile { offset: offset?, file: files.next()? });
        Lent::of(self.0.into_iter().map(file).collect(), memory)
            .map_err(|error| broke(Rule::Bounds, format!("lends what can't be read as its memory: {error}")))
    }
}
