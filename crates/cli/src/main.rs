//! `transship`: the command. Arguments, progress, reports; what happens to a guest is in the engine and the adapters.
//!
//! - `args`, `checks`, `units`: from words to checked values, before anything touches a VM
//! - `commands`: a file for each subcommand
//! - `progress`, `summary`, `output`, `failure`: from numbers to words, and exit codes
//! - `trust`: who the other end is, and whether anybody between can listen
//! - `sandbox`: which rights a process keeps
//! - `source`: how a process takes a guest over that is to be moved or saved
//! - `runtime`: where commands that run are found
//! - `signals`: Ctrl-C; `guard`, `stand_in`, `journal`: what even `kill -9` must not leave behind
#![forbid(unsafe_code)]

mod args;
mod checks;
mod commands;
mod control;
mod failure;
mod flags;
mod guard;
mod hints;
mod journal;
mod keys;
mod output;
mod progress;
mod runtime;
mod sandbox;
mod signals;
mod source;
mod stand_in;
mod summary;
mod trust;
mod units;

use std::{panic, process::ExitCode};

use clap::{Parser, error::ErrorKind};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use tracing::Dispatch;
use tracing_subscriber::{
    filter::{LevelFilter, Targets},
    fmt::MakeWriter,
    layer::SubscriberExt,
    util::SubscriberInitExt,
};

use args::{Cli, Command};
use failure::Failure;

/// Turns on logging to stderr, with the filters of tracing.
pub(crate) const LOG_VARIABLE: &str = "TRANSSHIP_LOG";

fn main() -> ExitCode {
    match parse().and_then(|cli| start_log().map(|()| cli)).and_then(|cli| run(&cli)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// Runs the command. A bug that panics halfway through a move still ends with an exit code that is true.
fn run(cli: &Cli) -> Result<(), Failure> {
    panic::catch_unwind(|| dispatch(cli)).unwrap_or_else(|_| match &cli.command {
        Command::Move(_) | Command::Receive(_) | Command::Relay(_) => Err(Failure::NeedsPerson(
            "a bug ended this process in the middle of a move; check both VMs: at most one of them may run".into(),
        )),
        Command::Save(_) | Command::Fork(_) => Err(Failure::NeedsPerson(
            "a bug ended this process in the middle of a save; check whether the guest runs".into(),
        )),
        Command::Restore(args) if args.lazy => Err(Failure::NeedsPerson(
            "a bug ended this process in the middle of a restore; if the guest was already started, a second process \
             brings its pages"
                .into(),
        )),
        _ => Err(Failure::Failed("a bug ended this process".into())),
    })
}

/// Pages of guests are in our buffers, and keys beside them: they are for no core dump, and for no other process of
/// this user. A synthetic guest is one that others look into.
fn keep_to_ourselves(command: &Command) -> Result<(), Failure> {
    if matches!(command, Command::Guest(_)) {
        return Ok(());
    }
    set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(|error| Failure::Failed(format!("can't turn core dumps of this process off: {error}")))
}

fn dispatch(cli: &Cli) -> Result<(), Failure> {
    keep_to_ourselves(&cli.command)?;
    match &cli.command {
        Command::Check(args) => commands::check::run(args),
        Command::Plan(args) => commands::plan::run(args),
        Command::Move(args) => commands::moving::run(args),
        Command::Receive(args) => commands::receive::run(args),
        Command::Relay(args) => commands::relay::run(args),
        Command::Save(args) => commands::save::run(args),
        Command::Status(args) => commands::steering::status(args),
        Command::Cancel(args) => commands::steering::cancel(args),
        Command::Go(args) => commands::steering::go(args),
        Command::Restore(args) => commands::restore::run(args),
        Command::Clone(args) => commands::clones::run(args),
        Command::Fork(args) => commands::fork::run(args),
        Command::Info(args) => commands::info::run(args),
        Command::Convert(args) => commands::convert::run(args),
        Command::Watch(args) => commands::watch::run(args),
        Command::Balloon(args) => commands::balloon::run(args),
        Command::Guest(args) => commands::guest::run(args),
        Command::Bench { arguments } => commands::bench::run(arguments),
        Command::Guard(args) => commands::guard::run(args),
        Command::StandIn(args) => commands::stand_in::run(args),
        Command::Steward(args) => sandbox::run_steward(args),
        Command::Completions { shell } => commands::shell::completions(*shell),
        Command::Man { subcommand } => commands::shell::manual(subcommand.as_deref()),
    }
}

fn parse() -> Result<Cli, Failure> {
    Cli::try_parse().or_else(|error| match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            error.print()?;
            Err(Failure::OutputClosed)
        }
        // The help itself is the answer to a bare `transship`.
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            Err(Failure::Usage(Vec::new()))
        }
        _ => Err(Failure::Usage(vec![usage(&error.render().to_string())])),
    })
}

/// What clap says on several lines, on one, without the synopsis.
fn usage(rendered: &str) -> String {
    let words = rendered.split("\n\nUsage:").next().unwrap_or(rendered);
    let words = words.split("\n\nFor more information").next().unwrap_or(words);
    let line = words.split("\n\n").map(|part| part.split_whitespace().collect::<Vec<_>>().join(" "));
    let line = line.collect::<Vec<_>>().join("; ");
    format!("{}; see `transship --help`", line.strip_prefix("error: ").unwrap_or(&line))
}

fn start_log() -> Result<(), Failure> {
    let Ok(filter) = std::env::var(LOG_VARIABLE) else {
        talk(|| output::Talk).init();
        return Ok(());
    };
    let filter = filter.parse::<Targets>().map_err(|why| {
        Failure::Usage(vec![format!("{LOG_VARIABLE} {filter:?}: {why}; write debug, or transship_engine=trace")])
    })?;
    // A log that can't be written must not end a move.
    let lines = tracing_subscriber::fmt().with_writer(std::io::stderr).log_internal_errors(false);
    lines.with_max_level(LevelFilter::TRACE).finish().with(filter).init();
    Ok(())
}

/// What is shown without the variable, each on a line of its own: the warnings of all of transship's own crates. The
/// user can do something about each of these.
fn talk<W: for<'w> MakeWriter<'w> + Send + Sync + 'static>(to: W) -> Dispatch {
    let lines = tracing_subscriber::fmt().without_time().with_level(false).with_target(false).with_ansi(false);
    let lines = lines.with_writer(to).log_internal_errors(false).finish();
    lines.with(Targets::new().with_target("transship", LevelFilter::WARN)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All warnings of all crates of this workspace, and nothing else.
    #[test]
    fn warnings_reach_the_user() {
        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        tracing::dispatcher::with_default(&talk(std::sync::Mutex::new(writer)), || {
            tracing::warn!(target: "transship", "1");
            tracing::warn!(target: "transship_engine::destination::accept", "2");
            tracing::warn!(target: "transship_vmm::qemu::destination", "3");
            tracing::warn!(target: "transship_vmm::handoff::socket", "4");
            tracing::warn!(target: "transship_balloon::door", "5");
            tracing::warn!(target: "transship_memory", "6");
            tracing::info!(target: "transship_engine", "not this");
            tracing::warn!(target: "vhost_user_backend", "nor that");
        });
        let mut said = String::new();
        std::io::Read::read_to_string(&mut reader, &mut said).expect("what was said");
        assert_eq!(said.split_whitespace().collect::<Vec<_>>(), ["1", "2", "3", "4", "5", "6"]);
    }
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_clap_says_fits_one_line() {
        let cases: [(&[&str], &[&str]); 3] = [
            (&["transship", "move", "--vm", "qemu:/x"], &["not provided: --to <URI>"]),
            (&["transship", "move", "--chanels", "3"], &["'--chanels'", "'--channels'"]),
            (&["transship", "move", "--zero-pages", "mian"], &["'mian'", "--zero-pages", "'main'"]),
        ];
        for (arguments, parts) in cases {
            let error = Cli::try_parse_from(arguments).expect_err("a usage error");
            let line = usage(&error.render().to_string());
            assert!(!line.contains('\n') && !line.contains("Usage:"), "{line}");
            for part in parts {
                assert!(line.contains(part), "{part:?} is not in {line:?}");
            }
        }
    }

    /// A command line that is shown to people is one that works.
    #[test]
    fn examples_are_command_lines() {
        let mut command = Cli::command();
        command.build();
        let help = command.get_subcommands_mut().map(|sub| sub.render_long_help().to_string()).collect::<String>();
        let readme = include_str!("../../../README.md");
        let mut seen = 0;
        for line in help.lines().chain(readme.lines()).map(str::trim) {
            let line = line.split_once("$ ").map_or(line, |(_, after_prompt)| after_prompt);
            let line = line.split_once(" # ").map_or(line, |(command, _)| command);
            if line.starts_with("transship ") && line.contains(" --") {
                let words = line.trim_end_matches(" &").split_whitespace();
                Cli::try_parse_from(words).unwrap_or_else(|error| panic!("{line}: {error}"));
                seen += 1;
            }
        }
        assert!(seen >= 15, "only {seen} examples found");
    }

    #[test]
    fn short_help_fits_a_screen() {
        let mut all = Cli::command();
        all.build();
        let names: Vec<_> =
            all.get_subcommands().filter(|sub| !sub.is_hide_set()).map(|sub| sub.get_name().to_string()).collect();
        assert!(names.contains(&"move".to_string()), "{names:?}");
        for name in names {
            let sub = all.find_subcommand_mut(&name).expect("just listed");
            let help = sub.clone().term_width(80).render_help().to_string();
            assert!(help.lines().count() <= 24, "{name}: {} lines\n{help}", help.lines().count());
        }
    }
}
