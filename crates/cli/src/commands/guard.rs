//! `transship guard`: waits beside a `transship move` for its end. See `crate::guard`.
use std::io::{self, Read};

use transship_vmm::{VmAddress, resume_abandoned};

use crate::{failure::Failure, guard::DISARM, output};

/// Returns when the move says that the guest is not ours to resume; resumes it when the move ends without a word.
pub(crate) fn run(vm: &str) -> Result<(), Failure> {
    let vm: VmAddress = vm.parse().map_err(|why| Failure::Usage(vec![why]))?;
    let mut word = [0];
    match io::stdin().read(&mut word) {
        Ok(1) if word[0] == DISARM => Ok(()),
        _ => {
            resume_abandoned(&vm).map_err(|error| Failure::NeedsPerson(format!("the guest stands still: {error}")))?;
            output::say("the move died while the guest stood still; the guest runs on here");
            Ok(())
        }
    }
}
