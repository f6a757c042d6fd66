//! What each subcommand does.
pub(crate) mod balloon;
pub(crate) mod bench;
pub(crate) mod check;
pub(crate) mod clones;
pub(crate) mod convert;
pub(crate) mod fork;
pub(crate) mod guard;
pub(crate) mod guest;
pub(crate) mod info;
pub(crate) mod moving;
pub(crate) mod receive;
pub(crate) mod relay;
pub(crate) mod restore;
pub(crate) mod save;
pub(crate) mod shell;
pub(crate) mod stand_in;
pub(crate) mod watch;
