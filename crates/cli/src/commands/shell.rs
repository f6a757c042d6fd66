//! `transship completions` and `transship man`: for packagers, made from the same list as the help.
use clap::CommandFactory;
use clap_complete::Shell;

use crate::{args::Cli, failure::Failure, output};

pub(crate) fn completions(shell: Shell) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "transship", &mut script);
    print(&script)
}

pub(crate) fn manual(subcommand: Option<&str>) -> Result<(), Failure> {
    let mut command = Cli::command();
    // Subcommands get their full names ("transship-move") only when the tree is built.
    command.build();
    let page = match subcommand {
        None => command,
        Some(name) => command
            .find_subcommand(name)
            .cloned()
            .ok_or_else(|| Failure::Usage(vec![format!("{name:?} is not a subcommand; see `transship -h`")]))?,
    };
    let mut text = Vec::new();
    clap_mangen::Man::new(page).render(&mut text)?;
    print(&text)
}

fn print(text: &[u8]) -> Result<(), Failure> {
    Ok(output::result(&String::from_utf8_lossy(text))?)
}
