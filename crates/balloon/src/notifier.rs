//! Telling QEMU that the configuration has changed, so that it tells the driver.
//!
//! QEMU 11.1 crashes if it comes to read such a message while no driver uses the device: between the end of one use and
//! the beginning of the next, as when the guest is stopped, reset, or the device unplugged. So a message is sent only
//! while the queues run, and whoever has changed something can wait until QEMU has taken note of it. After that it is
//! safe to stop the guest.
use std::{
    io::{self, Read, Write},
    net::Shutdown as Close,
    os::unix::net::UnixStream,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// Request 2 (the configuration has changed), protocol version 1 with the wish for a reply, no payload.
const CHANGED: [[u8; 4]; 3] = [2_u32.to_le_bytes(), 9_u32.to_le_bytes(), 0_u32.to_le_bytes()];
/// A header and 64 bits.
const REPLY_BYTES: usize = 20;
/// How long QEMU may take. Its main loop may be busy with a guest's disks.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// What is to be told, and to whom.
#[derive(Debug, Default)]
pub(crate) struct Notifier {
    state: Mutex<State>,
    /// Something in the state has changed.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    channel: Option<Arc<UnixStream>>,
    /// The queues run.
    running: bool,
    /// Changes so far …
    wanted: u64,
    /// … and those that QEMU has taken note of.
    told: u64,
}

impl Notifier {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// QEMU is to be told by this from now on. It replaces the one before, which belonged to a device that is gone.
    pub(crate) fn open(&self, channel: UnixStream) -> io::Result<()> {
        channel.set_read_timeout(Some(PATIENCE))?;
        channel.set_write_timeout(Some(PATIENCE))?;
        let before = self.state().channel.replace(Arc::new(channel));
        hang_up(before);
        self.changed.notify_all();
        Ok(())
    }

    /// There is nobody to be told. [`Notifier::run`] ends.
    pub(crate) fn close(&self) {
        let before = {
            let mut state = self.state();
            state.running = false;
            state.channel.take()
        };
        hang_up(before);
        self.changed.notify_all();
    }

    pub(crate) fn set_running(&self, running: bool) {
        self.state().running = running;
        self.changed.notify_all();
    }

    pub(crate) fn is_running(&self) -> bool {
        self.state().running
    }

    /// The configuration has changed: QEMU will be told, at the latest when the queues run again.
    pub(crate) fn change(&self) {
        self.state().wanted += 1;
        self.changed.notify_all();
    }

    /// Waits until QEMU has taken note of all changes. False: it does not, or no driver uses the device now.
    pub(crate) fn wait_told(&self) -> bool {
        let waiting = |state: &mut State| state.running && state.told < state.wanted;
        let waited = self.changed.wait_timeout_while(self.state(), 2 * PATIENCE, waiting);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.running && state.told >= state.wanted
    }

    /// Tells QEMU of changes until `close`, which is called after `open`.
    pub(crate) fn run(&self) {
        loop {
            let nothing = |state: &mut State| state.channel.is_some() && !(state.running && state.told < state.wanted);
            let state = self.changed.wait_while(self.state(), nothing).unwrap_or_else(PoisonError::into_inner);
            let Some(channel) = state.channel.clone() else { return };
            let wanted = state.wanted;
            drop(state);
            let told = tell(&channel);
            let mut state = self.state();
            match told {
                Ok(()) => state.told = wanted,
                // It was unplugged, or QEMU is about to go. Another try would find it so again.
                Err(error) if state.channel.as_ref().is_some_and(|now| Arc::ptr_eq(now, &channel)) => {
                    tracing::debug!(%error, "QEMU does not accept notices of changes any more");
                    state.running = false;
                }
                // It is another device's turn already.
                Err(_) => {}
            }
            drop(state);
            self.changed.notify_all();
        }
    }
}

fn tell(mut channel: &UnixStream) -> io::Result<()> {
    channel.write_all(CHANGED.as_flattened())?;
    channel.read_exact(&mut [0; REPLY_BYTES])
}

fn hang_up(channel: Option<Arc<UnixStream>>) {
    if let Some(channel) = channel {
        // It may be closed already.
        let _ = channel.shutdown(Close::Both);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::thread;

    use super::*;

    /// As QEMU does it.
    fn take_note(mut qemu: &UnixStream) {
        let mut message = [0; 12];
        qemu.read_exact(&mut message).unwrap();
        assert_eq!(message, [2, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
        qemu.write_all(&[0; REPLY_BYTES]).unwrap();
    }

    #[test]
    fn nothing_is_sent_while_the_queues_stand_still() {
        let (ours, qemu) = UnixStream::pair().unwrap();
        let notifier = Notifier::default();
        notifier.open(ours).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| notifier.run());
            notifier.change();
            assert!(!notifier.wait_told());
            qemu.set_nonblocking(true).unwrap();
            assert_eq!((&qemu).read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            qemu.set_nonblocking(false).unwrap();

            // Two changes may be one message.
            notifier.change();
            notifier.set_running(true);
            take_note(&qemu);
            assert!(notifier.wait_told());

            scope.spawn(|| take_note(&qemu));
            notifier.change();
            assert!(notifier.wait_told());
            notifier.close();
        });
    }

    #[test]
    fn a_qemu_that_hangs_up_is_not_waited_for() {
        let (ours, qemu) = UnixStream::pair().unwrap();
        let notifier = Notifier::default();
        notifier.open(ours).unwrap();
        notifier.set_running(true);
        thread::scope(|scope| {
            scope.spawn(|| notifier.run());
            drop(qemu);
            notifier.change();
            assert!(!notifier.wait_told());
            notifier.close();
        });
    }
}
