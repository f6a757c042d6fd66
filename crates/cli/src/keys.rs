//! The keys of encrypted files: `--encrypt-to` and `--identity`.
use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use transship_engine::{Identities, KeyTextError, Recipients};
use zeroize::Zeroizing;

use crate::checks::Checks;

/// More than any file with keys has.
const FILE_MAX: u64 = 1 << 20;
/// What others of this host may not do with a secret key.
const OTHERS: u32 = 0o007;
/// With which public keys begin.
const PUBLIC: &str = "age1";

/// Of `--encrypt-to`; none within: it was not given.
pub(crate) fn recipients(checks: &mut Checks, given: &[String]) -> Option<Option<Recipients>> {
    let mut all: Option<Recipients> = None;
    for who in given {
        let one = recipients_of(who).map_err(|why| checks.mistake(format!("--encrypt-to: {why}"))).ok()?;
        all = Some(match all {
            Some(others) => others.and(one),
            None => one,
        });
    }
    Some(all)
}

fn recipients_of(who: &str) -> Result<Recipients, String> {
    if who.starts_with(PUBLIC) && !Path::new(who).exists() {
        return who.parse().map_err(|_| {
            format!("{who} is no public X25519 key of age, as `age-keygen` prints them; other kinds are not known")
        });
    }
    let (text, _) = text(Path::new(who))?;
    text.parse().map_err(|why: KeyTextError| format!("{who}: {why}"))
}

/// Of `--identity`; none within: it was not given.
pub(crate) fn identities(checks: &mut Checks, files: &[PathBuf]) -> Option<Option<Identities>> {
    if files.is_empty() {
        return Some(None);
    }
    let mut all = Zeroizing::new(String::new());
    for path in files {
        let text = secret(path).map_err(|why| checks.mistake(format!("--identity: {why}"))).ok()?;
        // Made as large as needed at once: a text that grows leaves copies behind.
        let mut more = Zeroizing::new(String::with_capacity(all.len() + text.len() + 1));
        more.push_str(&all);
        more.push_str(&text);
        more.push('\n');
        all = more;
    }
    all.parse().map(Some).map_err(|why: KeyTextError| checks.mistake(format!("--identity: {why}"))).ok()
}

/// A file of secret keys, which others may not have.
fn secret(path: &Path) -> Result<Zeroizing<String>, String> {
    let (text, found) = text(path)?;
    text.parse::<Identities>().map_err(|why| format!("{}: {why}", path.display()))?;
    match found.is_file() && found.permissions().mode() & OTHERS != 0 {
        true => Err(format!(
            "every user of this host may use {}; take it from them (chmod o-rwx), and make a new key if others may \
             have read it",
            path.display()
        )),
        false => Ok(text),
    }
}

fn text(path: &Path) -> Result<(Zeroizing<String>, fs::Metadata), String> {
    let failed = |error: io::Error| format!("can't read {}: {error}", path.display());
    let mut file = fs::File::open(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    // A descriptor of a shell's (`<(…)`) has no length.
    let mut text = Zeroizing::new(String::with_capacity(FILE_MAX as usize + 1));
    io::Read::read_to_string(&mut io::Read::take(&mut file, FILE_MAX + 1), &mut text).map_err(failed)?;
    match text.len() as u64 > FILE_MAX {
        true => Err(format!("{} is too large for a file with keys", path.display())),
        false => Ok((text, found)),
    }
}
