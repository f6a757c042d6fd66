//! Which part of the engine may use which.
use std::collections::HashSet;

use crate::sources::{files, none, product_lines};

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
            "forecast",
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
