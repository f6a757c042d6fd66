//! How the other end is known, and whether anybody between can listen: `--token`, `--token-lifetime`, `--tls`,
//! `--peer-name`, `--insecure`.
mod certificates;
mod users;

use std::{fmt, fs, io::Read, str::FromStr, time::Duration};

use rustix::system::uname;
use serde::Serialize;
use transship_engine::{Caller, Error, Host, Listener, Token, Uri, Usage};
use zeroize::Zeroizing;

use crate::{args::TlsArgs, checks::Checks, failure::Failure, output, units};
use certificates::Shown;
pub(crate) use users::{Comes, users};

/// How long a token is good if nobody says otherwise.
const LIFETIME: Duration = Duration::from_secs(3600);
const LIFETIME_MIN: Duration = Duration::from_secs(1);
const LIFETIME_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// More than any file with a token has.
const FILE_MAX: u64 = 4096;

/// The value of `--token`, which is never shown.
#[derive(Clone)]
pub(crate) struct TokenText(Zeroizing<String>);

impl FromStr for TokenText {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(Zeroizing::new(text.to_owned())))
    }
}

impl fmt::Debug for TokenText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenText(…)")
    }
}

impl TokenText {
    /// The token.
    pub(crate) fn read(&self) -> Result<Token, String> {
        let Some(path) = self.0.strip_prefix('@') else {
            return self.0.parse().map_err(|why| format!("--token: {why}"));
        };
        let mut text = Zeroizing::new(String::new());
        fs::File::open(path)
            .and_then(|file| file.take(FILE_MAX).read_to_string(&mut text))
            .map_err(|error| format!("--token: can't read {path}: {error}"))?;
        text.parse().map_err(|why| format!("--token: {path}: {why}"))
    }
}

/// What a user says about the network between the two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Network {
    /// Nothing: what leaves this host is encrypted.
    Unknown,
    /// Nobody else is there.
    Trusted,
}

impl Network {
    /// Of `--insecure`.
    pub(crate) fn of(insecure: bool) -> Self {
        if insecure { Self::Trusted } else { Self::Unknown }
    }
}

/// The end that calls `to`, the value of the flag `--to`; without one, in clear. `receiver`: what prints a token.
pub(crate) fn caller(
    checks: &mut Checks,
    to: Option<&Uri>,
    token: Option<&TokenText>,
    tls: &TlsArgs,
    network: Network,
    receiver: &str,
) -> Option<Option<Caller>> {
    let others = [("--token", token.is_some()), ("--insecure", network == Network::Trusted)];
    match (token, to) {
        _ if tls.tls.is_some() || !tls.peer_name.is_empty() => {
            let shown = Shown::check(checks, tls, Usage::Client, &others)??;
            // Without an address nobody is called, or it was a mistake.
            to.map_or(Some(None), |to| shown.caller(checks, to).map(Some))
        }
        (Some(token), _) => {
            match token.read().and_then(|token| Caller::with_token(&token).map_err(|e| e.to_string())) {
                Ok(caller) => Some(Some(caller)),
                Err(mistake) => {
                    checks.mistake(mistake);
                    None
                }
            }
        }
        (None, Some(to)) if to.is_remote() && network == Network::Unknown => {
            checks.mistake(format!(
                "--to {to}: guest memory would cross the network unencrypted; use the command that `{receiver}` \
                 prints there, which has a --token, or --tls with certificates on both hosts, or --insecure if nobody \
                 else is on that network"
            ));
            None
        }
        _ => Some(None),
    }
}

/// What goes to or comes from a stock QEMU beside a relay is in clear.
pub(crate) fn stock_qemu(checks: &mut Checks, flag: &str, uri: Option<&Uri>, network: Network) {
    if let Some(uri) = uri.filter(|uri| uri.is_remote() && network == Network::Unknown) {
        checks.mistake(format!(
            "{flag} {uri}: a stock QEMU's migration would cross the network unencrypted; add --insecure if nobody \
             else is on that network, or use a pair of `transship relay` beside the QEMUs"
        ));
    }
}

/// The end that calls a stock QEMU; without one, in clear.
pub(crate) fn caller_of_qemu(
    checks: &mut Checks,
    to: Option<&Uri>,
    tls: &TlsArgs,
    network: Network,
) -> Option<Option<Caller>> {
    match Shown::check(checks, tls, Usage::Client, &[("--insecure", network == Network::Trusted)])? {
        Some(shown) => shown.caller(checks, to?).map(|caller| Some(caller.in_plain_tls())),
        None => {
            qemu_in_clear(checks, "--to", to, network);
            Some(None)
        }
    }
}

/// Whom a `receive` hears to which a stock QEMU migrates.
pub(crate) fn entry_of_qemu(
    checks: &mut Checks,
    listen: Option<&Uri>,
    tls: &TlsArgs,
    network: Network,
) -> Option<Entry> {
    match Shown::check(checks, tls, Usage::Server, &[("--insecure", network == Network::Trusted)])? {
        Some(shown) => Some(Entry::Certificate(shown.host().in_plain_tls())),
        None => {
            qemu_in_clear(checks, "--listen", listen, network);
            Some(Entry::Open)
        }
    }
}

fn qemu_in_clear(checks: &mut Checks, flag: &str, uri: Option<&Uri>, network: Network) {
    if let Some(uri) = uri.filter(|uri| uri.is_remote() && network == Network::Unknown) {
        checks.mistake(format!(
            "{flag} {uri}: a stock QEMU's migration would cross the network unencrypted; use --tls and that QEMU's \
             tls-creds, or a pair of `transship relay` beside the QEMUs, or --insecure if nobody else is on that \
             network"
        ));
    }
}

/// A token where none has a meaning.
pub(crate) fn no_token(checks: &mut Checks, flag: &str, is_given: bool) {
    if is_given {
        checks.mistake(format!("{flag}: a stock QEMU knows no tokens; leave {flag} out with --peer qemu"));
    }
}

/// Whom the end that listens hears.
pub(crate) enum Entry {
    /// Everybody, in clear.
    Open,
    /// A caller with a token, which is good for so long.
    Token(Duration),
    /// A caller that shows a certificate.
    Certificate(Host),
}

/// Of the flags of a command that listens.
pub(crate) fn entry(
    checks: &mut Checks,
    listen: Option<&Uri>,
    lifetime: Option<&str>,
    tls: &TlsArgs,
    network: Network,
) -> Option<Entry> {
    let others = [("--token-lifetime", lifetime.is_some()), ("--insecure", network == Network::Trusted)];
    if let Some(shown) = Shown::check(checks, tls, Usage::Server, &others)? {
        return Some(Entry::Certificate(shown.host()));
    }
    match lifetime {
        Some(text) => {
            let bounds = (LIFETIME_MIN, LIFETIME_MAX);
            checks.within("--token-lifetime", text, units::time, bounds, "from 1s to 168h").map(Entry::Token)
        }
        None if network == Network::Unknown && listen.is_some_and(Uri::is_remote) => Some(Entry::Token(LIFETIME)),
        None => Some(Entry::Open),
    }
}

/// What scripts read before the move begins.
#[derive(Serialize)]
struct Told<'a> {
    token: &'a str,
    command: &'a str,
    lifetime_s: f64,
}

/// Has the listener hear only those who may come; makes a token if it wants one, and tells it. `command`: what the
/// other side runs, up to its address.
pub(crate) fn lock(listener: Listener, entry: &Entry, command: &str, as_json: bool) -> Result<Listener, Failure> {
    let lifetime = match entry {
        Entry::Open => return Ok(listener),
        Entry::Certificate(host) => return Ok(listener.locked(host.clone(), None)),
        Entry::Token(lifetime) => *lifetime,
    };
    let (host, token) = Host::with_new_token().map_err(|failure| Error::Untrusted(failure.to_string()))?;
    let text = token.reveal();
    let command = Zeroizing::new(format!("{command}{} --token {}", reachable(listener.uri()), *text));
    if as_json {
        output::json(&Told { token: &text, command: &command, lifetime_s: lifetime.as_secs_f64() })?;
    } else {
        output::say(&format!("run this on the source's host within {lifetime:?}, and show it to nobody else:"));
        output::result(&format!("{}\n", *command))?;
    }
    Ok(listener.locked(host, Some(lifetime)))
}

/// The address by which others reach a listener: all of this host's addresses have its name.
fn reachable(uri: &Uri) -> Uri {
    match uri {
        Uri::Tcp { host, port } if host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_unspecified()) => {
            Uri::Tcp { host: uname().nodename().to_string_lossy().into_owned(), port: *port }
        }
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn caller_of(to: &str, token: Option<&str>, network: Network) -> Result<bool, Vec<String>> {
        let mut checks = Checks::default();
        let (to, token) = (to.parse().unwrap(), token.map(|text| text.parse().unwrap()));
        let tls = TlsArgs::default();
        let caller = caller(&mut checks, Some(&to), token.as_ref(), &tls, network, "transship receive");
        match checks.finish(caller) {
            Ok(caller) => Ok(caller.is_some()),
            Err(Failure::Usage(mistakes)) => Err(mistakes),
            Err(other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_this_host_is_reached_in_clear() {
        for here in ["tcp:127.0.0.1:1", "tcp:127.9.9.9:1", "tcp:[::1]:1", "tcp:[::ffff:127.0.0.1]:1", "tcp:localhost:1"]
        {
            assert_eq!(caller_of(here, None, Network::Unknown), Ok(false), "{here}");
        }
        assert_eq!(caller_of("unix:/run/s", None, Network::Unknown), Ok(false));
        for other in ["tcp:ship2:1", "tcp:192.0.2.1:1", "tcp:[2001:db8::1]:1", "tcp:localhost.ship:1", "tcp:0.0.0.0:1"]
        {
            let mistakes = caller_of(other, None, Network::Unknown).unwrap_err();
            assert!(mistakes[0].contains("--token") && mistakes[0].contains("--insecure"), "{mistakes:?}");
            assert_eq!(caller_of(other, None, Network::Trusted), Ok(false), "{other}");
        }
    }

    #[test]
    fn a_token_is_used_wherever_it_is_given_and_never_shown() {
        let (_, token) = Host::with_new_token().unwrap();
        let text = token.reveal();
        assert_eq!(caller_of("unix:/run/s", Some(&text), Network::Unknown), Ok(true));
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), format!("{}\n", *text)).unwrap();
        let given = format!("@{}", file.path().display());
        assert_eq!(caller_of("tcp:ship2:1", Some(&given), Network::Unknown), Ok(true));
        let wrong = format!("{}A", &text[..70]);
        let mistakes = caller_of("tcp:ship2:1", Some(&wrong), Network::Unknown).unwrap_err();
        assert!(mistakes.len() == 1 && !mistakes[0].contains(&wrong[8..]), "{mistakes:?}");
        assert!(!format!("{:?}", TokenText::from_str(&text)).contains(&text[8..]));
        let mistakes = caller_of("tcp:ship2:1", Some("@/nowhere/t"), Network::Unknown).unwrap_err();
        assert!(mistakes[0].contains("can't read /nowhere/t"), "{mistakes:?}");
    }

    #[test]
    fn others_are_told_the_name_of_this_host() {
        let told = |uri: &str| reachable(&uri.parse().unwrap()).to_string();
        assert_eq!(told("tcp:192.0.2.1:4444"), "tcp:192.0.2.1:4444");
        for all in ["tcp:0.0.0.0:4444", "tcp:[::]:4444"] {
            assert!(!told(all).contains("0.0.0.0") && !told(all).contains("::") && told(all).ends_with(":4444"));
        }
    }
}
