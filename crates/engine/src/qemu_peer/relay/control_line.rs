//! What is said to the other relay on the control connection.
use std::{
    io::{self, Write},
    sync::Mutex,
};

use transship_wire::relay::Message;

use super::fate::lock;
use crate::transport::Connection;

/// The sending half, and a handle to close the connection by while another thread sends.
pub(super) struct ControlLine(Mutex<Connection>, Connection);

impl ControlLine {
    pub(super) fn new(sender: Connection, handle: Connection) -> Self {
        Self(Mutex::new(sender), handle)
    }

    pub(super) fn send(&self, message: &Message) -> io::Result<()> {
        lock(&self.0).write_all(&message.encode())
    }

    pub(super) fn close(&self) {
        self.1.shutdown();
    }
}
