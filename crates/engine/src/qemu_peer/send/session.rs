//! The connections to a QEMU that waits, and what goes over them up to the devices' state.
//!
//! ```text
//!   header, configuration, a return path, ping ─► pong     it speaks to us, has all channels, and is of the same machine
//!   START: the guest's own blocks, ping        ─► pong     it has them
//!   PART: a round, its barrier, ping           ─► pong     all of the round is in place; again and again
//! ```
use std::{cell::RefCell, sync::Arc, time::Duration};

use transship_memory::{GuestMemory, WindowBuffer};
use transship_wire::qemu::{Block, Command, Configuration, Name};

use super::{
    QemuSendOptions,
    channels::{self, Channels, Common, PacketSender},
    line::Line,
    main_stream::MainStream,
    plan::{Barriers, StreamPlan},
};
use crate::{
    Compress, Error, MoveTerms, Progress, Report, Uri, ZeroPages,
    channels::{Encoders, EncodingOptions, RoundWork, Sent, Shared},
    free::FreePages,
    guest::RegionPages,
    pacer::Pacer,
    page_map::PageMap,
    rounds::Link,
    stream::regions::RegionBlock,
    transport::STALL_TIMEOUT,
};

/// The connections, and what the destination holds by now.
pub(crate) struct SendSession {
    pub(crate) line: Line,
    channels: Option<Channels>,
    pub(crate) plan: StreamPlan,
    shared: Arc<Shared>,
    common: Arc<Common>,
    /// No round was sent yet.
    first: bool,
    buffer: WindowBuffer,
}

impl SendSession {
    /// Connects, and has the destination agree to the machine and to the guest's blocks. It refuses here whatever it
    /// can refuse without having seen a page.
    pub(crate) fn open(
        to: &Uri,
        plan: StreamPlan,
        uuid: [u8; 16],
        memory: GuestMemory,
        regions: &[RegionBlock],
        options: &QemuSendOptions,
        progress: &Arc<Progress>,
    ) -> Result<Self, Error> {
        let QemuSendOptions { channels: count, compress, ref terms } = *options;
        let pacer = terms.bandwidth.map(Pacer::new).map(Arc::new);
        let mut line = Line::open(to, terms.caller.as_ref(), pacer.clone(), progress)?;
        // Until it has the first bytes of a connection a destination does nothing else at all; and an old one takes the
        // first connection for the main one.
        line.writer.header().configuration(&Configuration::new(plan.machine.clone())).command(&Command::OpenReturnPath);
        line.ping();
        line.flush()?;
        let names = regions.iter().map(|region| region.name.clone()).collect();
        let common = Arc::new(Common::new(names, plan.zeros, compress));
        let (content, look_for_zeros) = (PageMap::empty(&memory), terms.zero_pages != ZeroPages::Off);
        let shared = Shared { pacer, look_for_zeros, ..Shared::new(memory, content, to.to_string(), progress) };
        let shared = Arc::new(shared);
        let channels = match count {
            0 => None,
            count => {
                let MoveTerms { encoders, when_busy, .. } = *terms;
                let (channels, compress) = (count, Compress::Fixed(compress));
                let encoding = EncodingOptions { compress, encoders, when_busy, channels, may_be_raw: false };
                let encoders = Encoders::start(&encoding, &shared)?;
                Some(channels::connect((to, terms.caller.as_ref()), count, uuid, encoders, &shared, &common)?)
            }
        };
        let mut session = Self { line, channels, plan, shared, common, first: true, buffer: WindowBuffer::default() };
        let begin = match count {
            0 => "begin (does it wait with `multifd` off?)".to_owned(),
            count => format!("begin (does it wait with `multifd` on and `multifd-channels` {count}?)"),
        };
        session.line.await_pong(&begin, STALL_TIMEOUT, || Ok(()))?;
        session.start(regions.iter().map(|region| (&region.name, region.bytes)))?;
        session.settle("take the guest's memory blocks", STALL_TIMEOUT)?;
        Ok(session)
    }

    /// A list of blocks. There may be more than one.
    pub(crate) fn start<'a>(&mut self, blocks: impl Iterator<Item = (&'a Name, u64)> + Clone) -> Result<(), Error> {
        let writer = &mut self.line.writer;
        writer.ram_start(blocks.clone().map(|(_, bytes)| bytes).sum());
        for (name, bytes) in blocks {
            writer.block(&Block { name: name.clone(), used_bytes: bytes, gpa: None, mapped: None });
        }
        self.end_of_memory()
    }

    /// The end of a section, with the main stream's half of a barrier in it. The channels have sent theirs.
    fn end_section(&mut self) {
        if self.plan.barriers == Barriers::ByRounds {
            self.line.writer.multifd_flush();
        }
        self.line.writer.end_of_section();
    }

    /// The end of a section of memory, with a barrier on all channels.
    pub(crate) fn end_of_memory(&mut self) -> Result<(), Error> {
        let mut sent = Sent::default();
        let channels = self.channels.iter_mut().flat_map(|channels| channels.all_mut());
        channels.into_iter().try_for_each(|channel| channel.barrier(&mut sent))?;
        self.line.sent += sent.bytes;
        self.end_section();
        Ok(())
    }

    /// Waits until the destination has all that was written so far, and still has all channels. One that lets a channel
    /// go meanwhile may never answer: it waits for what would come there.
    pub(crate) fn settle(&mut self, doing: &str, patience: Duration) -> Result<(), Error> {
        let Self { line, channels, .. } = self;
        let has_all = || channels.iter().flat_map(Channels::all).try_for_each(PacketSender::check_open);
        line.ping();
        line.await_pong(doing, patience, has_all)?;
        has_all()
    }

    /// The destination has everything: tells it that nothing more comes, where it wants to know that from a cut.
    pub(crate) fn say_goodbye(&mut self) {
        let channels = self.channels.iter_mut().flat_map(|channels| channels.all_mut());
        channels.into_iter().for_each(PacketSender::say_goodbye);
        self.line.say_goodbye();
    }

    /// Ends all connections. A destination that does not have the end of the stream will never run the guest.
    pub(crate) fn hang_up(&self) {
        self.line.hang_up();
        self.channels.iter().for_each(Channels::hang_up);
    }
}

impl Link for SendSession {
    fn content(&self) -> &[PageMap] {
        &self.shared.content
    }

    fn send(&mut self, work: &RoundWork<'_>, free: &mut FreePages) -> Result<(Sent, Vec<RegionPages>), Error> {
        let before = self.line.sent;
        self.line.writer.part();
        let main = MainStream {
            line: RefCell::new(&mut self.line),
            shared: &self.shared,
            common: &self.common,
            first: self.first,
        };
        let (mut sent, new_holes) = match &mut self.channels {
            None => main.send(work, free, &mut self.buffer)?,
            Some(channels) => channels.run_round(work, free, &main)?,
        };
        self.end_section();
        self.line.flush()?;
        self.first = false;
        sent.bytes += self.line.sent - before;
        Ok((sent, new_holes))
    }

    fn confirm(&mut self, _round: u32, _sent: &mut Sent, patience: Duration) -> Result<(), Error> {
        self.settle("put the pages of a round into place", patience)
    }

    fn check_silence(&mut self) -> Result<(), Error> {
        self.line.check_silence()
    }

    fn report(&self, report: &mut Report) {
        self.channels.iter().for_each(|channels| channels.report(report));
    }

    fn name(&self) -> &'static str {
        "peer"
    }
}
