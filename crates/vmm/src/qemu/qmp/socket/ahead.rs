//! Questions that are asked together. Each way to QEMU and back takes a switch from process to process, twice; and most
//! of the time that an attachment takes goes by in these.
use std::{
    os::fd::BorrowedFd,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};

use super::{
    super::{Command, QmpError, Question},
    COMMAND_WAIT, Socket,
};

/// The least number of a descriptor set of ours.
const SET_MIN: u64 = 1 << 30;

/// What was asked before somebody wants to know.
pub(super) struct Asked {
    id: u64,
    command: &'static str,
    arguments: Value,
    /// None: it has not come yet.
    result: Option<Result<Value, QmpError>>,
}

impl Asked {
    fn is(&self, command: &str, arguments: &Value) -> bool {
        self.command == command && self.arguments == *arguments
    }
}

impl Socket {
    /// Asks all of these that were not asked yet, in this order, and waits for no answer.
    ///
    /// # Errors
    /// QEMU is gone, or reads nothing.
    pub(super) fn begin_to_ask(&mut self, questions: &[Question]) -> Result<(), QmpError> {
        let mut new: Vec<(&'static str, &Value)> = Vec::new();
        for (command, arguments) in questions {
            let is_known = self.asked.iter().any(|asked| asked.is(command, arguments));
            if !is_known && !new.contains(&(*command, arguments)) {
                new.push((*command, arguments));
            }
        }
        if new.is_empty() {
            return Ok(());
        }
        let asked = self.give(&new, None)?.zip(new);
        let asked =
            asked.map(|(id, (command, arguments))| Asked { id, command, arguments: arguments.clone(), result: None });
        self.asked.extend(asked);
        Ok(())
    }

    /// The same, and waits. Whoever gives one of these commands gets the answer from here, until
    /// [`Socket::forget_answers`]. None of them may change anything.
    ///
    /// # Errors
    /// QEMU is gone or does not answer; that it refuses one is an answer.
    pub(super) fn ask_ahead(&mut self, questions: &[Question]) -> Result<(), QmpError> {
        self.begin_to_ask(questions)?;
        let deadline = Instant::now() + COMMAND_WAIT;
        while let Some(command) = self.asked.iter().find(|asked| asked.result.is_none()).map(|asked| asked.command) {
            let Some(message) = self.message(deadline)? else { return Err(self.timeout(command, COMMAND_WAIT)) };
            self.sort(message)?;
        }
        Ok(())
    }

    /// What came while somebody waited for something else: an event, an answer to what was asked ahead, or one for
    /// which nobody waits any more.
    pub(super) fn sort(&mut self, message: Value) -> Result<(), QmpError> {
        if message.get("event").is_some() {
            self.keep(message);
        } else if message.get("id").is_none() {
            return Err(self.protocol("an answer to no command"));
        } else if let Some(asked) = self.asked.iter_mut().find(|asked| message["id"] == asked.id) {
            asked.result = Some(result_of(asked.command, message));
        }
        Ok(())
    }

    /// Gives all of these, in this order, and waits for all answers: a result each, or the refusal. A descriptor goes
    /// with the first.
    ///
    /// # Errors
    /// QEMU is gone or does not answer.
    pub(super) fn give_all(
        &mut self,
        commands: &[Command],
        fd: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> Result<Vec<Result<Value, QmpError>>, QmpError> {
        let given: Vec<_> = commands.iter().map(|(command, arguments)| (*command, arguments)).collect();
        let ids = self.give(&given, fd)?;
        self.await_all(ids.zip(given.into_iter().map(|(command, _)| command)), limit)
    }

    /// Gives commands that use this descriptor, puts it into a set for them before, and takes it away behind them.
    ///
    /// # Errors
    /// As [`Socket::give_all`]; or QEMU does not take the descriptor.
    pub(super) fn give_with_set(
        &mut self,
        fd: BorrowedFd<'_>,
        commands: &dyn Fn(u64) -> Vec<Command>,
        limit: Duration,
    ) -> Result<Vec<Result<Value, QmpError>>, QmpError> {
        // One that nobody else has: QEMU counts its own from 0, and what a killed process has left has another.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let set = SET_MIN + u64::from(now.subsec_nanos());
        let mut all = vec![("add-fd", json!({ "fdset-id": set }))];
        all.extend(commands(set));
        all.push(("remove-fd", json!({ "fdset-id": set })));
        let given: Vec<_> = all.iter().map(|(command, arguments)| (*command, arguments)).collect();
        let ids = self.give(&given, Some(fd))?;
        let mut results = self.await_all(ids.zip(given.into_iter().map(|(command, _)| command)), limit)?;
        // If the last fails QEMU keeps an open file that nobody uses, until we disconnect.
        let _ = results.pop();
        results.remove(0)?;
        Ok(results)
    }

    fn await_all(
        &mut self,
        given: impl Iterator<Item = (u64, &'static str)>,
        limit: Duration,
    ) -> Result<Vec<Result<Value, QmpError>>, QmpError> {
        let deadline = Instant::now() + limit;
        let mut results = Vec::new();
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
        self.asked.clear();
    }

    /// What QEMU has said to that ahead, if it has.
    pub(super) fn answered(&self, command: &str, arguments: &Value) -> Option<Result<Value, QmpError>> {
        self.asked.iter().find(|asked| asked.is(command, arguments))?.result.clone()
    }
}

/// The result in an answer, or why there is none.
pub(super) fn result_of(command: &str, mut answer: Value) -> Result<Value, QmpError> {
    match answer.get("error") {
        Some(error) => {
            let reason = error["desc"].as_str().unwrap_or("no reason given").to_owned();
            Err(QmpError::Refused { command: command.to_owned(), reason })
        }
        None => Ok(answer["return"].take()),
    }
}
