//! In front of the encoders: how each job is to be encoded, and what happens while all of them are busy.
use std::{sync::atomic::Ordering::Relaxed, time::Instant};

use transship_auto::{Auto, RawFlow};
use transship_ring::{Submitter, TrySubmitError};

use super::coder::{EncoderSetup, Tools, gone};
use crate::{Error, control::TICK};

/// How a job is to be encoded.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Chosen {
    /// Which of the encoders' encodings; of no meaning without encoders.
    pub(crate) encoding: u8,
    /// The encoder is to try them all.
    pub(crate) sample: bool,
    /// It is to be left as it is, by choice, and few such may be on their way.
    pub(crate) raw: bool,
}

/// Where jobs are handed to encoders.
pub(crate) struct Dispatcher<Job> {
    submitter: Submitter<Job>,
    /// If there is a choice.
    pub(super) auto: Option<Auto>,
    tools: Tools,
}

impl<Job> Dispatcher<Job> {
    pub(crate) fn new(submitter: Submitter<Job>, setup: &EncoderSetup, tools: &Tools) -> Self {
        Self { submitter, auto: setup.auto(), tools: tools.clone() }
    }

    /// Chooses the encoding of a job, if there is a choice. If the job is to be left as it is, this returns how many
    /// such may be on their way.
    pub(crate) fn choose(&mut self, chosen: &mut Chosen) -> Option<RawFlow> {
        let auto = self.auto.as_mut()?;
        let meters = &self.tools.meters;
        while let Some(sample) = meters.samples.pop() {
            auto.learn(&sample);
        }
        let choice = auto.choose(Instant::now(), &meters.counts(auto.current()));
        chosen.encoding = choice.encoding as u8;
        chosen.sample |= choice.sample;
        chosen.raw = choice.encoding == auto.raw();
        chosen.raw.then(|| auto.raw_flow())
    }

    /// Hands a job to an encoder. It comes back if all are busy.
    pub(crate) fn try_submit(&mut self, job: Job) -> Result<Option<Job>, Error> {
        let tally = &self.tools.progress.encoding;
        tally.submitted.fetch_add(1, Relaxed);
        let busy = unless_gone(self.submitter.try_submit(job))?;
        if busy.is_some() {
            tally.busy.fetch_add(1, Relaxed);
        }
        Ok(busy)
    }

    /// Hands over a job that has come back, and waits until an encoder has room. `goes_on` is asked meanwhile; when it
    /// says no, the job is dropped.
    pub(crate) fn submit(&mut self, mut job: Job, goes_on: impl Fn() -> Result<bool, Error>) -> Result<(), Error> {
        while goes_on()? {
            match unless_gone(self.submitter.submit_timeout(job, TICK))? {
                Some(back) => job = back,
                None => break,
            }
        }
        Ok(())
    }
}

/// The job, if all encoders are busy.
fn unless_gone<Job>(submitted: Result<usize, TrySubmitError<Job>>) -> Result<Option<Job>, Error> {
    match submitted {
        Ok(_) => Ok(None),
        Err(TrySubmitError::Busy(job)) => Ok(Some(job)),
        Err(TrySubmitError::Gone(_)) => Err(gone()),
    }
}
