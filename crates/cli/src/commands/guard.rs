//! `transship guard`: waits beside a `transship move` or `save` for its end. See `crate::guard`.
use std::io::{self, Read};

use transship_vmm::{VmAddress, settle_abandoned};

use crate::{failure::Failure, guard::DISARM, output};

/// Returns when the other process says that the guest is not ours to resume; puts it back as it was when that ends without a word.
pub(crate) fn run(vm: &str, will: &str, run: bool) -> Result<(), Failure> {
    let vm: VmAddress = vm.parse().map_err(|why| Failure::Usage(vec![why]))?;
    let mut word = [0];
    match io::stdin().read(&mut word) {
        Ok(1) if word[0] == DISARM => Ok(()),
        _ => {
            let stands = |error| Failure::NeedsPerson(format!("the guest stands still: {error}"));
            settle_abandoned(&vm, will, run).map_err(stands)?;
            output::say(match run {
                true => "the command died while the guest stood still; the guest runs on here",
                false => "the command died; the guest stands as it stood before",
            });
            Ok(())
        }
    }
}
