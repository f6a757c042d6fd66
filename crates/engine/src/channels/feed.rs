//! The main thread's part of a round: cuts it into pieces and hands them over, in memory order.
use crossbeam_channel::{SendTimeoutError, Sender};
use transship_memory::{Freeing, PageRange, WindowBuffer, WindowPages};

use super::{
    Batch, RoundWork, Shared, Window,
    encoding::Encoders,
    gate::{Gate, Ready},
};
use crate::{
    Error,
    control::TICK,
    free::FreePages,
    guest::RegionPages,
    scan::{self, Pending},
};

/// What the main thread does in a round beside handing work over, as the protocol has it.
pub(crate) trait MainThread {
    /// An error if the session can't go on: a channel has failed, the peer has spoken, the user has cancelled.
    fn check(&self) -> Result<(), Error>;

    /// As `check`, while the channels end the round.
    fn check_at_the_end(&self) -> Result<(), Error>;

    /// What the peer says of a failure, if it says anything.
    fn reason(&self) -> Option<Error>;

    /// Tells which pages of a region are holes now; false: the channels have to.
    fn tells_holes(&self, _region: usize, _pending: &Pending) -> Result<bool, Error> {
        Ok(false)
    }

    /// Looks for the zero pages of a window; none: channels and encoders do.
    fn look(&self, _window: &Window, _buffer: &mut WindowBuffer) -> Result<Option<u128>, Error> {
        Ok(None)
    }

    /// Pages of a window that are not handed over: holes by now, or of no use to the guest.
    fn left_out(&self, _region: usize, _pages: WindowPages) -> Result<(), Error> {
        Ok(())
    }
}

/// Cuts a round into pieces.
pub(super) struct Feed<'a> {
    pub(super) work: &'a RoundWork<'a>,
    pub(super) shared: &'a Shared,
    pub(super) free: &'a mut FreePages,
    pub(super) main: &'a dyn MainThread,
    /// Pages that were not handed over since they are holes by now.
    pub(super) new_holes: Vec<RegionPages>,
    /// For a main thread that looks for zero pages.
    pub(super) buffer: WindowBuffer,
}

impl Feed<'_> {
    pub(super) fn hand_to_channels(&mut self, queue: &Sender<Batch>) -> Result<(), Error> {
        for (region, pending) in self.work.pending.iter().enumerate() {
            for range in self.holes_to_hand_over(region, pending)? {
                hand_over(Batch::Hole { region, range }, queue, self.main)?;
            }
            for windows in pending.batches() {
                let windows = self.windows(region, windows)?;
                hand_over(Batch::Pages(windows), queue, self.main)?;
            }
        }
        Ok(())
    }

    pub(super) fn hand_to_encoders(&mut self, encoders: &mut Encoders, gate: &Gate) -> Result<(), Error> {
        for (region, pending) in self.work.pending.iter().enumerate() {
            for range in self.holes_to_hand_over(region, pending)? {
                self.main.check()?;
                encoders.pass(Ready::Hole { region, range }, gate, self.main)?;
            }
            for windows in pending.batches() {
                // Encoded, a window goes as it is.
                let claimed = windows.into_iter().map(|window| self.shared.claim(region, window));
                let windows = claimed.filter(|window| !window.is_empty()).collect();
                for window in self.windows(region, windows)? {
                    self.main.check()?;
                    encoders.submit(window, gate, self.main)?;
                }
            }
        }
        encoders.flush(gate, self.main)
    }

    fn holes_to_hand_over<'p>(
        &self,
        region: usize,
        pending: &'p Pending,
    ) -> Result<impl Iterator<Item = PageRange> + 'p, Error> {
        let told = self.main.tells_holes(region, pending)?;
        Ok((!told).then(|| pending.gone.ranges()).into_iter().flatten())
    }

    /// Some windows of the round, without what need not be read.
    fn windows(&mut self, region: usize, windows: Vec<WindowPages>) -> Result<Vec<Window>, Error> {
        let Self { work, shared, free, main, new_holes, buffer } = self;
        let windows = trim(shared, work, region, windows, free, *main, new_holes)?;
        let look = |pages: WindowPages| {
            let mut window = Window::new(work.round, region, pages);
            window.zero = main.look(&window, buffer)?;
            Ok(window)
        };
        windows.into_iter().map(look).collect()
    }
}

/// Leaves out what the guest can do without, or has given back since the look: reading a hole would fill it again.
pub(crate) fn trim(
    shared: &Shared,
    work: &RoundWork<'_>,
    region: usize,
    windows: Vec<WindowPages>,
    free: &mut FreePages,
    main: &dyn MainThread,
    new_holes: &mut Vec<RegionPages>,
) -> Result<Vec<WindowPages>, Error> {
    let mut left = windows.clone();
    free.trim(region, &mut left);
    if work.freeing != Freeing::Never {
        left.retain_mut(|wanted| {
            let holes = scan::new_holes(&shared.memory.regions()[region], *wanted);
            new_holes.extend(wanted.with(holes).runs().map(|pages| RegionPages { region, pages }));
            *wanted = wanted.without(holes);
            !wanted.is_empty()
        });
    }
    let mut kept = left.iter().peekable();
    for window in windows {
        let still = kept.next_if(|kept| kept.first == window.first).map_or(0, |kept| kept.mask);
        let out = window.without(still);
        if !out.is_empty() {
            shared.dealt_with(out.count());
            main.left_out(region, out)?;
        }
    }
    Ok(left)
}

/// Waits for room.
fn hand_over(mut batch: Batch, queue: &Sender<Batch>, main: &dyn MainThread) -> Result<(), Error> {
    loop {
        main.check()?;
        match queue.send_timeout(batch, TICK) {
            Ok(()) => return Ok(()),
            Err(SendTimeoutError::Timeout(back)) => batch = back,
            // All threads have failed; collecting their results says how.
            Err(SendTimeoutError::Disconnected(_)) => return Ok(()),
        }
    }
}
