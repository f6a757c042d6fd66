//! Words that readers have to read twice.
use crate::sources::{files, none, sources};

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

/// Where documents are.
pub(crate) const DOCUMENTS: [&str; 4] = ["docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"];

/// Lines of prose: of a document what is not code, of a program its comments.
pub(crate) fn prose(path: &str, text: &str) -> Vec<(usize, String)> {
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

#[test]
fn prose_uses_words_that_readers_know() {
    let mut findings = Vec::new();
    let documents = files(&DOCUMENTS, ".md");
    for (path, text) in documents.into_iter().chain(sources()).filter(|(path, _)| path != "tests/tests/style/prose.rs")
    {
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
