//! The connections of a source: how they come about, and what the main thread looks at while pages go over them.
use std::{sync::Arc, time::Duration};

use transship_memory::{GuestMemory, WindowBuffer};
use transship_secure::Caller;
use transship_wire::{Message, Preamble, Role, SessionId};

use super::sender::PageSender;
use crate::{
    Error, MoveOptions, MoveTerms, Progress, Rule, Uri, ZeroPages,
    channels::{self, Encoders, EncodingOptions, MainThread, Shared, Window},
    control::Control,
    cpu,
    pacer::Pacer,
    page_map::PageMap,
    transport::{Connection, random},
};

/// How long a peer that broke a data connection may take to say why on the control connection.
const REASON_TIMEOUT: Duration = Duration::from_millis(500);

/// All data connections of a session.
pub(crate) type Channels = channels::Channels<PageSender>;

/// Opens the control connection of a new session.
pub(crate) fn connect_control(to: &Uri, caller: Option<&Caller>) -> Result<(Control, SessionId), Error> {
    let session = SessionId(random()?);
    let mut connection = connect(to, caller, session, Role::Control)?;
    // It must know us before it learns anything about the guest.
    connection.await_word(to)?;
    Ok((Control::new(connection, to.to_string())?, session))
}

/// What goes over data connections.
pub(crate) struct Setup {
    pub(crate) session: SessionId,
    pub(crate) memory: GuestMemory,
    /// By region: the pages for which the destination holds content.
    pub(crate) content: Vec<PageMap>,
}

impl Setup {
    /// For a destination whose memory is zero.
    pub(crate) fn new(session: SessionId, memory: GuestMemory) -> Self {
        let content = PageMap::empty(&memory);
        Self { session, memory, content }
    }
}

/// Opens the data connections, each with the role of its number.
pub(crate) fn connect_channels(
    to: &Uri,
    setup: Setup,
    role: impl Fn(u8) -> Role,
    options: &MoveOptions,
    progress: &Arc<Progress>,
) -> Result<Channels, Error> {
    let Setup { session, memory, content } = setup;
    let terms = &options.terms;
    let shared = Arc::new(Shared {
        pacer: terms.bandwidth.map(Pacer::new).map(Arc::new),
        look_for_zeros: terms.zero_pages == ZeroPages::Channels,
        ..Shared::new(memory, content, to.to_string(), progress)
    });
    let MoveOptions { compress, channels, .. } = *options;
    let MoveTerms { encoders, when_busy, .. } = *terms;
    let encoding = EncodingOptions { compress, encoders, when_busy, channels, may_be_raw: true };
    let mut all = Channels::new(&shared, Encoders::start(&encoding, &shared)?);
    for number in 0..channels {
        let connection = connect(to, terms.caller.as_ref(), session, role(number))?;
        all.add(connection, |connection| Ok(PageSender::new(connection, number, Arc::clone(&shared))))?;
    }
    Ok(all)
}

pub(super) fn connect(to: &Uri, caller: Option<&Caller>, session: SessionId, role: Role) -> Result<Connection, Error> {
    let mut connection = Connection::call(to, caller)?;
    connection.greet(to, &Preamble { session, role }.encode())?;
    Ok(connection)
}

/// The main thread while the channels work.
pub(crate) struct Watch<'a> {
    pub(crate) control: &'a Control,
    pub(crate) shared: &'a Shared,
    /// It looks for zero pages.
    pub(crate) looks: bool,
}

impl MainThread for Watch<'_> {
    fn check(&self) -> Result<(), Error> {
        let progress = &self.shared.progress;
        if self.shared.failure.is_over() {
            return Err(Error::breach(&self.control.peer, Rule::Stays, "broke a data connection"));
        }
        progress.cpu.main.set(cpu::thread_seconds());
        self.control.check_silence()?;
        if progress.is_cancelled() { Err(Error::CANCELLED) } else { Ok(()) }
    }

    /// No look at the control connection: `RoundDone` may be there before our last thread has reported.
    fn check_at_the_end(&self) -> Result<(), Error> {
        Ok(())
    }

    fn reason(&self) -> Option<Error> {
        match self.control.incoming.recv_timeout(REASON_TIMEOUT) {
            Ok(Ok(Message::Abort(refusal))) => Some(Error::Refused(refusal.reason)),
            _ => None,
        }
    }

    fn look(&self, window: &Window, buffer: &mut WindowBuffer) -> Result<Option<u128>, Error> {
        self.looks.then(|| self.shared.zero_mask(window, buffer)).transpose()
    }
}
