//! Where results go: the table to standard output, the rest to the files that were asked for.
use std::{
    fmt, fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::{
    aims::Aims,
    rows::{self, Row},
};

/// The files that were asked for.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Files {
    /// Write all results, with every single run
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draw a picture
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

impl Files {
    /// Can they be written, when all has been measured?
    pub(crate) fn check(&self) -> Result<(), String> {
        for file in [&self.json, &self.svg].into_iter().flatten() {
            let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            if !folder.is_dir() {
                return Err(format!("can't write {}: there is no folder {}", file.display(), folder.display()));
            }
        }
        Ok(())
    }

    /// Prints the table, its rows and its aims, and writes the files.
    pub(crate) fn publish(
        &self,
        table: impl fmt::Display,
        results: impl Serialize,
        aims: &Aims,
        rows: &[Row],
        svg: impl FnOnce() -> String,
    ) -> Result<(), String> {
        let parts = [table.to_string(), rows::text(rows), aims.to_string()];
        let text = parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n");
        // A reader that has enough is no error, and the files below are still wanted.
        match io::stdout().lock().write_all(text.as_bytes()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(format!("can't print: {error}")),
            _ => {}
        }
        let write = |file: &Path, text: String| {
            fs::write(file, text).map_err(|e| format!("can't write {}: {e}", file.display()))
        };
        if let Some(file) = &self.json {
            let json = serde_json::json!({ "results": results, "aims": aims, "rows": rows });
            write(file, format!("{json:#}\n"))?;
        }
        if let Some(file) = &self.svg {
            write(file, svg())?;
        }
        Ok(())
    }
}

/// Says how far it is, in one piece: the commands that it starts write beside it.
pub(crate) fn say(line: &str) {
    // If nobody can read it, nobody can be told so either.
    let _ = io::stderr().write_all(format!("transship: {line}\n").as_bytes());
}
