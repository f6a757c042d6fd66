//! `transship convert`: one layout of a snapshot from the other.
use transship_engine::{Error, FileUri, Progress, Report, convert};

use super::info::place;
use crate::{
    args::ConvertArgs,
    checks::Checks,
    failure::Failure,
    keys,
    progress::Display,
    signals::{self, Side, Watcher},
    summary,
};

pub(crate) fn run(args: &ConvertArgs) -> Result<(), Failure> {
    let mut checks = Checks::default();
    let from = checks.read("FROM", &args.from, place);
    let to = checks.read("TO", &args.to, str::parse::<FileUri>);
    let identities = keys::identities(&mut checks, &args.identity);
    let ((from, to), identities) = checks.finish(from.zip(to).zip(identities))?;
    signals::outlive_file_limits()?;
    let progress = Progress::new();
    let _signals = Watcher::cancelling(&progress, Side::Conversion)?;
    let mut report = Report::default();
    let outcome =
        Display::start(&progress).map_err(|source| Error::Io { what: "start a thread".into(), source }).and_then(
            |_display| convert(&from, &to, args.format.map(Into::into), identities.as_ref(), &progress, &mut report),
        );
    summary::converted(outcome, report, args.json)
}
