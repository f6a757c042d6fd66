//! `transship plan`: what a move would be like.
use std::{fmt::Write as _, io::IsTerminal, sync::Arc, time::Duration};

use serde::Serialize;
use transship_engine::{
    Caller, Carrier, Converge, GuestSample, LinkSpeed, MoveOptions, Outlook, Progress, Uri, Work, predict,
    predict_post_copy, probe, sample_guest,
};
use transship_guest::Watch;
use transship_vmm::{AttachOptions, VmAddress, attach_source};

use crate::{
    args::PlanArgs,
    checks::Checks,
    failure::Failure,
    flags::{self, Patience},
    output,
    sandbox::{Errands, Left, Role, Sandbox},
    signals::Held,
    trust::{self, Network},
    units::{self, Bytes, Rate, Time},
};

const TIME_MIN: Duration = Duration::from_secs(1);
const TIME_MAX: Duration = Duration::from_secs(600);
/// What a link is taken for of which nothing is known: a gigabit.
const UNKNOWN_BYTES_PER_S: f64 = 125e6;
/// More connections at a time measure no better.
const PROBES: u8 = 4;

pub(crate) fn run(args: &PlanArgs) -> Result<(), Failure> {
    let request = Request::check(args)?;
    let progress = Progress::new();
    let cancelled = Arc::clone(&progress);
    let signals = Held::hold()?;
    let mut guest = attach_source(&request.vm, request.attach.clone())?;
    guest.acquire(Watch::Track)?;
    let sandbox = &request.sandbox;
    let _steward = sandbox.steward(&Errands { connect: request.to.iter().cloned().collect(), ..Errands::default() })?;
    sandbox.confine(Role::Plan, Left::Nothing)?;
    let _signals = signals.start(move |_| cancelled.cancel())?;
    let link = Link::of(&request, &progress)?;
    output::say(&format!("looking at the guest for {}", Time(request.time)));
    let sample = sample_guest(guest.as_mut(), request.time, &progress)?;
    drop(guest);
    let ways = ways(&sample, &link, &request);
    let plan = Plan { guest: sample, link, ways };
    match args.json {
        true => output::json(&plan)?,
        false => output::result(&plan.picture(std::io::stdout().is_terminal()))?,
    }
    Ok(())
}

/// What was asked for, checked.
struct Request {
    vm: VmAddress,
    to: Option<Uri>,
    caller: Option<Caller>,
    time: Duration,
    bandwidth: Option<u64>,
    patience: Patience,
    channels: u8,
    encoders: u8,
    attach: AttachOptions,
    sandbox: Sandbox,
}

impl Request {
    fn check(args: &PlanArgs) -> Result<Self, Failure> {
        let mut checks = Checks::default();
        let checks_ref = &mut checks;
        let vm = checks_ref.read("--vm", &args.vm, str::parse::<VmAddress>);
        if let Some(VmAddress::Libvirt(_)) = &vm {
            checks_ref.mistake(format!("--vm: {}", transship_vmm::qemu::libvirt::NO_MOVES));
        }
        let to = match &args.to {
            Some(text) => checks_ref.read("--to", text, str::parse::<Uri>).map(Some),
            None => Some(None),
        };
        let to_address = to.as_ref().and_then(Option::as_ref);
        let network = Network::of(args.insecure);
        let caller =
            trust::caller(checks_ref, to_address, args.token.as_ref(), &args.tls, network, "transship receive");
        let time = checks_ref.within("--time", &args.time, units::time, (TIME_MIN, TIME_MAX), "from 1s to 10m");
        let bandwidth = flags::bandwidth(checks_ref, args.bandwidth.as_deref());
        let patience = Patience::check(checks_ref, &args.downtime, None, &args.max_rounds);
        let defaults = MoveOptions::default();
        let channels = flags::count(checks_ref, "--channels", args.channels.as_deref(), defaults.channels);
        let encoders = flags::count(checks_ref, "--encoders", args.encoders.as_deref(), defaults.terms.encoders);
        let attach = flags::attach(args.allow_untracked_writers, args.tracker.into(), None);
        let sandbox = Sandbox::check(&args.sandbox, checks_ref);
        let request = (|| {
            Some(Self {
                vm: vm?,
                to: to?,
                caller: caller?,
                time: time?,
                bandwidth: bandwidth?,
                patience: patience?,
                channels: channels?,
                encoders: encoders?,
                attach,
                sandbox: sandbox?,
            })
        })();
        checks.finish(request)
    }
}

/// What carries the pages.
#[derive(Debug, Serialize)]
struct Link {
    bytes_per_s: f64,
    round_trip_ms: f64,
    known: Known,
}

/// How that is known.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Known {
    Measured,
    /// By `--bandwidth`, or that is less than what was measured.
    Given,
    /// Not at all.
    Assumed,
}

impl Link {
    fn of(request: &Request, progress: &Progress) -> Result<Self, Failure> {
        let limit = request.bandwidth.map(|limit| limit as f64);
        let Some(to) = &request.to else {
            let known = if limit.is_some() { Known::Given } else { Known::Assumed };
            return Ok(Self { bytes_per_s: limit.unwrap_or(UNKNOWN_BYTES_PER_S), round_trip_ms: 0.0, known });
        };
        output::say(&format!("measuring the way to {to}"));
        let speed = probe(to, request.caller.as_ref(), request.channels.min(PROBES), progress)?;
        let LinkSpeed { bytes_per_s, round_trip_ms, .. } = speed;
        Ok(match limit {
            Some(limit) if limit < bytes_per_s => Self { bytes_per_s: limit, round_trip_ms, known: Known::Given },
            _ => Self { bytes_per_s, round_trip_ms, known: Known::Measured },
        })
    }

    fn carrier(&self) -> Carrier {
        let round_trip = Duration::try_from_secs_f64(self.round_trip_ms / 1e3).unwrap_or_default();
        Carrier { bytes_per_s: self.bytes_per_s, round_trip, ratio: 1.0, encode_bytes_per_s: None }
    }
}

/// What a move with these flags would be like.
#[derive(Debug, Serialize)]
struct Way {
    /// Of `transship move`; empty: none.
    flags: String,
    #[serde(flatten)]
    outlook: Outlook,
}

/// As it is, with each way to encode, and with each way to end it.
fn ways(sample: &GuestSample, link: &Link, request: &Request) -> Vec<Way> {
    let Patience { downtime, max_rounds, .. } = request.patience;
    let work = Work { downtime, max_rounds, converge: Converge::Never };
    let plain = link.carrier();
    let way = |flags: String, carrier: &Carrier, work: &Work| Way { flags, outlook: predict(sample, carrier, work) };
    let mut ways = vec![way(String::new(), &plain, &work)];
    for codec in &sample.codecs {
        // All encoders together are as many times as fast as one.
        let encode = codec.encode_bytes_per_s * f64::from(request.encoders);
        let carrier = Carrier { ratio: codec.ratio, encode_bytes_per_s: Some(encode), ..plain };
        ways.push(way(format!("--compress {}", codec.method), &carrier, &work));
    }
    ways.push(way("--converge pace".into(), &plain, &Work { converge: Converge::Pace, ..work }));
    if !ways[0].outlook.converges {
        let outlook = predict_post_copy(sample, &plain, &work);
        ways.push(Way { flags: "--converge postcopy".into(), outlook });
        // A quarter more than it would take.
        let enough = Duration::try_from_secs_f64(ways[0].outlook.downtime_ms * 1.25e-3).unwrap_or_default();
        let enough = Duration::from_millis(enough.as_millis() as u64 + 1);
        let flags = format!("--downtime {}ms", enough.as_millis());
        ways.push(way(flags, &plain, &Work { downtime: enough, ..work }));
    }
    ways
}

#[derive(Debug, Serialize)]
struct Plan {
    guest: GuestSample,
    link: Link,
    ways: Vec<Way>,
}

impl Plan {
    /// `draws`: with bars.
    fn picture(&self, draws: bool) -> String {
        let mut text = format!("guest  {}\nlink   {}\n\n", self.guest_in_words(), self.link_in_words());
        let name = |way: &Way| if way.flags.is_empty() { "as it is".to_owned() } else { way.flags.clone() };
        let width = self.ways.iter().map(|way| name(way).len()).max().unwrap_or(0);
        let head = format!(
            "{:<width$}  {:>10}  {:>10}  {:>6}  {:>9}  {:>6}",
            "", "time", "downtime", "rounds", "bytes", "work"
        );
        let _ = writeln!(text, "{head}");
        let longest = self.ways.iter().map(|way| way.outlook.total_ms).fold(1.0, f64::max);
        for way in &self.ways {
            let Outlook { converges, total_ms, rounds, bytes, downtime_ms, work_share, follows_bytes } = way.outlook;
            let (time, stop) = (Time::from_ms(total_ms), Time::from_ms(downtime_ms));
            let _ = write!(text, "{:<width$}  ", name(way));
            if converges {
                let share = work_share.map_or("?".to_owned(), |share| format!("{:.0} %", share * 100.0));
                let _ = write!(text, "{time:>10}  {stop:>10}  {rounds:>6}  {:>9}  {share:>6}", Bytes(bytes));
                if follows_bytes > 0 {
                    let _ = write!(text, "  {} follow it", Bytes(follows_bytes));
                }
                if draws {
                    let _ = write!(text, "  {}", "█".repeat((total_ms / longest * 20.0).ceil() as usize));
                }
            } else {
                let _ =
                    write!(text, "does not converge in {rounds} rounds ({time}): the rest would stop it for {stop}");
            }
            text.push('\n');
        }
        text
    }

    fn guest_in_words(&self) -> String {
        let GuestSample { memory_bytes, data_bytes, zero_share, written, .. } = &self.guest;
        let (memory, data, zero) = (Bytes(*memory_bytes), Bytes(*data_bytes), zero_share * 100.0);
        let mut text = format!("{memory}, of which {data} hold data, {zero:.0} % of it zeros");
        if let (Some(first), Some(last)) = (written.first(), written.last()) {
            let amount = |bytes: f64| Bytes(bytes as u64);
            let _ = write!(
                text,
                "; writes {} in {} and {} in {}",
                amount(first.bytes),
                Time::from_ms(first.ms),
                amount(last.bytes),
                Time::from_ms(last.ms)
            );
        }
        text
    }

    fn link_in_words(&self) -> String {
        let known = match self.link.known {
            Known::Measured => format!("{} there and back, measured", Time::from_ms(self.link.round_trip_ms)),
            Known::Given => "as --bandwidth says".to_owned(),
            Known::Assumed => "assumed: name a receiver that waits with --to, or the speed with --bandwidth".to_owned(),
        };
        format!("{}, {known}", Rate(self.link.bytes_per_s))
    }
}

#[cfg(test)]
mod tests {
    use transship_engine::{CodecSample, Written};

    use super::*;

    fn request() -> Request {
        Request {
            vm: "qemu:/run/vm.qmp".parse().expect("an address"),
            to: None,
            caller: None,
            time: TIME_MIN,
            bandwidth: None,
            patience: Patience { downtime: Duration::from_millis(300), max_downtime: Duration::ZERO, max_rounds: 30 },
            channels: 1,
            encoders: 2,
            attach: AttachOptions::default(),
            sandbox: Sandbox::Off,
        }
    }

    fn plan(mb_per_s: f64) -> Plan {
        let point = |ms: f64| Written { ms, bytes: mb_per_s * 1e3 * ms };
        let guest = GuestSample {
            memory_bytes: 2 << 30,
            data_bytes: 1 << 30,
            zero_share: 0.25,
            written: vec![point(100.0), point(5000.0)],
            codecs: vec![CodecSample { method: "lz4".into(), ratio: 4.0, encode_bytes_per_s: 4e8 }],
            state_ms: 20.0,
        };
        let link = Link { bytes_per_s: 100e6, round_trip_ms: 0.5, known: Known::Measured };
        let ways = ways(&guest, &link, &request());
        Plan { guest, link, ways }
    }

    #[test]
    fn a_guest_that_does_not_converge_gets_every_way_to_end_it() {
        let plan = plan(200.0);
        let ends: Vec<_> = plan.ways.iter().map(|way| (way.flags.as_str(), way.outlook.converges)).collect();
        let Some((longer, true)) = ends.last() else { panic!("{ends:?}") };
        assert!(longer.starts_with("--downtime "), "{ends:?}");
        assert_eq!(ends[0], ("", false));
        assert_eq!(ends[2..4], [("--converge pace", true), ("--converge postcopy", true)]);
        let text = plan.picture(false);
        assert!(
            text.contains("2.0 GiB, of which 1.0 GiB hold data, 25 % of it zeros; writes 19.1 MiB in 100 ms"),
            "{text}"
        );
        assert!(text.contains("95.4 MiB/s, 0.5 ms there and back, measured"), "{text}");
        assert!(
            text.lines().any(|line| line.starts_with("--converge postcopy") && line.ends_with("follow it")),
            "{text}"
        );
        assert!(text.contains("as it is") && text.contains("does not converge in") && !text.contains('█'), "{text}");
        assert!(plan.picture(true).lines().last().is_some_and(|line| line.contains('█')));
    }

    #[test]
    fn one_that_does_needs_none() {
        let plan = plan(1.0);
        assert!(plan.ways.iter().all(|way| way.outlook.converges), "{:?}", plan.ways);
        assert!(!plan.ways.iter().any(|way| way.flags.starts_with("--downtime")));
        assert!(plan.ways[1].outlook.bytes * 3 < plan.ways[0].outlook.bytes, "{:?}", plan.ways);
    }
}
