//! Questions that are asked together. Each way to QEMU and back takes a switch from process to process, twice; and most
//! of the time that an attachment takes goes by in these. QEMU reads the rest of them while we look at the first
//! answer.
use std::{
    ops::Range,
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{
    super::{Command, QmpError, Question},
    COMMAND_WAIT, Socket,
};

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

/// What goes with a command.
#[derive(Default)]
pub(super) struct Beside<'a> {
    /// Asked right before it.
    pub(super) before: &'a [Question],
    /// Asked behind it.
    pub(super) behind: &'a [Question],
    /// Typed ahead behind that.
    pub(super) next: Option<&'a Command>,
}

impl Socket {
    /// Those of the questions that were not asked yet, each once.
    fn unasked<'a>(&self, questions: &'a [Question]) -> Vec<(&'static str, &'a Value)> {
        let mut new = Vec::new();
        for (command, arguments) in questions {
            let is_known = self.asked.iter().any(|asked| asked.is(command, arguments));
            if !is_known && !new.contains(&(*command, arguments)) {
                new.push((*command, arguments));
            }
        }
        new
    }

    /// Questions that were given with these numbers.
    fn await_later(&mut self, ids: Range<u64>, questions: &[(&'static str, &Value)]) {
        let asked = ids.zip(questions);
        let asked = asked.map(|(id, (command, arguments))| Asked {
            id,
            command,
            arguments: (*arguments).clone(),
            result: None,
        });
        self.asked.extend(asked);
    }

    /// Asks all of these that were not asked yet, in this order, and does not wait. Whoever gives one of these commands
    /// gets the answer from here, until [`Socket::forget_answers`]. None of them may change anything.
    ///
    /// # Errors
    /// QEMU is gone, or does not read.
    pub(super) fn ask_ahead(&mut self, questions: &[Question]) -> Result<(), QmpError> {
        let new = self.unasked(questions);
        if !new.is_empty() {
            let ids = self.give(&new, None)?;
            self.await_later(ids, &new);
        }
        Ok(())
    }

    /// Waits until all that was asked ahead is answered: what QEMU said before it was asked has come, too.
    ///
    /// # Errors
    /// QEMU is gone or does not answer; that it refuses one is an answer.
    pub(super) fn await_asked(&mut self) -> Result<(), QmpError> {
        while let Some(at) = self.asked.iter().position(|asked| asked.result.is_none()) {
            self.await_one(at, COMMAND_WAIT)?;
        }
        Ok(())
    }

    /// Waits for the answer to this one of those that were asked.
    fn await_one(&mut self, at: usize, limit: Duration) -> Result<(), QmpError> {
        let deadline = Instant::now() + limit;
        while self.asked[at].result.is_none() {
            let Some(message) = self.message(deadline)? else {
                return Err(self.timeout(self.asked[at].command, limit));
            };
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

    /// Gives all of these, in this order, asks the questions behind them, and waits for what comes of the commands: a
    /// result for each, or the refusal.
    ///
    /// # Errors
    /// QEMU is gone or does not answer.
    pub(super) fn give_all(
        &mut self,
        commands: &[Command],
        questions: &[Question],
        limit: Duration,
    ) -> Result<Vec<Result<Value, QmpError>>, QmpError> {
        let mut all: Vec<_> = commands.iter().map(|(command, arguments)| (*command, arguments)).collect();
        all.extend(self.unasked(questions));
        let ids = self.give(&all, None)?;
        let (given, asked) = all.split_at(commands.len());
        self.await_later(ids.start + given.len() as u64..ids.end, asked);
        self.await_all(ids.zip(given.iter().map(|(command, _)| *command)), limit)
    }

    /// Gives a command without arguments, with a descriptor if it needs one, and asks what goes with it. Its answer.
    ///
    /// # Errors
    /// QEMU is gone, does not answer, or refuses the command. Then nothing was asked that counts.
    pub(super) fn give_and_ask(
        &mut self,
        command: &'static str,
        fd: Option<BorrowedFd<'_>>,
        Beside { before, behind, next }: Beside<'_>,
        limit: Duration,
    ) -> Result<Value, QmpError> {
        let none = json!({});
        let mut all = self.unasked(before);
        let place = all.len();
        all.push((command, &none));
        all.extend(self.unasked(behind));
        let ids = self.give(&all, fd)?;
        let id = ids.start + place as u64;
        self.await_later(ids.start..id, &all[..place]);
        self.await_later(id + 1..ids.end, &all[place + 1..]);
        next.map_or(Ok(()), |next| self.type_ahead(next))?;
        let answer = self.await_answer(id, command, Instant::now() + limit, limit);
        if answer.is_err() {
            [before, behind].into_iter().for_each(|questions| self.forget_answers_to(questions));
        }
        answer
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

    /// The same of these alone.
    pub(super) fn forget_answers_to(&mut self, questions: &[Question]) {
        self.asked.retain(|asked| !questions.iter().any(|(command, arguments)| asked.is(command, arguments)));
    }

    /// What QEMU says to that, if it was asked ahead.
    pub(super) fn answered(
        &mut self,
        command: &str,
        arguments: &Value,
        limit: Duration,
    ) -> Option<Result<Value, QmpError>> {
        let at = self.asked.iter().position(|asked| asked.is(command, arguments))?;
        match self.await_one(at, limit) {
            Ok(()) => self.asked[at].result.clone(),
            Err(error) => Some(Err(error)),
        }
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
