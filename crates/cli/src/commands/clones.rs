//! `transship clone`: a guest from an image that it shares with others.
use std::{
    path::Path,
    process::{Command, Stdio},
    time::Instant,
};

use transship_engine::{CloneSource, Error, Progress, Report, RestoreOptions, StandIn, arguments, clone_guest};
use transship_vmm::{VmAddress, attach_destination};

use crate::{
    args::CloneArgs,
    checks::Checks,
    failure::Failure,
    output,
    sandbox::Sandbox,
    signals::{Side, Watcher},
    stand_in, summary,
};

pub(crate) fn run(args: &CloneArgs) -> Result<(), Failure> {
    let since = Instant::now();
    if let Some(folder) = &args.print_args {
        return Ok(output::result(&format!("{}\n", shell_words(&arguments(folder)?)))?);
    }
    let mut checks = Checks::default();
    // The command line has both where it does not have --print-args.
    let (text, from) = (args.vm.clone().unwrap_or_default(), args.from.clone().unwrap_or_default());
    let vm = checks.read("--vm", &text, str::parse::<VmAddress>);
    let vm = checks.finish(vm)?;
    let progress = Progress::new();
    let _signals = Watcher::cancelling(&progress, Side::Restore)?;
    let mut report = Report::default();
    let run = match (args.run, args.stopped) {
        (true, _) => Some(true),
        (_, true) => Some(false),
        _ => None,
    };
    let options = RestoreOptions { run, ..RestoreOptions::default() };
    let sandbox = Sandbox::by_default()?;
    let outcome = attach_destination(&vm).map_err(Error::from).and_then(|mut guest| {
        let mut stand_in = stand_in::Process::new(&text, &sandbox).freezing(guest.process());
        let lazily = Some(&mut stand_in as &mut dyn StandIn);
        clone_guest(guest.as_mut(), &CloneSource::open(&from)?, &options, lazily, since, &progress, &mut report)
    });
    let outcome = outcome.and_then(|()| match &args.after {
        Some(command) => after(command, &vm, args.number).map_err(Error::Unfit),
        None => Ok(()),
    });
    summary::cloned(outcome, report, args.json)
}

/// Runs the user's command for a clone that is there.
///
/// # Errors
/// It fails; the clone goes on.
pub(super) fn after(command: &str, vm: &VmAddress, number: u32) -> Result<(), String> {
    let (VmAddress::Qemu(socket) | VmAddress::Handoff(socket)) = vm else {
        return Err(format!("clone {number} has no socket of its own for the command of --after"));
    };
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).env("TRANSSHIP_SOCKET", socket).env("TRANSSHIP_NUMBER", number.to_string());
    let ended = shell.stdin(Stdio::null()).stdout(Stdio::from(std::io::stderr())).status();
    let failed = |why: String| format!("clone {number} is there, but the command of --after failed: {why}");
    match ended {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(failed(status.to_string())),
        Err(error) => Err(failed(error.to_string())),
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
