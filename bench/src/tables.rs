//! The tables that there are. A new one is a file that implements [`Measured`], and a line in `tables!`.
use crate::all::plan::{Job, Plan};

/// A table of `transship bench`.
pub(crate) trait Measured: clap::Args {
    /// On the command line.
    const NAME: &'static str;

    /// Measures it, prints it, and writes what was asked for ([`crate::output::Files::publish`]). A failure comes after
    /// that: what was measured before it took its time, too.
    fn run(&self) -> Result<(), String>;

    /// What `transship bench all` measures of it: runs of the command, each of which can be interrupted and taken up
    /// again on its own.
    fn jobs(plan: &Plan) -> Vec<Job>;
}

/// Makes the subcommands of the tables, in the order in which `all` measures them.
macro_rules! tables {
    ($($(#[$doc:meta])* $variant:ident($table:ty),)*) => {
        /// The tables.
        #[derive(Debug, clap::Subcommand)]
        pub enum Table {
            /// Every table, into one folder with a page that shows them
            All(crate::all::All),
            $($(#[$doc])* $variant($table),)*
        }

        impl Table {
            pub(crate) fn run(&self) -> Result<(), String> {
                match self {
                    Self::All(all) => crate::all::run(all),
                    $(Self::$variant(table) => Measured::run(table),)*
                }
            }
        }

        /// What `all` measures, table by table.
        pub(crate) fn jobs(plan: &Plan) -> Vec<Job> {
            [$(<$table as Measured>::jobs(plan)),*].concat()
        }

        /// The names of all tables.
        #[cfg(test)]
        pub(crate) fn names() -> Vec<&'static str> {
            vec![$(<$table as Measured>::NAME),*]
        }
    };
}

tables! {
    /// What the machine does on its own: memory, codecs, disk
    Limits(crate::limits::Limits),
    /// Moves of memory that was never touched, or is zero, random or mixed
    ZeroPages(crate::zero_pages::ZeroPages),
    /// Moves of data that can be compressed, by method
    Codecs(crate::codecs::Codecs),
    /// Moves of guests that keep writing, by number of encoders
    Threads(crate::threads::Threads),
    /// Guests saved to files and restored, by layout of the file
    Files(crate::files::Snapshots),
    /// Moves between transship and stock QEMU, both ways, by QEMU's own protocol
    QemuWire(crate::qemu_wire::QemuWire),
    /// Moves of a Linux guest whose free memory is full of old data, without hints, with them, and with reporting
    FreePages(crate::free_pages::FreePages),
    /// Moves over encrypted connections and in clear, beside stock QEMU's own TLS
    Tls(crate::tls::Tls),
    /// What a guest notices of a move: how long it stands still, and how much slower it is
    GuestView(crate::guest_view::GuestView),
    /// Moves of guests that write faster than the link carries, by each way of ending them
    Converge(crate::converge::Converge),
    /// Guests made from one moment of another, by number of them
    Clones(crate::clones::Clones),
    /// A domain of libvirt saved and migrated, beside virsh alone
    Libvirt(crate::libvirt::Libvirt),
    /// Migrations of stock QEMU over a link, through two relays and without
    Relays(crate::relays::Relays),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{FromArgMatches, Subcommand};
    use std::collections::HashSet;

    #[test]
    fn each_job_is_a_command_that_the_tables_take() {
        for quick in [false, true] {
            let plan = Plan { quick, ..Plan::default() };
            let jobs = jobs(&plan);
            let mut names = HashSet::new();
            for job in &jobs {
                assert!(names.insert(job.name.clone()), "{} is there twice", job.name);
                let words = std::iter::once("bench").chain(job.arguments.iter().map(String::as_str));
                let matches = Table::augment_subcommands(clap::Command::new("bench")).try_get_matches_from(words);
                let table = matches.and_then(|matches| Table::from_arg_matches(&matches));
                assert!(table.is_ok(), "{:?}: {}", job.arguments, table.map(drop).unwrap_err());
            }
            for name in super::names() {
                assert!(jobs.iter().any(|job| job.table() == name), "{name} has no job");
            }
        }
    }
}
