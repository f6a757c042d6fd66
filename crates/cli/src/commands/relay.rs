//! `transship relay`: one end of a link between two stock QEMUs.
mod access;

use std::sync::Arc;

use transship_engine::{
    Compress, Error, Listener, MoveOptions, Progress, RelayOptions, Relayed, Report, Uri, relay_from_qemu, relay_many,
    relay_to_qemu,
};

use crate::{
    args::RelayArgs,
    checks::Checks,
    commands::moving::compression,
    failure::Failure,
    flags, output,
    progress::Display,
    sandbox::{Errands, Left, Role, Sandbox, Steward},
    signals::{Held, Side},
    summary,
    trust::{self, Comes, Entry, Network},
    units,
};
use access::Access;

/// What stands before the address of a link.
const LINK: &str = "relay:";

/// With `--many` alone.
const MANY_MAX: u64 = 1000;

pub(crate) fn run(args: &RelayArgs) -> Result<(), Failure> {
    let request = Request::check(args)?;
    let progress = Progress::new();
    let signals = Held::hold()?;
    // It cleans up: it is told to after everything else has ended.
    let (_steward, listener) = match set_up(&request) {
        Ok(ready) => ready,
        Err(error) => return summary::relayed(Err(error), Report::default(), args.json),
    };
    if let Some(most) = request.many {
        let _signals = signals.cancelling(&progress, Side::Relays)?;
        return serve(&request, listener, most, &progress, args.json);
    }
    let _signals = signals.cancelling(&progress, Side::Relay)?;
    let mut report = Report::default();
    let outcome = relay(&request, locked(listener, &request, args.json)?, &progress, &mut report);
    summary::relayed(outcome, report, args.json)
}

/// All that needs rights; then they are gone.
fn set_up(request: &Request) -> Result<(Option<Steward>, Listener), Error> {
    let listener = listen(request)?;
    let sandbox = request.near.as_ref().map_or(&request.sandbox, |near| request.sandbox.encoding(near.compress));
    let errands = Errands { connect: vec![request.to.clone()], ..Errands::of_listener(listener.uri()) };
    let steward = sandbox.steward(&errands)?;
    sandbox.confine(Role::Relay, Left::Nothing)?;
    Ok((steward, listener))
}

/// Relays what comes until the user has had enough. Why a migration failed is said when it has; the service has not.
fn serve(
    request: &Request,
    listener: Listener,
    most: usize,
    progress: &Arc<Progress>,
    json: bool,
) -> Result<(), Failure> {
    let listener = locked(listener, request, json)?;
    let mut tell = |relayed| match relayed {
        Relayed::Begun { number, peer } => output::say(&format!("migration {number}: {peer} has come")),
        Relayed::Ended { number, outcome, report } => {
            output::complain(&format!("migration {number}: {}", summary::relayed_in_a_line(&outcome, &report)));
            // Whoever reads them may be gone; the migrations go on.
            let _ = if json { output::json(&report) } else { Ok(()) };
        }
    };
    Ok(relay_many(&listener, &request.to, request.near.as_ref(), most, progress, &mut tell)?)
}

/// The listener, for those who may use it.
fn listen(request: &Request) -> Result<Listener, Error> {
    let listener = request.access.labelled(|| Listener::bind(&request.listen))?;
    if let Uri::Unix(path) = &request.listen {
        request.access.apply(path)?;
    }
    Ok(match request.users.clone() {
        Some(users) => listener.for_users(users),
        None => listener,
    })
}

/// With a lock if it needs one; prints the token.
fn locked(listener: Listener, request: &Request, json: bool) -> Result<Listener, Failure> {
    let command = format!("transship relay --listen URI --to {LINK}");
    let listener = trust::lock(listener, &request.entry, &command, json)?;
    let link = if request.near.is_none() { LINK } else { "" };
    // Scripts wait for this line; it has the port that the system chose.
    output::say(&format!("listening at {link}{}", listener.uri()));
    Ok(listener)
}

fn relay(request: &Request, listener: Listener, progress: &Arc<Progress>, report: &mut Report) -> Result<(), Error> {
    let _display = Display::start(progress).map_err(|source| Error::Io { what: "start a thread".into(), source })?;
    match &request.near {
        Some(options) => relay_from_qemu(&listener, &request.to, options, progress, report),
        None => relay_to_qemu(listener, &request.to, progress, report),
    }
}

/// What was asked for, checked without touching anything.
struct Request {
    listen: Uri,
    to: Uri,
    /// Near the source; else near the destination.
    near: Option<RelayOptions>,
    /// Whom it hears.
    entry: Entry,
    /// The users who may connect to its unix socket; none: everybody who can.
    users: Option<Vec<u32>>,
    /// How many at once, of a service.
    many: Option<usize>,
    access: Access,
    sandbox: Sandbox,
}

impl Request {
    fn check(args: &RelayArgs) -> Result<Self, Failure> {
        let mut checks = Checks::default();
        let (listen, to) = (args.listen.strip_prefix(LINK), args.to.strip_prefix(LINK));
        let uri = |checks: &mut Checks, flag, text: &str| checks.read(flag, text, str::parse::<Uri>);
        let listen_uri = uri(&mut checks, "--listen", listen.unwrap_or(&args.listen));
        let to_uri = uri(&mut checks, "--to", to.unwrap_or(&args.to));
        let network = Network::of(args.insecure);
        match (listen, to) {
            (None, Some(_)) => trust::stock_qemu(&mut checks, "--listen", listen_uri.as_ref(), network),
            (Some(_), None) => trust::stock_qemu(&mut checks, "--to", to_uri.as_ref(), network),
            _ => {}
        }
        let side = match (listen, to) {
            (None, Some(_)) => near(args, to_uri.as_ref(), &mut checks).map(|near| (Some(near), Entry::Open)),
            (Some(_), None) => {
                only_near(args, &mut checks);
                let lifetime = args.token_lifetime.as_deref();
                let entry = trust::entry(&mut checks, listen_uri.as_ref(), lifetime, &args.tls, network);
                entry.map(|entry| (None, entry))
            }
            (both, _) => {
                let how = if both.is_some() { "both are" } else { "neither is" };
                let what =
                    "near the source: --listen URI --to relay:URI; near the destination: --listen relay:URI --to URI";
                checks
                    .mistake(format!("--listen, --to: one of them is the link to the other relay, and {how}; {what}"));
                None
            }
        };
        let many = match args.many.as_deref() {
            Some(text) => {
                let bounds = (1, MANY_MAX);
                checks.within("--many", text, units::count, bounds, "1 to 1000").map(|many| Some(many as usize))
            }
            None => Some(None),
        };
        let is_socket = listen_uri.as_ref().is_none_or(|uri| matches!(uri, Uri::Unix(_)));
        let access = Access::check(args, is_socket, &mut checks);
        let sandbox = Sandbox::check(&args.sandbox, &mut checks);
        let comes = if listen.is_some() { Comes::Transship } else { Comes::Qemu };
        let users = trust::users(&mut checks, listen_uri.as_ref(), comes, &args.allow_user);
        let request = (|| {
            let (near, entry) = side?;
            let (listen, to, users) = (listen_uri?, to_uri?, users?);
            Some(Self { listen, to, near, entry, users, many: many?, access: access?, sandbox: sandbox? })
        })();
        checks.finish(request)
    }
}

fn near(args: &RelayArgs, to: Option<&Uri>, checks: &mut Checks) -> Option<RelayOptions> {
    let defaults = MoveOptions::default();
    let channels = flags::count(checks, "--channels", args.channels.as_deref(), defaults.channels);
    let encoders = flags::count(checks, "--encoders", args.encoders.as_deref(), defaults.terms.encoders);
    let compress = match &args.compress {
        Some(text) => checks.read("--compress", text, compression),
        None => Some(Compress::Auto),
    };
    if args.token_lifetime.is_some() {
        checks.mistake("--token-lifetime: give it to the relay near the destination, which makes the token".into());
    }
    let network = Network::of(args.insecure);
    let caller = trust::caller(checks, to, args.token.as_ref(), &args.tls, network, "transship relay");
    Some(RelayOptions {
        channels: channels?,
        compress: compress?,
        encoders: encoders?,
        without_return_path: args.without_return_path,
        caller: caller?,
    })
}

/// The relay near the destination does as the other one says.
fn only_near(args: &RelayArgs, checks: &mut Checks) {
    let given = [
        ("--channels", args.channels.is_some()),
        ("--compress", args.compress.is_some()),
        ("--encoders", args.encoders.is_some()),
        ("--without-return-path", args.without_return_path),
        ("--token", args.token.is_some()),
    ];
    for (flag, _) in given.into_iter().filter(|(_, given)| *given) {
        checks.mistake(format!("{flag}: give it to the relay near the source; this one follows"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cli, args::Command};
    use clap::Parser;

    fn check(words: &str) -> Result<Request, Vec<String>> {
        let cli = Cli::try_parse_from(words.split(' ')).expect("it is a command line");
        let Command::Relay(args) = cli.command else { panic!("{words}") };
        match Request::check(&args) {
            Ok(request) => Ok(request),
            Err(Failure::Usage(mistakes)) => Err(mistakes),
            Err(other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_address_is_the_link() {
        let near = "transship relay --listen unix:/a --to relay:tcp:ship2:1 --channels 3 --insecure";
        let near = check(near).expect("it is right");
        assert_eq!(near.to.to_string(), "tcp:ship2:1");
        assert_eq!(near.near.map(|options| (options.channels, options.compress)), Some((3, Compress::Auto)));
        let far = check("transship relay --listen relay:unix:/a --to unix:/b").expect("it is right");
        assert!(far.near.is_none() && far.listen.to_string() == "unix:/a" && matches!(far.entry, Entry::Open));
        let far = check("transship relay --listen relay:tcp:0.0.0.0:1 --to unix:/b").expect("it is right");
        assert!(matches!(far.entry, Entry::Token(time) if time.as_secs() == 3600), "others can connect: they need it");
    }

    #[test]
    fn a_wrong_pair_is_told_what_to_type() {
        for (words, part) in [
            ("--listen unix:/a --to unix:/b", "neither is; near the source: --listen URI --to relay:URI"),
            ("--listen relay:unix:/a --to relay:unix:/b", "both are"),
            ("--listen relay:unix:/a --to unix:/b --compress zstd", "--compress: give it to the relay near the source"),
            ("--listen unix:/a --to relay:tcp:ship2:1", "--token"),
            ("--listen unix:/a --to relay:unix:/b --token-lifetime 1h", "give it to the relay near the destination"),
            ("--listen relay:unix:/a --to unix:/b --token ts1-", "--token: give it to the relay near the source"),
            ("--listen relay:udp:a --to unix:/b", "tcp:HOST:PORT"),
        ] {
            let mistakes = check(&format!("transship relay {words}")).err().expect("it is wrong");
            assert!(mistakes.iter().any(|mistake| mistake.contains(part)), "{words}: {mistakes:?}");
        }
    }
}
