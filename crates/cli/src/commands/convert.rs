//! `transship convert`: one layout of a snapshot from the other.
use std::sync::Arc;

use transship_engine::{FileUri, Format, Progress, Report, convert};

use super::info::place;
use crate::{
    args::ConvertArgs,
    checks::Checks,
    failure::Failure,
    keys,
    sandbox::{Role, Sandbox},
    signals::{self, Held, Side},
    source::{Place, Waiting, WhenOpened},
    summary,
};

pub(crate) fn run(args: &ConvertArgs) -> Result<(), Failure> {
    let mut checks = Checks::default();
    let from = checks.read("FROM", &args.from, place);
    let to = checks.read("TO", &args.to, str::parse::<FileUri>);
    let identities = keys::identities(&mut checks, &args.identity);
    let recipients = keys::recipients(&mut checks, &args.encrypt_to);
    let format: Option<Format> = args.format.map(Into::into);
    if !args.encrypt_to.is_empty() && format.is_some_and(|format| format != Format::Stream) {
        let why = "only a stream is written from the beginning to the end";
        checks.mistake(format!("--encrypt-to: {why}; use it with --format stream"));
    }
    let sandbox = Sandbox::check(&args.sandbox, &mut checks);
    let keys = identities.zip(recipients);
    let (((from, to), (identities, recipients)), sandbox) = checks.finish(from.zip(to).zip(keys).zip(sandbox))?;
    signals::outlive_file_limits()?;
    let progress = Progress::new();
    let waiting =
        Waiting { signals: Held::hold()?, side: Side::Conversion, control: None, progress: Arc::clone(&progress) };
    let place = Place::of(&to, format == Some(Format::Raw));
    let threads = WhenOpened::confine(waiting, &sandbox, Role::Convert, place);
    let mut report = Report::default();
    let outcome = convert(&from, &to, format, (identities.as_ref(), recipients.as_ref()), &progress, &mut report);
    drop(threads);
    summary::converted(outcome, report, args.json)
}
