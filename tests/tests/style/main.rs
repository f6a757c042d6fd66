//! The rules of CONTRIBUTING.md that a program can look at. Each finding says where it is and how to mend it.
#![allow(clippy::unwrap_used)]
mod engine;
mod links;
mod prose;
mod sources;

use std::{collections::HashSet, fs};

use sources::{code, files, none, product_lines, root, sources};

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
