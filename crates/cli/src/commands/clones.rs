//! `transship clone`: a guest from an image that it shares with others.
//!
//! The image's manifest is read, and its files are opened, with all rights; so are the processes looked at that use the
//! clone's disks. Then the rights are given up. The command of --after is run by the steward.
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use transship_engine::{
    CloneSource, Error, Progress, Report, RestoreOptions, StandIn, UserCommand, arguments, clone_guest,
};
use transship_memory::GuestMemory;
use transship_vmm::{VmAddress, attach_destination};

use crate::{
    args::CloneArgs,
    checks::Checks,
    failure::Failure,
    flags, output,
    sandbox::{Errands, Role, Sandbox, Steward},
    signals::{Side, Watcher},
    stand_in, summary,
};

/// The phase of a command of the user's.
const AFTER: &str = "after";

pub(crate) fn run(args: &CloneArgs) -> Result<(), Failure> {
    let since = Instant::now();
    if let Some(folder) = &args.print_args {
        return Ok(output::result(&format!("{}\n", shell_words(&arguments(folder)?)))?);
    }
    let mut checks = Checks::default();
    // The command line has both where it does not have --print-args.
    let (text, from) = (args.vm.clone().unwrap_or_default(), args.from.clone().unwrap_or_default());
    let vm = checks.read("--vm", &text, str::parse::<VmAddress>);
    let sandbox = Sandbox::check(&args.sandbox, &mut checks);
    let (vm, sandbox) = checks.finish(vm.zip(sandbox))?;
    let after = args.after.as_ref().map(|command| After::of(command, &vm, args.number)).transpose();
    let after = after.map_err(Failure::Failed)?;
    let progress = Progress::new();
    let _signals = Watcher::cancelling(&progress, Side::Restore)?;
    let mut report = Report::default();
    // It is told to end after everything else has ended.
    let mut steward = None;
    let request = Request { vm, text, from, sandbox, after, run: flags::run_state(args.run, args.stopped) };
    let outcome = request.clone(since, &mut steward, &progress, &mut report);
    summary::cloned(outcome, report, args.json)
}

/// What was asked for.
struct Request {
    vm: VmAddress,
    /// As the user wrote it.
    text: String,
    from: PathBuf,
    sandbox: Sandbox,
    after: Option<After>,
    run: Option<bool>,
}

impl Request {
    fn clone(
        &self,
        since: Instant,
        steward: &mut Option<Steward>,
        progress: &Arc<Progress>,
        report: &mut Report,
    ) -> Result<(), Error> {
        let mut guest = attach_destination(&self.vm)?;
        let image = CloneSource::open(&self.from)?;
        let (mut errands, mut stand_in) = (Errands::default(), None);
        if may_be_lazy(&guest.memory()) {
            guest.prepare_to_miss();
            stand_in = Some(stand_in::Process::new(&self.text, &self.sandbox).freezing(guest.process()).start()?);
            errands = Errands::of_filling(guest.as_ref());
        }
        errands.commands.extend(self.after.iter().map(|after| (AFTER, after.command.clone())));
        *steward = self.sandbox.steward(&errands)?;
        self.sandbox.confine_when_opened(Role::Fill);
        let options = RestoreOptions { run: self.run, ..RestoreOptions::default() };
        let lazily = stand_in.as_mut().map(|process| process as &mut dyn StandIn);
        clone_guest(guest.as_mut(), &image, &options, lazily, since, progress, report)?;
        self.after.as_ref().map_or(Ok(()), After::run).map_err(Error::unfit)
    }
}

/// Memory that maps something is a mapping of the image, or refused. Any other is filled when it is touched, if it can
/// be empty.
fn may_be_lazy(memory: &GuestMemory) -> bool {
    let maps = memory.regions().iter().any(|region| region.file_below().is_some());
    !maps && memory.regions().len() == 1 && memory.check_can_be_empty().is_ok()
}

/// The user's command for a clone that is there.
pub(super) struct After {
    command: UserCommand,
    number: u32,
}

impl After {
    /// # Errors
    /// The clone has no socket of its own.
    pub(super) fn of(command: &str, vm: &VmAddress, number: u32) -> Result<Self, String> {
        let (VmAddress::Qemu(socket) | VmAddress::Handoff(socket)) = vm else {
            return Err(format!("clone {number} has no socket of its own for the command of --after"));
        };
        let variable = |name: &str, value: String| (name.to_owned(), value);
        let environment = vec![
            variable("TRANSSHIP_SOCKET", socket.display().to_string()),
            variable("TRANSSHIP_NUMBER", number.to_string()),
        ];
        Ok(Self { command: UserCommand { shell: command.to_owned(), environment }, number })
    }

    /// # Errors
    /// It fails; the clone goes on.
    pub(super) fn run(&self) -> Result<(), String> {
        let number = self.number;
        let failed = |why: String| format!("clone {number} is there, but the command of --after failed: {why}");
        match self.command.run(AFTER) {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(failed(status.to_string())),
            Err(error) => Err(failed(error.to_string())),
        }
    }
}

/// Words as a shell takes them.
pub(super) fn shell_words(words: &[String]) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./,=:@+".contains(c);
    let quoted = |word: &String| match word.chars().all(is_plain) && !word.is_empty() {
        true => word.clone(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    };
    words.iter().map(quoted).collect::<Vec<_>>().join(" ")
}

/// What `{args}` of a command is replaced by.
pub(super) fn quoted_arguments(folder: &Path) -> Result<String, Error> {
    arguments(folder).map(|words| shell_words(&words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_where_a_shell_would_change_them() {
        let words = ["-object", "a,b=c/d", "it's", "", "$x y"].map(str::to_owned);
        assert_eq!(shell_words(&words), r"-object a,b=c/d 'it'\''s' '' '$x y'");
    }
}
