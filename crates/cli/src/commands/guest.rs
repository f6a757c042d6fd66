//! `transship guest`: the synthetic guest, as a process of its own.
use transship_lines::Shutdown;
use transship_memory::PAGE;
use transship_vmm::synthetic::{self, SyntheticOptions, WriteRate};

use crate::{
    args::{Content, GuestArgs},
    checks::Checks,
    failure::Failure,
    signals::Watcher,
    units,
};

/// What the writers go round in unless told otherwise, where the memory has that much.
const HOT_SET: u64 = 64 << 20;

pub(crate) fn run(args: &GuestArgs) -> Result<(), Failure> {
    let options = check(args)?;
    let shutdown = Shutdown::new().map_err(|error| Failure::Failed(format!("can't make an eventfd: {error}")))?;
    let ask = shutdown.clone();
    let _signals = Watcher::start(move |_| ask.request())?;
    let summary = synthetic::run(&options, &shutdown, &synthetic::print_events()).map_err(|error| match error {
        synthetic::Error::Options(what) => Failure::Usage(vec![what]),
        other => Failure::Failed(other.to_string()),
    })?;
    match summary.check {
        Some(check) if check.wrong > 0 => Err(Failure::Failed(format!(
            "{} of {} pages do not hold what the guest has written: the move lost data, please report it",
            check.wrong, check.pages
        ))),
        _ => Ok(()),
    }
}

fn check(args: &GuestArgs) -> Result<SyntheticOptions, Failure> {
    let mut checks = Checks::default();
    let memory = checks.within("--mem", &args.mem, units::size, (PAGE, 1 << 48), "from 4K to 256T");
    let regions = checks.within("--regions", &args.regions, units::count, (1, 64), "1 to 64");
    let threads = checks.within("--threads", &args.threads, units::count, (1, 256), "1 to 256");
    let touched = checks.read("--touched", &args.touched, units::share);
    let write_rate = match args.write_rate.as_deref() {
        None => Some(WriteRate::None),
        Some(text) => checks.read("--write-rate", text, write_rate),
    };
    let hot_set = match &args.hot_set {
        Some(text) => checks.within("--hot-set", text, units::size, (PAGE, 1 << 48), "at least 4K").map(Some),
        None => Some(None),
    };
    let duration = match &args.duration {
        Some(text) => checks.read("--duration", text, units::time).map(Some),
        None => Some(None),
    };
    let options = (|| {
        let memory_bytes = memory?;
        Some(SyntheticOptions {
            regions: usize::try_from(regions?).ok()?,
            incoming: args.incoming,
            huge: args.huge.clone(),
            touched: touched?,
            content: content(args),
            write_rate: write_rate?,
            threads: usize::try_from(threads?).ok()?,
            hot_set_bytes: Some(hot_set?.unwrap_or(HOT_SET.min(memory_bytes))),
            duration: duration?,
            ..SyntheticOptions::new(&args.listen, memory_bytes)
        })
    })();
    checks.finish(options)
}

fn write_rate(text: &str) -> Result<WriteRate, String> {
    match text {
        "max" => Ok(WriteRate::Max),
        text => match units::rate(text).map_err(|why| format!("{why}, or max"))? {
            0 => Ok(WriteRate::None),
            rate => Ok(WriteRate::BytesPerSecond(rate)),
        },
    }
}

fn content(args: &GuestArgs) -> synthetic::Content {
    match (&args.corpus, args.content) {
        (Some(folder), _) => synthetic::Content::Corpus(folder.clone()),
        (None, Content::Zero) => synthetic::Content::Zero,
        (None, Content::Random) => synthetic::Content::Random,
        (None, Content::Mixed) => synthetic::Content::Mixed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn options(flags: &[&str]) -> Result<SyntheticOptions, Failure> {
        let arguments = ["transship", "guest", "--listen", "/run/g"].iter().chain(flags);
        let Command::Guest(args) = Cli::try_parse_from(arguments).expect("clap takes it").command else {
            panic!("another command")
        };
        check(&args)
    }

    #[test]
    fn flags_become_options() {
        let flags = ["--mem", "32M", "--touched", "25%", "--write-rate", "max", "--threads", "2", "--duration", "3s"];
        let options = options(&flags).expect("good");
        assert_eq!((options.memory_bytes, options.touched, options.threads), (32 << 20, 0.25, 2));
        assert_eq!(options.write_rate, WriteRate::Max);
        assert_eq!(options.hot_set_bytes, Some(32 << 20), "no more than the memory");
        assert_eq!(options.duration, Some(std::time::Duration::from_secs(3)));
    }

    #[test]
    fn every_wrong_flag_is_named() {
        let flags = ["--mem", "0", "--touched", "50", "--write-rate", "slow", "--threads", "0", "--duration", "3"];
        let Err(Failure::Usage(mistakes)) = options(&flags) else { panic!("wrong flags were let through") };
        for (mistake, flag) in mistakes.iter().zip(["--mem", "--threads", "--touched", "--write-rate", "--duration"]) {
            assert!(mistake.starts_with(flag), "{mistake}");
        }
        assert_eq!(mistakes.len(), 5, "{mistakes:?}");
        assert!(mistakes[3].ends_with("or max"), "{mistakes:?}");
    }
}
