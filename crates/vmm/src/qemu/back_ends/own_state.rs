//! Back ends of networks that have a state of their own, which QEMU (10.0 and newer) asks for when it saves that of its
//! devices.
//!
//! passt is one. It hands its connections over then, and its first versions that can (Debian 13's is of May 2025) end
//! when they have done so: a guest that stays has no network any more. Newer ones go on, and have an option
//! `--migrate-exit` by which they don't.
use std::fs;

/// The first QEMU that asks the back end of a network. What a back end has, QEMU does not say: 11.1 crashes at
/// `x-query-virtio-status` of such a device.
pub(super) const ASKS: (u64, u64) = (10, 0);
/// Of passt: it would go on without.
const OPTION: &str = "--migrate-exit";
/// Of a passt that ends.
const LAST_WORDS: &str = "Migration complete, exiting";

/// Whether the process ends when it has given its state, or may do so for all that can be seen of it.
pub(super) fn ends(pid: i32) -> bool {
    let has = |text: &[u8], word: &str| text.windows(word.len()).any(|piece| piece == word.as_bytes());
    let (arguments, programs) = (fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default(), programs(pid));
    let say = |word: &str| programs.iter().any(|program| has(program, word));
    programs.is_empty() || has(&arguments, OPTION) || (say(LAST_WORDS) && !say(OPTION))
}

/// Its program, and passt where a loader has started that; none: they may not be read.
fn programs(pid: i32) -> Vec<Vec<u8>> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let passt = maps.lines().filter(|line| line.rsplit('/').next().is_some_and(|name| name.starts_with("passt")));
    let mapped = passt.filter_map(|line| Some(format!("/proc/{pid}/map_files/{}", line.split_once(' ')?.0)));
    let files = mapped.chain([format!("/proc/{pid}/exe")]);
    files.map(|path| fs::read(path).ok()).collect::<Option<_>>().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{
        io::Read,
        path::Path,
        process::{Command, Stdio},
    };

    use super::*;

    fn ends_when_run(program: &Path, argument: &str) -> bool {
        let mut process = Command::new(program).args(["1000", argument]).spawn().unwrap();
        let ends = ends(process.id() as i32);
        process.kill().unwrap();
        process.wait().unwrap();
        ends
    }

    #[test]
    fn a_program_that_says_that_it_ends_is_known_from_one_that_can_go_on() {
        // It has the words of both.
        assert!(!ends(std::process::id() as i32));
        let folder = tempfile::tempdir().unwrap();
        for (words, argument, expected) in
            [("", "1", false), (LAST_WORDS, "1", true), (&format!("{LAST_WORDS} {OPTION}"), "1", false)]
        {
            let program = folder.path().join(format!("program{}", words.len()));
            // By somebody else: a program that one of our threads still has open for writing can't be run.
            let script = "cp -L /bin/sleep \"$0\" && printf %s \"$1\" >>\"$0\"";
            assert!(Command::new("sh").args(["-c", script]).arg(&program).arg(words).status().unwrap().success());
            assert_eq!(ends_when_run(&program, argument), expected, "{words:?}");
        }
        assert!(ends(i32::MAX), "nothing can be seen of it");
    }

    #[test]
    fn an_option_by_which_it_ends_is_seen() {
        let arguments = ["-c", "echo; read line", OPTION];
        let pipes = || Stdio::piped();
        let mut process = Command::new("sh").args(arguments).stdin(pipes()).stdout(pipes()).spawn().unwrap();
        // Its arguments are there a moment after it is.
        process.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        assert!(ends(process.id() as i32));
        process.kill().unwrap();
        process.wait().unwrap();
    }
}
