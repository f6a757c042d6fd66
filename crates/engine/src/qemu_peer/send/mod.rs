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

use std::{sync::Arc, time::Instant};

use transship_codec::Setting;

use crate::{
    Error, MoveTerms, Progress, Report, Uri,
    at_stop::AtStop,
    ending::finish,
    fail_point,
    forecast::Aim,
    guarded::Guarded,
    guest::{Guard, SourceGuest, StateFormat},
    rounds::{MoveInProgress, Rounds},
    shortfall::Medium,
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
    let begin = Instant::now();
    report.bytes.guest = guest.memory().bytes();
    // Ending the tracking takes time that grows with the memory. By then the guest runs again, here or there, and
    // nothing waits for this.
    let mut rounds = None;
    let guest = &mut Guarded::new(guest, guard);
    let result = prepare(guest.unguarded(), options).and_then(|(plan, regions)| {
        let uuid = guest.unguarded().uuid()?;
        let mut session = SendSession::open(to, plan, uuid, guest.memory(), &regions, options, progress)?;
        fail_point::reach("peer.connected")?;
        let at_stop = AtStop::new(&options.terms.at_stop);
        let mut course = MoveInProgress { guest: &mut *guest, progress, report, begin, at_stop, post_copy: None };
        let result = run(&mut course, &mut session, options, &regions, &mut rounds);
        if result.is_ok() {
            session.say_goodbye();
        }
        session.hang_up();
        result
    });
    if !matches!(result, Ok(()) | Err(Error::Unknown(_))) {
        guest.plug_back();
    }
    finish(result, begin, progress, report)
}

/// What can be refused before anybody is asked.
fn prepare(guest: &mut dyn SourceGuest, options: &QemuSendOptions) -> Result<(StreamPlan, Vec<RegionBlock>), Error> {
    if guest.state_format() == StateFormat::Opaque {
        return Err(Error::Unfit(
            "a stock QEMU understands only the device state of a QEMU, but this guest has another VMM; let a \
             transship receive it"
                .into(),
        ));
    }
    guest.check_for_stock()?;
    Ok((StreamPlan::new(machine_name(guest)?, options)?, region_blocks(guest)?))
}

fn run(
    course: &mut MoveInProgress<'_, '_>,
    session: &mut SendSession,
    options: &QemuSendOptions,
    regions: &[RegionBlock],
    rounds: &mut Option<Rounds>,
) -> Result<(), Error> {
    let MoveTerms { downtime, max_downtime, bandwidth, max_rounds, converge, .. } = options.terms;
    let aim = Aim { medium: Medium::Link, downtime, max_downtime, bandwidth, max_rounds, converge };
    let rounds = course.up_to_switchover(rounds, session, aim, &options.terms.hold)?;
    course.hand_over(&mut StockQemu::new(session, regions), rounds)
}
