//! `transship-bench`: the tables of docs/benchmarks.md, also called as `transship bench`.
#![forbid(unsafe_code)]
use std::process::ExitCode;

use clap::Parser;
use transship_bench::Bench;

/// Measure on this machine, compared with stock QEMU
#[derive(Debug, Parser)]
#[command(name = "transship-bench", bin_name = "transship bench", version)]
struct Program {
    #[command(flatten)]
    bench: Bench,
}

fn main() -> ExitCode {
    match Program::parse().bench.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("transship bench: {why}");
            ExitCode::FAILURE
        }
    }
}
