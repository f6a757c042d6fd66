//! `transship guard`: waits beside a `transship move` or `save` for its end. See `crate::guard`.
use std::{
    io,
    os::{fd::AsFd, unix::net::UnixStream},
    time::{Duration, Instant},
};

use transship_engine::Uri;
use transship_guest::{Duty, LastWill};
use transship_lines::{Line, LineSocket};
use transship_vmm::{VmAddress, qemu::libvirt::Purpose, settle_abandoned};

use crate::{
    args::GuardArgs,
    checks::Checks,
    failure::Failure,
    guard::Word,
    output,
    sandbox::{Errands, Left, Role, Sandbox},
};

/// Longer than anything runs.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Returns when the other process has ended after it said that the guest is not ours to resume; puts the guest back as
/// it was when that ends without such a word.
pub(crate) fn run(args: &GuardArgs) -> Result<(), Failure> {
    let mut checks = Checks::default();
    let vm = checks.read("--vm", &args.vm, str::parse::<VmAddress>);
    let sandbox = Sandbox::check(&args.sandbox, &mut checks);
    let (vm, sandbox) = checks.finish(vm.zip(sandbox))?;
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    // It keeps the way to the VMM, which is taken only if the other process dies.
    let connect = match &vm {
        VmAddress::Qemu(path) | VmAddress::Handoff(path) => vec![Uri::Unix(path.clone())],
        VmAddress::Libvirt(_) => Vec::new(),
    };
    // These keep the way to the VMM, which is taken only if the other process dies.
    let _steward = sandbox.steward(&Errands { connect, ..Errands::default() })?;
    sandbox.reach_domain(&vm, &Purpose::Settle)?;
    sandbox.confine(Role::Guard, Left::Nothing)?;
    let Some((will, duty)) = last_word(&mut LineSocket::new(UnixStream::from(socket))) else { return Ok(()) };
    let run = duty == Duty::RunAgain;
    let stands = |error| Failure::NeedsPerson(format!("the guest is stopped: {error}"));
    settle_abandoned(&vm, will, run).map_err(stands)?;
    output::say(match run {
        true => "the command died while the guest stood still; the guest runs on here",
        false => "the command died; the guest is left as it was",
    });
    Ok(())
}

/// What is to be done, by what was said before the socket has ended; none: nothing.
fn last_word(line: &mut LineSocket) -> Option<(LastWill, Duty)> {
    let mut last: Option<(LastWill, Duty)> = None;
    while let Ok(Line { text, fds }) = line.receive(Instant::now() + FOREVER) {
        match (serde_json::from_slice(&text), &mut last) {
            (Ok(Word::Begin(text)), last) => *last = Some((LastWill { text, files: fds }, Duty::LeaveIt)),
            (Ok(Word::RunAgain), Some((_, duty))) => *duty = Duty::RunAgain,
            (Ok(Word::LeaveIt), Some((_, duty))) => *duty = Duty::LeaveIt,
            (Ok(Word::End), last) => *last = None,
            _ => break,
        }
    }
    last
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{io::Write, thread};

    use super::*;

    #[test]
    fn the_last_word_counts_and_the_end_is_the_end() {
        let (begin, again, leave, end) = ("{\"begin\":\"w\"}\n", "\"run-again\"\n", "\"leave-it\"\n", "\"end\"\n");
        for (words, last) in [
            (vec![], None),
            (vec![begin], Some(Duty::LeaveIt)),
            (vec![begin, again], Some(Duty::RunAgain)),
            (vec![begin, again, leave], Some(Duty::LeaveIt)),
            (vec![begin, leave, again], Some(Duty::RunAgain)),
            (vec![begin, again, end], None),
            // The next one is another matter.
            (vec![begin, again, end, begin], Some(Duty::LeaveIt)),
            // Nothing has begun.
            (vec![again], None),
            // Behind what is no word nothing is believed.
            (vec![begin, again, "\"x\"\n", leave], Some(Duty::RunAgain)),
            // Half a word is none.
            (vec![begin, again, "\"end\""], Some(Duty::RunAgain)),
        ] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let reader = thread::spawn(move || last_word(&mut LineSocket::new(ours)));
            theirs.write_all(words.concat().as_bytes()).unwrap();
            drop(theirs);
            assert_eq!(reader.join().unwrap().map(|(_, duty)| duty), last, "{words:?}");
        }
    }
}
