//! The balloon that a user names with `--balloon`: what is asked for hints.
use std::path::{Path, PathBuf};

use transship_balloon::Client;
use transship_guest::Hints;
use transship_memory::GuestMemory;
use transship_vmm::Balloon;

use crate::output;

/// The balloon with this socket.
pub(crate) fn balloon(socket: PathBuf) -> Balloon {
    Balloon { socket, connect }
}

/// One that can't be asked is no reason to fail.
fn connect(socket: &Path, memory: &GuestMemory) -> Option<Box<dyn Hints>> {
    match Client::connect(socket, memory) {
        Ok(client) => Some(Box::new(client)),
        Err(error) => {
            output::say(&format!("{error}; going on without its hints"));
            None
        }
    }
}
