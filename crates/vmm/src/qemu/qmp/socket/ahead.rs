//! Questions that are asked together. Each way to QEMU and back takes a switch from process to process, twice; and most
//! of the time that an attachment takes goes by in these.
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{
    super::{Command, QmpError, Question},
    COMMAND_WAIT, Socket,
};

/// An answer that came before somebody asked.
pub(super) struct Answer {
    command: &'static str,
    arguments: Value,
    result: Result<Value, QmpError>,
}

impl Socket {
    /// Asks all of these, in this order. Whoever gives one of these commands gets the answer from here, until
    /// [`Socket::forget_answers`]. None of them may change anything.
    ///
    /// # Errors
    /// QEMU is gone or does not answer; that it refuses one is an answer.
    pub(super) fn ask_ahead(&mut self, questions: &[Question]) -> Result<(), QmpError> {
        let results = self.give_all(questions, COMMAND_WAIT)?;
        let answers = questions.iter().zip(results);
        self.ahead.extend(answers.map(|((command, arguments), result)| Answer {
            command,
            arguments: arguments.clone(),
            result,
        }));
        Ok(())
    }

    /// Gives all of these, in this order, and waits for all answers: a result each, or the refusal.
    ///
    /// # Errors
    /// QEMU is gone or does not answer.
    pub(super) fn give_all(
        &mut self,
        commands: &[Command],
        limit: Duration,
    ) -> Result<Vec<Result<Value, QmpError>>, QmpError> {
        let give = |(command, arguments): &Command| Ok((self.give(command, arguments.clone(), None)?, *command));
        let given = commands.iter().map(give).collect::<Result<Vec<_>, QmpError>>()?;
        let deadline = Instant::now() + limit;
        let mut results = Vec::with_capacity(given.len());
        for (id, command) in given {
            match self.await_answer(id, command, deadline, limit) {
                Err(error) if !matches!(error, QmpError::Refused { .. }) => return Err(error),
                result => results.push(result),
            }
        }
        Ok(results)
    }

    /// What was asked ahead counts no more.
    pub(super) fn forget_answers(&mut self) {
        self.ahead.clear();
    }

    /// What QEMU has said to that ahead.
    pub(super) fn answered(&self, command: &str, arguments: &Value) -> Option<Result<Value, QmpError>> {
        let answer = self.ahead.iter().find(|answer| answer.command == command && answer.arguments == *arguments)?;
        Some(answer.result.clone())
    }
}
