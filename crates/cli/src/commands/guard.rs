//! `transship guard`: waits beside a `transship move` or `save` for its end. See `crate::guard`.
use std::io::{self, Read};

use transship_vmm::{VmAddress, settle_abandoned};

use crate::{failure::Failure, guard::Word, output};

/// Returns when the other process says that the guest is not ours to resume; puts it back as it was when that ends
/// without such a word.
pub(crate) fn run(vm: &str, will: &str) -> Result<(), Failure> {
    let vm: VmAddress = vm.parse().map_err(|why| Failure::Usage(vec![why]))?;
    let last = last_word(&mut io::stdin());
    if last == Word::End {
        return Ok(());
    }
    let run = last == Word::RunAgain;
    let stands = |error| Failure::NeedsPerson(format!("the guest is stopped: {error}"));
    settle_abandoned(&vm, will, run).map_err(stands)?;
    output::say(match run {
        true => "the command died while the guest stood still; the guest runs on here",
        false => "the command died; the guest is left as it was",
    });
    Ok(())
}

/// What was said last before the pipe has ended.
fn last_word(pipe: &mut dyn Read) -> Word {
    let mut last = Word::LeaveIt;
    let mut byte = [0];
    while let Ok(1) = pipe.read(&mut byte) {
        match Word::read(byte[0]) {
            Some(Word::End) => return Word::End,
            Some(word) => last = word,
            None => break,
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_word_counts_and_the_end_is_the_end() {
        for (words, last) in [
            ("", Word::LeaveIt),
            ("r", Word::RunAgain),
            ("rl", Word::LeaveIt),
            ("lr", Word::RunAgain),
            ("d", Word::End),
            ("rd", Word::End),
            ("rdr", Word::End),
            // Behind what is no word nothing is believed.
            ("rxl", Word::RunAgain),
        ] {
            assert_eq!(last_word(&mut words.as_bytes()), last, "{words:?}");
        }
    }
}
