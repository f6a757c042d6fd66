//! `transship move --recover`: goes on for a move with post-copy all of whose processes are dead.
use std::sync::Arc;

use transship_engine::{Error, Progress, Report};
use transship_vmm::{GivenAway, given_away};

use super::{Request, Way};
use crate::{
    args::{Converge, MoveArgs, Peer},
    checks::Checks,
    failure::Failure,
    journal::{Journal, Unfinished},
    output,
    progress::Display,
    sandbox::{Errands, Left, Role, Steward},
    summary,
};

/// What says nothing of a guest that is somewhere else already.
pub(super) fn refuse(args: &MoveArgs, checks: &mut Checks) {
    let is_held = args.steering.hold || args.steering.hold_for.is_some() || args.steering.hold_until.is_some();
    let all = [
        ("--peer", args.peer == Peer::Qemu),
        ("--converge", args.converge != Converge::Never),
        ("--deadline", args.deadline.is_some()),
        ("--max-downtime", args.max_downtime.is_some()),
        ("--at-stop", args.at_stop.is_some()),
        ("--hold", is_held),
        ("--control", args.steering.control.is_some()),
        ("--balloon", args.balloon.is_some()),
        ("--verify", args.verify),
        ("--no-lending", args.no_lending),
    ];
    for (flag, _) in all.into_iter().filter(|(_, is_given)| *is_given) {
        checks.mistake(format!("{flag}: not with --recover, whose guest has been handed over already; leave it out"));
    }
}

pub(super) fn run(request: &Request, json: bool) -> Result<(), Failure> {
    let (progress, mut report) = (Progress::new(), Report::default());
    // It cleans up: it is told to after everything else has ended.
    let mut steward = None;
    let outcome = recover(request, &mut steward, &progress, &mut report);
    summary::recovered(outcome, report, json)
}

fn recover(
    request: &Request,
    steward: &mut Option<Steward>,
    progress: &Arc<Progress>,
    report: &mut Report,
) -> Result<(), Error> {
    let Way::ToTransship(options) = &request.way else {
        return Err(Error::Bug("a stock QEMU takes no guest before its pages"));
    };
    let GivenAway { memory, process } = given_away(&request.vm)?;
    let (mut journal, Unfinished { what, before }) = Journal::take_over(process).map_err(Error::unfit)?;
    let sandbox = request.sandbox();
    let connect = vec![request.to.clone()];
    *steward = sandbox.steward(&Errands { connect, journal: journal.path(), ..Errands::default() })?;
    sandbox.confine(Role::Move, Left::Nothing)?;
    let failed = |source| Error::Io { what: "start a thread".into(), source };
    let _display = Display::start(progress).map_err(failed)?;
    output::say(
        "going on with the move; if this command ends, also by Ctrl-C, the guest waits for its pages until it is started \
         again. If the receiver has ended and the guest never ran there, end this command and resume the guest here",
    );
    what.recover(memory, before, (&request.to, options), progress, report)?;
    journal.erase();
    Ok(())
}
