//! A guest moves to a stock QEMU that waits with `-incoming`: we are the source of its migration.
//!
//! - `plan`: what the stream must be like for this machine
//! - `line`: the main connection; `channels`: the multifd channels; `main_stream`: the main thread in a round
//! - `session`: what goes over them, up to the devices' state
//! - `switchover`: the devices' state, and the point of no return
mod channels;
mod line;
mod main_stream;
mod plan;
mod session;
mod switchover;

use std::sync::Arc;

use transship_codec::Setting;

use crate::{
    Error, Misfit, MoveTerms, PostCopyAfter, Progress, Report, Uri, fail_point,
    guarded::Guarded,
    guest::{Guard, SourceGuest, StateFormat},
    moving::{Receiver, carry_out},
    rounds::{MoveInProgress, Rounds},
    stream::{
        regions::{RegionBlock, region_blocks},
        state::machine_name,
    },
};
use plan::StreamPlan;
use session::SendSession;
use switchover::StockQemu;

/// Options of a move to a stock QEMU.
#[derive(Debug, Clone)]
pub struct QemuSendOptions {
    /// Multifd channels, as many as the destination has; 0: it has multifd off, and everything goes over one
    /// connection.
    pub channels: u8,
    /// How pages are encoded, as the destination's `multifd-compression` says: none, zlib or zstd. None without
    /// channels.
    pub compress: Setting,
    /// What a transship could be asked as well. What goes raw because all encoders are busy is stored in the form of
    /// the method: a QEMU takes no other.
    pub terms: MoveTerms,
}

impl Default for QemuSendOptions {
    fn default() -> Self {
        Self { channels: 0, compress: Setting::NONE, terms: MoveTerms::default() }
    }
}

/// Moves the guest to the stock QEMU that waits at `to`. `guard`: who puts the guest back as it was should this process
/// die before it is given up; none: nobody.
///
/// On success the guest is the destination's, which has said so; here it is stopped for good. On every failure but
/// [`Error::Unknown`] it runs here as if nothing had been (or stands, if it stood before). The report is filled as far
/// as it got, also on failure.
///
/// # Errors
/// See [`Error`]; [`Error::outcome`] says where the guest is.
pub fn send_to_qemu(
    guest: &mut dyn SourceGuest,
    guard: Option<&mut dyn Guard>,
    to: &Uri,
    options: &QemuSendOptions,
    progress: &Arc<Progress>,
    report: &mut Report,
) -> Result<(), Error> {
    let mut receiver = ToQemu { to, options, regions: Vec::new() };
    carry_out(&mut receiver, &options.terms, (guest, guard), progress, report)
}

/// The QEMU at `to`.
struct ToQemu<'a> {
    to: &'a Uri,
    options: &'a QemuSendOptions,
    /// The guest's own blocks, once it is connected.
    regions: Vec<RegionBlock>,
}

impl Receiver for ToQemu<'_> {
    type Session = SendSession;

    fn connect(&mut self, guest: &mut Guarded<'_>, progress: &Arc<Progress>) -> Result<SendSession, Error> {
        let plan;
        (plan, self.regions) = prepare(guest.unguarded(), self.options)?;
        let (uuid, memory) = (guest.unguarded().uuid()?, guest.memory());
        let session = SendSession::open(self.to, plan, uuid, memory, &self.regions, self.options, progress)?;
        fail_point::reach("peer.connected")?;
        Ok(session)
    }

    /// A stock QEMU's own post-copy can't be spoken from outside of the source's QEMU.
    fn post_copy(&self) -> Option<PostCopyAfter> {
        None
    }

    /// Neither does it compare.
    fn compares(&self) -> bool {
        false
    }

    fn hand_over(
        &mut self,
        session: &mut SendSession,
        course: &mut MoveInProgress<'_, '_>,
        rounds: &mut Rounds,
    ) -> Result<(), Error> {
        course.hand_over(&mut StockQemu::new(session, &self.regions), rounds)
    }

    fn part(&mut self, mut session: SendSession, result: &Result<(), Error>, _progress: &Progress) {
        if result.is_ok() {
            session.say_goodbye();
        }
        session.hang_up();
    }
}

/// What can be refused before anybody is asked.
fn prepare(guest: &mut dyn SourceGuest, options: &QemuSendOptions) -> Result<(StreamPlan, Vec<RegionBlock>), Error> {
    if guest.state_format() == StateFormat::Opaque {
        return Err(Misfit::Vmm.unfit(
            "a stock QEMU understands only the device state of a QEMU, but this guest has another VMM; let a \
             transship receive it",
        ));
    }
    guest.check_for_stock()?;
    Ok((StreamPlan::new(machine_name(guest)?, options)?, region_blocks(guest)?))
}
