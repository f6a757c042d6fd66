//! Questions that are asked together. Each way to QEMU and back takes a switch from process to process, twice; and most
//! of the time that an attachment takes goes by in these.
use std::time::Instant;

use serde_json::Value;

use super::{super::QmpError, COMMAND_WAIT, Socket};

/// An answer that came before somebody asked.
pub(super) struct Answer {
    command: &'static str,
    arguments: Value,
    /// Or the reason why QEMU refuses.
    result: Result<Value, String>,
}

impl Socket {
    /// Asks all of these, in this order. Whoever gives one of these commands gets the answer from here, until
    /// [`Socket::forget_answers`]. None of them may change anything.
    ///
    /// # Errors
    /// QEMU is gone or does not answer; that it refuses one is an answer.
    pub(super) fn ask_ahead(&mut self, questions: &[(&'static str, Value)]) -> Result<(), QmpError> {
        let mut given = Vec::with_capacity(questions.len());
        for (command, arguments) in questions {
            given.push((self.give(command, arguments.clone(), None)?, *command, arguments.clone()));
        }
        let deadline = Instant::now() + COMMAND_WAIT;
        for (id, command, arguments) in given {
            let result = loop {
                let Some(message) = self.message(deadline)? else { return Err(self.timeout(command, COMMAND_WAIT)) };
                match self.answer(id, command, message) {
                    Ok(None) => {}
                    Ok(Some(answer)) => break Ok(answer),
                    Err(QmpError::Refused { reason, .. }) => break Err(reason),
                    Err(error) => return Err(error),
                }
            };
            self.ahead.push(Answer { command, arguments, result });
        }
        Ok(())
    }

    /// What was asked ahead counts no more.
    pub(super) fn forget_answers(&mut self) {
        self.ahead.clear();
    }

    /// What QEMU has said to that ahead.
    pub(super) fn answered(&self, command: &str, arguments: &Value) -> Option<Result<Value, QmpError>> {
        let answer = self.ahead.iter().find(|answer| answer.command == command && answer.arguments == *arguments)?;
        let refused = |reason: &String| QmpError::Refused { command: command.to_owned(), reason: reason.clone() };
        Some(answer.result.clone().map_err(|reason| refused(&reason)))
    }
}
