//! The rules of CONTRIBUTING.md that a program can look at. Each finding says where it is and how to mend it.
#![allow(clippy::unwrap_used)]
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

const WIDTH: usize = 120;
const LONGEST_FUNCTION: usize = 70;

/// Where `unsafe` may stand, and what for. Whoever adds a line here says so in docs/architecture.md, too.
const UNSAFE: [(&str, &str); 11] = [
    ("crates/memory/src/", "guest memory is mapped, and read while others write to it"),
    ("crates/memory/tests/", "the same, from outside"),
    ("crates/ring/src/", "places of rings that threads hand over"),
    ("crates/isal/", "foreign functions"),
    ("crates/lines/src/tcp.rs", "two system calls that have no safe wrapper"),
    ("crates/codec/src/", "foreign functions"),
    ("crates/codec/tests/", "the stock zlib's own, to compare with"),
    ("crates/vmm/tests/qemu/sandboxed.rs", "a filter that is set between fork and exec"),
    ("crates/vmm/src/qemu/", "attaching: ptrace, and a socket's peer"),
    ("crates/vmm/src/handoff/userfaultfd.rs", "a system call that has no safe wrapper"),
    ("crates/vmm/src/synthetic/mapping.rs", "it is the guest"),
];

/// Where something sleeps in the product, and why nothing wakes it.
const SLEEP: [(&str, &str); 13] = [
    ("crates/engine/src/fail_point.rs", "tests hold a process there"),
    ("crates/engine/src/filling/stand_in.rs", "an error that stays, looked at again until the VMM has ended"),
    ("crates/vmm/src/freeze.rs", "the kernel does not say when a stopped process stands"),
    ("crates/vmm/src/qemu/back_ends/rest.rs", "a count in a guest's memory, which others write"),
    ("crates/vmm/src/qemu/held.rs", "the kernel does not say when another's thread begins to wait"),
    (
        "crates/vmm/src/qemu/inject/tracee.rs",
        "a signal would tell, but in a program of many threads anybody may get it",
    ),
    ("crates/vmm/src/handoff/mod.rs", "a socket that takes one client, and does not say when it is free"),
    ("crates/vmm/src/qemu/abandoned.rs", "the same"),
    ("crates/cli/src/commands/fork.rs", "nothing says when somebody begins to listen at a socket"),
    ("crates/vmm/src/qemu/libvirt/carrier.rs", "events that may be under way"),
    ("crates/vmm/src/qemu/libvirt/claim.rs", "the kernel does not say when a name is free"),
    ("crates/vmm/src/qemu/libvirt/serving.rs", "a daemon that is restarted"),
    ("crates/vmm/src/qemu/machine.rs", "QEMU has no event for the end of finish-migrate"),
];

/// Functions that may be longer, and why.
const LONG: [(&str, &str); 1] = [("simulate", "a model of a link, read from top to bottom")];

/// Crates that stand side by side: none uses another.
const SIBLINGS: [&str; 3] = ["engine", "vmm", "balloon"];

/// The parts of the engine, those that stand on fewer others first, and which of the others each uses. What is not here
/// is everybody's (errors, options, progress, sets of pages), and uses none of these.
const ENGINE: [(&str, &[&str]); 36] = [
    ("digest", &[]),
    ("filling", &[]),
    ("forecast", &[]),
    ("free", &[]),
    ("guarded", &[]),
    ("pacer", &[]),
    ("pacing", &["forecast"]),
    ("scan", &[]),
    ("stream", &[]),
    ("transport", &[]),
    ("control", &["transport"]),
    ("owed", &["control"]),
    ("at_stop", &["control"]),
    ("hold", &["control", "forecast"]),
    ("converging", &["forecast", "hold"]),
    ("door", &["transport"]),
    ("ending", &["guarded"]),
    ("unplug", &["control", "guarded"]),
    ("channels", &["control", "free", "pacer", "scan", "transport"]),
    ("plan", &["control", "forecast", "pacing", "transport"]),
    (
        "rounds",
        &[
            "at_stop",
            "channels",
            "converging",
            "forecast",
            "free",
            "guarded",
            "hold",
            "pacing",
            "plan",
            "scan",
            "unplug",
        ],
    ),
    ("hand_over", &["ending", "guarded", "rounds"]),
    ("moving", &["at_stop", "ending", "guarded", "rounds"]),
    ("destination", &["control", "digest", "door", "ending", "filling", "owed", "transport"]),
    (
        "source",
        &[
            "channels",
            "control",
            "digest",
            "filling",
            "free",
            "guarded",
            "hand_over",
            "moving",
            "owed",
            "pacer",
            "rounds",
            "scan",
            "stream",
            "transport",
        ],
    ),
    ("snapshot/file", &["pacer", "snapshot", "stream"]),
    ("snapshot/image", &["snapshot", "snapshot/file", "stream"]),
    ("snapshot/mapped", &["snapshot", "snapshot/file", "snapshot/image", "stream"]),
    ("snapshot", &["ending", "snapshot/file", "snapshot/image", "snapshot/mapped", "stream"]),
    (
        "snapshot/restore",
        &["ending", "filling", "snapshot", "snapshot/file", "snapshot/image", "snapshot/mapped", "stream"],
    ),
    ("charge", &["destination", "snapshot", "source"]),
    (
        "snapshot/save",
        &[
            "at_stop",
            "converging",
            "ending",
            "forecast",
            "free",
            "guarded",
            "hold",
            "pacing",
            "scan",
            "snapshot",
            "snapshot/file",
            "snapshot/image",
            "snapshot/mapped",
            "stream",
            "unplug",
        ],
    ),
    ("qemu_peer", &["control", "door"]),
    (
        "qemu_peer/receive",
        &["control", "door", "ending", "qemu_peer", "snapshot", "snapshot/file", "stream", "transport"],
    ),
    ("qemu_peer/relay", &["channels", "control", "door", "ending", "qemu_peer", "transport"]),
    (
        "qemu_peer/send",
        &[
            "channels",
            "control",
            "free",
            "guarded",
            "hand_over",
            "moving",
            "pacer",
            "rounds",
            "scan",
            "stream",
            "transport",
        ],
    ),
];

/// What the prose avoids, in documents and comments, and what to write.
const WORDS: [(&str, &str); 21] = [
    ("its begin ", "its start"),
    ("'s begin ", "'s start"),
    ("at the begin,", "at the beginning,"),
    ("from the begin,", "from the beginning,"),
    ("the begin of", "the start of"),
    ("those of the begin", "those of the start"),
    ("or the begin.", "or the start."),
    ("from begin to end", "from start to end"),
    ("over there", "at the destination, on the other side"),
    ("told of again", "reported again"),
    ("are told of", "are reported"),
    ("is told of", "is notified of, is reported to"),
    ("was told of", "was notified of, was reported to"),
    ("wakes who ", "wakes the threads that"),
    ("look whether", "check whether"),
    ("looks whether", "checks whether"),
    ("looked whether", "checked whether"),
    (" in turns", " alternately"),
    ("had better be", "should be"),
    ("could not be put back", "can't restore"),
    ("which nobody has asked for", "without being asked"),
];

/// The same, in documents alone.
const DOCUMENT_WORDS: [(&str, &str); 12] = [
    ("hears of ", "learns of"),
    ("hear of ", "learn of"),
    ("is let run", "runs again"),
    ("is let pass", "goes through"),
    ("the look at", "the search for, the check of"),
    ("is to be ", "must be"),
    ("are to be ", "must be"),
    ("somebody", "name the process or the person"),
    ("lets us", "allows it"),
    ("in whichever", "in any"),
    ("takes nothing for", "accepts nothing for"),
    ("by and by", "over time"),
];

/// How no sentence begins, and what to write.
const OPENINGS: [(&str, &str); 5] = [
    ("Who ", "name the thread, the process or the person: \"A thread that …\""),
    ("Would the ", "If the … did"),
    ("Should the ", "If the …"),
    ("Should it ", "If it …"),
    ("Should anything ", "If anything …"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// All files below these folders that end so: path from the root, and text.
fn files(folders: &[&str], end: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut left: Vec<PathBuf> = folders.iter().map(|folder| root().join(folder)).collect();
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if path.to_str().is_some_and(|path| path.ends_with(end))
            && !path.components().any(|c| c.as_os_str() == "target")
        {
            let name = path.strip_prefix(root()).unwrap().display().to_string();
            found.push((name, fs::read_to_string(&path).unwrap()));
        }
    }
    assert!(!found.is_empty(), "nothing below {folders:?} ends with {end}");
    found
}

fn sources() -> Vec<(String, String)> {
    files(&["crates", "bench", "tests", "guest", "fuzz/fuzz_targets"], ".rs")
}

/// A line without its comment and without what is in its strings, near enough for words to be looked for.
fn code(line: &str) -> String {
    let mut kept = String::new();
    let (mut in_string, mut before) = (false, ' ');
    for (at, c) in line.char_indices() {
        match c {
            '"' if before != '\\' && before != '\'' => in_string = !in_string,
            '/' if !in_string && line[at..].starts_with("//") => break,
            c if !in_string => kept.push(c),
            _ => {}
        }
        before = c;
    }
    kept
}

/// Whether the file is a test's, or from this line on its tests are.
fn product_lines(path: &str, text: &str) -> Vec<(usize, String)> {
    let is_test = ["/tests/", "/tests.rs", "/examples/"].iter().any(|part| path.contains(part));
    let lines = text.lines().take_while(|line| !is_test && line.trim() != "mod tests {");
    lines.enumerate().map(|(number, line)| (number + 1, code(line))).collect()
}

fn none(findings: &[String]) {
    assert!(findings.is_empty(), "\n{}", findings.join("\n"));
}

#[test]
fn comments_are_not_wider_than_code() {
    let mut findings = Vec::new();
    for (path, text) in sources() {
        let mut in_drawing = false;
        for (number, line) in text.lines().enumerate() {
            let Some(comment) = line.trim_start().strip_prefix("//") else { continue };
            let comment = comment.trim_start_matches(['/', '!', ' ']);
            in_drawing ^= comment.starts_with("```");
            let can_be_broken = !in_drawing && !comment.starts_with('|');
            if can_be_broken && line.chars().count() > WIDTH {
                findings.push(format!("{path}:{}: a comment of more than {WIDTH} columns: break the line", number + 1));
            }
        }
    }
    none(&findings);
}

/// Entries of a list that none of these needs any more.
fn stale(list: &str, entries: &[(&str, &str)], needed: &HashSet<&str>) -> Vec<String> {
    let gone = entries.iter().filter(|(entry, _)| !needed.contains(entry));
    gone.map(|(entry, _)| format!("{list}: nothing needs {entry} any more: take it out of the list")).collect()
}

/// The entry that names the path, or a folder that it is in.
fn listed<'a>(list: &[(&'a str, &str)], path: &str) -> Option<&'a str> {
    list.iter().find(|(listed, _)| path.starts_with(listed)).map(|(listed, _)| *listed)
}

#[test]
fn unsafe_stays_where_it_is_expected() {
    let (mut findings, mut needed) = (Vec::new(), HashSet::new());
    for (path, text) in sources() {
        let has = |line: &str| line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe");
        let Some(at) = text.lines().position(|line| has(&code(line))) else { continue };
        if let Some(entry) = listed(&UNSAFE, &path) {
            needed.insert(entry);
        } else {
            let cure = "find a safe way, or a crate that has it";
            findings.push(format!("{path}:{}: unsafe outside of the places that UNSAFE lists: {cure}", at + 1));
        }
    }
    findings.extend(stale("UNSAFE", &UNSAFE, &needed));
    none(&findings);
}

#[test]
fn nothing_in_the_product_sleeps_without_a_reason() {
    let (mut findings, mut needed) = (Vec::new(), HashSet::new());
    for (path, text) in files(&["crates"], ".rs") {
        if path.starts_with("crates/lab/") {
            continue;
        }
        for (number, line) in product_lines(&path, &text) {
            if !line.contains("sleep(") {
                continue;
            }
            if let Some(entry) = listed(&SLEEP, &path) {
                needed.insert(entry);
            } else {
                findings
                    .push(format!("{path}:{number}: it sleeps: wait for an event, or say in SLEEP why there is none"));
            }
        }
    }
    findings.extend(stale("SLEEP", &SLEEP, &needed));
    none(&findings);
}

#[test]
fn functions_fit_on_a_screen() {
    let (mut findings, mut needed) = (Vec::new(), HashSet::new());
    for (path, text) in sources() {
        let lines: Vec<String> = text.lines().map(code).collect();
        for (start, line) in lines.iter().enumerate() {
            let Some((_, rest)) = line.split_once("fn ") else { continue };
            let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
            let indent = line.len() - line.trim_start().len();
            // rustfmt puts the closing brace below the first character of the function.
            let close = format!("{}}}", " ".repeat(indent));
            let length = lines[start..].iter().position(|line| *line == close).map_or(0, |end| end + 1);
            let one_line = line.trim_end().ends_with(['}', ';']);
            if one_line || length <= LONGEST_FUNCTION {
                continue;
            }
            if let Some((long, _)) = LONG.iter().find(|(long, _)| *long == name) {
                needed.insert(*long);
            } else {
                findings
                    .push(format!("{path}:{}: {name} has {length} lines: find its parts, and name them", start + 1));
            }
        }
    }
    findings.extend(stale("LONG", &LONG, &needed));
    none(&findings);
}

/// Crates of tests may use whatever they need.
#[test]
fn siblings_do_not_use_one_another() {
    let mut findings = Vec::new();
    for name in SIBLINGS {
        let text = fs::read_to_string(root().join(format!("crates/{name}/Cargo.toml"))).unwrap();
        let own = text.split("[dev-dependencies]").next().unwrap_or_default();
        for other in SIBLINGS.iter().filter(|other| **other != name) {
            if own.contains(&format!("transship-{other}.")) {
                findings.push(format!("crates/{name} uses {other}: what both need belongs into a crate below them"));
            }
        }
    }
    none(&findings);
}

/// Lines of prose: of a document what is not code, of a program its comments.
fn prose(path: &str, text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut in_code = false;
    for (number, line) in text.lines().enumerate() {
        let line = match line.trim_start().strip_prefix("//") {
            Some(comment) if path.ends_with(".rs") => comment.trim_start_matches(['/', '!', ' ']),
            _ if path.ends_with(".rs") => continue,
            _ => line.trim_start_matches(['-', '|', ' ']),
        };
        in_code ^= line.starts_with("```");
        if !in_code {
            found.push((number + 1, line.to_owned()));
        }
    }
    found
}

/// Whether a sentence of the line begins so, and does not ask.
fn opens(line: &str, opening: &str) -> bool {
    let first = line.starts_with(opening) || line.contains(&format!(". {opening}"));
    (first || line.contains(&format!("; {}", opening.to_lowercase()))) && !line.contains('?')
}

/// What a tree of `use` names, each path in full.
fn leaves(tree: &str) -> Vec<String> {
    let Some((head, rest)) = tree.split_once('{') else { return vec![tree.trim().to_owned()] };
    let inner = rest.rsplit_once('}').map_or(rest, |(inner, _)| inner);
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, c) in inner.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&inner[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&inner[start..]);
    let named = parts.into_iter().filter(|part| !part.trim().is_empty());
    named.flat_map(leaves).map(|leaf| format!("{}{leaf}", head.trim())).collect()
}

/// Paths that a file of the engine uses, from the crate's root; `module`: its own.
fn used(code: &str, module: &[&str]) -> Vec<String> {
    let trees = code.split(';').filter_map(|statement| Some(statement.rsplit_once("use ")?.1));
    let mut paths: Vec<String> =
        trees.filter(|tree| tree.trim_start().starts_with(['c', 's'])).flat_map(leaves).collect();
    let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let inline = code.match_indices("crate::").map(|(at, _)| code[at..].split(|c| !is_path(c)).next().unwrap_or(""));
    paths.extend(inline.map(str::to_owned));
    let from_root = |path: String| {
        let mut base = module;
        let mut rest = path.as_str();
        while let Some(above) = rest.strip_prefix("super::") {
            (base, rest) = (base.split_last()?.1, above);
        }
        match rest.strip_prefix("crate::") {
            Some(rest) => Some(rest.replace("::", "/")),
            None if rest.len() == path.len() => None, // another crate's
            None => Some(base.iter().copied().chain(rest.split("::")).collect::<Vec<_>>().join("/")),
        }
    };
    paths.into_iter().filter_map(from_root).collect()
}

/// The part of the engine that this is in: the one whose name is the longest.
fn part(path: &str) -> Option<usize> {
    let is_in = |name: &str| path.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let fits = ENGINE.iter().enumerate().filter(|(_, (name, _))| is_in(name));
    fits.max_by_key(|(_, (name, _))| name.len()).map(|(number, _)| number)
}

#[test]
fn parts_of_the_engine_use_no_others_than_they_say() {
    const ROOT: &str = "crates/engine/src/";
    let (mut findings, mut seen) = (Vec::new(), HashSet::new());
    for (path, text) in files(&[ROOT], ".rs") {
        let module = path.trim_start_matches(ROOT).trim_end_matches(".rs").trim_end_matches("/mod");
        let own = part(module);
        if module == "lib" {
            continue; // it names everything that is public
        }
        let code: Vec<String> = product_lines(&path, &text).into_iter().map(|(_, line)| line).collect();
        for used in used(&code.join(" "), &module.split('/').collect::<Vec<_>>()) {
            let Some(other) = part(&used).filter(|other| Some(*other) != own) else { continue };
            let (name, may) = own.map_or((module, &[][..]), |own| ENGINE[own]);
            seen.insert((name.to_owned(), ENGINE[other].0));
            if !may.contains(&ENGINE[other].0) {
                let cure = "move what both need below them, or say in ENGINE that it may";
                findings.push(format!("{path}: {name} uses {}: {cure}", ENGINE[other].0));
            }
        }
    }
    for (name, may) in ENGINE {
        for other in may.iter().filter(|other| !seen.contains(&(name.to_owned(), **other))) {
            findings.push(format!("ENGINE: {name} does not use {other} any more: take it out of the list"));
        }
    }
    none(&findings);
}

#[test]
fn prose_uses_words_that_readers_know() {
    let mut findings = Vec::new();
    let documents = files(&["docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"], ".md");
    for (path, text) in documents.into_iter().chain(sources()).filter(|(path, _)| path != "tests/tests/style.rs") {
        let lines = prose(&path, &text);
        let nexts = lines.iter().skip(1).map(|(_, next)| next.to_lowercase()).chain([String::new()]);
        for ((number, line), next) in lines.iter().zip(nexts) {
            let of_documents = DOCUMENT_WORDS.iter().filter(|_| path.ends_with(".md"));
            // Also where the line was broken in the middle of it; what the next line has alone is found there.
            let (lower, both) = (line.to_lowercase(), format!("{line} {next}").to_lowercase());
            let is_here = |word: &str| lower.contains(word) || (both.contains(word) && !next.contains(word.trim()));
            let words = WORDS.iter().chain(of_documents).filter(|(word, _)| is_here(word));
            let is_test = path.contains("tests/") || path.starts_with("crates/lab/");
            let openings = OPENINGS.iter().filter(|(opening, _)| !is_test && opens(line, opening));
            findings.extend(
                words.chain(openings).map(|(word, better)| format!("{path}:{number}: {word:?}: write {better}")),
            );
        }
    }
    none(&findings);
}
