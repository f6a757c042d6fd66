//! The files that are looked at, and what of them is code of the product.
use std::{
    fs,
    path::{Path, PathBuf},
};

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// All files below these folders that end so: path from the root, and text.
pub(crate) fn files(folders: &[&str], end: &str) -> Vec<(String, String)> {
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

pub(crate) fn sources() -> Vec<(String, String)> {
    files(&["crates", "bench", "tests", "guest", "fuzz/fuzz_targets"], ".rs")
}

/// A line without its comment and without what is in its strings, near enough for words to be looked for.
pub(crate) fn code(line: &str) -> String {
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
pub(crate) fn product_lines(path: &str, text: &str) -> Vec<(usize, String)> {
    let is_test = ["/tests/", "/tests.rs", "/examples/"].iter().any(|part| path.contains(part));
    let lines = text.lines().take_while(|line| !is_test && line.trim() != "mod tests {");
    lines.enumerate().map(|(number, line)| (number + 1, code(line))).collect()
}

pub(crate) fn none(findings: &[String]) {
    assert!(findings.is_empty(), "\n{}", findings.join("\n"));
}
