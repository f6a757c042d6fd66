//! What each subcommand does.
pub(crate) mod guard;
pub(crate) mod guest;
pub(crate) mod moving;
pub(crate) mod receive;
pub(crate) mod shell;
pub(crate) mod watch;
