//! What the engine knows of a guest. Adapters implement these traits; the engine never asks which VMM it is.
use std::{io::Read, time::Duration};

use transship_memory::{Freeing, GuestMemory, Tracker};
use transship_wire::GuestDescription;

/// An adapter's failure: what happened, to what, and what the user can do, in one line.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct GuestError(pub String);

/// A guest that is to be moved away. Created attached (memory mapped, every refusal already made), but with nothing changed
/// in the VMM. Dropping it leaves nothing of ours there.
pub trait SourceGuest: Send {
    /// What the destination must match.
    fn description(&self) -> GuestDescription;
    /// The regions, mapped for reading, in the order of the description.
    fn memory(&self) -> GuestMemory;
    /// Whether the guest, or the VMM on its behalf, may give memory back while it runs. If in doubt, it may.
    fn freeing(&self) -> Freeing {
        Freeing::Possible
    }
    /// Begins to track writes. Called at most once before `stop`.
    fn track(&mut self) -> Result<Box<dyn Tracker>, GuestError>;
    /// Whether the vCPUs run now.
    fn is_running(&mut self) -> Result<bool, GuestError>;
    /// Stops the vCPUs and waits until all writes to guest memory have ended (block jobs flushed included).
    fn stop(&mut self) -> Result<(), GuestError>;
    /// How long saving, sending and loading the device state is thought to take; for the forecast before the first one.
    fn state_estimate(&self) -> Duration;
    /// The device state of the stopped guest, as a stream to be read to its end. Afterwards `state_saved` must be asked.
    fn save_state(&mut self) -> Result<Box<dyn Read + Send>, GuestError>;
    /// Whether the VMM calls the state that was read complete.
    fn state_saved(&mut self) -> Result<(), GuestError>;
    /// Called right before the destination is told to go: whatever happens now, nothing of this side may let the guest run.
    ///
    /// # Errors
    /// It can't be made sure; the guest is then not given up.
    fn give_up(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
    /// Takes back whatever `stop` and `save_state` did: the guest runs here again, as if nothing had been. If `run` is
    /// false the guest is left stopped but whole.
    fn resume(&mut self, run: bool) -> Result<(), GuestError>;
    /// How a person resumes this guest by hand, for messages: a command line.
    fn resume_hint(&self) -> String;
}

/// A guest that waits for its memory and state. Nothing may run in it before `start`.
pub trait DestinationGuest: Send {
    /// What it waits for.
    fn description(&self) -> GuestDescription;
    /// The regions, mapped for writing, in the order of the description.
    fn memory(&self) -> GuestMemory;
    /// Loads the device state, to the end of `state`, and waits until the VMM says that it has loaded it all.
    fn load_state(&mut self, state: &mut dyn Read) -> Result<(), GuestError>;
    /// Lets the vCPUs run (`run`), or leaves the guest loaded and stopped.
    fn start(&mut self, run: bool) -> Result<(), GuestError>;
    /// How a person starts this guest by hand, for messages: a command line.
    fn start_hint(&self) -> String;
}
