//! Links of the documents, to files of the project and to headings in them.
use std::{
    collections::{HashMap, HashSet},
    fs,
    path::{Path, PathBuf},
};

use crate::{
    prose::{DOCUMENTS, prose},
    sources::{files, none, root},
};

/// The anchor of a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|&char| char.is_alphanumeric() || [' ', '-', '_'].contains(&char));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

/// What the links of a line lead to, but for those to other sites.
fn links(line: &str) -> impl Iterator<Item = &str> {
    let ends = line.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    ends.map(|(target, _)| target).filter(|target| !target.contains("://"))
}

#[test]
fn links_lead_to_what_is_there() {
    let documents: Vec<_> = files(&DOCUMENTS, ".md")
        .into_iter()
        .map(|(path, text)| (fs::canonicalize(root().join(&path)).unwrap(), prose(&path, &text), path))
        .collect();
    let anchors: HashMap<&Path, HashSet<String>> = documents
        .iter()
        .map(|(place, lines, _)| {
            let headings = lines.iter().filter_map(|(_, line)| line.strip_prefix('#'));
            (place.as_path(), headings.map(|heading| anchor(heading.trim_start_matches('#'))).collect())
        })
        .collect();
    let mut findings = Vec::new();
    for (place, lines, path) in &documents {
        for (number, target) in lines.iter().flat_map(|(number, line)| links(line).map(move |link| (number, link))) {
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let to: PathBuf = match file {
                "" => place.clone(),
                file => fs::canonicalize(place.with_file_name(file)).unwrap_or_default(),
            };
            if !to.exists() {
                findings.push(format!("{path}:{number}: {target} leads to no file"));
            } else if !heading.is_empty() && anchors.get(to.as_path()).is_none_or(|all| !all.contains(heading)) {
                findings.push(format!("{path}:{number}: {target} leads to no heading"));
            }
        }
    }
    none(&findings);
}
